"""`hybridrl doctor cluster [key=value ...]`, and a run on several machines before a model is loaded: tries
the machines together. Each measures its facts and reaches the others."""

import argparse
import os
import signal
import time
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import ray
import ray._private.worker
import torch
import torch.distributed as dist
from ray.exceptions import RayError
from ray.util.placement_group import placement_group_table
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from hybridrl.config import PPOConfig
from hybridrl.config.files import holds_adapter, resolve_model
from hybridrl.config.findings import Findings
from hybridrl.core import device as devices
from hybridrl.core.cluster.failures import cause
from hybridrl.core.cluster.group import Group, kill, spawn
from hybridrl.core.cluster.session import (
    RayMachine,
    RaySession,
    existing_ray,
    join_command,
    no_response,
    ray_address,
    read_machines,
    read_nodes,
)
from hybridrl.doctor import read_hosts, resolve
from hybridrl.doctor.facts import (
    ADDRESS,
    CLOCK,
    DIRECTORY,
    GLOO,
    NETWORK,
    Facts,
    add_common_facts,
    check_directory,
    compare_machines,
    gloo_fault,
    machine_facts,
    on_interface,
    script_of,
)
from hybridrl.doctor.joining import check_hosts, check_room, missing_hosts, wait_until
from hybridrl.doctor.links import LINK_SECONDS, Link, Pair, measure_link, pairs_of, reach, report_links
from hybridrl.runtime.environment import joins, worker_environment
from hybridrl.runtime.guard import end_with_parent
from hybridrl.tracking.console import info, warn

START = (
    "run `ray start --head --port=6379` on the first machine and `ray start --address=FIRST:6379` on each of the "
    "others, then repeat this with RAY_ADDRESS=FIRST:6379"
)
START_SECONDS = 300.0  # for a process to import torch, from a slow disk too
COLLECTIVE_SECONDS, PAIR_SECONDS = 60.0, 10.0
OF_DRIVER = ("hybridrl", "ray", "transformers", "Python")  # the driver's torch may be another build
DRIVER = "driver"
# What only the driver reads.
DRIVER_ONLY = ("data.train_files", "data.val_files", "data.custom_cls", "data.sampler", "algorithm.adv_estimator")
DRIVER_SECTIONS = ("trainer", "own")


def shared_paths(values: Mapping[str, Any], place: str = "") -> dict[str, str]:
    """Return the models, .py files and modules that a configuration names and every machine reads, by key."""
    paths: dict[str, str] = {}
    for name, value in values.items():
        key = f"{place}{name}"
        if key in DRIVER_SECTIONS or key.startswith(DRIVER_ONLY):
            continue
        if isinstance(value, Mapping):
            paths |= shared_paths(value, f"{key}.")
        for item in [value] if isinstance(value, str) else value if isinstance(value, list) else []:
            if isinstance(item, str) and (name == "external_lib" or _is_shared(item)):
                paths[f"{key}={item}"] = item
    return paths


def _is_shared(value: str) -> bool:
    if value.startswith("pkg://") or os.path.isfile(script_of(value)):
        return True
    return os.path.isdir(value) and ((resolve_model(value) / "config.json").is_file() or holds_adapter(value))


class Probe:
    """The process that tries one machine."""

    def __init__(self) -> None:
        end_with_parent(os.getppid(), signal.SIGKILL)

    def facts(
        self, device: str, paths: Mapping[str, str], gpus: float, directory: str, marker: str, reply: str
    ) -> Facts:
        """Measure the machine, whose Ray offers this number of GPUs."""
        address = on_interface(ray.util.get_node_ip_address())
        shared = check_directory(Path(directory), marker, reply)
        return machine_facts(device, paths, gpus) | {ADDRESS: address, GLOO: gloo_fault(), DIRECTORY: shared}

    def clock(self) -> float:
        return time.time()

    def listen(self) -> tuple[str, int]:
        """Listen where ranks of this machine would; return address and port."""
        address = ray.util.get_node_ip_address()
        self.listener = devices.listen(address)
        return address, self.listener.getsockname()[1]

    def reach(self, places: Sequence[tuple[str, int]]) -> list[str]:
        """Return for each of the other machines why it cannot be reached, or an empty text."""
        with ThreadPoolExecutor(len(places)) as pool:
            return list(pool.map(lambda place: reach(*place), places))

    def all_reduce(self, rank: int, ranks: int, device: str, address: str, seconds: float) -> Link | None:
        """Sum a number over the machines as training ranks do; collective. Returns the link of two machines on CPU."""
        gpus = ray.get_gpu_ids()
        if device == "cuda" and gpus:
            os.environ["CUDA_VISIBLE_DEVICES"] = str(gpus[0])
        try:
            devices.join_group(device, address, self.listener if rank == 0 else None, rank, ranks, seconds)
            number = torch.ones(1, device=devices.current(device))
            dist.all_reduce(number, async_op=True).wait(timedelta(seconds=seconds))
            if number.item() != ranks:
                raise RuntimeError(f"the sum over {ranks} machines is {number.item():g}")
            return measure_link(_seconds_of_sum) if ranks == 2 and device == "cpu" else None
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()


