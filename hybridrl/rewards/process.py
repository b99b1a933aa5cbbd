"""One scoring process: its supervisor, which starts, sends, receives within limits and kills, and its program, `main`.

The supervisor runs in the driver or in a scoring actor. The program imports nothing heavy, loads the reward once and
scores until the supervisor closes the socket; it does not interrupt a plain function that hangs.
"""

import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from hybridrl.config import ConfigError
from hybridrl.config.schema_parts import RewardConfig
from hybridrl.required import required
from hybridrl.rewards.load import (
    CPU_SECONDS,
    calls_at_once,
    in_one_call,
    load_reward,
    seconds_between_calls,
    seconds_between_requests,
)
from hybridrl.rewards.program import NoMessage, Program, messages_of
from hybridrl.rewards.score import Score, ScoringRequest, checked, fault_of, score_request
from hybridrl.runtime.guard import bound_log
from hybridrl.runtime.stacks import shared_bytes

_LOADS = 3  # attempts of a process that is killed meanwhile, from outside or by the kernel
LOAD_TIMEOUT = 300  # seconds to import the user's file: a large library on a busy machine takes tens
# Seconds for a process to cancel a coroutine by itself: this does not disturb the other calls in progress.
_GRACE = 1.0
# Seconds for a process to end once its socket is closed: then its own exit code is reported.
_END_TIMEOUT = 2.0
_SECONDS_BETWEEN_CHECKS, _MOST_BETWEEN_CHECKS = 0.1, 0.5  # checks of a process's memory
_MIB, _PAGE = 1 << 20, os.sysconf("SC_PAGE_SIZE")
_MIN_DEFAULT_MEMORY, _DEFAULT_SHARE = 4096, 8


@dataclass(frozen=True)
class Launch:
    """The start of a scoring process: the driver's import path, working directory and environment variables."""

    path: Sequence[str]
    directory: str | None
    environment: dict[str, str]

    @classmethod
    def here(cls) -> "Launch":
        return cls(list(sys.path), os.getcwd(), dict(os.environ))


class ScorerDied(RuntimeError):
    """A scoring process is killed whenever it loads the reward; after a restart of the run it may succeed."""

    code = "worker-died"


class _MemoryExceeded(Exception):
    """A scoring process is above reward.memory_mb."""


