"""Runs tests against one program: each test in a process of its own, and the program in another.

Started by `run.py` in a bare interpreter, in place of `inside.py`. It writes a JSON line for each test: "" where the
program passed it, or null.
"""

import json
import os
import socket
from typing import Any, NoReturn

from hybridrl.rewards.sandbox.inside import prepare
from hybridrl.rewards.sandbox.processes import end_with_parent, execute, finish, start
from hybridrl.rewards.sandbox.stand_ins import serve, try_test


def main(library: int, tests: int) -> None:
    job = prepare(library)
    ours, theirs = socket.socketpair()
    parent = os.getpid()
    if os.fork() == 0:
        end_with_parent(parent)
        ours.close()
        os.close(tests)
        _serve_programs(job, theirs)
    theirs.close()
    with open(tests, encoding="utf-8") as file:
        texts = json.load(file)
    for text in texts:
        print(json.dumps(_passes(job, text, ours)), flush=True)


def _passes(job: dict[str, Any], text: str, programs: socket.socket) -> str | None:
    programs.send(b"r")
    (connection,) = socket.recv_fds(programs, 1, 1)[1]
    run = start(job, lambda: try_test(text, connection), kept=connection)
    os.close(connection)
    return None if finish(run, job["wall_seconds"]) is None else ""


def _serve_programs(job: dict[str, Any], control: socket.socket) -> NoReturn:
    """Run the program for each byte received, until the next one. This process has never read the tests."""
    while control.recv(1):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            run = start(job, lambda ours=ours: serve(execute(job), ours.fileno()), kept=ours.fileno())
            socket.send_fds(control, [b"r"], [theirs.fileno()])
        finish(run, job["wall_seconds"], until=control.fileno())
    os._exit(0)
