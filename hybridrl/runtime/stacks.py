"""Stacks of a process of this machine, requested from outside without a risk for it: a thread of the process writes the
stacks of all threads to its log, and the kernel knows about a process whose threads cannot run.

The processes of an actor are those that write to its log: the actor itself, and an engine's own processes. Nothing is
requested of one that has not called `write_stacks_on_request`. A signal needs no thread, but its handler walks frames
without the GIL, which ends a process now and then whose threads run, most often while they import. So it is the last
resort: for a process that computes or waits without running any Python, and the frames of one thread by itself.

    hybridrl stacks PID
"""

import argparse
import contextlib
import ctypes
import faulthandler
import os
import re
import signal
import socket
import struct
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil

REQUEST = signal.SIGUSR1
REPLY_SECONDS = 5.0  # for a thread to get the GIL, also on a machine whose cores are all busy
STARVED_SECONDS = 0.1  # CPU time; with less a runnable process has not had the time to reply
SIGNAL_SECONDS = 1.0
NOTICED_SECONDS = 3.0  # within which a death is noticed
DIED = f"died within {SIGNAL_SECONDS:g} s of the {REQUEST.name} that requested its stack"
DEEPEST = 100  # frames of a thread
THREAD = re.compile(r"^(?=(?:Thread|Stack) .*:$)", re.MULTILINE)
FRAME = re.compile(r'^  File "(.+)", line (\d+) in (.+)$', re.MULTILINE)
OWN = (f"{Path(__file__).parents[1]}/", "/vllm/")  # where a frame says most, best first
IDLE = "/ray/_private/worker.py"  # the loop in which an actor waits for calls
LARGEST = 5  # processes that are named when the machine is out of memory
WRAPPERS = {"wrapper", "inner", "_fn"}  # torch's decorators

Frame = tuple[str, str, str]  # file, line, function

signalled: dict[str, float] = {}  # when, by log


# -- in the process ----------------------------------------------------------------------------------------------------


def write_stacks_on_request() -> None:
    """From now on, write the stacks of all threads to standard error when `activities` requests them, and the stack of
    a thread when it gets REQUEST, whatever it is executing."""
    faulthandler.register(REQUEST, file=2, all_threads=False)
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(address_of(os.getpid()))
    except OSError:  # it listens already; if another program does, only the kernel's facts remain
        listener.close()
        return
    listener.listen()
    threading.Thread(target=_reply_to_all, args=[listener], name="stacks", daemon=True).start()


def address_of(pid: int) -> bytes:
    """Return the address of a process, which needs no file. Containers may share addresses, and have equal numbers."""
    return f"\0hybridrl-stacks-{os.stat('/proc/self/ns/pid').st_ino}-{pid}".encode()


def _reply_to_all(listener: socket.socket) -> None:
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:  # too many open files
            time.sleep(1)
            continue
        with connection, contextlib.suppress(OSError):
            connection.settimeout(SIGNAL_SECONDS)
            if _peer(connection)[1] in (0, os.geteuid()):
                text = _stacks().encode(errors="replace")
                with contextlib.suppress(OSError):  # a full disk
                    os.write(2, text)
                connection.sendall(text)


def _peer(connection: socket.socket) -> tuple[int, int]:
    """Return the process and the user at the other end."""
    pid, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid, user


