"""Runs one program on several inputs, each in a process of its own that has given up what it does not need.

Started by `run.py` in a bare interpreter, it imports the standard library and `system_calls.py` alone. It reads a job
and writes, for each run, a JSON line: the output, or null where the run failed. It is told no expected output, so the
program finds none in its memory.
"""

import ctypes
import json
import operator
import os
import resource
import select
import signal
import sys
import threading
from typing import Any, NoReturn

from hybridrl.rewards.sandbox.system_calls import give_up_system_calls

_PARENT_DEATH_SIGNAL = 1
_READY = b"r"


def main() -> None:
    _end_with_parent()
    job = json.load(sys.stdin)
    for given in job["inputs"]:
        print(json.dumps(_run(job, given)), flush=True)


def _run(job: dict[str, Any], given: Any) -> str | None:
    stdin, stdout = os.memfd_create("stdin"), os.memfd_create("stdout")
    ready, confined = os.pipe()
    child = os.fork()
    if child == 0:
        _live(job, given, stdin, stdout, confined)
    os.close(confined)
    try:
        succeeded = _wait(child, job["wall_seconds"])
        if os.read(ready, 1) != _READY:
            raise RuntimeError("a run could not be confined")
        return os.pread(stdout, os.fstat(stdout).st_size, 0).decode(errors="replace") if succeeded else None
    finally:
        for descriptor in (stdin, stdout, ready):
            os.close(descriptor)


def _wait(child: int, seconds: float) -> bool:
    """Whether the child ended by itself, in time and with status 0."""
    descriptor = os.pidfd_open(child)
    try:
        if not select.select([descriptor], [], [], seconds)[0]:
            os.kill(child, signal.SIGKILL)
        return os.waitpid(child, 0)[1] == 0
    finally:
        os.close(descriptor)


def _live(job: dict[str, Any], given: Any, stdin: int, stdout: int, confined: int) -> NoReturn:
    """The child's whole life: confine itself, run the program, end."""
    status = 1
    try:
        _end_with_parent()
        os.write(stdin, given.encode(errors="replace") if job["kind"] == "stdin" else b"")
        os.lseek(stdin, 0, os.SEEK_SET)
        for source, target in ((stdin, 0), (stdout, 1), (os.open(os.devnull, os.O_WRONLY), 2)):
            os.dup2(source, target)
        sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
        for name, limit in job["limits"].items():
            resource.setrlimit(vars(resource)[f"RLIMIT_{name}"], (limit, limit))
        for name in [name for name in sys.modules if name.startswith("hybridrl")]:
            del sys.modules[name]
        give_up_system_calls()
        os.write(confined, _READY)
        os.closerange(3, 256)
        _execute(job, given)
        for thread in threading.enumerate():
            if thread is not threading.current_thread() and not thread.daemon:
                thread.join()
        status = 0
    except SystemExit as end:
        status = 0 if end.code in (None, 0) else 1
    finally:
        try:
            sys.stdout.flush()
        except BaseException:
            status = 1
        os._exit(status)


def _execute(job: dict[str, Any], given: Any) -> None:
    """The program as a script; then, by the job's kind, a call of its function or its tests, and the job's mark."""
    space: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(job["program"], "<program>", "exec"), space)
    if job["kind"] == "call":
        name = job["function"]
        function = space[name] if name in space else operator.attrgetter(name)(space["Solution"]())
        print(f"\n{job['mark']}{json.dumps(function(*given))}")
    elif job["kind"] == "asserts":
        exec(compile(given, "<tests>", "exec"), space)
        print(f"\n{job['mark']}")


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL)
