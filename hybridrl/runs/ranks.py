"""Training ranks of a run: their processes, their models, and plans that fit these. Independent of rollout."""

import gc
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from hybridrl.config import PPOConfig
from hybridrl.core.cluster import Group, RaySession, gather, spawn
from hybridrl.core.cluster.group import START_LIMIT
from hybridrl.core.training.planning import MicroBatchBudget
from hybridrl.core.training.worker import TrainWorker, WorkerConfig
from hybridrl.core.training.worker_group import CriticPlan, PolicyPlan, TrainWorkers
from hybridrl.runs.settings import build_algorithm, build_policy_plan, ppo_worker_config
from hybridrl.runs.setup import start_session
from hybridrl.runtime.environment import worker_environment
from hybridrl.tracking.console import info

Plan = TypeVar("Plan", PolicyPlan, CriticPlan)


@contextmanager
def training_ranks(config: PPOConfig, directory: Path, logs: Path) -> Iterator[TrainWorkers]:
    """Yield training ranks for the run in `directory`, in a separate Ray and without rollout servers."""
    trainer, algorithm = config.trainer, build_algorithm(config)
    with closing(start_session(trainer, config.ray_kwargs.ray_init)) as session:
        group = start_train_workers(session, logs)
        build_models(group, ppo_worker_config(config, algorithm, directory, 1), trainer.startup_timeout)
        critic = CriticPlan.of(config.critic) if algorithm.uses_critic else None
        plans = padded_plans(group, build_policy_plan(config), critic, trainer.step_timeout)
        yield TrainWorkers(group, *plans, config.actor_rollout_ref.rollout.dtype, trainer.step_timeout)


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


def padded_plans(
    group: Group, policy: PolicyPlan, critic: CriticPlan | None, timeout: float
) -> tuple[PolicyPlan, CriticPlan | None]:
    """Return the plans for the built models: rows are padded for a family whose layers mix packed rows."""
    padded = group.broadcast(TrainWorker.padded, timeout=timeout)[0]
    if padded["actor"] and not policy.updates.budget.padded:
        policy = _padded(policy, "actor")
    if critic is not None and padded["critic"] and not critic.updates.budget.padded:
        critic = _padded(critic, "critic")
    return policy, critic


def _padded(plan: Plan, name: str) -> Plan:
    info(f"{name}: its layers mix rows that are packed together, so rows are padded to the longest of a micro-batch")
    budgets = {name: replace(old, padded=True) for name, old in vars(plan).items() if isinstance(old, MicroBatchBudget)}
    return replace(plan, updates=replace(plan.updates, budget=replace(plan.updates.budget, padded=True)), **budgets)