def _stacks() -> str:
    """Return the stacks of all threads but this one, the main thread's first, as faulthandler writes them."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames, main = sys._current_frames(), threading.main_thread().ident
    del frames[threading.get_ident()]
    lines = [f"{time.strftime('%F %T')} stacks of process {os.getpid()}"]
    for ident in sorted(frames, key=lambda ident: ident != main):
        lines.append(f"Thread {ident:#x} {names.get(ident, '')} (most recent call first):")
        frame = frames.pop(ident)
        for _ in range(DEEPEST):
            if frame is not None:
                code = frame.f_code
                lines.append(f'  File "{code.co_filename}", line {frame.f_lineno} in {code.co_name}')
                frame = frame.f_back
    return "\n".join(lines) + "\n"


# -- from outside ------------------------------------------------------------------------------------------------------


def activities(logs: Iterable[str]) -> dict[str, str]:
    """Return, by log, the activities of this machine's processes writing to it, after requesting their stacks. Logs
    without a writer on this machine are left out. Takes seconds if a process does not reply, otherwise less."""
    writers = _writers({os.path.realpath(log): log for log in logs})
    with ThreadPoolExecutor(max(len(writers), 1)) as threads:
        return dict(zip(writers, threads.map(_activity, writers, writers.values()), strict=True))


def _writers(logs: dict[str, str]) -> dict[str, list[int]]:
    """Return the processes whose standard error is one of the logs, by its value, the oldest first."""
    writers = defaultdict(list)
    for pid in sorted(psutil.pids()):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            target = os.readlink(f"/proc/{pid}/fd/2")
            if target in logs:
                writers[logs[target]].append(pid)
    return writers


def kill_writers(log: str) -> None:
    """Kill the processes of this machine that write to this log, even stopped ones."""
    for pid in _writers({os.path.realpath(log): log}).get(log, []):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _activity(log: str, pids: Sequence[int]) -> str:
    parts = []
    for pid in pids:
        with contextlib.suppress(OSError, psutil.Error):  # it has ended
            process = psutil.Process(pid)
            name = Path(next(iter(process.cmdline()), process.name())).name
            if doing := _process_activity(process, Path(log)):
                parts.append(f"{name} (pid {pid}) {doing}")
    return "; ".join(parts)


def _process_activity(process: psutil.Process, log: Path) -> str:
    """Return where a process is; nothing for a helper that sleeps, such as Python's resource tracker."""
    before = _cpu_seconds(process)
    letter, state, _ = _state(process.pid)
    stacks = None if letter in "tT" else request(process.pid)
    if stacks:
        return place(stacks) + f", {state}" * (letter not in "RS")
    if stacks is None:
        return {"S": "", "R": "running"}.get(letter, state)
    used = {thread: seconds - before.get(thread, 0.0) for thread, seconds in _cpu_seconds(process).items()}
    computed, (letter, state, handles) = sum(used.values()), _state(process.pid)
    targets = [process.pid] * (letter == "S")  # its main thread waits
    if computed > STARVED_SECONDS:  # the thread that computes has the GIL
        targets = [max(used, key=lambda thread: used[thread]), process.pid]
    if not handles or letter in "tT":
        targets = []
    stack = next(filter(None, (_signal(process, thread, log) for thread in targets)), "")
    if stack == DIED:
        return DIED
    facts = f"no thread has run Python for {REPLY_SECONDS:g} s, with {computed:.1f} s of CPU time: {state}"
    return f"{place(stack)}; {facts}" if stack else facts


def _state(pid: int) -> tuple[str, str, bool]:
    """Return the letter and the description of a process's state, and whether it handles REQUEST."""
    lines = Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines()
    status = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
    letter, word = status["State"].split()[0], status["State"].partition("(")[2].rstrip(")")
    waits = Path(f"/proc/{pid}/wchan").read_text().strip("0")
    handles = bool(int(status["SigCgt"], 16) >> (REQUEST - 1) & 1)
    return letter, f"{word} (state {letter}{f', in {waits}' * bool(waits)})", handles


def _cpu_seconds(process: psutil.Process) -> dict[int, float]:
    return {thread.id: thread.user_time + thread.system_time for thread in process.threads()}


def request(pid: int) -> str | None:
    """Request the stacks of a process; empty if it did not reply in time, None if it does not take requests."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(REPLY_SECONDS)
        try:
            connection.connect(address_of(pid))
            if _peer(connection)[0] != pid:  # another program took the address
                return None
            return connection.makefile("rb").read().decode(errors="replace") or None
        except (TimeoutError, BlockingIOError):  # not even accepted, as many requests wait
            return ""
        except OSError:
            return None


def _signal(process: psutil.Process, thread: int, log: Path) -> str:
    """Request a thread's stack, written to the log; return it, empty if there is none, or DIED if the process ended."""
    size = log.stat().st_size
    signalled[str(log)] = time.monotonic()
    # glibc has tgkill since 2.30; without it the main thread gets the signal
    send = getattr(ctypes.CDLL(None), "tgkill", lambda pid, _, number: os.kill(pid, number))
    send(process.pid, thread, REQUEST)
    time.sleep(SIGNAL_SECONDS)
    if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE:
        return DIED
    with log.open("rb") as file:
        file.seek(size)
        return "".join(THREAD.split(file.read().decode(errors="replace"))[1:])


