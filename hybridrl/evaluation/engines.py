"""Engines of an evaluation: they load their weights from files, no trainer uses their devices, and they never sleep."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hybridrl.config import EvaluationConfig
from hybridrl.core.cluster import RaySession
from hybridrl.core.cluster.group import control_limit
from hybridrl.core.rollout import RolloutClient
from hybridrl.core.rollout.fleet import RolloutFleet
from hybridrl.core.rollout.lanes import Server
from hybridrl.runs.plugins import load
from hybridrl.tracking.console import info, stage


@contextmanager
def serving(config: EvaluationConfig, session: RaySession, logs: Path) -> Iterator[RolloutClient]:
    """Start an engine per tensor-parallel group of devices and yield the client of all; one that is lost loads its
    weights again."""
    section, limit = config.actor_rollout_ref, config.trainer.startup_timeout
    fleet = RolloutFleet(
        session,
        load(f"engine.{section.rollout.name}"),
        section.model,
        section.rollout,
        logs=logs,
        startup_timeout=limit,
        timeout=control_limit(config.trainer.step_timeout),
    )
    info(f"logs of all processes: {logs}")

    def revive(index: int) -> Server:
        fleet.rebuild(index)
        client.capacity = fleet.rollout.max_num_seqs  # less, if it ran out of memory
        return fleet.handle(index)

    with stage(f"starting {len(fleet)} engine{'s' * (len(fleet) > 1)}"):
        fleet.finish_start(fleet.start())
    client = fleet.client(revive)
    client.capacity = fleet.rollout.max_num_seqs
    yield client
    fleet.kill(range(len(fleet)))
