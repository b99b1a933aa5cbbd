"""A side of a comparison that needs a separate process: requests over a pipe, one line of JSON each way."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil


class Child:
    """A script in a child process, which waits for a request when idle. Its output goes to a file."""

    def __init__(self, command: list[str], log: Path, environment: dict[str, str] | None = None) -> None:
        self.log = log
        request_end, requests = os.pipe()
        replies, reply_end = os.pipe()
        with open(log, "w", encoding="utf-8") as output:
            self.process = subprocess.Popen(
                [*command, "--pipes", f"{request_end},{reply_end}"],
                stdout=output,
                stderr=output,
                pass_fds=[request_end, reply_end],
                env=os.environ | (environment or {}),
            )
        os.close(request_end)
        os.close(reply_end)
        self.requests, self.replies = os.fdopen(requests, "w"), os.fdopen(replies)

    def call(self, name: str, **arguments: Any) -> Any:
        print(json.dumps([name, arguments]), file=self.requests, flush=True)
        line = self.replies.readline()
        if not line:
            raise RuntimeError(f"{self.log} ends with:\n{self.log.read_text()[-3000:]}")
        return json.loads(line)

    def __enter__(self) -> "Child":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        descendants = []  # such as an engine in a process of its own
        with suppress(psutil.NoSuchProcess):
            descendants = psutil.Process(self.process.pid).children(recursive=True)
        self.requests.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
        for descendant in descendants:
            with suppress(psutil.NoSuchProcess):
                descendant.kill()


def serve(pipes: str, functions: dict[str, Callable[..., Any]]) -> None:
    """Call functions by name, in the child, until the parent is gone."""
    request_end, reply_end = map(int, pipes.split(","))
    with os.fdopen(request_end) as requests, os.fdopen(reply_end, "w") as replies:
        for line in requests:
            name, arguments = json.loads(line)
            print(json.dumps(functions[name](**arguments)), file=replies, flush=True)
    sys.stdout.flush()
    os._exit(0)  # engines and trainers print many messages when they end normally