class ScoringProcess:
    """A scorer in a process of its own. Only `stop` may be called from another thread than the other methods.

    The kernel kills the process when the thread that started it ends.
    """

    def __init__(
        self, config: RewardConfig, data_sources: Collection[str], log_path: Path | None, launch: Launch | None = None
    ) -> None:
        self._config, self._data_sources = config, frozenset(data_sources)
        self._limit = config.timeout + _GRACE + seconds_between_requests(config)
        self._lost = True  # there is no process until the next start
        self._log_path, self._launch = log_path, launch
        default_memory = max(psutil.virtual_memory().total // _MIB // _DEFAULT_SHARE, _MIN_DEFAULT_MEMORY)
        self._memory_mb = config.memory_mb or default_memory
        self._next_check = 0.0
        self._may_start = True
        self._launching = threading.Lock()
        self._program: Program | None = None

    def start(self) -> bool:
        """Start or replace the process and load the reward; return whether it reads token ids.

        ConfigError: the reward could not be loaded. ScorerDied: the process was killed each time.
        """
        reply = next((reply for _ in range(_LOADS) if (reply := self._load()) is not None), None)
        if reply is None:
            raise ScorerDied(f"a scoring process {self._kill()} while it loaded the reward, {_LOADS} times in a row")
        if isinstance(reply, str):
            self._kill()
            raise ConfigError(reply)
        self._lost = False
        return reply

    def _load(self) -> bool | str | None:
        """Start a process; return its reply, why it could not load the reward, or None if it was killed."""
        self.close()
        launch, log = self._launch or Launch.here(), self._log_path
        with self._launching, contextlib.nullcontext() if log is None else open(log, "ab") as output:
            if not self._may_start:
                raise RuntimeError("the scoring process was stopped")
            options = {"stdout": output, "stderr": output, "cwd": launch.directory, "env": launch.environment}
            program = self._program = Program(__name__, launch.path, **options)
        see_log = "" if self._log_path is None else f"; its output is in {self._log_path}"
        try:
            program.messages.send((self._config, self._data_sources), LOAD_TIMEOUT)
            return self._reply(LOAD_TIMEOUT)
        except TimeoutError:
            return f"the reward did not load within {LOAD_TIMEOUT} s"
        except _MemoryExceeded as error:
            return f"the reward used {error} while it was loaded; set a higher limit"
        except NoMessage:
            return f"the reward wrote to the connection of its scoring process while it was loaded{see_log}"
        except (EOFError, OSError):
            ended = self._kill(_END_TIMEOUT)
            killed = program.process.returncode < 0 and self._may_start
            return None if killed else f"a scoring process {ended} while it loaded the reward{see_log}"

    def score(self, requests: Sequence[ScoringRequest]) -> Iterator[Score]:
        """Yield one Score per request, in order; a request that ends the process does not affect the others. One whose
        process was killed is scored once more: as a rule not the reward killed it, but the system or a user.

        ConfigError or ScorerDied: a process started in place of a lost one could not load the reward.
        """
        waiting, whole = deque(requests), in_one_call(self._config)
        detail, killed = "", False  # about the first waiting request
        if self._lost:
            self.start()
        self._send(waiting)
        while waiting:
            score, request = self._receive(), waiting.popleft()
            if score.fault == "overran" and waiting and (self._config.judged or self._config.functions):
                for suspect in (request, *waiting):  # calls may run concurrently: any of them may be the slow one
                    yield from self.score([suspect])
                return
            divided = whole and len(waiting) + 1 < len(requests)  # others of its call have their scores
            if score.fault == "overran" and request.solution:
                detail = f"scoring took more than {CPU_SECONDS} s of CPU time, so the response counts as empty"
                waiting.appendleft(replace(request, solution=""))
            elif score.fault == "killed" and not killed and not divided:
                waiting.appendleft(request)
                killed = True
            else:
                score = replace(score, fault="died") if score.fault == "killed" else score
                yield replace(score, detail=detail) if detail else score
                while whole and self._lost and waiting:  # the call was for all of them
                    waiting.popleft()
                    yield score
                detail, killed = "", False
            if self._lost:
                self.start()
                if waiting:
                    self._send(waiting)

    def stop(self) -> None:
        """Kill the process and do not start another."""
        with self._launching:
            self._may_start = False
            if self._program is not None:
                self._kill()

    def close(self) -> None:
        """Close the socket."""
        if self._program is not None:
            self._program.messages.close()

    def _send(self, requests: Collection[ScoringRequest]) -> None:
        """Send requests; one `_receive` per request must follow."""
        try:
            required(self._program).messages.send(list(requests), self._limit)
        except OSError:  # killed or stopped from outside while it was idle
            self._kill()
            self.start()
            required(self._program).messages.send(list(requests), self._limit)

    def _receive(self) -> Score:
        """Return the next score; if it is a fault that cost the process its life, the process is lost.

        The fault "killed" is by a signal that nothing in a program raises by mistake.
        """
        try:
            return checked(self._reply(self._limit))
        except TimeoutError:
            fault, detail = "timeout", f"no score within {self._config.timeout:g} s (reward.timeout)"
        except _MemoryExceeded as error:
            fault, detail = "memory", f"the scoring process used {error}"
        except (NoMessage, TypeError) as error:
            said = str(error) or "the reward, or what it has started, wrote to its connection"
            fault, detail = "died", f"what the scoring process sent is not the next score: {said}"
        except (EOFError, OSError):
            ended = self._kill(_END_TIMEOUT)
            by_signal = {signal.SIGPROF: "overran", signal.SIGKILL: "killed", signal.SIGTERM: "killed"}
            code, detail = required(self._program).process.returncode, f"the scoring process {ended}"
            fault = by_signal.get(-code, "died")
        self._kill()
        return Score(None, fault=fault, detail=detail)

    def _reply(self, seconds: float) -> Any:
        """Return the next message, checking the memory of the process now and then. None begins the time again: a
        judge gets one more of the requests that had to wait."""
        program, deadline = required(self._program), time.monotonic() + seconds
        while True:
            now, began = time.monotonic(), time.thread_time()
            if now >= self._next_check:
                bound_log(self._log_path)
                if _exceeds(program.process.pid, self._memory_mb * _MIB):
                    raise _MemoryExceeded(f"more than {self._memory_mb:,} MiB of memory (reward.memory_mb)")
                took = time.thread_time() - began  # grows with the number of processes of the machine
                self._next_check = now + max(_SECONDS_BETWEEN_CHECKS, min(100 * took, _MOST_BETWEEN_CHECKS))
            try:
                reply = program.messages.receive(min(_SECONDS_BETWEEN_CHECKS, max(deadline - now, 0)))
                if reply is not None:
                    return reply
                deadline = time.monotonic() + seconds
            except TimeoutError:
                if time.monotonic() >= deadline:
                    raise

    def _kill(self, seconds_to_end: float = 0.0) -> str:
        """Kill the process, unless it ends in time, and all that it started; return how it ended."""
        code, self._lost = required(self._program).kill(seconds_to_end), True
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def _exceeds(process: int, limit: int) -> bool:
    """Whether a process, its group and its descendants hold more bytes than the limit; those they share count once."""
    members = [process, *_members(process)]
    resident = [_resident(member) for member in members]
    if sum(resident) <= limit:  # reading the proportional set sizes takes a hundred times as long
        return False
    return (shared_bytes(members) or max(resident)) > limit


def _members(process: int) -> set[int]:
    """Return the other processes of a group, and those that they or its first one have started."""
    members, waiting = {process}, [process]
    for entry in os.listdir("/proc"):
        with contextlib.suppress(OSError, ValueError):
            waiting += [int(entry)] if os.getpgid(int(entry)) == process else []
    while waiting:
        members.add(member := waiting.pop())
        with contextlib.suppress(OSError):  # it has ended meanwhile
            for task in Path(f"/proc/{member}/task").iterdir():
                waiting += {int(child) for child in (task / "children").read_text().split()} - members
    return members - {process}


def _resident(process: int) -> int:
    with contextlib.suppress(OSError, IndexError):  # it has ended meanwhile
        return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * _PAGE
    return 0


def main(descriptor: int, supervisor: int) -> None:
    """Receive a RewardConfig and data sources; send whether token ids are required, or why loading failed as a string.

    Then receive lists of ScoringRequest, and send the fields of one Score per request, in their order, and None before
    each request to a judge.
    """
    messages = messages_of(descriptor, supervisor)
    logging.basicConfig(format="%(asctime)s %(message)s")
    config, data_sources = messages.receive()
    scorer = CallerScorer(config, data_sources, cpu_limited=True, started=lambda: messages.send(None))
    try:
        messages.send(scorer.start())
    except ConfigError as error:
        messages.send(str(error))
        return
    with contextlib.suppress(EOFError):
        while True:
            for score in scorer.score(messages.receive()):
                messages.send(tuple(vars(score).values()))  # a class would be looked up by name for each one


class CallerScorer:
    """Scores in the caller's thread without a time limit, as the reward manager requires: in turn, concurrently,
    rate-limited or in one call. `options` are those of `load_reward`."""

    def __init__(self, config: RewardConfig, data_sources: Collection[str], **options: Any) -> None:
        self._config, self._load = config, partial(load_reward, config, data_sources, **options)
        self._seconds, self._next_call, self._lock = seconds_between_calls(config), 0.0, threading.Lock()

    def start(self) -> bool:
        self._reward = self._load()
        at_once = calls_at_once(self._config, any(function.is_async for function in self._reward.functions))
        self._map = ThreadPoolExecutor(at_once).map if at_once > 1 else map
        return self._reward.takes_tokens

    def score(self, requests: Sequence[ScoringRequest]) -> Iterator[Score]:
        """Yield one Score per request, in order, each as soon as it is known."""
        if not in_one_call(self._config):
            yield from self._map(self._score, requests)
            return
        try:
            yield from self._reward.score_all(requests)
        except (Exception, SystemExit) as error:
            yield from [fault_of(error, f"{len(requests)} responses at once")] * len(requests)

    def _score(self, request: ScoringRequest) -> Score:
        if self._seconds:
            with self._lock:
                time.sleep(max(self._next_call - time.monotonic(), 0))
                self._next_call = time.monotonic() + self._seconds
        return score_request(self._reward.score, request)

    def stop(self) -> None: ...

    def close(self) -> None: ...
