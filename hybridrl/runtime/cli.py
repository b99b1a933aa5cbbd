"""The command line shared by all entry points: parse, load, run, and end with one clear message.

A sweep is several runs from one command: one for each combination of the values given, one after another or some at
once. Each run has its own directory and is the same run as by its own command. Runs share the driver's imports, Ray and
the fork server.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import IO, Any, Generic, TypeVar

from rich.text import Text

from hybridrl import project_file
from hybridrl.config import ConfigError, TrainingConfig
from hybridrl.config.checks.training import this_machine
from hybridrl.config.compose import CONF, SHIPPED, as_override, as_yaml, split_sweep
from hybridrl.config.json_schema import json_schema
from hybridrl.config.load import explain_keys
from hybridrl.runtime import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_REJECTED
from hybridrl.runtime.environment import reject_foreign_builds
from hybridrl.runtime.guard import REQUESTS, ended_by_closed_pipe, stop_at_once
from hybridrl.tracking.console import Terminal, info, print_text
from hybridrl.tracking.faults import PAGE, code_of
from hybridrl.tracking.report import draw_runs, run_table
from hybridrl.tracking.secrets import mask_text, remember

T = TypeVar("T")


@dataclass(frozen=True)
class RunCommand(Generic[T]):
    """An entry point for runs, `hybridrl NAME`: its help text, `load` for its configuration, and `open`: a context with
    everything that successive runs share. It yields a function that runs one and may return an exit status."""

    name: str
    purpose: str
    example: tuple[str, ...]
    config_name: str
    first_keys: tuple[str, ...]
    load: Callable[..., T]
    open: Callable[[T], AbstractContextManager[Callable[[T], int | None]]]

    @property
    def example_line(self) -> str:
        return " \\\n      ".join((f"hybridrl {self.name}", *self.example))


def run_command(command: RunCommand[T], argv: list[str] | None = None) -> int:
    """Parse, load and run; return the exit status: 0, 1 (the run failed), 2 (invalid input), 130 (interrupted), or the
    run's own."""
    words, parser = sys.argv[1:] if argv is None else argv, _parser(command)
    arguments, further = parser.parse_known_args(_with_values(words))
    if options := [item for item in further if item.startswith("-")]:
        parser.error(_unknown_option(options[0], command.name))
    arguments.overrides += further
    stop_at_once()
    try:
        if arguments.help is not None:
            return _show(SWEEP_HELP if arguments.multirun else _help(command, parser, arguments.help))
        return _run(command, words, arguments)
    except ConfigError as error:
        causes = str(error)
        if arguments.cfg and error.config is not None:  # as far as it can be read
            try:
                _show(as_yaml(error.config, arguments.package), end="")
            except ConfigError as absent:
                causes = f"{absent}\n{causes}"
        _print("error:", "bold red", causes)
        if not arguments.overrides and arguments.config_path == CONF and arguments.help is None:
            _print("", "", f"for example: {command.example_line}\n(--help all lists all keys)")
        return EXIT_REJECTED
    except KeyboardInterrupt:
        info(f"stopped ({REQUESTS.last or 'Ctrl-C'}); no process is left running")
        return EXIT_INTERRUPTED
    except Exception as error:
        if not type(error).__module__.startswith("hybridrl"):  # our own errors need no traceback of the driver
            print_text(mask_text("".join(traceback.format_exception(error))), error=True)
        text, code = str(error) or type(error).__name__, code_of(error)
        separator = "\n" if "\n" in text else " "
        _print(f"failed [{code}]:", "bold red", f"{text}{separator}({project_file(PAGE)}#{code})")
        return EXIT_FAILED


def _show(text: str, end: str = "\n") -> int:
    """Print what was requested instead of a run; return the exit status."""
    with ended_by_closed_pipe():
        print(text, end=end)
    return 0


def _help(command: RunCommand[T], parser: argparse.ArgumentParser, section: str) -> str:
    width = min(shutil.get_terminal_size((100, 24)).columns, 120)
    keys = explain_keys(command.config_name, section, command.first_keys, width)
    return keys if section else f"{parser.format_help()}\n{keys}"


