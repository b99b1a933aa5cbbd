"""`hybridrl doctor cluster [key=value ...]`, and a run on several machines before a model is loaded: tries
the machines together. Each measures its facts and reaches the others."""

import argparse
import os
import signal
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import ray
import ray._private.worker
import torch
import torch.distributed as dist
from ray.exceptions import RayError
from ray.util.placement_group import placement_group_table
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from hybridrl import project_file
from hybridrl.config.files import holds_adapter, resolve_model
from hybridrl.config.findings import Finding, Findings, Severity
from hybridrl.core import device as devices
from hybridrl.core.cluster.failures import cause
from hybridrl.core.cluster.group import Group, kill, spawn
from hybridrl.core.cluster.session import (
    RayMachine,
    RaySession,
    describe_room,
    existing_ray,
    join_command,
    missing_machines,
    read_machines,
    request_of,
)
from hybridrl.doctor import resolve
from hybridrl.doctor.machine import (
    INSTALLING,
    SHARED_MEMORY,
    SHOWN,
    TEMPORARY,
    Facts,
    check_directory,
    machine_facts,
    reach,
    script_of,
)
from hybridrl.runtime.environment import joins, worker_environment
from hybridrl.runtime.guard import end_with_parent
from hybridrl.tracking.console import info, warn

START = (
    "run `ray start --head --port=6379` on the first machine and `ray start --address=FIRST:6379` on each of the "
    "others, then repeat this with RAY_ADDRESS=FIRST:6379"
)
START_SECONDS = 300.0  # for a process to import torch, from a slow disk too
COLLECTIVE_SECONDS, PAIR_SECONDS = 60.0, 10.0
VERSIONS = ("hybridrl", *SHOWN, "CUDA", "NCCL", "VLLM_NCCL_SO_PATH", "Python", "CUDA driver")
OF_DRIVER = ("hybridrl", "ray", "transformers", "Python")  # the driver's torch may be another build
DRIVER, DIRECTORY, NETWORK, CLOCK = "driver", "run directory", "network", "clock offset in s"
CLOCK_SECONDS = 2.0
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

    def facts(self, device: str, paths: Mapping[str, str], directory: str, marker: str, reply: str) -> Facts:
        return machine_facts(device, paths) | {DIRECTORY: check_directory(Path(directory), marker, reply)}

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

    def all_reduce(self, rank: int, ranks: int, device: str, address: str, seconds: float) -> None:
        """Sum a number over the machines as training ranks do; collective."""
        gpus = ray.get_gpu_ids()
        if device == "cuda" and gpus:
            os.environ["CUDA_VISIBLE_DEVICES"] = str(gpus[0])
        try:
            devices.join_group(device, address, self.listener if rank == 0 else None, rank, ranks, seconds)
            number = torch.ones(1, device=devices.current(device))
            dist.all_reduce(number, async_op=True).wait(timedelta(seconds=seconds))
            if number.item() != ranks:
                raise RuntimeError(f"the sum over {ranks} machines is {number.item():g}")
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()


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
    nodes = {machine.node_id: machine.name for machine in read_machines()}
    names, actors = [], []
    for number, device in enumerate(session.first_devices):
        names.append(f"machine {number} ({nodes[session.node(device)]})")
        environment = worker_environment(session.device, session.sharing(device))
        actors.append(spawn(Probe, session, device, environment, gpus=1))
    return _probe(actors, names, session.device, session.device, directory, paths)


def probe_machines(machines: Sequence[RayMachine], device: str, directory: Path, paths: Mapping[str, str]) -> Findings:
    """Try machines without a run, which may use their GPUs: messages between them go by gloo only."""
    names = [f"machine {number} ({machine.name})" for number, machine in enumerate(machines)]
    pins = [NodeAffinitySchedulingStrategy(machine.node_id, soft=False) for machine in machines]
    actors = [ray.remote(Probe).options(num_cpus=0, scheduling_strategy=pin).remote() for pin in pins]
    return _probe(actors, names, device, "cpu", directory, paths)


def _probe(
    actors: list, names: list[str], device: str, collective: str, directory: Path, paths: Mapping[str, str]
) -> Findings:
    group = Group(actors, "probe", [f"machine-{number}" for number in range(len(actors))])
    try:
        facts = _gather_facts(group, names, device, directory, paths)
        failed = {name: fact for name, fact in facts.items() if isinstance(fact, str)}
        measured = {name: fact for name, fact in facts.items() if not isinstance(fact, str)}
        findings = Findings()
        for name, reason in failed.items():
            fix = "install hybridrl there, the same version, and check ray_kwargs.ray_init.runtime_env"
            findings.error("cluster.start", f"{name} runs no process of hybridrl: {reason}", fix)
        if not failed:
            for name, reason in _try_network(group, names, collective).items():
                measured[name][NETWORK] = reason
        here = machine_facts("cpu", paths)
        driver = {fact: here[fact] for fact in (*OF_DRIVER, *paths)}
        findings.add(*compare_machines({DRIVER: driver} | measured).items)
        return findings
    finally:
        for actor in actors:
            kill(actor)


