"""What the front doors share: reading the command line, and ending every way a run can end with one clear message."""

import argparse
import shutil
import signal
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from rich.console import Console
from rich.text import Text

from hybridrl.config import ConfigError
from hybridrl.config.compose import CONF, as_yaml
from hybridrl.config.help import changed_values, explain_keys
from hybridrl.runtime.signals import REQUESTS, stop_at_once
from hybridrl.tracking.log import info

T = TypeVar("T")

EXIT_FAILED, EXIT_REFUSED, EXIT_INTERRUPTED = 1, 2, 130


@dataclass(frozen=True)
class FrontDoor(Generic[T]):
    """A command: what --help says of it, and how its configuration is loaded and run."""

    module: str
    purpose: str
    example: tuple[str, ...]
    config_name: str
    first_keys: tuple[str, ...]
    load: Callable[..., T]
    run: Callable[[T], None]


def run_command(door: FrontDoor[T], argv: list[str] | None = None) -> int:
    """Parse, load, run; returns the exit status: 0, 1 (the run failed), 2 (refused before it began), 130 (stopped)."""
    arguments = _parse(door, argv)
    if arguments.help or arguments.cfg:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # into `head`, say
    if arguments.help:
        print(_help(door))
        return 0
    stop_at_once()
    try:
        config = door.load(
            arguments.overrides,
            config_name=arguments.config_name,
            config_dir=arguments.config_path,
            note=_note,
        )
        if arguments.cfg:
            print(as_yaml(config), end="")
            return 0
        info(f"changed from the shipped configuration:\n{changed_values(config)}")
        door.run(config)
    except ConfigError as error:
        _say("refused", "bold red", str(error))
        if not arguments.overrides and arguments.config_path == CONF:
            _say("", "", f"for example: {_example(door)}\n(--help lists all keys)")
        return EXIT_REFUSED
    except KeyboardInterrupt:
        info(f"stopped ({REQUESTS.last or 'Ctrl-C'}); nothing is left running")
        return EXIT_INTERRUPTED
    except Exception as error:
        _tell(error)
        return EXIT_FAILED
    return 0


def _parse(door: FrontDoor[T], argv: list[str] | None) -> argparse.Namespace:
    parser = _parser(door)
    arguments, more = parser.parse_known_args(argv)
    options = [item for item in more if item.startswith("-")]
    if options:
        parser.error(f"unknown option {options[0]}; configuration keys are given as key=value")
    arguments.overrides += more
    return arguments


def _parser(door: FrontDoor[T]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        usage=f"python -m {door.module} [key=value ...]",
        description=f"{door.purpose}\n\nfor example:\n  {_example(door)}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        add_help=False,
        allow_abbrev=False,
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="values of configuration keys")
    parser.add_argument("-h", "--help", action="store_true", help="show this, and every key with its value and meaning")
    parser.add_argument("--cfg", action="store_true", help="print the resolved configuration and stop")
    parser.add_argument(
        "-cp", "--config-path", type=Path, default=CONF, metavar="DIR", help="directory of an own configuration file"
    )
    parser.add_argument(
        "-cn",
        "--config-name",
        default=door.config_name,
        metavar="NAME",
        help=f"that file's name; it begins with defaults: [{door.config_name}, _self_]",
    )
    return parser


def _example(door: FrontDoor[T]) -> str:
    return " \\\n      ".join((f"python -m {door.module}", *door.example))


def _help(door: FrontDoor[T]) -> str:
    width = min(shutil.get_terminal_size((100, 24)).columns, 120)
    return f"{_parser(door).format_help()}\n{explain_keys(door.config_name, door.first_keys, width)}"


def _tell(error: Exception) -> None:
    """A failure in its own words first; the driver's traceback only where the words are not ours."""
    if not type(error).__module__.startswith("hybridrl"):
        traceback.print_exception(error)
    _say("failed", "bold red", str(error) or type(error).__name__)


def _note(text: str) -> None:
    _say("warning:", "yellow", text)


def _say(word: str, style: str, text: str) -> None:
    """Say to standard error, so that standard output holds nothing but what was asked for."""
    apart = "\n" if "\n" in text else " "
    Console(stderr=True).print(Text.assemble((word, style), apart, text), soft_wrap=True, highlight=False)
