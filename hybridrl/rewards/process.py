"""The driver's side of one scoring process: start, send answers, receive each score within its limits, kill.

Knows nothing of queues or of other processes. The other side is `worker.py`.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

import psutil

from hybridrl.config import ConfigError
from hybridrl.config.schema_reward import RewardConfig
from hybridrl.rewards.managers import seconds_between_calls
from hybridrl.rewards.messages import Messages, NoMessage
from hybridrl.rewards.score import Answer, Score

# Seconds for the user's file to be imported: a large library on a busy machine takes tens.
_LOAD_TIMEOUT = 300
# Seconds that a process has to give up a coroutine by itself, which costs the other calls under way nothing.
_GRACE = 1.0
# Seconds that a process has to end once its connection is closed, so that its exit code is the one reported.
_END_TIMEOUT = 2.0
_SECONDS_BETWEEN_LOOKS = 0.1  # at a process's memory
_MIB = 1 << 20
_LEAST_DEFAULT_MEMORY, _DEFAULT_SHARE = 4096, 8


class _TooMuchMemory(Exception):
    """A scoring process is above reward.memory_mb."""


class ScoringProcess:
    """One process with the reward loaded. Only `stop` may be called from another thread than `start`.

    The kernel kills the process when the thread that started it ends. `lost`: there is none until the next `start`.
    """

    def __init__(self, config: RewardConfig, data_sources: Collection[str], log_path: Path | None):
        self._config, self._data_sources = config, frozenset(data_sources)
        self._limit = config.timeout + _GRACE + seconds_between_calls(config)
        self.lost, self.takes_tokens = True, False
        self._log_path = log_path
        self._memory_mb = config.memory_mb or _default_memory()
        self._next_look = 0.0
        self._messages: Messages | None = None
        self._may_start = True
        self._launching = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start, or replace what was lost, and wait until the reward is loaded; ConfigError: it is not."""
        self.close()
        ours, theirs = socket.socketpair()
        self._messages = Messages(ours)
        with theirs, self._launching:
            if not self._may_start:
                raise RuntimeError("the scoring process was stopped")
            self._process = _launch(theirs.fileno(), self._log_path)
        try:
            self._messages.send((self._config, self._data_sources), _LOAD_TIMEOUT)
            reply = self._reply(_LOAD_TIMEOUT)
        except TimeoutError:
            reply = f"the reward did not load within {_LOAD_TIMEOUT} s"
        except _TooMuchMemory:
            reply = f"the reward used {self._too_much()} while it was loaded; set a higher limit"
        except NoMessage:
            reply = f"the reward wrote to the connection of its scoring process while it was loaded{self._see_log()}"
        except (EOFError, OSError):
            reply = f"a scoring process {self._kill(_END_TIMEOUT)} while it loaded the reward{self._see_log()}"
        if isinstance(reply, str):
            self._kill()
            raise ConfigError(reply)
        self.lost, self.takes_tokens = False, reply

    def send(self, answers: list[Answer]) -> None:
        """Hand over answers; one `receive` for each must follow."""
        try:
            self._messages.send(answers, self._limit)
        except OSError:  # killed or stopped from outside while it was idle
            self._kill()
            self.start()
            self._messages.send(answers, self._limit)

    def receive(self) -> Score:
        """The next answer's score. Where the process had to be killed for it or ended by itself, it is `lost`.

        The fault "overran": a built-in scorer met its limit of CPU time.
        """
        try:
            return self._reply(self._limit)
        except TimeoutError:
            fault, detail = "timeout", f"no score within {self._config.timeout:g} s (reward.timeout)"
        except _TooMuchMemory:
            fault, detail = "memory", f"the scoring process used {self._too_much()}"
        except NoMessage:
            fault, detail = "died", "what the scoring process sent is no score: the reward wrote to its connection"
        except (EOFError, OSError):
            ended = self._kill(_END_TIMEOUT)
            overran = self._process.returncode == -signal.SIGPROF
            fault, detail = "overran" if overran else "died", f"the scoring process {ended}"
        self._kill()
        return Score(None, fault=fault, detail=detail)

    def stop(self) -> None:
        """Kill the process and let none start again."""
        with self._launching:
            self._may_start = False
            if self._process is not None:
                self._kill()

    def close(self) -> None:
        """Close the connection; only from the thread that uses it."""
        if self._messages is not None:
            self._messages.close()

    def _reply(self, seconds: float) -> Any:
        """The next message, with a look at the memory of the process now and then."""
        deadline = time.monotonic() + seconds
        while True:
            now = time.monotonic()
            if now >= self._next_look:
                self._next_look = now + _SECONDS_BETWEEN_LOOKS
                if _most_memory(self._process.pid) > self._memory_mb * _MIB:
                    raise _TooMuchMemory
            try:
                return self._messages.receive(min(_SECONDS_BETWEEN_LOOKS, max(deadline - now, 0)))
            except TimeoutError:
                if time.monotonic() >= deadline:
                    raise

    def _too_much(self) -> str:
        return f"more than {self._memory_mb:,} MiB of memory (reward.memory_mb)"

    def _see_log(self) -> str:
        return "" if self._log_path is None else f"; its output is in {self._log_path}"

    def _kill(self, seconds_to_end: float = 0.0) -> str:
        """Kill the process, unless it ends by itself in time, and all that it started; say how it ended."""
        if self._process.returncode is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(seconds_to_end)
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


def _default_memory() -> int:
    return max(psutil.virtual_memory().total // _MIB // _DEFAULT_SHARE, _LEAST_DEFAULT_MEMORY)


def _most_memory(process: int) -> int:
    """Bytes in memory of this process, or of one that it has started if that has more; 0 where the system does not say.

    Their sum would count memory several times that they share.
    """
    own, children = 0, []
    with contextlib.suppress(OSError, IndexError):  # it has ended meanwhile
        own = int(Path(f"/proc/{process}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        for task in Path(f"/proc/{process}/task").iterdir():
            children += [int(child) for child in (task / "children").read_text().split()]
    return max([own, *map(_most_memory, children)])
