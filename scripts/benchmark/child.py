"""A side of a comparison that needs a process of its own: it is asked over a pipe, one line of JSON each way."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any


class Child:
    """A script under this process; idle, it waits for a line. Its own output goes to a file."""

    def __init__(self, command: list[str], log: Path, environment: dict[str, str] | None = None) -> None:
        self.log = log
        ask, self.question = os.pipe()
        self.answer, tell = os.pipe()
        with open(log, "w", encoding="utf-8") as output:
            self.process = subprocess.Popen(
                [*command, "--pipes", f"{ask},{tell}"],
                stdout=output,
                stderr=output,
                pass_fds=[ask, tell],
                env=os.environ | (environment or {}),
            )
        os.close(ask)
        os.close(tell)
        self.questions, self.answers = os.fdopen(self.question, "w"), os.fdopen(self.answer)

    def ask(self, what: str, **more: Any) -> Any:
        print(json.dumps([what, more]), file=self.questions, flush=True)
        line = self.answers.readline()
        if not line:
            raise RuntimeError(f"{self.log} ends with:\n{self.log.read_text()[-3000:]}")
        return json.loads(line)

    def __enter__(self) -> "Child":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.questions.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()


def serve(pipes: str, answers: dict[str, Callable[..., Any]]) -> None:
    """The other end: answer until the asker is gone."""
    ask, tell = map(int, pipes.split(","))
    with os.fdopen(ask) as questions, os.fdopen(tell, "w") as replies:
        for line in questions:
            what, more = json.loads(line)
            print(json.dumps(answers[what](**more)), file=replies, flush=True)
    sys.stdout.flush()
    os._exit(0)  # engines and trainers have much to say at their end
