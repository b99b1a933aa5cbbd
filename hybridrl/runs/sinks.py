"""Custom metric sinks: classes in a user's file, each tried in a temporary directory before the start."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hybridrl.config import ConfigError
from hybridrl.config.custom_code import bind_named, call_custom, load_function
from hybridrl.tracking import SampleRow, Sink

KEY, PAGE = "trainer.logger", "docs/extensions.md"
# What a sink's constructor may take: it gets those of these parameters that it has.
PARAMETERS = ("run_dir", "project", "name", "config", "saved", "offline")

# The calls of a trial.
CALLS: dict[str, tuple[Any, ...]] = {
    "log": (0, {"timing_s/start_up": 1.0}),
    "samples": (0, [SampleRow("2+2?", "4", "4", 1.0)]),
    "state_dict": (),
    "close": (),
}


def custom_sinks(loggers: list[str]) -> dict[str, Callable[..., Sink]]:
    """Return what makes each custom sink among the loggers from the values of PARAMETERS, by its name; raises
    ConfigError for one that is not there."""
    classes = {name: load_function(name, KEY) for name in loggers if ":" in name}
    return {name: lambda *values, made=made: _given(made, *values)() for name, made in classes.items()}


def _given(made: Callable[..., Any], *values: Any) -> Callable[..., Any]:
    return bind_named(made, dict(zip(PARAMETERS, values, strict=True)))


def try_sinks(loggers: list[str], project: str, name: str) -> None:
    """Make every custom sink with `offline=True` in a directory that is deleted, have it log one made-up step, and
    close it; raises ConfigError if it cannot be used."""
    for logger in custom_sinks(loggers):
        with tempfile.TemporaryDirectory() as directory:
            make = _given(load_function(logger, KEY), Path(directory), project, name, {}, {}, True)
            sink = call_custom(KEY, logger, make, trial="when it is created", page=PAGE)
            if not isinstance(sink, Sink):
                cause, fix = f"{KEY}={logger} is no hybridrl.tracking.Sink", "derive the class from it"
                raise ConfigError(cause, fix=fix, keys=KEY)
            for method, arguments in CALLS.items():
                call_custom(KEY, f"{logger}.{method}", getattr(sink, method), *arguments, trial="in a trial", page=PAGE)