def _run(command: RunCommand[T], argv: list[str], arguments: argparse.Namespace) -> int:
    """Run once or as a sweep, or print the configurations of what would run."""
    place = {"config_name": arguments.config_name, "config_dir": arguments.config_path}
    if arguments.schema:
        schema = next(schema for schema, name in SHIPPED.items() if name == command.config_name)
        return _show(json.dumps(json_schema(schema), indent=1, allow_nan=False))
    if arguments.multirun and arguments.cfg:
        with ended_by_closed_pipe():
            for point in load_points(command, arguments.overrides, place)[1]:  # a YAML document each
                print(f"--- # {point.name}\n{as_yaml(point.config, arguments.package)}", end="")
        return 0
    if arguments.multirun:
        return run_sweep(command, argv, arguments.overrides, place, arguments.at_once, arguments.only)
    messages = None if arguments.cfg else info
    config = command.load(arguments.overrides, **place, report=partial(_print, "warning:", "yellow"), show=messages)
    if arguments.cfg:
        return _show(as_yaml(config, arguments.package), end="")
    remember(asdict(config))
    reject_foreign_builds()
    with command.open(config) as run:
        return run(config) or 0


def _parser(command: RunCommand[T]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        usage=f"hybridrl {command.name} [key=value ...]",
        description=f"{command.purpose}\n\nfor example:\n  {command.example_line}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        add_help=False,
        allow_abbrev=False,
    )
    add, place = parser.add_argument, "directory of a custom configuration file"
    add("overrides", nargs="*", metavar="key=value", help="values of configuration keys")
    sections = "show this; with a section, such as data, or all, the keys there with value and meaning"
    add("-h", "--help", nargs="?", const="", metavar="SECTION", help=sections)
    add("-c", "--cfg", nargs="?", const="job", choices=["job", "all"], help="print the resolved configuration and exit")
    section = "the section that --cfg prints, such as actor_rollout_ref.rollout"
    add("-p", "--package", metavar="SECTION", default="", help=section)
    add("--schema", action="store_true", help="print a JSON Schema of configuration files, for editors, and exit")
    several = f"run every combination of the values given: key=a,b ({project_file('docs/sweeps.md')})"
    add("-m", "--multirun", action="store_true", help=several)
    at_once = "with -m: N runs at a time, each with its part of the machine"
    add("--at-once", type=int, default=1, metavar="N", help=at_once)
    add("--only", action="append", default=[], help=argparse.SUPPRESS)
    add("--resolve", action="store_true", help="has no effect, as --cfg prints resolved values always")
    add("-cp", "--config-path", type=Path, default=CONF, metavar="DIR", help=place)
    name = f"that file's name; it begins with defaults: [{command.config_name}, _self_]"
    add("-cn", "--config-name", default=command.config_name, metavar="NAME", help=name)
    return parser


def _with_values(argv: list[str]) -> list[str]:
    """The arguments, with `--cfg` and `--help` joined to their word if one follows: Hydra writes `--cfg job`, but what
    follows is often key=value."""
    joined: list[str] = []
    for argument in argv:
        before = joined[-1] if joined else ""
        if before in ("-h", "--help", "-c", "--cfg") and "=" not in argument and not argument.startswith("-"):
            joined[-1] = f"--{'help' if 'h' in before else 'cfg'}={argument}"
        else:
            joined.append(argument)
    return [f"{word}={'' if 'h' in word else 'job'}" if word in ("--help", "--cfg") else word for word in joined]


def _unknown_option(option: str, command: str) -> str:
    """Return what to do instead, for options of Hydra."""
    shown = "--cfg shows the configuration, hybridrl doctor with the keys of a run shows versions and machine"
    instead = {
        ("--info", "-i"): shown,
        ("-cd", "--config-dir"): "name the directory of your own configuration file in --config-path",
        ("-sc", "--shell-completion"): 'eval "$(register-python-argcomplete hybridrl)"',
        ("--hydra-help",): f"see hybridrl {command} --help",
        ("--experimental-rerun",): "the same command resumes a run; its config.yaml can be given by --config-path",
        ("--version", "-v"): "see hybridrl --version",
    }
    name = option.partition("=")[0]
    fix = next((fix for names, fix in instead.items() if name in names), "configuration keys are given as key=value")
    return f"unknown option {name}; {fix}"


def _print(label: str, style: str, text: str) -> None:
    """Print to standard error; standard output holds only what was requested."""
    separator = "\n" if "\n" in text else " "
    Terminal(stderr=True).print(
        Text.assemble((label, style), separator, mask_text(text)), soft_wrap=True, highlight=False
    )


