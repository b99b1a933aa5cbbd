"""The program of a scoring process: load the reward once, then score requests until the supervisor closes the socket.

Imports nothing heavy. A plain function that hangs is not interrupted here: the supervisor (`process.py`) kills it.
"""

import logging
import os
import pickle
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from hybridrl.config import ConfigError
from hybridrl.config.schema_algorithm import RewardConfig
from hybridrl.rewards.load import Reward, calls_at_once, in_one_call, load_reward, seconds_between_calls
from hybridrl.rewards.score import Score, ScoringRequest, fault_of, score_request
from hybridrl.runtime.guard import end_with_parent

# Starts each message, so that anything else written to the socket is recognised as not being one.
_MAGIC = b"\x00hybridrl"
_LENGTH = 8
_HEADER = len(_MAGIC) + _LENGTH
_CHUNK = 1 << 16


def main(descriptor: int, supervisor: int) -> None:
    """Receive a RewardConfig and data sources; send whether token ids are required, or why loading failed as a string.

    Then receive lists of ScoringRequest, and send one Score per request, in their order.
    """
    end_with_parent(supervisor, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the driver, which ends this process
    logging.basicConfig(format="%(asctime)s %(message)s")
    os.set_inheritable(descriptor, False)  # processes that the reward starts must not keep the socket open
    messages = Messages(socket.socket(fileno=descriptor))
    config, data_sources = messages.receive()
    try:
        reward = load_reward(config, data_sources, cpu_limited=True)
    except ConfigError as error:
        messages.send(str(error))
        return
    messages.send(reward.takes_tokens)
    scoring = Scoring(reward, config)
    while True:
        try:
            requests = messages.receive()
        except EOFError:
            return
        for score in scoring.scores(requests):
            messages.send(score)


class Scoring:
    """Scores lists of requests as the reward manager requires: in turn, concurrently, rate-limited or in one call."""

    def __init__(self, reward: Reward, config: RewardConfig) -> None:
        self._reward, self._in_one_call = reward, in_one_call(config)
        self._seconds, self._next_call, self._lock = seconds_between_calls(config), 0.0, threading.Lock()
        at_once = calls_at_once(config, reward.is_async)
        self._threads = ThreadPoolExecutor(at_once) if at_once > 1 else None

    def scores(self, requests: list[ScoringRequest]) -> Iterator[Score]:
        """Yield one Score per request, in order, each as soon as it is known."""
        if not self._in_one_call:
            yield from (self._threads.map if self._threads else map)(self._score, requests)
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


class NoMessage(Exception):
    """Something other than a message arrived on the socket."""


class Messages:
    """Pickled messages over one end of a socket. A partly received message is kept across a timeout."""

    def __init__(self, end: socket.socket) -> None:
        self._end, self._received = end, bytearray()

    def send(self, message: Any, seconds: float | None = None) -> None:
        """Send a message. OSError: the other side has ended; TimeoutError: it does not read."""
        content = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        self._end.settimeout(seconds)
        self._end.sendall(_MAGIC + len(content).to_bytes(_LENGTH) + content)

    def receive(self, seconds: float | None = None) -> Any:
        """Return the next message. TimeoutError: none in time; EOFError or OSError: the other side has ended."""
        deadline = None if seconds is None else time.monotonic() + seconds
        self._fill(_HEADER, deadline)
        if not self._received.startswith(_MAGIC):
            raise NoMessage
        length = int.from_bytes(self._received[len(_MAGIC) : _HEADER])
        self._fill(_HEADER + length, deadline)
        content = bytes(self._received[_HEADER : _HEADER + length])
        del self._received[: _HEADER + length]
        try:
            return pickle.loads(content)
        except Exception as error:  # foreign bytes in the middle of a message can raise anything
            raise NoMessage from error

    def close(self) -> None:
        """Close the socket."""
        self._end.close()

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