def _gather_facts(
    group: Group, names: list[str], device: str, directory: Path, paths: Mapping[str, str]
) -> dict[str, Facts | str]:
    """Return the facts of each machine, or why it has none."""
    marker = f".cluster-{uuid.uuid4().hex}"
    replies = [f"{marker}-{number}" for number in range(len(names))]
    (directory / marker).touch()
    try:
        parts = [(device, paths, str(directory), marker, reply) for reply in replies]
        facts = dict(zip(names, _outcomes(group.start_each(Probe.facts, parts), START_SECONDS), strict=True))
        for number, (name, reply) in enumerate(zip(names, replies, strict=True)):
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


def _try_network(group: Group, names: list[str], device: str) -> dict[str, str]:
    """Connect every machine to every other, then sum a number over pairs and over all; return each one's faults."""
    places = group.broadcast(Probe.listen, timeout=START_SECONDS)
    reached = group.broadcast(Probe.reach, places, timeout=START_SECONDS)
    faults = {
        name: ", ".join(
            f"cannot reach {other} at {reason}" for other, reason in zip(names, reasons, strict=True) if reason
        )
        for name, reasons in zip(names, reached, strict=True)
    }
    if any(faults.values()):
        return faults
    for other in range(1, len(names)):  # over gloo, as a failed NCCL ends its process
        pair = (names[0], names[other])
        failed = _all_reduce(group.only([0, other]), "cpu", PAIR_SECONDS)
        if failed:
            reasons = "; ".join(f"{pair[rank]}: {reason}" for rank, reason in failed.items())
            message = f"no all-reduce with {names[0]} within {PAIR_SECONDS:g} s ({reasons})"
            # At once, as torch numbers a process's groups, and after a failure the numbers of two machines differ.
            return faults | {names[other]: message}
    failures = _all_reduce(group, device, COLLECTIVE_SECONDS)
    return faults | {names[rank]: f"no all-reduce over all machines: {reason}" for rank, reason in failures.items()}


def _all_reduce(group: Group, device: str, seconds: float) -> dict[int, str]:
    """Return the ranks of the group that failed, and why."""
    try:
        host, port = group.only([0]).broadcast(Probe.listen, timeout=seconds)[0]
    except RuntimeError as error:
        return {0: str(error).splitlines()[0]}
    parts = [(rank, len(group), device, f"{host}:{port}", seconds) for rank in range(len(group))]
    outcomes = _outcomes(group.start_each(Probe.all_reduce, parts), seconds + PAIR_SECONDS)
    return {rank: outcome for rank, outcome in enumerate(outcomes) if isinstance(outcome, str)}


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


def _check_room(device: str, pools: Mapping[str, tuple[int, int]], findings: Findings) -> None:
    """Report the machines of the cluster, and what is missing of the machines and devices of each of a run's pools."""
    machines = read_machines()
    room = [line for _, size in pools.values() for line in describe_room(machines, request_of(device, size))]
    lines = [f"{len(machines)} machine(s)", *room, *describe_reservations()]
    dashboard = ray._private.worker.get_dashboard_url()
    lines += [f"dashboard: {dashboard}"] if dashboard else []
    findings.info("cluster.ray", "\n".join([*lines, f"to add a machine: {join_command()}"]))
    for section, (count, size) in pools.items():
        for missing in missing_machines(machines, request_of(device, size), count):
            fix = f"run `{join_command()}` there, or lower {section}.nnodes or {section}.n_gpus_per_node"
            findings.error("cluster.ray", missing, fix, keys=f"{section}.nnodes", value=count)


# -- comparing facts ---------------------------------------------------------------------------------------------------


class FactRule(NamedTuple):
    """Rule for a fact of one machine."""

    severity: Severity
    code: str
    wrong: Callable[[Any], bool]
    fix: str


