"""Training ranks of a run: their processes, their models, and plans that fit these. Independent of rollout."""

import gc
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

from hybridrl.config import PPOConfig
from hybridrl.core.cluster import Group, RaySession, gather, spawn
from hybridrl.core.cluster.group import START_LIMIT
from hybridrl.core.training.building import WorkerConfig
from hybridrl.core.training.planning import UpdatePlan
from hybridrl.core.training.worker import TrainWorker
from hybridrl.core.training.worker_group import CriticPlan, RankPlan, TrainWorkers
from hybridrl.runs.settings import build_algorithm, build_policy_plan, ppo_worker_config
from hybridrl.runs.setup import start_session
from hybridrl.runtime.environment import worker_environment
from hybridrl.tracking.console import info


@contextmanager
def training_ranks(config: PPOConfig, directory: Path, logs: Path) -> Iterator[TrainWorkers]:
    """Yield training ranks for the run in `directory`, in a separate Ray and without rollout servers."""
    trainer, worker = config.trainer, ppo_worker_config(config, build_algorithm(config), directory, 1)
    with closing(start_session(trainer, config.ray_kwargs.ray_init)) as session:
        group = start_train_workers(session, logs)
        build_models(group, worker, trainer.startup_timeout)
        critic = CriticPlan(config.critic, UpdatePlan.of(config.critic)) if "critic" in worker.models else None
        plan = padded_plan(group, RankPlan(worker.models, build_policy_plan(config), critic), trainer.step_timeout)
        yield TrainWorkers(group, plan, config.actor_rollout_ref.rollout.dtype, trainer.step_timeout)


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


def padded_plan(group: Group, plan: RankPlan, timeout: float) -> RankPlan:
    """Return the plan for the built models: rows are padded for a family whose layers mix packed rows."""
    padded = group.broadcast(TrainWorker.padded, timeout=timeout)[0]
    for name, model in plan.models.items():
        if padded[name] and not model.budget.padded:
            info(f"{name}: its layers mix packed rows, so rows are padded to the longest of a micro-batch")
            plan = replace(
                plan, models={**plan.models, name: replace(model, budget=replace(model.budget, padded=True))}
            )
    policy, critic = plan.policy, plan.critic
    if padded["actor"]:
        policy = replace(policy, updates=policy.updates.padded())
    if critic is not None and padded.get("critic"):
        critic = replace(critic, updates=critic.updates.padded())
    return replace(plan, policy=policy, critic=critic)