DIRECTORY = "trainer.default_local_dir"
LINE = "sweep: "  # begins the lines that are passed on from runs at the same time
LONGEST_NAME = 120
SWEEP_HELP = f"""usage: hybridrl sweep [--at-once N] key=value ... key=a,b ...

Train with every combination of several values: key=a,b or key=choice(a,b) or key=range(0,4). Each run has its own
directory below trainer.default_local_dir, and is resumed or skipped by the same command
({project_file("docs/sweeps.md")}).

  --at-once N    N runs at a time, each with its part of the machine

for example:
  hybridrl sweep --config-path {project_file("recipes/quickstart")} --config-name train \\
      actor_rollout_ref.actor.optim.lr=1e-4,5e-5 trainer.seed=0,1

hybridrl train --help lists the keys."""


@dataclass(frozen=True)
class Point:
    """One combination of the values of a sweep; its name is that of its directory."""

    name: str
    overrides: list[str]
    config: TrainingConfig

    @property
    def directory(self) -> Path:
        return Path(self.config.trainer.default_local_dir).expanduser()


def run_sweep(
    command: RunCommand, argv: Sequence[str], overrides: list[str], place: dict[str, Any], at_once: int, only: list[str]
) -> int:
    """Run every combination (of those in `only`, if any), and print what came of them. Returns the exit status: 1 if a
    run failed. Raises ConfigError before the first run if any of them is invalid."""
    base, points = load_points(command, overrides, place)
    if only:
        return run_points(command, [point for point in points if point.name in only])
    info(f"{LINE}{len(points)} runs, each in {base} under its name: {', '.join(point.name for point in points)}")
    try:
        if at_once > 1:
            return run_at_once(command, argv, points, at_once, base)
        return run_points(command, points)
    finally:
        directories = {point.name: point.directory for point in points if (point.directory / "metrics.jsonl").is_file()}
        if directories:
            info(f"\n{run_table(directories)}")
            info(f"\nthe curves of all runs: {draw_runs(base, directories)}")


def load_points(command: RunCommand, overrides: list[str], place: dict[str, Any]) -> tuple[Path, list[Point]]:
    """Load the configuration of every combination."""
    fixed, swept = split_sweep(overrides)
    if DIRECTORY in swept:
        raise ConfigError(f"{DIRECTORY} has several values", fix="name one: each run gets a directory below it")
    if empty := [key for key, values in swept.items() if not values]:
        key = empty[0].lstrip("+~")
        cause = f"{key} has no value in {next(text for text in overrides if text.startswith(empty[0]))}"
        raise ConfigError(cause, fix=f"count upwards, as in {key}=range(0,5), or write the values out: {key}=a,b")
    if not swept:
        raise ConfigError(
            "a sweep needs a key with several values", fix="for example actor_rollout_ref.actor.optim.lr=1e-6,1e-5"
        )
    combinations = [dict(zip(swept, values, strict=True)) for values in product(*swept.values())]
    first_values = [f"{key}={value}" for key, value in combinations[0].items()]
    base = Path(command.load([*fixed, *first_values], **place).trainer.default_local_dir)
    points, shown = [], set()

    def report(text: str) -> None:
        if text not in shown:
            info(f"warning: {text}")
        shown.add(text)

    for combination in combinations:
        name = combination_name(combination)
        settings = [f"{key}={value}" for key, value in combination.items()] + [
            f"{DIRECTORY}={as_override(str(base / name))}"
        ]
        try:
            config = command.load([*fixed, *settings], **place, report=report)
        except ConfigError as error:
            raise ConfigError(f"{name}: {error}") from error
        remember(asdict(config))
        points.append(Point(name, [*fixed, *settings], config))
    if len({point.name for point in points}) < len(points):
        raise ConfigError(
            f"two runs would be named {points[0].name}", fix="leave out values that are equal, or shorten them"
        )
    return base, points


def combination_name(combination: dict[str, str]) -> str:
    """Return the name of a run, of characters that need no quotes in a key's value: its values by the last parts of
    their keys, or by whole keys if two of those are equal."""
    short = [key.lstrip("+~").rpartition(".")[2] for key in combination]
    keys = short if len(set(short)) == len(short) else [key.lstrip("+~") for key in combination]
    name = "_".join(f"{key}-{value}" for key, value in zip(keys, combination.values(), strict=True))
    return re.sub(r"[^\w.+-]+", "_", name)[:LONGEST_NAME]


