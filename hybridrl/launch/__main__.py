"""`hybridrl launch slurm|ssh|kuberay|skypilot [options] -- key=value ...`: prints, writes or submits the file of a run.
`hybridrl launch address HOST`, for those files: the address of this machine on the route to the host."""

import argparse
import os
import re
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil
import yaml

from hybridrl.config import ConfigError, PPOConfig
from hybridrl.config.findings import Findings
from hybridrl.config.load import resolve_config
from hybridrl.doctor import KEYS, Command, read_hosts
from hybridrl.launch import render
from hybridrl.runtime import EXIT_REJECTED
from hybridrl.tracking.console import print_text

SUBMIT = {"slurm": "sbatch", "ssh": "bash", "kuberay": "kubectl create -f", "skypilot": "sky jobs launch -y"}
OPTIONS = yaml.safe_load(Path(__file__).with_name("options.yaml").read_text(encoding="utf-8"))
USAGE = "hybridrl launch slurm|ssh|kuberay|skypilot [options] [--scheduler-args ...] -- key=value ..."


def parse(words: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the options, with the scheduler's own in `further`, and the words of `hybridrl train`."""
    parser = argparse.ArgumentParser(usage=USAGE, description="Start a run on several machines.", allow_abbrev=False)
    parser.add_argument("engine", choices=[*SUBMIT], metavar="slurm|ssh|kuberay|skypilot")
    for name, option in OPTIONS.items():
        value, _, meaning = option["use"].partition(": ")
        how: dict[str, Any] = {"action": "append"} if option["default"] == [] else {"type": type(option["default"])}
        meaning += f" ({', '.join(option['for'])})" if "for" in option else ""
        parser.add_argument(f"--{name}", default=option["default"], metavar=value, help=meaning, **how)
    parser.add_argument("--scheduler-args", metavar="...", help="options of the scheduler, up to --")
    target = parser.add_mutually_exclusive_group()
    target.add_argument("--out", type=Path, metavar="FILE", help="write the file; only you can read it")
    target.add_argument("--submit", action="store_true", help=f"pass it to {', '.join(SUBMIT.values())}")
    end = words.index("--") if "--" in words else len(words)
    start = words.index("--scheduler-args") if "--scheduler-args" in words[:end] else end
    options = parser.parse_args(words[:start])
    options.further = words[start + 1 : end]
    return options, words[end + 1 :]


def check(options: argparse.Namespace) -> None:
    """Reject options that the scheduler does not have or lacks, and read the hosts and the variables."""
    findings, engine = Findings(), options.engine
    for name, option in OPTIONS.items():
        value = vars(options)[name.replace("-", "_")]
        if value != option["default"] and engine not in option.get("for", SUBMIT):
            fix = f"leave it out; it is for {', '.join(option['for'])}"
            findings.error("conflict", f"--{name} has no effect on {engine}", fix)
        elif value == option["default"] and engine in option.get("needed", ()):
            findings.error("conflict", f"--{name} is not set", f"--{name} {option['use']}")
        form = option.get(engine) or option.get("form", r"[^\x00-\x1f\x7f]*")
        for text in value if isinstance(value, list) else [str(value)]:
            if not re.fullmatch(form, text):
                findings.error("conflict", f"--{name} {text!r} has another form", f"--{name} {option['use']}")
    findings.close()
    interfaces = {"GLOO_SOCKET_IFNAME": options.interface, "NCCL_SOCKET_IFNAME": options.interface}
    options.env = [*(interfaces if options.interface else {}).items(), *(text.split("=", 1) for text in options.env)]
    if engine == "ssh":
        options.hosts = read_hosts(Path(options.hosts))
        options.nodes = options.nodes or len(options.hosts)
        if not options.min_nodes <= options.nodes == len(options.hosts):
            cause = f"--nodes {options.nodes} --min-nodes {options.min_nodes} for {len(options.hosts)} hosts"
            raise ConfigError(cause, fix="leave --nodes out, and lower --min-nodes")
    passed_on = {"time": "--time=", "partition": "--partition=", "account": "--account=", "user": "-l"}
    options.further[:0] = [f"{flag}{value}" for name, flag in passed_on.items() if (value := vars(options)[name])]


def resolve(options: argparse.Namespace, keys: argparse.Namespace) -> tuple[PPOConfig, list[str]]:
    """Return the configuration, and the keys that --nodes and --gpus set. Raises ConfigError if other keys contradict
    them."""
    nodes, gpus = options.nodes, int(options.gpus.rpartition(":")[2])
    added = [f"trainer.nnodes={nodes}", f"trainer.n_gpus_per_node={gpus}" if gpus else "trainer.device=cpu"]
    words = [*added, *keys.overrides]  # the last value of a key counts
    resolved = resolve_config(PPOConfig, words, keys.config_name, keys.config_path, offline=True)
    config = resolved.accept(lambda text: print_text(f"warning: {text}", error=True))
    machines, devices = config.trainer.nnodes, config.trainer.n_gpus_per_node or 1
    sizes = [(machines, devices)]
    if config.separate:  # on machines of its own, or on other GPUs of the same
        others, per_machine = config.rollout_pool
        sizes = [(machines + others, max(devices, per_machine)), (max(machines, others), devices + per_machine)]
    if config.trainer.device == "cpu":
        sizes = [(machines, 0) for machines, _ in sizes]
    if (nodes, gpus) not in sizes:
        fix = " or ".join(f"--nodes {machines} --gpus {devices}" for machines, devices in sizes)
        raise ConfigError(f"--nodes {nodes} --gpus {gpus} are not the machines of the command's keys", fix=fix)
    return config, added


def address(host: str, interface: str = "", here: str = "") -> str:
    """Return the IPv4 address of an interface, by default that of the route to the host. Raises ConfigError if there is
    none, or if this machine is not `here`."""
    try:
        socket.create_server((here, 0)).close()
        if interface:
            addresses = psutil.net_if_addrs()[interface]
            return next(entry.address for entry in addresses if entry.family == socket.AF_INET)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))  # sends nothing
            return probe.getsockname()[0]
    except (OSError, KeyError, StopIteration) as error:
        cause = f"this machine{f', not {here},' * bool(here)} has no address {interface} to reach {host}: {error}"
        fix = f"run the script on its first host; --interface names one of {', '.join(psutil.net_if_addrs())}"
        raise ConfigError(cause, fix=fix) from error


