"""Whether a request for stacks harms a process: `python scripts/benchmark/stacks.py [--requests N] [--signals N]`

Requests the stacks of a process whose threads import modules all the time, while other programs use every core. Then
these threads also keep the GIL for up to a tenth of a second, and replies are expected within a fiftieth, until the
signal of the last resort was sent as often as requested: more often at a wrong moment than with the limit of seconds.
Last a stopped process and one whose thread keeps the GIL must be named. Exits with status 1 if a process died, did not
reply or was not named.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import psutil

from hybridrl.runtime import stacks

TOP = Path(__file__).parents[2]
ACTOR = Path(__file__).with_name("stacks_actor.py")
WAITS, KEEPS_THE_GIL = "waits", "computes"
LONGEST = 5_000_000  # numbers to add: about a tenth of a second
SHORT_SECONDS = 0.02


@contextmanager
def actor(log: Path, threads: int, work: str = WAITS, longest: int = 1) -> Iterator[subprocess.Popen]:
    """Start a process that writes to a log and takes requests. Now and then one of its threads that import keeps the
    GIL, and adds up to `longest` numbers."""
    log.unlink(missing_ok=True)
    environment = os.environ | {"PYTHONPATH": str(TOP)}
    command = [sys.executable, ACTOR, log, str(threads), str(longest), work]
    process = subprocess.Popen(command, env=environment)
    try:
        while not log.exists() or "\n" not in log.read_text(errors="replace"):
            time.sleep(0.01)
        yield process
    finally:
        process.kill()
        process.wait()


def requested(directory: Path, threads: int, count: int) -> bool:
    """Request the stacks `count` times; return whether no process died and each request had a reply."""
    died = replies = sent = 0
    slowest = 0.0
    while sent < count:
        with actor(directory / "requested.log", threads) as process:
            while sent < count and process.poll() is None:
                sent, began = sent + 1, time.monotonic()
                replies += bool(stacks.request(process.pid))
                slowest = max(slowest, time.monotonic() - began)
            died += process.poll() is not None
    print(f"{sent} requests: {died} processes died, {replies} replies, the slowest after {slowest:.2f} s", flush=True)
    return died == 0 and replies == sent


def signalled(directory: Path, threads: int, count: int) -> bool:
    """Have the signal of the last resort sent `count` times; return whether no process died."""
    died = sent = 0
    log = directory / "signalled.log"
    with (
        patch.object(stacks, "REPLY_SECONDS", SHORT_SECONDS),
        patch.object(stacks, "SIGNAL_SECONDS", SHORT_SECONDS / 2),
        patch.object(stacks, "STARVED_SECONDS", 0.0),
    ):
        while sent < count:
            with actor(log, threads, longest=LONGEST) as process:
                while sent < count and process.poll() is None:
                    sent += "no thread has run Python" in stacks.activities([str(log)]).get(str(log), "")
                died += process.poll() is not None
    print(f"{sent} times the last resort: {died} processes died", flush=True)
    return died == 0


def named(directory: Path) -> bool:
    """Return whether a stopped process and one that keeps the GIL are named."""
    parts = []
    for work, text in ((WAITS, "stopped (state T"), (KEEPS_THE_GIL, "no thread has run Python")):
        log = directory / "named.log"
        with actor(log, 0, work) as process:
            if work is WAITS:
                process.send_signal(signal.SIGSTOP)
                while psutil.Process(process.pid).status() != psutil.STATUS_STOPPED:
                    time.sleep(0.01)
            activity = stacks.activities([str(log)])[str(log)]
            parts.append(text in activity and process.poll() is None)
            print(activity, flush=True)
    return all(parts)


@contextmanager
def busy() -> Iterator[None]:
    """Run programs that use every core."""
    with ExitStack() as stack:
        for _ in range(os.cpu_count() or 1):
            program = subprocess.Popen([sys.executable, "-c", "while True: pass"])
            stack.callback(program.wait)
            stack.callback(program.kill)
        yield


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Request the stacks of a process that imports, under full load.")
    parser.add_argument("--requests", type=int, default=8000)
    parser.add_argument("--signals", type=int, default=2000)
    parser.add_argument("--threads", type=int, default=3, help="threads that import")
    options = parser.parse_args(argv)
    with TemporaryDirectory() as directory, busy():
        place = Path(directory)
        results = [
            requested(place, options.threads, options.requests),
            signalled(place, options.threads, options.signals),
            named(place),
        ]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