INTERFACE = "the interface: NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME in ray_kwargs.ray_init.runtime_env.env_vars"
SHARED = "set trainer.default_local_dir to a directory on storage that all machines share"
RULES = {
    DIRECTORY: FactRule("error", "cluster.directory", bool, SHARED),
    NETWORK: FactRule("error", "cluster.network", bool, f"open the ports between the machines, or name {INTERFACE}"),
    CLOCK: FactRule(
        "warning", "cluster.clock", lambda value: abs(value) > CLOCK_SECONDS, "synchronize it (chronyc makestep)"
    ),
    "memory free in GiB": FactRule("warning", "cluster.free", lambda value: value < 2, "end other programs"),
    TEMPORARY: FactRule("warning", "cluster.free", lambda value: value < 1, "delete files there"),
    SHARED_MEMORY: FactRule("warning", "cluster.free", lambda value: value < 1, "mount it with a larger size"),
}


def compare_machines(machines: Mapping[str, Facts]) -> Findings:
    """Judge the facts of all machines, by their names: a table, and what differs or fails with its fix."""
    findings = Findings()
    findings.info("cluster.facts", f"{', '.join(machines)}\n{facts_table(machines)}")
    for fact, holders in _values(machines).items():
        if rule := RULES.get(fact):
            for value, names in holders.items():
                if rule.wrong(value):
                    cause = f"{fact}, on {names}: {value}"
                    findings.add(Finding(rule.code, rule.severity, cause=cause, fix=rule.fix))
        elif fact in VERSIONS:
            _compare_versions(fact, holders, findings)
        else:
            _compare_paths(fact, holders, findings)
    return findings


def _compare_versions(fact: str, holders: Mapping[Any, str], findings: Findings) -> None:
    if len(holders) == 1:
        return
    cause = f"{fact} differs: {_listed(holders)}"
    same_minor = len({str(value).rpartition(".")[0] for value in holders}) == 1
    if fact == "CUDA driver" or (fact == "Python" and same_minor):
        findings.warn("cluster.versions", cause)
    else:
        fix = f"install the same on each machine, as {project_file(INSTALLING)} says"
        findings.error("cluster.versions", cause, fix)


def _compare_paths(fact: str, holders: Mapping[Any, str], findings: Findings) -> None:
    fix = "copy the same files to each machine, or name a path on storage that all machines share"
    if None in holders:
        findings.error("cluster.paths", f"{fact} does not exist on {holders[None]}", fix)
    elif len(holders) > 1:
        findings.error("cluster.paths", f"{fact} has different contents: {_listed(holders)}", fix)


def facts_table(machines: Mapping[str, Facts]) -> str:
    """Return one line per fact: the value that all machines share, or each value with its machines, marked by `!`."""
    values = _values(machines)
    width = max(map(len, values), default=0)
    lines = []
    for fact, holders in values.items():
        rule = RULES.get(fact)
        wrong = any(map(rule.wrong, holders)) if rule else len(holders) > 1 or None in holders
        text = _listed(holders) if len(holders) > 1 or wrong else _shown(next(iter(holders)))
        lines.append(f"{'!' if wrong else ' '} {fact:{width}}  {text}")
    return "\n".join(lines)


def _values(machines: Mapping[str, Facts]) -> dict[str, dict[Any, str]]:
    """For each fact its values, and for each value the machines that have it."""
    holders: dict[str, dict[Any, list[str]]] = defaultdict(lambda: defaultdict(list))
    for name, facts in machines.items():
        for fact, value in facts.items():
            holders[fact][value].append(name)
    return {fact: {value: ", ".join(names) for value, names in values.items()} for fact, values in holders.items()}


def _listed(holders: Mapping[Any, str]) -> str:
    return "; ".join(f"{_shown(value)} on {names}" for value, names in holders.items())


def _shown(value: Any) -> str:
    return {None: "missing", "": "-"}.get(value) or f"{value}"


def run(options: argparse.Namespace) -> Findings:
    """Try the machines of the cluster that a configuration or RAY_ADDRESS names."""
    resolved = resolve(options)
    findings = Findings()
    if resolved.config is None or "ray_kwargs.ray_init" in resolved.rejected:
        findings.add(*resolved.findings.errors)
    elif not joins(resolved.config.ray_kwargs.ray_init):
        findings.error("cluster.ray", "no Ray cluster is named: neither RAY_ADDRESS nor ray_init.address is set", START)
    else:
        config = resolved.config
        pools = {"trainer": (config.trainer.nnodes, config.trainer.n_gpus_per_node or 1)}
        pools |= {"actor_rollout_ref.rollout": config.rollout_pool} if config.separate else {}
        with findings.gathered("cluster.ray"), existing_ray(config.ray_kwargs.ray_init):
            _check_room(config.trainer.device, pools, findings)
            path = Path(config.trainer.default_local_dir).expanduser().absolute()
            directory = next(parent for parent in (path, *path.parents) if parent.is_dir())
            paths = shared_paths(asdict(config))
            findings.add(*probe_machines(read_machines(), config.trainer.device, directory, paths).items)
    return findings
