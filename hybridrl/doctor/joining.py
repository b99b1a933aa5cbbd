"""Machines that have joined a Ray: waits for hosts by name; those that are missing, dead, twice or unexpected; and what
each lacks for a run."""

import socket
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path

from hybridrl.config import PPOConfig
from hybridrl.config.checks.training import CPU_SLOT_BYTES
from hybridrl.config.findings import Findings
from hybridrl.core.cluster.session import RayMachine, RayNode, describe_room, missing_machines, request_of
from hybridrl.doctor import RENAME
from hybridrl.doctor.machine import GIB, TOKEN_BYTES
from hybridrl.plugins import load as plugin
from hybridrl.runs.placement import describe, expected_groups, place_processes
from hybridrl.tracking.console import info
from hybridrl.tracking.faults import last_lines

POLL_SECONDS, REPORT_SECONDS = 1.0, 60.0
LOG_BYTES, SHOWN_CHARACTERS = 1 << 14, 300


def wait_until(lacking: Callable[[], list[str]], deadline: float) -> bool:
    """Wait until nothing is lacking, and show changes of the list. Returns whether it was in time; `deadline` is a time
    of the monotonic clock."""
    shown, reported = list[str](), float("-inf")
    while missing := lacking():
        now = time.monotonic()
        if now >= deadline:
            return False
        if missing != shown or now - reported >= REPORT_SECONDS:
            info(f"waiting up to {deadline - now:.0f} s for {', '.join(missing)}")
            shown, reported = missing, now
        time.sleep(POLL_SECONDS)
    return True


def is_host(node: RayNode, host: str) -> bool:
    """Whether a node of Ray runs on a host: by its address, its name in Ray, or the first part of its host's name."""
    addresses = _addresses(host)
    if node.label == host or node.address in addresses:
        return True
    return host not in addresses and host.partition(".")[0] == node.host.partition(".")[0]


@cache
def _addresses(host: str) -> frozenset[str]:
    try:
        return frozenset(str(item[4][0]) for item in socket.getaddrinfo(host, None))
    except OSError:
        return frozenset()


def missing_hosts(hosts: Sequence[str], nodes: Sequence[RayNode]) -> list[str]:
    """Return the hosts without a live node."""
    return [host for host in hosts if not any(node.alive and is_host(node, host) for node in nodes)]


def check_hosts(hosts: Sequence[str], nodes: Sequence[RayNode], logs: Path | None, findings: Findings) -> None:
    """Report missing hosts with the last lines of their logs, hosts that joined twice, and unexpected nodes. Without
    hosts, report nodes that died and did not join again."""
    alive = [node for node in nodes if node.alive]
    for node in [] if hosts else nodes:
        if node.address not in {other.address for other in alive}:
            cause, fix = f"{node.name} joined Ray {_end(node)}", "start Ray there again, or do without it"
            findings.warn("cluster.dead", cause, fix)
    for host in missing_hosts(hosts, nodes):
        ends = [f"joined Ray {_end(node)}" for node in nodes if is_host(node, host)]
        fix = "start Ray there at an address that the others reach (ray start --node-ip-address=...)"
        cause = f"{host} {(ends or ['has not joined Ray'])[-1]}; {last_line(host, logs)}"
        findings.error("cluster.missing", cause, fix)
    for host in hosts:
        places = [node.name for node in alive if is_host(node, host)]
        if len(places) > 1:
            cause = f"{host} is in Ray {len(places)} times, as {', '.join(places)}"
            fix = f"end the Ray that was left there; if these are two machines, {RENAME}"
            findings.error("cluster.twice", cause, fix)
    for node in alive if hosts else []:
        names = [host for host in hosts if is_host(node, host)]
        if len(names) > 1:
            findings.error("cluster.twice", f"{' and '.join(names)} are one machine in Ray, {node.name}", RENAME)
        if not names:
            cause = f"{node.name} joined this Ray {node.seconds:.0f} s ago and is not among the hosts"
            findings.warn("cluster.unexpected", cause, "check RAY_ADDRESS: this may be another cluster, or an old Ray")


def _end(node: RayNode) -> str:
    return f"as {node.address} and died {node.seconds:.0f} s ago ({node.reason or 'no reason known'})"


def last_line(host: str, logs: Path | None) -> str:
    """Return the end of a host's log."""
    if logs is None:
        return "no --logs are named"
    log = logs / f"{host}.log"
    lines = last_lines(log, LOG_BYTES).split("\n") if log.is_file() else []
    line = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return f"{log} ends with: {line[-SHOWN_CHARACTERS:]}" if line else f"there is nothing in {log}"


def check_room(config: PPOConfig, machines: Sequence[RayMachine], remarks: Sequence[str], findings: Findings) -> None:
    """Report machines and `remarks`, lacks of devices, memory and space, and the placement of a run's processes."""
    device, rollout = config.trainer.device, config.actor_rollout_ref.rollout
    pools = {"trainer": (config.trainer.nnodes, config.trainer.n_gpus_per_node or 1)}
    pools |= {"actor_rollout_ref.rollout": config.rollout_pool} if config.separate else {}
    room = [line for _, size in pools.values() for line in describe_room(machines, request_of(device, size))]
    findings.info("cluster.ray", "\n".join([f"{len(machines)} machine(s)", *room, *remarks]))
    for section, (count, size) in pools.items():
        request, fix = request_of(device, size), f"{section}.nnodes or {section}.n_gpus_per_node"
        lacking = [f"{machine.name} has {lack}" for machine in machines if (lack := _lack(machine, request))]
        for missing in missing_machines(machines, request, count):
            findings.error("cluster.room", "; ".join([missing, *lacking]), f"add a machine, or lower {fix}")
        needs = {"CPU": size, "memory": size * CPU_SLOT_BYTES} if device == "cpu" else {}
        for machine in machines:
            if machine.has(request) and (lack := _lack(machine, needs)):
                findings.warn("cluster.room", f"{machine.name} has {lack} for its CPU devices", f"lower {fix}")
    rows = config.data.train_batch_size * rollout.n * (rollout.max_model_len or 0) * TOKEN_BYTES
    for machine in machines:
        if lack := _lack(machine, {"object_store_memory": rows} if "object_store_memory" in machine.total else {}):
            fix = f"ray start --object-store-memory={2 * rows}, where /dev/shm has room for it"
            findings.warn("cluster.store", f"{machine.name} has {lack} for the rows of a step", fix)
    groups = expected_groups(machines, device, [size for count, size in pools.values() for _ in range(count)])
    if groups:
        episodes = plugin("episodes").runs_episodes(rollout, ())
        findings.info("cluster.placement", describe(place_processes(groups, config, episodes=episodes)))


def _lack(machine: RayMachine, needs: Mapping[str, float]) -> str:
    """Return the resources of which a machine has too little, with the amounts; empty if there are none."""
    names = [name for name, amount in needs.items() if machine.total.get(name, 0) < amount]
    units = {name: (GIB, "GiB of ") if "memory" in name else (1, "") for name in names}
    return " and ".join(
        f"{machine.total.get(name, 0) / unit:.3g} of {needs[name] / unit:.3g} {word}{name}"
        for name, (unit, word) in units.items()
    )
