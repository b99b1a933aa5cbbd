"""The driver's side of one scoring process: start, send answers, receive each score in time, kill.

Knows nothing of queues or of other processes. The other side is `worker.py`.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Collection
from multiprocessing import Pipe
from pathlib import Path

from hybridrl.config import ConfigError
from hybridrl.config.schema_reward import RewardConfig
from hybridrl.rewards.managers import seconds_between_calls
from hybridrl.rewards.score import Answer, Score

# Seconds for the user's file to be imported: a large library on a busy machine takes tens.
_LOAD_TIMEOUT = 300
# Seconds that a process has to give up a coroutine by itself, which costs the other calls under way nothing.
_GRACE = 1.0


class ScoringProcess:
    """One process with the reward loaded. Only `stop` may be called from another thread than `start`.

    The kernel kills the process when the thread that started it ends. `lost`: there is none until the next `start`.
    """

    def __init__(self, config: RewardConfig, data_sources: Collection[str], log_path: Path | None):
        self._config, self._data_sources = config, frozenset(data_sources)
        self._limit = config.timeout + _GRACE + seconds_between_calls(config)
        self.lost, self.takes_tokens = True, False
        self._log_path = log_path
        self._may_start = True
        self._launching = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start, or replace what was lost, and wait until the reward is loaded; ConfigError: it is not."""
        self._connection, theirs = Pipe()
        with theirs, self._launching:
            if not self._may_start:
                raise RuntimeError("the scoring process was stopped")
            self._process = _launch(theirs.fileno(), self._log_path)
        try:
            self._connection.send((self._config, self._data_sources))
            reply = f"the reward did not load within {_LOAD_TIMEOUT} s"
            if self._connection.poll(_LOAD_TIMEOUT):
                reply = self._connection.recv()
        except (EOFError, OSError):
            reply = f"a scoring process {self._kill()} while it loaded the reward{self._see_log()}"
        if isinstance(reply, str):
            self._kill()
            raise ConfigError(reply)
        self.lost, self.takes_tokens = False, reply

    def send(self, answers: list[Answer]) -> None:
        """Hand over answers; one `receive` for each must follow."""
        try:
            self._connection.send(answers)
        except OSError:  # killed from outside while it was idle
            self.start()
            self._connection.send(answers)

    def receive(self) -> Score:
        """The next answer's score. Where the process had to be killed for it or ended by itself, it is `lost`.

        The fault "overran": a built-in scorer met its limit of CPU time.
        """
        try:
            if self._connection.poll(self._limit):
                return self._connection.recv()
        except (EOFError, OSError):
            ended = self._kill()
            overran = self._process.returncode == -signal.SIGPROF
            return Score(None, fault="overran" if overran else "died", detail=f"the scoring process {ended}")
        self._kill()
        return Score(None, fault="timeout", detail=f"no score within {self._config.timeout:g} s (reward.timeout)")

    def stop(self) -> None:
        """Kill the process and let none start again."""
        with self._launching:
            self._may_start = False
            if self._process is not None:
                self._kill()

    def _see_log(self) -> str:
        return "" if self._log_path is None else f"; its output is in {self._log_path}"

    def _kill(self) -> str:
        """Kill the process and all that it started, and say how it ended."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.kill()  # should it have left its group
        self.lost = True
        code = self._process.wait()
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def _launch(descriptor: int, log_path: Path | None) -> subprocess.Popen[bytes]:
    """A bare interpreter with this one's `sys.path`: it imports `worker.py`, not the driver's main module."""
    code = f"import sys; sys.path[:] = {sys.path}; from hybridrl.rewards.worker import main; "
    code += f"main({descriptor}, {os.getpid()})"
    with contextlib.ExitStack() as stack:
        log = stack.enter_context(open(log_path, "ab")) if log_path is not None else None
        return subprocess.Popen(
            [sys.executable, "-u", "-c", code],
            pass_fds=[descriptor],
            process_group=0,  # out of reach of the terminal's Ctrl-C, and killed with its own children
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
