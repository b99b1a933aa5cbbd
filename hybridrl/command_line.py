"""What the front doors share: reading the command line, and ending every way a run can end with one clear message."""

import argparse
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from hybridrl.config import ConfigError
from hybridrl.config.compose import CONF, as_yaml
from hybridrl.config.help import explain_keys
from hybridrl.tracking.log import console, info, warn

T = TypeVar("T")

EXIT_FAILED, EXIT_REFUSED, EXIT_INTERRUPTED = 1, 2, 130


def run_command(
    purpose: str,
    example: str,
    config_name: str,
    load: Callable[..., T],
    run: Callable[[T], None],
    argv: list[str] | None = None,
) -> int:
    """Parse, load, run; returns the exit status: 0, 1 (the run failed), 2 (refused before it began), 130 (stopped)."""
    arguments = _parse(purpose, example, config_name, argv)
    signal.signal(signal.SIGTERM, _terminated)
    try:
        config = load(
            arguments.overrides,
            config_name=arguments.config_name,
            config_dir=arguments.config_path,
            note=warn,
        )
        if arguments.cfg:
            print(as_yaml(config), end="")
        else:
            run(config)
    except ConfigError as error:
        console.print("[bold red]refused[/]", end=" ")
        console.print(str(error), markup=False, highlight=False, soft_wrap=True)
        return EXIT_REFUSED
    except KeyboardInterrupt as stop:
        info(f"stopped ({stop or 'Ctrl-C'}); nothing is left running")
        return EXIT_INTERRUPTED
    except Exception as error:
        _tell(error)
        return EXIT_FAILED
    return 0


def _parse(purpose: str, example: str, config_name: str, argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=purpose,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        add_help=False,
        usage=example,
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="values of configuration keys")
    parser.add_argument(
        "--help", "-h", action="store_true", help="show this, and every key with its default and meaning"
    )
    parser.add_argument("--config-path", "-cp", type=Path, default=CONF, help="directory of an own configuration file")
    parser.add_argument("--config-name", "-cn", default=config_name, help="its name; list ppo_trainer in its defaults")
    parser.add_argument("--cfg", action="store_true", help="print the resolved configuration and stop")
    arguments, more = parser.parse_known_args(argv)
    unknown = [item for item in more if item.startswith("-")]
    if unknown:
        parser.error(f"unknown option {unknown[0]}; configuration keys are given as key=value")
    arguments.overrides += more
    if arguments.help:
        parser.print_help()
        print("\n" + explain_keys(CONF, config_name))
        sys.exit(0)
    return arguments


def _terminated(*_: object) -> None:
    raise KeyboardInterrupt("SIGTERM")


def _tell(error: Exception) -> None:
    """A failure in its own words first; the driver's traceback only where the words are not ours."""
    if not type(error).__module__.startswith("hybridrl"):
        traceback.print_exception(error)
    console.print("[bold red]failed[/]", end=" ")
    console.print(str(error) or type(error).__name__, markup=False, highlight=False, soft_wrap=True)