def death_note(log: str) -> str:
    """Return an addition to the cause of a death that was just noticed, if REQUEST was sent to a process with this
    log at that time."""
    lately = time.monotonic() - signalled.get(log, float("-inf")) < SIGNAL_SECONDS + NOTICED_SECONDS
    return f"; it {DIED}" * lately


def place(stacks: str) -> str:
    """Return where the stacks of a process show it to be: "in all_reduce (learner.py:143 _gradient)", the innermost
    function, and the innermost line of hybridrl or vLLM that leads there."""
    threads = [FRAME.findall(block) for block in THREAD.split(stacks)[1:]]
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


# -- memory ------------------------------------------------------------------------------------------------------------


def largest_processes(logs: Sequence[str]) -> list[str]:
    """Return lines about the largest processes of this machine. Those of this run are marked, with the name of their
    log in the directory of `logs`, if they have one. The last line is the memory of the whole run."""
    sizes = [(process.info["memory_info"], process) for process in psutil.process_iter(["name", "memory_info"])]
    largest = sorted(((size.rss, item.pid, item.info["name"]) for size, item in sizes if size), reverse=True)[:LARGEST]
    own, lines = run_processes(logs), ["the largest processes of the driver's machine now:"]
    for size, pid, program in largest:
        mark = f"{own[pid]} of this run" if pid in own else ""
        lines.append(f"  {program}{mark} (pid {pid}): {(shared_bytes([pid]) or size) / (1 << 30):.2f} GiB")
    return [*lines, f"  all of this run: {shared_bytes(own) / (1 << 30):.2f} GiB"]


def shared_bytes(pids: Iterable[int]) -> int:
    """Return the proportional set size of processes: shared memory counts once; others' processes are left out."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError, IndexError):  # it has ended
            total += int(Path(f"/proc/{pid}/smaps_rollup").read_text().partition("\nPss:")[2].split()[0]) << 10
    return total


def run_processes(logs: Sequence[str]) -> dict[int, str]:
    """Return the processes of this run, with the names of those that have a log."""
    own = dict.fromkeys([os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))], "")
    return own | {pid: f", {name}" for pid, name in named_processes(logs).items()}


def named_processes(logs: Sequence[str]) -> dict[int, str]:
    """Return the processes of this machine that write to a log in the directory of `logs`, with the log's name."""
    paths = Path(logs[0]).parent.glob("*") if logs else ()
    named = _writers({str(log): log.stem for log in paths})
    return {pid: name for name, pids in named.items() for pid in pids}


def memory_by_role(logs: Sequence[str]) -> dict[str, float]:
    """Return metrics: the GiB of a run's processes on the driver's machine, of the driver and by what begins the names
    of their logs."""
    sizes: defaultdict[str, float] = defaultdict(float)
    for pid, name in ({os.getpid(): "driver"} | named_processes(logs)).items():
        sizes[f"perf/process_memory_gb/{name.partition('-')[0]}"] += shared_bytes([pid]) / (1 << 30)
    return dict(sizes)


def main() -> int:
    """Print the stacks of a process; return the exit status."""
    purpose = "Print the stacks of all threads of a process of a run."
    status = "exit status: 0 printed, 1 the process does not reply, 2 there is no such process of a run"
    parser = argparse.ArgumentParser(prog="hybridrl stacks", description=purpose, epilog=status)
    parser.add_argument("pid", type=int, metavar="PID", help="such as that of a ray::TrainWorker")
    pid = parser.parse_args().pid
    if pid < 1 or not psutil.pid_exists(pid):
        parser.error(f"there is no process {pid}")
    stacks = request(pid)
    if stacks is None:
        parser.error(f"process {pid} is none of a run: it takes no requests for its stacks")
    print(stacks or f"process {pid} did not reply within {REPLY_SECONDS:g} s")
    return 0 if stacks else 1


if __name__ == "__main__":
    sys.exit(main())
