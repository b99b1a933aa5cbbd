"""Placement of a run's processes: a line per machine before they start, and a file of the run for its page."""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from hybridrl.config import PPOConfig, TrainingConfig
from hybridrl.core.cluster import RaySession
from hybridrl.core.cluster.session import RayMachine, read_machines, request_of
from hybridrl.plugins import load as plugin
from hybridrl.rewards.actors import shares_of_machines
from hybridrl.runs.directory import PLACEMENT


class Placed(NamedTuple):
    """A machine of a run, and its processes by the names of their logs: of each device, and those without a device."""

    node: str
    devices: list[list[str]]
    others: list[str]

    def __str__(self) -> str:
        parts = [f"device {number}: {' '.join(names)}" for number, names in enumerate(self.devices)]
        return "; ".join([self.node, *parts, *filter(None, [" ".join(self.others)])])


def place_processes(
    groups: Sequence[tuple[RayMachine, int]], config: TrainingConfig, *, episodes: bool
) -> list[Placed]:
    """Return the machines of a run with their processes. `groups`: the node and the number of devices of each, in the
    session's order; `episodes`: whether episode processes run."""
    machines = [Placed(node.name, [[] for _ in range(size)], []) for node, size in groups]
    devices = [names for machine in machines for names in machine.devices]
    ranks = config.trainer.nnodes * (config.trainer.n_gpus_per_node or 1)
    for rank, names in enumerate(devices[:ranks]):
        names.append(f"train-{rank}")
    if not isinstance(config, PPOConfig):
        return machines
    rollout = config.actor_rollout_ref.rollout
    for number, names in enumerate(devices[ranks if config.separate else 0 :]):
        names.append(f"rollout-{number // rollout.tensor_model_parallel_size}")
    nodes: dict[str, Placed] = {}
    for (node, _), machine in zip(groups, machines, strict=True):
        nodes.setdefault(node.node_id, machine)
    hosts = [*nodes.values()]
    for number, share in enumerate(shares_of_machines(config.reward, len(hosts))):
        hosts[number].others.extend([f"scoring-{number} (processes: {share})"] * bool(share))
    logs = plugin("episodes").episode_logs(rollout, config.trainer, Path()) if episodes else []
    for number, log in enumerate(logs):
        hosts[number % len(hosts)].others.append(Path(log).stem)
    return machines


def expected_groups(machines: Sequence[RayMachine], device: str, sizes: Sequence[int]) -> list[tuple[RayMachine, int]]:
    """Return a machine for each group of devices, the one with the fewest groups that has room; empty without room."""
    groups, taken, used = list[tuple[RayMachine, int]](), Counter[str](), Counter[str]()
    for size in sizes:
        fitting = [machine for machine in machines if machine.has(request_of(device, used[machine.node_id] + size))]
        if not fitting:
            return []
        machine = min(fitting, key=lambda machine: taken[machine.node_id])
        taken[machine.node_id] += 1
        used[machine.node_id] += size
        groups.append((machine, size))
    return groups


def place_session(session: RaySession, config: TrainingConfig, *, episodes: bool) -> list[Placed]:
    """Return the placement on the devices that a session has reserved."""
    nodes = {node.node_id: node for node in read_machines()}
    groups = [(nodes[node], size) for node, size in zip(session.nodes, session.sizes, strict=True)]
    return place_processes(groups, config, episodes=episodes)


def describe(machines: Sequence[Placed]) -> str:
    """Return a line per machine."""
    return "\n".join(f"machine {number} on {machine}" for number, machine in enumerate(machines))


def write_placement(machines: Sequence[Placed], directory: Path) -> None:
    """Write the file that `RunDirectory.placement` reads."""
    text = json.dumps([machine._asdict() for machine in machines], indent=1)
    (directory / PLACEMENT).write_text(text, encoding="utf-8")