def deliver(options: argparse.Namespace, text: str, logs: Path) -> int:
    """Print, write or submit the file; return the exit status. Raises ConfigError."""
    program, *words = SUBMIT[options.engine].split()
    try:
        if options.engine == "slurm":
            logs.mkdir(parents=True, exist_ok=True)  # or Slurm ends the job without a message
        if options.out:  # it may hold secrets
            with open(os.open(options.out, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
                file.write(text)
        elif not options.submit:
            print(text, end="")
        elif options.engine == "ssh":  # takes the run's whole time, and signals reach it
            os.execvp(program, [program, "-c", text])
        else:
            with tempfile.NamedTemporaryFile("w", suffix=".yaml", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                further = options.further if options.engine != "slurm" else []
                return subprocess.run([program, *words, *further, file.name]).returncode
    except OSError as error:
        fix = f"name a new file with --out, where it can be written; {program} takes it where it is installed"
        raise ConfigError(str(error), fix=fix) from error
    return 0


def launch(words: list[str]) -> int:
    """Return the exit status. Raises ConfigError."""
    options, run = parse(words)
    check(options)
    config, added = resolve(options, Command("", KEYS, "").parse("launch", run))
    scripted = options.engine in ("slurm", "ssh")
    options.workdir = options.workdir or (str(Path.cwd()) if scripted else ".")
    directory = Path(options.workdir, config.trainer.default_local_dir).expanduser()
    if not scripted and not any(directory.is_relative_to(mount.rpartition(":")[2]) for mount in options.mounts):
        fix = "name a directory below /PLACE of --mounts FROM:/PLACE"
        raise ConfigError(f"trainer.default_local_dir={directory} would be lost with its machine", fix=fix)
    text = render(options, [*added, *run], directory, config.trainer.experiment_name)
    return deliver(options, text, directory / "launch")


def main(argv: list[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else argv
    try:
        if words[:1] == ["address"]:
            print(address(*words[1:]))
            return 0
        return launch(words)
    except ConfigError as error:
        print_text(f"error: {error}", error=True)
        return EXIT_REJECTED


if __name__ == "__main__":
    sys.exit(main())
