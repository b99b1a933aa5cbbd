"""`faults.jsonl`: the faults reported by a run, and its end, for people and `hybridrl why`; kinds of missing scores.

Each record is a line, written at once: `{"time", "step", "code", "text", "tail", "memory", "end"}`. A run begins with
the code `begun`, and its last record has `"end": true`, unless it was killed.
"""

import json
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hybridrl import plugins
from hybridrl.required import required
from hybridrl.tracking.secrets import mask_text

Memory = dict[str, int | None]

FILE, PAGE = "faults.jsonl", "docs/errors.md"
BEGUN, FINISHED, STOPPED, RESTART, REQUESTED = "begun", "finished", "stopped", "restart", "stop-requested"
UNEXPECTED = "unexpected"  # an exception from outside hybridrl
PER_CODE = 100  # most records per code; a fault of every response would otherwise fill the disk
TAIL_LINES, TAIL_BYTES = 40, 16384  # most lines and bytes from the log of a process
BEGINS = "-- another process writes here from now on --\n"  # in the log of an actor that replaces another
# The name of a process in texts; its log file has the same name.
ACTOR = re.compile(r"\b(rollout|train)(?: server |-)(\d+)\b")

# Messages of `kill_cause` and Ray's memory monitor; of Python and torch; of CUDA and vLLM. The host is tried first: its
# messages may also contain "out of memory".
KILLED = re.compile("killed by the kernel for lack|kernel killed a|low on memory|memory usage threshold", re.IGNORECASE)
MEMORY = {
    "host-memory": rf"{KILLED.pattern}|memory pressure|can.?.?t allocate memory|bad_alloc|\bMemoryError\b",
    "device-memory": r"out of memory|\bOutOfMemoryError\b|ALLOC_FAILED|not enough GPU memory"
    r"|less than desired \w+ memory|no available memory for the cache|larger than the available KV cache",
}
# Codes of general errors, and patterns in their text or log that show the cause.
GENERAL = {"device-memory", "worker-died", "worker-failed", "rollout-failed", "save-failed", UNEXPECTED}
SIGNS = {
    "disk-full": r"No space left on device|Disk quota exceeded|\[Errno (28|122)\]|\bOutOfDiskError\b",
    **MEMORY,
    "no-response": r"no response from .+ within",
    "engine-start": r"^\w+: (start-up|rollout server\.start): rollout-\d+",
}


def out_of_memory(text: str) -> str | None:
    """Return the code of the memory that ran out according to a message or log; None if there was enough."""
    return _sign_in(text, MEMORY)


def _sign_in(text: str, signs: Mapping[str, str]) -> str | None:
    return next((code for code, pattern in signs.items() if re.search(pattern, text, re.IGNORECASE)), None)


def code_of(error: BaseException, tail: Sequence[str] = ()) -> str:
    """Return the stable code of an error that ends a run: its class's code, or the cause shown by text and log."""
    if isinstance(error, KeyboardInterrupt):
        return STOPPED
    ours = type(error).__module__.startswith("hybridrl")
    code = getattr(type(error), "code", UNEXPECTED) if ours else UNEXPECTED
    text = "\n".join([f"{type(error).__name__}: {error}", *tail])
    return code if code not in GENERAL else _sign_in(text, SIGNS) or code


@dataclass(frozen=True)
class Fault:
    """One record. `step`: the current step, 0 before the first; `tail`: the last lines of the affected process's log;
    `end`: the run ended with this record."""

    time: str
    step: int
    code: str
    text: str
    tail: list[str] = field(default_factory=list)
    memory: Memory = field(default_factory=dict)
    end: bool = False

    @property
    def is_sound(self) -> bool:
        """Whether the fields of a record from a file have their types. Raises ValueError for another form of time."""
        texts = all(isinstance(text, str) for text in (self.code, self.text))
        numbers = isinstance(self.memory, dict) and all(isinstance(size, int | None) for size in self.memory.values())
        return texts and numbers and isinstance(self.step, int) and isinstance(self.tail, list) and bool(self.at.tzinfo)

    @property
    def at(self) -> datetime:
        return datetime.fromisoformat(self.time)


class FaultLog(logging.Handler):
    """Appends to `faults.jsonl` of a directory; as a handler, it appends logged warnings. If the disk is full, a record
    is written with the next one."""

    def __init__(self, directory: Path, memory: Callable[[], Memory]) -> None:
        super().__init__(logging.WARNING)
        self.directory, self.memory, self.step = directory, memory, 0
        self._counts: Counter[str] = Counter()
        # After a line that a kill cut short, the first record begins a new one.
        self._unwritten = b"" if read_end(directory / FILE, 1) in (b"\n", b"") else b"\n"

    def emit(self, record: logging.LogRecord) -> None:
        self.add(getattr(record, "code", "warning"), record.getMessage())

    def add(self, code: str, text: str) -> None:
        """Record a fault that the run survives, at most PER_CODE times per code."""
        self._counts[code] += 1
        if self._counts[code] <= PER_CODE:
            self.write(code, text, self.tail(text))

    def write(self, code: str, text: str = "", tail: Sequence[str] = (), *, end: bool = False) -> None:
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        masked = mask_text("\n".join(tail)).splitlines()  # together: a private key has several lines
        fault = Fault(now, self.step, code, mask_text(text), masked, self.memory(), end)
        with required(self.lock), suppress(OSError):  # a checkpoint is published, and a server rebuilt, in a thread
            self._unwritten += json.dumps(asdict(fault)).encode() + b"\n"
            with (self.directory / FILE).open("ab", buffering=0) as file:
                self._unwritten = self._unwritten[file.write(self._unwritten) :]

    def tail(self, text: str) -> list[str]:
        """Return the last log lines of the first process in a text, if it is on this machine."""
        named = ACTOR.search(text)
        if named is None:
            return []
        end = read_end(self.directory / "logs" / f"{named[1]}-{named[2]}.log", TAIL_BYTES)
        return of_last_process(end.decode(errors="replace")).splitlines()[-TAIL_LINES:]


