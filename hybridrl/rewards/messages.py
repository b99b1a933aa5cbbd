"""Pickled messages between the driver and a scoring process, over a socket. No side waits longer than it says."""

import pickle
import socket
import time
from typing import Any

_BEGINNING = b"\x00hybridrl"  # of each message, so that what else was written to the descriptor is no message
_LENGTH = 8
_HEADER = len(_BEGINNING) + _LENGTH
_CHUNK = 1 << 16


class NoMessage(Exception):
    """What arrived was written by something else."""


class Messages:
    """One side's end. What has arrived of a message is kept where the time ends before the rest is there."""

    def __init__(self, end: socket.socket) -> None:
        self._end, self._arrived = end, bytearray()

    def send(self, message: Any, seconds: float | None = None) -> None:
        """OSError: the other side has ended, or does not read (TimeoutError)."""
        content = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        self._end.settimeout(seconds)
        self._end.sendall(_BEGINNING + len(content).to_bytes(_LENGTH) + content)

    def receive(self, seconds: float | None = None) -> Any:
        """The next message. TimeoutError: it is not there in time; EOFError or OSError: the other side has ended."""
        deadline = None if seconds is None else time.monotonic() + seconds
        self._take(_HEADER, deadline)
        if not self._arrived.startswith(_BEGINNING):
            raise NoMessage
        length = int.from_bytes(self._arrived[len(_BEGINNING) : _HEADER])
        self._take(_HEADER + length, deadline)
        content = bytes(self._arrived[_HEADER : _HEADER + length])
        del self._arrived[: _HEADER + length]
        try:
            return pickle.loads(content)
        except Exception as error:  # whatever bytes in the midst of it have made of it
            raise NoMessage from error

    def close(self) -> None:
        self._end.close()

    def _take(self, count: int, deadline: float | None) -> None:
        """Wait until so many bytes have arrived."""
        while len(self._arrived) < count:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                raise TimeoutError
            self._end.settimeout(left)
            if not (received := self._end.recv(_CHUNK)):
                raise EOFError
            self._arrived += received
