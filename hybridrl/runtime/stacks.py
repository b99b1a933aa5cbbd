"""What a process of this machine is doing, asked from outside: on request it writes the stacks of all its threads to
its log, and the kernel knows about one that cannot.

The processes of an actor are those that write to its log: the actor itself, and an engine's own processes."""

import contextlib
import faulthandler
import os
import re
import signal
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil

REQUEST = signal.SIGUSR1
REPLY_SECONDS, LOOK_SECONDS = 1.0, 0.05
THREAD = re.compile(r"^(?=Current thread 0x|Thread 0x)", re.MULTILINE)
FRAME = re.compile(r'^  File "(.+)", line (\d+) in (.+)$', re.MULTILINE)
OWN = (f"{Path(__file__).parents[1]}/", "/vllm/")  # where a frame says most, best first
IDLE = "/ray/_private/worker.py"  # the loop in which an actor waits for calls
WRAPPERS = {"wrapper", "inner", "_fn"}  # torch's decorators

Frame = tuple[str, str, str]  # file, line, function


def write_stacks_on_request() -> None:
    """Have this process write the stacks of all its threads to its standard error when it gets REQUEST, whatever it is
    executing; it is not disturbed."""
    faulthandler.register(REQUEST, file=2, all_threads=True)


def activities(logs: Iterable[str]) -> dict[str, str]:
    """Return what the processes of this machine are doing that write to each of these logs, after asking them for their
    stacks. Logs that no process of this machine writes to are left out. Takes a second per process at most."""
    found = _writers({os.path.realpath(log): log for log in logs})
    with ThreadPoolExecutor() as threads:
        return dict(zip(found, threads.map(_activity, found, found.values()), strict=True))


def _writers(logs: dict[str, str]) -> dict[str, list[int]]:
    """Return the processes whose standard error is one of the logs, by its value, the oldest first."""
    writers = defaultdict(list)
    for pid in sorted(psutil.pids()):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            target = os.readlink(f"/proc/{pid}/fd/2")
            if target in logs:
                writers[logs[target]].append(pid)
    return writers


def _activity(log: str, pids: Sequence[int]) -> str:
    parts = []
    for pid in pids:
        with contextlib.suppress(OSError, psutil.NoSuchProcess):
            if doing := _process_activity(pid, Path(log)):
                parts.append(f"{Path(psutil.Process(pid).cmdline()[0]).name} (pid {pid}) {doing}")
    return "; ".join(parts)


def _process_activity(pid: int, log: Path) -> str:
    """Return where a process is; nothing for a helper that sleeps, such as Python's resource tracker."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    status = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
    letter, word = status["State"].split()[0], status["State"].partition("(")[2].rstrip(")")
    answers = int(status["SigCgt"], 16) >> (REQUEST - 1) & 1  # any other process would die of the signal
    if letter in "RS" and not answers:
        return "" if letter == "S" else "running"
    if letter in "RS" and (stacks := _request(pid, log)):
        return place(stacks)
    waits = Path(f"/proc/{pid}/wchan").read_text().strip("0")
    return f"{word} (state {letter}{f', in {waits}' * bool(waits)})"


def _request(pid: int, log: Path) -> str:
    """Ask a process for its stacks; return what its log has since, empty if it did not respond."""
    size = seen = log.stat().st_size
    os.kill(pid, REQUEST)
    deadline = time.monotonic() + REPLY_SECONDS
    while time.monotonic() < deadline:
        time.sleep(LOOK_SECONDS)
        last, seen = seen, log.stat().st_size
        if seen == last > size:  # it is complete
            with log.open("rb") as file:
                file.seek(size)
                return file.read().decode(errors="replace")
    return ""


def place(stacks: str) -> str:
    """Return where the stacks of a process show it to be: "in all_reduce (learner.py:143 _gradient)", the innermost
    function, and the innermost line of hybridrl or vLLM that leads there."""
    blocks = sorted(THREAD.split(stacks)[1:], key=lambda block: not block.startswith("Current"))
    threads = [FRAME.findall(block) for block in blocks]
    for own in OWN:
        for frames in threads:
            if line := next((frame for frame in frames if own in frame[0]), None):
                return _describe(frames, line)
    frames = threads[0] if threads else []
    if not frames or IDLE in frames[0][0]:
        return "idle"
    return _describe(frames, frames[0])


def _describe(frames: list[Frame], line: Frame) -> str:
    inner = next((name for _, _, name in frames if name not in WRAPPERS), line[2])
    where = f"{Path(line[0]).name}:{line[1]}"
    return f"in {inner} ({where}{f' {line[2]}' * (inner != line[2])})"
