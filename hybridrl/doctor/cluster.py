"""`python -m hybridrl.doctor cluster [key=value ...]`: tries the machines of a Ray cluster together, without a run."""

import argparse
from pathlib import Path

from hybridrl.config import PPOConfig
from hybridrl.config.compose import as_dict
from hybridrl.config.findings import Findings
from hybridrl.config.load import resolve_config
from hybridrl.core.cluster.facts import shared_paths
from hybridrl.core.cluster.probe import probe_machines
from hybridrl.core.cluster.session import (
    dashboard,
    describe_reservations,
    describe_room,
    join_command,
    joined,
    missing_machines,
    read_machines,
    request_of,
)
from hybridrl.doctor import add_run_arguments, show
from hybridrl.runtime.environment import joins

START = (
    "run `ray start --head --port=6379` on the first machine and `ray start --address=FIRST:6379` on each of the "
    "others, then repeat this with RAY_ADDRESS=FIRST:6379"
)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m hybridrl.doctor cluster",
        description="Try the machines of a Ray cluster (RAY_ADDRESS or ray_kwargs.ray_init.address) together: "
        "versions, the files that a run names, its directory, and the network.",
    )
    parser.add_argument("--json", action="store_true", help="print findings as JSON")
    add_run_arguments(parser)
    options = parser.parse_args(argv)
    resolved = resolve_config(PPOConfig, options.overrides, options.config_name, options.config_path)
    findings = Findings()
    if resolved.config is None:
        findings.add(*resolved.findings.errors)
    elif not joins(resolved.config.ray_kwargs.ray_init):
        findings.error("cluster.ray", "no Ray cluster is named: neither RAY_ADDRESS nor ray_init.address is set", START)
    else:
        _examine(resolved.config, findings)
    return show(findings, as_json=options.json, verdict=True)


def _examine(config: PPOConfig, findings: Findings) -> None:
    trainer, device = config.trainer, config.trainer.device
    pools = {"trainer": (trainer.nnodes, trainer.n_gpus_per_node or 1)}
    if config.separate:
        pools["actor_rollout_ref.rollout"] = config.rollout_pool
    with findings.gathered("cluster.ray"), joined(config.ray_kwargs.ray_init):
        machines = read_machines()
        room = [line for _, size in pools.values() for line in describe_room(machines, request_of(device, size))]
        lines = [f"{len(machines)} machine(s)", *room, *describe_reservations()]
        lines += [f"dashboard: {dashboard()}"] if dashboard() else []
        findings.info("cluster.ray", "\n".join([*lines, f"to add a machine: {join_command()}"]))
        for section, (count, size) in pools.items():
            for missing in missing_machines(machines, request_of(device, size), count):
                fix = f"run `{join_command()}` there, or lower {section}.nnodes or {section}.n_gpus_per_node"
                findings.error("cluster.ray", missing, fix, keys=f"{section}.nnodes", value=count)
        path = Path(trainer.default_local_dir).expanduser().absolute()
        directory = next(parent for parent in (path, *path.parents) if parent.is_dir())
        findings.add(*probe_machines(machines, device, directory, shared_paths(as_dict(config))).items)
