"""A program that runs custom code in a process of its own, and the messages to it: of scoring, tools and agents.

The process may fork, start and print what it likes. Its descendants end with it, and its forks have no part in the
messages. Only plain values are read from it, of a bounded size and in their order.
"""

import contextlib
import io
import os
import pickle
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

from hybridrl.runtime.guard import end_with_parent
from hybridrl.runtime.keeper import started_with

# Starts each message, so that anything else written to the socket is recognised as not being one.
_MAGIC = b"\x00hybridrl"
_LENGTH = 8
_HEADER = len(_MAGIC) + _LENGTH
_LARGEST_REPLY = 16 << 20  # bytes, of what a process of custom code may send
_CHUNK = 1 << 16
_SCANS = 100  # at most, for processes that a program has started
PROGRAM = "HYBRIDRL_PROGRAM"  # the variable inherited by the descendants of a Program


class NoMessage(Exception):
    """Something other than a message arrived on the socket."""


class _Plain(pickle.Unpickler):
    """Reads values without classes: code of another process runs nothing here."""

    def find_class(self, module: str, name: str) -> Any:
        raise NoMessage(f"it is a {module}.{name}")


class Messages:
    """Pickled messages over one end of a socket, each with its number. A partly received message is kept across a
    timeout. `limit` is the size of the largest one from a process of custom code, which are plain values."""

    def __init__(self, end: socket.socket, limit: int | None = None) -> None:
        self._end, self._received, self._limit = end, bytearray(), limit
        self._sent, self._taken, self._sending = 0, 0, threading.Lock()
        self.close = end.close

    def send(self, message: Any, seconds: float | None = None) -> None:
        """Send a message, from any thread. OSError: the other side has ended; TimeoutError: it does not read."""
        with self._sending:
            content = pickle.dumps((self._sent, message), pickle.HIGHEST_PROTOCOL)
            self._end.settimeout(seconds)
            self._end.sendall(_MAGIC + len(content).to_bytes(_LENGTH) + content)
            self._sent += 1

    def receive(self, seconds: float | None = None) -> Any:
        """Return the next message. TimeoutError: none in time; EOFError or OSError: the other side has ended;
        NoMessage: it is none, or not the next one."""
        deadline = None if seconds is None else time.monotonic() + seconds
        self._fill(_HEADER, deadline)
        if not self._received.startswith(_MAGIC):
            raise NoMessage
        length = int.from_bytes(self._received[len(_MAGIC) : _HEADER])
        if self._limit and length > self._limit:
            raise NoMessage(f"it has {length:,} bytes, of at most {self._limit:,}")
        self._fill(_HEADER + length, deadline)
        content = bytes(self._received[_HEADER : _HEADER + length])
        del self._received[: _HEADER + length]
        try:
            number, message = _Plain(io.BytesIO(content)).load() if self._limit else pickle.loads(content)
        except NoMessage:
            raise
        except Exception as error:  # foreign bytes in the middle of a message can raise anything
            raise NoMessage from error
        if number != self._taken:
            raise NoMessage(f"it has the number {number!r:.20} instead of {self._taken}")
        self._taken += 1
        return message

    def _fill(self, count: int, deadline: float | None) -> None:
        """Wait until `count` bytes have been received."""
        while len(self._received) < count:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                raise TimeoutError
            self._end.settimeout(left)
            if not (received := self._end.recv(_CHUNK)):
                raise EOFError
            self._received += received


class Program:
    """A bare interpreter that runs `main(descriptor, parent)` of a module with this `sys.path`, and the messages to it.

    It does not import the driver's main module. In a group of its own it is not reached by the terminal's Ctrl-C, and
    is killed with its own children. `options` are those of Popen.
    """

    def __init__(self, module: str, path: Sequence[str], **options: Any) -> None:
        ours, theirs = socket.socketpair()
        self.messages, descriptor = Messages(ours, _LARGEST_REPLY), theirs.fileno()
        self.mark, self._killed = secrets.token_hex(8), False
        code = f"import sys; sys.path[:] = {list(path)}; from {module} import main; main({descriptor}, {os.getpid()})"
        options |= {"pass_fds": [descriptor], "process_group": 0, "stdin": subprocess.DEVNULL}
        options["env"] = (options.get("env") or os.environ) | {PROGRAM: self.mark}
        with theirs:
            self.process = subprocess.Popen([sys.executable, "-u", "-c", code], **options)

    def kill(self, seconds_to_end: float) -> int:
        """Kill the process, unless it ends in time, and all that it started, in whatever group; return its exit
        code."""
        if not self._killed:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(seconds_to_end)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.kill()
            self._killed = True
            for _ in range(_SCANS):  # what is forked between a list and its signals is in the next one
                for pid in (pids := started_with(f"{PROGRAM}={self.mark}")):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                if not pids:
                    break
        return self.process.wait()


def messages_of(descriptor: int, parent: int) -> Messages:
    """Return the messages to the parent, in a Program, which ends with it; what the program forks does not have
    them."""
    end_with_parent(parent, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's Ctrl-C is for the driver, which ends this process
    os.set_inheritable(descriptor, False)  # processes that this one starts must not keep the socket open
    messages = Messages(socket.socket(fileno=descriptor))
    os.register_at_fork(after_in_child=messages.close)
    return messages