def run_points(command: RunCommand, points: Sequence[Point]) -> int:
    """Run one after another on the same Ray; one that fails does not stop the others."""
    failed = []
    with command.open(points[0].config) as run:
        for number, point in enumerate(points, 1):
            info(f"\n{LINE}run {number} of {len(points)}: {point.name}")
            began = time.monotonic()
            try:
                if status := run(point.config):
                    failed.append(point.name)
                ended = f"exit status {status}" if status else "done"
                info(f"{LINE}{point.name}: {ended} in {time.monotonic() - began:.0f} s")
            except Exception as error:
                failed.append(point.name)
                if not type(error).__module__.startswith("hybridrl"):
                    print_text(mask_text("".join(traceback.format_exception(error))), error=True)
                code = code_of(error)
                info(f"{LINE}{point.name}: failed [{code}]: {error} ({project_file(PAGE)}#{code})")
    if failed:
        info(f"{LINE}{len(failed)} of {len(points)} runs failed; the same command repeats those, and skips the others")
    return 1 if failed else 0


def run_at_once(command: RunCommand, argv: Sequence[str], points: Sequence[Point], at_once: int, base: Path) -> int:
    """Share the runs among `at_once` processes, each with its part of the machine's cores or GPUs."""
    shares = [share for share in (points[number::at_once] for number in range(at_once)) if share]
    base.mkdir(parents=True, exist_ok=True)
    processes, threads = [], []
    for number, (share, part) in enumerate(zip(shares, parts_of_machine(points[0].config, at_once), strict=False)):
        log = base / f"sweep-{number}.log"
        names = [f"--only={point.name}" for point in share]
        words = [sys.executable, "-m", "hybridrl", command.name, *argv, *names]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        with part.cores_only():
            process = subprocess.Popen(words, env=os.environ | part.environment, **pipes)
        info(f"{LINE}{', '.join(point.name for point in share)}: in process {process.pid}, output in {log}")
        threads.append(threading.Thread(target=pass_on, args=[process.stdout, log]))
        threads[-1].start()
        processes.append(process)
    try:
        return max(process.wait() for process in processes)
    finally:  # after Ctrl-C too: each of them stops, and saves first
        for process in processes:
            if process.poll() is None:
                process.terminate()
        for process, thread in zip(processes, threads, strict=True):
            process.wait()
            thread.join()


@dataclass(frozen=True)
class SweepPart:
    """Cores, and GPUs by variables of the environment, that one of several processes uses."""

    cores: list[int]
    environment: dict[str, str]

    @contextmanager
    def cores_only(self) -> Iterator[None]:
        """Run processes that start in the block on these cores."""
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, self.cores)
        try:
            yield
        finally:
            os.sched_setaffinity(0, before)


def parts_of_machine(config: TrainingConfig, at_once: int) -> Iterator[SweepPart]:
    """Divide the machine's cores, and its GPUs if the runs use them. Raises ConfigError if there are too few."""
    cores, trainer = sorted(os.sched_getaffinity(0)), config.trainer
    size, gpus = len(cores) // at_once, config.devices_per_machine
    visible = [gpu for gpu in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu]
    if not size:
        raise ConfigError(f"--at-once={at_once}: this machine has {len(cores)} cores", fix=f"--at-once={len(cores)}")
    if trainer.device == "cuda" and not visible:
        visible = [str(number) for number in range(this_machine().gpus)]
    if trainer.device == "cuda" and at_once * gpus > len(visible):
        most = max(len(visible) // gpus, 1)
        cause = f"--at-once={at_once}: {at_once} runs on {gpus} GPUs each need {at_once * gpus} GPUs, "
        raise ConfigError(f"{cause}and this machine has {len(visible)}", fix=f"--at-once={most}")
    for number in range(at_once):
        own = visible[number * gpus : (number + 1) * gpus]
        environment = {"CUDA_VISIBLE_DEVICES": ",".join(own)} if trainer.device == "cuda" else {}
        yield SweepPart(cores[number * size : (number + 1) * size], environment)


def pass_on(stream: IO[str], log: Path) -> None:
    """Write a process's output to a file, and show the lines about its runs."""
    with stream, log.open("w", encoding="utf-8") as file:
        for line in stream:
            file.write(line)
            file.flush()
            if line.startswith(LINE):
                info(line.rstrip("\n"))
