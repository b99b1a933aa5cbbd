"""The command line shared by all entry points: parse, load, run, and end with one clear message."""

import argparse
import shutil
import sys
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Generic, TypeVar

from rich.text import Text

from hybridrl.config import ConfigError
from hybridrl.config.compose import CONF, as_yaml
from hybridrl.config.load import explain_keys
from hybridrl.runtime import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_REJECTED
from hybridrl.runtime.signals import REQUESTS, ended_by_closed_pipe, stop_at_once
from hybridrl.runtime.sweep import SWEEP_HELP, print_points, run_sweep
from hybridrl.tracking.console import Terminal, info, print_text
from hybridrl.tracking.faults import PAGE, code_of
from hybridrl.tracking.secrets import mask_text

T = TypeVar("T")


@dataclass(frozen=True)
class Command(Generic[T]):
    """An entry point: its help text, how its configuration is loaded, and what opens all that one run after another
    can share and yields what runs one, which may return an exit status."""

    module: str
    purpose: str
    example: tuple[str, ...]
    config_name: str
    first_keys: tuple[str, ...]
    load: Callable[..., T]
    open: Callable[[T], AbstractContextManager[Callable[[T], int | None]]]

    @property
    def example_line(self) -> str:
        return " \\\n      ".join((f"python -m {self.module}", *self.example))


def run_command(command: Command[T], argv: list[str] | None = None) -> int:
    """Parse, load and run; return the exit status: 0, 1 (the run failed), 2 (invalid input), 130 (interrupted), or that
    of what ran."""
    given, parser = sys.argv[1:] if argv is None else argv, _parser(command)
    arguments, more = parser.parse_known_args(_with_values(given))
    if options := [item for item in more if item.startswith("-")]:
        parser.error(_unknown_option(options[0], command.module))
    arguments.overrides += more
    stop_at_once()
    try:
        if arguments.help is not None:
            return _show(SWEEP_HELP if arguments.multirun else _help(command, parser, arguments.help))
        return _run(command, given, arguments)
    except ConfigError as error:
        if arguments.cfg and error.config is not None:  # as far as it can be read
            _show(as_yaml(error.config, arguments.package or ""), end="")
        _print("error:", "bold red", str(error))
        if not arguments.overrides and arguments.config_path == CONF and arguments.help is None:
            _print("", "", f"for example: {command.example_line}\n(--help all lists all keys)")
        return EXIT_REJECTED
    except KeyboardInterrupt:
        info(f"stopped ({REQUESTS.last or 'Ctrl-C'}); no process is left running")
        return EXIT_INTERRUPTED
    except Exception as error:
        if not type(error).__module__.startswith("hybridrl"):  # our own errors need no traceback of the driver
            print_text("".join(traceback.format_exception(error)), error=True)
        text, code = str(error) or type(error).__name__, code_of(error)
        separator = "\n" if "\n" in text else " "
        _print(f"failed [{code}]:", "bold red", f"{text}{separator}({PAGE}#{code})")
        return EXIT_FAILED


def _show(text: str, end: str = "\n") -> int:
    """Print what was requested instead of a run; return the exit status."""
    with ended_by_closed_pipe():
        print(text, end=end)
    return 0


def _help(command: Command[T], parser: argparse.ArgumentParser, section: str) -> str:
    width = min(shutil.get_terminal_size((100, 24)).columns, 120)
    keys = explain_keys(command.config_name, section, command.first_keys, width)
    return keys if section else f"{parser.format_help()}\n{keys}"


def _run(command: Command[T], given: list[str], arguments: argparse.Namespace) -> int:
    """Run once or as a sweep, or print the configurations of what would run."""
    place = {"config_name": arguments.config_name, "config_dir": arguments.config_path}
    if arguments.multirun and arguments.cfg:
        with ended_by_closed_pipe():
            print_points(command, arguments.overrides, place, arguments.package or "")
        return 0
    if arguments.multirun:
        return run_sweep(command, given, arguments.overrides, place, arguments.at_once, arguments.only)
    messages = None if arguments.cfg else info
    config = command.load(arguments.overrides, **place, report=partial(_print, "warning:", "yellow"), show=messages)
    if arguments.cfg:
        return _show(as_yaml(config, arguments.package or ""), end="")
    with command.open(config) as run:
        return run(config) or 0


def _parser(command: Command[T]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        usage=f"python -m {command.module} [key=value ...]",
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
    add("-p", "--package", metavar="SECTION", help="the section that --cfg prints, such as actor_rollout_ref.rollout")
    several = "run every combination of the values given: key=a,b (docs/sweeps.md)"
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
    return [f"{one}={'' if 'h' in one else 'job'}" if one in ("--help", "--cfg") else one for one in joined]


def _unknown_option(option: str, module: str) -> str:
    """Return what to do instead, for options of Hydra."""
    shown = "--cfg shows the configuration, hybridrl doctor with the keys of a run shows versions and machine"
    instead = {
        ("--info", "-i"): shown,
        ("-cd", "--config-dir"): "name the directory of your own configuration file in --config-path",
        ("-sc", "--shell-completion"): 'eval "$(register-python-argcomplete hybridrl)"',
        ("--hydra-help",): f"see python -m {module} --help",
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
