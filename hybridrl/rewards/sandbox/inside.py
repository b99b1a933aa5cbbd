"""Run one program on several inputs, each in a confined process; report what each run printed.

Started by `run.py` in a bare interpreter. It reads a job and writes, for each run, a JSON line: the output, or null
if the run failed. It never holds an expected output, so a program cannot find one in its memory. Imports the standard
library and this package only.
"""

import builtins
import ctypes
import json
import operator
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

from hybridrl.rewards.sandbox.confinement import Library, confine, hide

_PARENT_DEATH_SIGNAL = 1
_READY = b"r"
_MOST_THREADS, _MOST_DESCRIPTORS = 64, 256
_SECONDS_BETWEEN_COUNTS = 0.02
_REAL_OPEN = open

StartedProgram = tuple[int, int, int]  # process id; descriptors of its output and of the message that it is confined


def main(library: int) -> None:
    job = prepare(library)

    def call(arguments: Any) -> None:
        """Print the job's mark, a random text absent from other outputs, and the result of the program's function."""
        space, name = execute(job), job["function"]
        function = space[name] if name in space else operator.attrgetter(name)(space["Solution"]())
        print(f"\n{job['mark']}{json.dumps(function(*arguments))}")

    for run_input in job["inputs"]:
        if job["kind"] == "stdin":
            run = start(job, lambda: execute(job), run_input)
        else:
            run = start(job, lambda run_input=run_input: call(run_input))
        print(json.dumps(finish(run, job["wall_seconds"])), flush=True)


def prepare(library: int) -> dict[str, Any]:
    """Prepare this process for starting programs, and return the job read from stdin."""
    end_with_parent(os.getppid())
    hide()
    Library(library).install()
    return json.load(sys.stdin)


def start(
    job: dict[str, Any], work: Callable[[], object], text: str = "", descriptor: int | None = None
) -> StartedProgram:
    """Start a confined process that does `work`, with `text` as its input; `descriptor` stays open in it."""
    stdin, stdout = os.memfd_create("stdin"), os.memfd_create("stdout")
    ready, confined = os.pipe()
    parent, child = os.getpid(), os.fork()
    if child == 0:
        end_with_parent(parent)
        _run_child(job, work, text, stdin, stdout, confined, descriptor)
    os.close(confined)
    os.close(stdin)
    return child, stdout, ready


def finish(run: StartedProgram, seconds: float, until: int | None = None) -> str | None:
    """Return what the run printed; None if it did not end by itself, in time and with status 0. It is killed when
    `until` becomes readable."""
    child, stdout, ready = run
    ending, deadline = os.pidfd_open(child), time.monotonic() + seconds
    watched = [ending] if until is None else [ending, until]
    try:
        while not (ended := select.select(watched, [], [], _SECONDS_BETWEEN_COUNTS)[0]):
            with open(f"/proc/{child}/stat", encoding="utf-8", errors="replace") as file:
                threads = int(file.read().rpartition(")")[2].split()[17])
            if time.monotonic() > deadline or threads > _MOST_THREADS:
                break
        if ending not in ended:
            os.kill(child, signal.SIGKILL)
        succeeded = os.waitpid(child, 0)[1] == 0
        if os.read(ready, 1) != _READY:
            raise RuntimeError("a run could not be confined")
        return os.pread(stdout, os.fstat(stdout).st_size, 0).decode(errors="replace") if succeeded else None
    finally:
        for descriptor in (ending, stdout, ready):
            os.close(descriptor)


def _run_child(
    job: dict[str, Any],
    work: Callable[[], object],
    text: str,
    stdin: int,
    stdout: int,
    confined: int,
    descriptor: int | None,
) -> NoReturn:
    """Confine this child, do the work, and exit."""

    def open_own(file: Any, *arguments: Any, **named: Any) -> Any:  # its own descriptors, and the first one by name
        return _REAL_OPEN(os.dup(0) if file == "/dev/stdin" else file, *arguments, **named)

    status = 1
    try:
        os.write(stdin, text.encode(errors="replace"))
        os.lseek(stdin, 0, os.SEEK_SET)
        for source, target in ((stdin, 0), (stdout, 1), (os.open(os.devnull, os.O_WRONLY), 2)):
            os.dup2(source, target)
        sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
        builtins.open, builtins.exit, builtins.quit = open_own, sys.exit, sys.exit
        for name in [name for name in sys.modules if name.startswith("hybridrl")]:
            del sys.modules[name]
        first = 3
        for spared in sorted({confined, descriptor or confined, _MOST_DESCRIPTORS}):
            os.closerange(first, spared)
            first = spared + 1
        confine(job["limits"])
        os.write(confined, _READY)
        os.close(confined)

        try:
            work()
            for thread in threading.enumerate():
                if thread is not threading.current_thread() and not thread.daemon:
                    thread.join()
        except SystemExit as end:
            if end.code not in (None, 0) or job["kind"] != "stdin":
                raise
        sys.stdout.flush()
        status = 0
    finally:
        os._exit(status)


def execute(job: dict[str, Any]) -> dict[str, Any]:
    """Run the program as a script and return its names."""
    space: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(job["program"], "<program>", "exec"), space)
    return space


def end_with_parent(parent: int) -> None:
    """Make the kernel kill this process when its parent ends."""
    ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
