"""Training ranks of a run: their processes, their models, and plans that fit these. Independent of rollout."""

import gc
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

from hybridrl.config import ConfigError, PPOConfig
from hybridrl.core.cluster import Group, RaySession, gather, spawn
from hybridrl.core.cluster.group import START_LIMIT
from hybridrl.core.pictures import PictureStore, Pixels
from hybridrl.core.training.building import WorkerConfig
from hybridrl.core.training.planning import UpdatePlan
from hybridrl.core.training.worker import TrainWorker
from hybridrl.core.training.worker_group import CriticPlan, RankPlan, TrainWorkers
from hybridrl.data.processor import picture_reader
from hybridrl.runs.models import vision_with
from hybridrl.runs.prepare import tokenizer_elsewhere
from hybridrl.runs.settings import build_algorithm, build_policy_plan, ppo_worker_config
from hybridrl.runs.setup import start_session
from hybridrl.runtime.environment import worker_environment
from hybridrl.tracking.console import info


@contextmanager
def training_ranks(
    config: PPOConfig, directory: Path, logs: Path, pictures: Sequence[Pixels] = ()
) -> Iterator[TrainWorkers]:
    """Yield training ranks for the run in `directory`, in a separate Ray and without rollout servers. Rows may have
    these pictures."""
    trainer, section, vision = config.trainer, config.actor_rollout_ref, None
    if pictures:
        reader = picture_reader(config.data, section.model, tokenizer_elsewhere(config.data, section.model))
        if isinstance(reader, str):
            raise ConfigError(f"the rows have pictures: {reader}", fix="restore the processor's files")
        vision = vision_with(section.model, reader)
    worker = ppo_worker_config(config, build_algorithm(config), directory, 1, vision)
    with closing(start_session(trainer, config.ray_kwargs.ray_init)) as session:
        group = start_train_workers(session, logs)
        build_models(group, worker, trainer.startup_timeout)
        critic = CriticPlan(config.critic, UpdatePlan.of(config.critic)) if "critic" in worker.models else None
        plan = fitting_plan(group, RankPlan(worker.models, build_policy_plan(config), critic), trainer.step_timeout)
        store = PictureStore(Group.share)
        stored = [store.add(pixels, 0) for pixels in pictures]  # else they would be freed
        yield TrainWorkers(group, plan, section.rollout.dtype, trainer.step_timeout, store.handles)
        stored.clear()


def start_train_workers(session: RaySession, logs: Path) -> Group:
    """Start one training rank per device, without its models."""
    ranks = session.training.devices
    environments = [worker_environment(session.device, session.sharing(rank)) for rank in range(ranks)]
    files = [str(logs / f"train-{rank}.log") for rank in range(ranks)]
    actors = [
        spawn(TrainWorker, session, rank, environments[rank], rank, ranks, file, gpus=1)
        for rank, file in enumerate(files)
    ]
    return Group(actors, "train worker", files)


def build_models(group: Group, worker: WorkerConfig, limit: float) -> None:
    """Build the models of all ranks, within `limit` seconds; collects garbage while it waits."""
    place, *_ = gather(group.start(TrainWorker.location), "train worker.location", limit, group.logs, key=START_LIMIT)
    building = group.start(TrainWorker.build, worker, f"{place['address']}:{place['port']}")
    gc.collect()
    gather(building, "start-up", limit, group.logs, key=START_LIMIT)


def fitting_plan(group: Group, plan: RankPlan, timeout: float) -> RankPlan:
    """Return the plan for the built models: rows are padded for a family whose layers mix packed rows, and each is
    computed whole if its layers mix rows that share tokens."""
    layouts = group.broadcast(TrainWorker.layouts, timeout=timeout)[0]
    for name, model in plan.models.items():
        of_model = layouts[name]
        if of_model["padded"] and not model.budget.padded:
            info(f"{name}: its layers mix packed rows, so rows are padded to the longest of a micro-batch")
        elif not (of_model["padded"] or of_model["shares"]) and model.budget.shares:
            info(f"{name}: dropout is active, or its layers mix rows that share tokens, so each row is computed whole")
        budget = replace(model.budget, **of_model)
        plan = replace(plan, models={**plan.models, name: replace(model, budget=budget)})
    policy, critic = plan.policy, plan.critic
    policy = replace(policy, updates=policy.updates.laid_out(**layouts["actor"]))
    if critic is not None and "critic" in layouts:
        critic = replace(critic, updates=critic.updates.laid_out(**layouts["critic"]))
    return replace(plan, policy=policy, critic=critic)