def of_last_process(log: str) -> str:
    """Return the part of a log that its last process wrote; earlier parts belong to earlier attempts."""
    return log.rpartition(BEGINS)[2]


def read_end(path: Path, size: int) -> bytes:
    """Return the last bytes of a file; empty if it cannot be read."""
    with suppress(OSError), path.open("rb") as file:
        file.seek(max(file.seek(0, 2) - size, 0))
        return file.read()
    return b""


def last_lines(path: Path, size: int) -> str:
    """Return complete lines from the end of a file. A cut line could show a secret without the key by which it is
    masked."""
    end = read_end(path, size + 1)
    return (end.partition(b"\n")[2] if len(end) > size else end).decode(errors="replace")


_current: FaultLog | None = None  # log of this process's run


def record(code: str, text: str) -> None:
    """Record a fault of the current run; does nothing if there is none."""
    if _current is not None:
        _current.add(code, text)


def begin_step(step: int) -> None:
    """Set the step of later records."""
    if _current is not None:
        _current.step = step


@contextmanager
def recording(directory: Path, memory: Callable[[], Memory] = dict) -> Iterator[None]:
    """Context in which faults are recorded in the directory, with a record at the beginning and one at the end.
    `memory` measures the machine's memory in bytes."""
    global _current
    log, logger = FaultLog(directory, memory), logging.getLogger("hybridrl")
    _current = log
    logger.addHandler(log)
    log.write(BEGUN)
    try:
        yield
    except BaseException as error:
        text = str(error) or type(error).__name__
        tail = log.tail(text)
        log.write(code_of(error, tail), text, tail, end=True)
        raise
    else:
        log.write(FINISHED, end=True)
    finally:
        logger.removeHandler(log)
        _current = None


def read_faults(directory: Path) -> list[Fault]:
    """Return the records of a directory in order; a line that cannot be read is left out."""
    faults = []
    with suppress(OSError):
        for line in (directory / FILE).read_text(encoding="utf-8", errors="replace").splitlines():
            with suppress(ValueError, TypeError, RecursionError):
                fault = Fault(**json.loads(line))
                faults += [fault] if fault.is_sound else []
    return faults


def last_run(faults: list[Fault]) -> list[Fault]:
    """Return the records of the last run, from its beginning on."""
    begins = [number for number, fault in enumerate(faults) if fault.code == BEGUN]
    return faults[begins[-1] :] if begins else []


@dataclass(frozen=True)
class FaultKind:
    """A reason for which responses have no score, and advice for users."""

    sentence: str
    advice: str
    rejects: bool = False  # a run does not start if its reward's trial has no score, for reasons of such kinds only

    def __str__(self) -> str:
        return f"{self.sentence}; {self.advice}"


# By name; other distributions add `fault.NAME`. A fault is the name of its kind, perhaps with a class: `judge:429`.
FAULT_KINDS = {
    "none": FaultKind("the reward function returned None", "return a number for every response", rejects=True),
    "nan": FaultKind("the reward is not finite or is beyond 1e18", "return a finite number", rejects=True),
    "type": FaultKind("the result is not a score", "return a number, or a dict with one as score", rejects=True),
    "raised": FaultKind("an exception was raised", "read its traceback in reward.log or episodes-*.log", rejects=True),
    "timeout": FaultKind("a time limit was reached", "raise reward.timeout or multi_turn.episode_timeout"),
    "overran": FaultKind("scoring even an empty response took too much CPU time", "leave the row out"),
    "memory": FaultKind("the scoring process used too much memory", "raise reward.memory_mb"),
    "died": FaultKind("the process that scored it or ran its episode died", "read reward.log or episodes-*.log"),
    "environment": FaultKind("an environment, a tool or an agent failed", "repair or restart the one that is named"),
    "no turns": FaultKind("the agent ended before the policy responded", "request a response before the agent ends"),
    "no reward": FaultKind("the agent set no reward", "return one, or set reward.custom_reward_function.path"),
    "picture": FaultKind("a picture could not be read again", "restore the file, or leave the row out"),
    "rejected": FaultKind("the engine rejected the request", "change the prompt or parameter that is named"),
    "engine died": FaultKind("engines died of the request", "read rollout-*.log, or leave the prompt out"),
    "judge": FaultKind("the judge gave no verdict", "check its server and the keys of reward.judge", rejects=True),
    "teacher": FaultKind("the teacher gave no log-probs", "check its server and distillation.teacher_models"),
    "reward_model": FaultKind("the reward model gave no score", "check the keys of reward.reward_model"),
    "reply": FaultKind("the reply of the model's server has no message", "read the server's log"),
}


def fault_kind(fault: str) -> FaultKind:
    """Return the kind of a fault. A file may have faults of kinds that are not declared here."""
    name = fault.partition(":")[0]
    if name in plugins.additions("fault", FAULT_KINDS):
        return plugins.load(f"fault.{name}")
    return FAULT_KINDS.get(name, FaultKind("its kind is not declared here", "install the package that declares it"))


def count_faults(scores: Sequence[Any]) -> list[tuple[str, int, int]]:
    """Return each fault of scores or samples, the number of those that have it, and the index of the first."""
    faults = [score and score.fault for score in scores]
    return [(fault, count, faults.index(fault)) for fault, count in Counter(filter(None, faults)).most_common()]
