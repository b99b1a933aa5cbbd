"""A run whose parts print when they end: `timed_start.py TIME key=value ...`, for `start_up.py`.

It is a process of its own, as the imports of start_up.py would be counted as the driver's. Each function is replaced in
the module that calls it.
"""

import argparse
import functools
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from hybridrl import main_ppo
from hybridrl.runs import command


def report(part: str) -> None:
    print(f"PART {part} {time.time() - options.began:.2f}", flush=True)


def then(plain: Callable[..., Any], part: str) -> Callable[..., Any]:
    """Return a function that reports a part when it has returned."""

    @functools.wraps(plain)
    def wrapped(*arguments: Any, **options: Any) -> Any:
        result = plain(*arguments, **options)
        report(part)
        return result

    return wrapped


@contextmanager
def reported(*arguments: Any, **options: Any) -> Iterator[Any]:
    """Be the fork server, which starts before the driver imports what is heavy."""
    report("configuration")
    with fork_server(*arguments, **options) as forks:
        from hybridrl.core.hybrid_engine import HybridEngine
        from hybridrl.core.trainer import RLTask
        from hybridrl.doctor import start
        from hybridrl.runs import ppo, setup

        report("imports of the driver")
        start.check_run_start = then(start.check_run_start, "checks")
        ppo.prepare = then(ppo.prepare, "data and reward")
        setup.start_session = then(setup.start_session, "Ray")
        ppo.start_train_workers = then(ppo.start_train_workers, "actors requested")
        ppo.start_devices = then(ppo.start_devices, "engines and trainers")
        HybridEngine.to_rollout = then(HybridEngine.to_rollout, "first weight sync")
        RLTask.train_step = then(RLTask.train_step, "first step")
        yield forks


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("began", type=float, help="time at which the command was started")
    options, overrides = parser.parse_known_args()
    fork_server = command.fork_server
    command.fork_server = reported
    sys.exit(main_ppo.main(overrides))