def _seconds_of_sum(size: int) -> float:
    tensor, began = torch.ones(size // 4), time.monotonic()
    dist.all_reduce(tensor)
    return time.monotonic() - began


def probe_run(session: RaySession, directory: Path, values: Mapping[str, Any]) -> None:
    """Try the machines of a run. Raises ConfigError, after printing a table, if they cannot run it."""
    findings = probe_session(session, directory, shared_paths(values))
    for finding in findings.items:
        if finding.severity == "warning":
            warn(finding.text, finding.code)
        elif finding.severity == "info" and findings.errors:
            info(finding.text)
    findings.close()


def probe_session(session: RaySession, directory: Path, paths: Mapping[str, str]) -> Findings:
    """Try the machines of a run. `paths` are what every machine reads, by key; `directory` is the run's."""
    nodes = {machine.node_id: machine for machine in read_machines()}
    machines = [nodes[session.node(device)] for device in session.first_devices]
    actors = []
    for device in session.first_devices:
        environment = worker_environment(session.device, session.sharing(device))
        actors.append(spawn(Probe, session, device, environment, gpus=1))
    return _probe(actors, machines, session.device, session.device, directory, paths)


def probe_machines(machines: Sequence[RayMachine], device: str, directory: Path, paths: Mapping[str, str]) -> Findings:
    """Try machines without a run, which may use their GPUs: messages between them go by gloo only."""
    pins = [NodeAffinitySchedulingStrategy(machine.node_id, soft=False) for machine in machines]
    actors = [ray.remote(Probe).options(num_cpus=0, scheduling_strategy=pin).remote() for pin in pins]
    return _probe(actors, machines, device, "cpu", directory, paths)


def _probe(
    actors: list,
    machines: Sequence[RayMachine],
    device: str,
    collective: str,
    directory: Path,
    paths: Mapping[str, str],
) -> Findings:
    group = Group(actors, "probe", [f"machine-{number}" for number in range(len(actors))])
    gpus = {
        f"machine {number} ({machine.name})": machine.total.get("GPU", 0) for number, machine in enumerate(machines)
    }
    try:
        facts = _gather_facts(group, gpus, device, directory, paths)
        failed = {name: fact for name, fact in facts.items() if isinstance(fact, str)}
        measured = {name: fact for name, fact in facts.items() if not isinstance(fact, str)}
        findings = Findings()
        for name, reason in failed.items():
            fix = "start its Ray again if it has died; install hybridrl there, the same version, and check "
            fix += "ray_kwargs.ray_init.runtime_env"
            findings.error("cluster.start", f"{name} runs no process of hybridrl: {reason}", fix)
        add_common_facts(measured)
        if not failed:
            for name, reason in _try_network(group, measured, collective, findings).items():
                measured[name][NETWORK] = reason
        here = machine_facts("cpu", paths)
        driver = {fact: here[fact] for fact in (*OF_DRIVER, *paths)}
        findings.add(*compare_machines({DRIVER: driver} | measured).items)
        return findings
    finally:
        for actor in actors:
            kill(actor)


def _gather_facts(
    group: Group, gpus: Mapping[str, float], device: str, directory: Path, paths: Mapping[str, str]
) -> dict[str, Facts | str]:
    """Return the facts of each machine, or why it has none. `gpus`: Ray's number of GPUs, by the machines' names."""
    marker = f".cluster-{uuid.uuid4().hex}"
    replies = [f"{marker}-{number}" for number in range(len(gpus))]
    (directory / marker).touch()
    try:
        counted = zip(gpus.values(), replies, strict=True)
        parts = [(device, paths, count, str(directory), marker, reply) for count, reply in counted]
        facts = dict(zip(gpus, _outcomes(group.start_each(Probe.facts, parts), START_SECONDS), strict=True))
        for number, (name, reply) in enumerate(zip(gpus, replies, strict=True)):
            if isinstance(facts[name], str):
                continue
            if not facts[name][DIRECTORY] and not (directory / reply).exists():
                facts[name][DIRECTORY] = "a file that it writes is not visible to the driver"
            asked = time.time()
            (clock,) = group.only([number]).broadcast(Probe.clock, timeout=START_SECONDS)
            facts[name][CLOCK] = round(clock - (asked + time.time()) / 2, 1)
    finally:
        (directory / marker).unlink()
        for reply in replies:
            (directory / reply).unlink(missing_ok=True)
    return facts


def _unreachable(group: Group, machines: Mapping[str, Facts]) -> dict[str, str]:
    """Return for each machine those that it cannot connect to, or why none can connect to it; empty if all can."""
    names, places = [*machines], _outcomes(group.start(Probe.listen), START_SECONDS)
    silent = {name: place for name, place in zip(names, places, strict=True) if isinstance(place, str)}
    if silent:
        return {
            name: f"cannot listen at its address in Ray: {silent.get(name, '')}" * (name in silent) for name in names
        }
    reached = group.broadcast(Probe.reach, places, timeout=START_SECONDS)
    return {
        name: ", ".join(
            f"cannot reach {other} at {reason}, there {machines[other][ADDRESS]}"
            for other, reason in zip(names, reasons, strict=True)
            if reason
        )
        for name, reasons in zip(names, reached, strict=True)
    }


def _try_network(group: Group, machines: Mapping[str, Facts], device: str, findings: Findings) -> dict[str, str]:
    """Connect every machine to every other, then sum over pairs, which measures their links, and over all. Returns each
    machine's faults."""
    names, faults = [*machines], _unreachable(group, machines)
    if any(faults.values()):
        return faults
    links: dict[Pair, Link] = {}
    for pair in pairs_of(len(names)):  # over gloo, as a failed NCCL ends its process
        outcomes = _sum(group.only(pair), "cpu", PAIR_SECONDS)
        ends = [names[machine] for machine in pair]
        if any(isinstance(outcome, str) for outcome in outcomes):
            reasons = "; ".join(
                f"{end}: {why}" for end, why in zip(ends, outcomes, strict=True) if isinstance(why, str)
            )
            message = f"no all-reduce with {ends[0]} within {PAIR_SECONDS:g} s ({reasons})"
            # At once, as torch numbers a process's groups, and after a failure the numbers of two machines differ.
            return faults | {ends[1]: message}
        links[pair] = outcomes[0]
    report_links(names, links, findings)
    outcomes = zip(names, _sum(group, device, COLLECTIVE_SECONDS), strict=True)
    return faults | {name: f"no all-reduce over all machines: {why}" for name, why in outcomes if isinstance(why, str)}


def _sum(group: Group, device: str, seconds: float) -> list[Any]:
    """Sum over the machines of a group. Returns for each the link of a pair, or as a text why it failed."""
    place = _outcomes(group.only([0]).start(Probe.listen), seconds)[0]
    if isinstance(place, str):
        return [place] * len(group)
    parts = [(rank, len(group), device, f"{place[0]}:{place[1]}", seconds) for rank in range(len(group))]
    return _outcomes(group.start_each(Probe.all_reduce, parts), seconds + LINK_SECONDS)


def _outcomes(refs: list, timeout: float) -> list[Any]:
    """Return the result of each call, or as a text why it has none."""
    ready, _ = ray.wait(refs, num_returns=len(refs), timeout=timeout)
    outcomes: list[Any] = []
    for ref in refs:
        try:
            outcomes.append(ray.get(ref) if ref in ready else f"no response within {timeout:g} s")
        except RayError as error:
            outcomes.append(cause(error))
    return outcomes


def describe_reservations() -> list[str]:
    """Return the reservations of running jobs; those of a run name its driver."""
    groups = placement_group_table().values()
    return [
        f"{group['name'] or 'unnamed'}: {group['state'].lower()}, {len(group['bundles'])} device(s)"
        for group in groups
        if group["state"] != "REMOVED"
    ]


def run(options: argparse.Namespace) -> Findings:
    """Try the machines of the cluster that a configuration or RAY_ADDRESS names."""
    resolved = resolve(options)
    findings = Findings()
    if resolved.config is None or "ray_kwargs.ray_init" in resolved.rejected:
        findings.add(*resolved.findings.errors)
    elif not joins(resolved.config.ray_kwargs.ray_init):
        findings.error("cluster.ray", "no Ray cluster is named: neither RAY_ADDRESS nor ray_init.address is set", START)
    else:
        with findings.gathered("cluster.hosts"):
            hosts = read_hosts(options.hosts) if options.hosts else []
            with findings.gathered("cluster.ray"):
                _check_cluster(resolved.config, hosts, options, findings)
    return findings


def _check_cluster(config: PPOConfig, hosts: Sequence[str], options: argparse.Namespace, findings: Findings) -> None:
    """Wait for the hosts, then try them. Raises ConfigError if no Ray responds."""
    ray_init, deadline = config.ray_kwargs.ray_init, time.monotonic() + options.wait
    address = ray_address(ray_init)
    if not wait_until(lambda: [f"Ray at {address}"] * bool(no_response(address)), deadline):
        check_hosts(hosts, [], options.logs, findings)
    with existing_ray(ray_init):
        wait_until(lambda: missing_hosts(hosts, read_nodes()), deadline)
        check_hosts(hosts, read_nodes(), options.logs, findings)
        if findings.errors:
            return
        machines = read_machines()
        dashboard = ray._private.worker.get_dashboard_url()
        lines = [*describe_reservations(), *[f"dashboard: {dashboard}"] * bool(dashboard)]
        check_room(config, machines, [*lines, f"to add a machine: {join_command()}"], findings)
        path = Path(config.trainer.default_local_dir).expanduser().absolute()
        directory = next(parent for parent in (path, *path.parents) if parent.is_dir())
        findings.add(*probe_machines(machines, config.trainer.device, directory, shared_paths(asdict(config))).items)
        check_hosts([], read_nodes() if findings.errors else [], None, findings)  # a machine may have died meanwhile
