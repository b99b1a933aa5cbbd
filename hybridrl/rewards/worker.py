"""What a scoring process runs: load the reward once, then score what arrives until the driver goes.

Imports nothing heavy itself. Ends no call of a plain function: whoever waits for it kills the process.
"""

import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from hybridrl.config import ConfigError
from hybridrl.config.schema_reward import RewardConfig
from hybridrl.rewards.load import Reward, load_reward
from hybridrl.rewards.managers import calls_at_once, in_one_call, seconds_between_calls
from hybridrl.rewards.messages import Messages
from hybridrl.rewards.score import Answer, Score, fault_of, score_answer
from hybridrl.runtime.guard import end_with_parent


def main(descriptor: int, driver: int) -> None:
    """Receive a RewardConfig and data sources, send whether tokens are wanted, or as a text why it does not load.

    Then, for lists of answers, send a Score each, in their order.
    """
    end_with_parent(driver, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the driver, which ends this process
    logging.basicConfig(format="%(asctime)s %(message)s")
    os.set_inheritable(descriptor, False)  # what the reward starts must not hold it open
    connection = Messages(socket.socket(fileno=descriptor))
    config, data_sources = connection.receive()
    try:
        reward = load_reward(config, data_sources, cpu_limited=True)
    except ConfigError as error:
        connection.send(str(error))
        return
    connection.send(reward.takes_tokens)
    scoring = Scoring(reward, config)
    while True:
        try:
            answers = connection.receive()
        except EOFError:
            return
        for score in scoring.scores(answers):
            connection.send(score)


class Scoring:
    """Scores lists of answers as the reward manager has it: one by one, several at once, paced, or in one call."""

    def __init__(self, reward: Reward, config: RewardConfig) -> None:
        self._reward, self.takes_tokens = reward, reward.takes_tokens
        self._in_one_call = in_one_call(config)
        self._pace = _Pace(seconds_between_calls(config))
        at_once = calls_at_once(config, reward.waits)
        self._threads = ThreadPoolExecutor(at_once) if at_once > 1 else None

    def scores(self, answers: list[Answer]) -> Iterator[Score]:
        """In the order of the answers, each as soon as it is known."""
        if self._in_one_call:
            yield from self._together(answers)
        else:
            yield from self._threads.map(self._one, answers) if self._threads else map(self._one, answers)

    def _one(self, answer: Answer) -> Score:
        self._pace.wait()
        return score_answer(self._reward.score, answer)

    def _together(self, answers: list[Answer]) -> list[Score]:
        try:
            return self._reward.score_all(answers)
        except (Exception, SystemExit) as error:
            return [fault_of(error, f"{len(answers)} answers at once")] * len(answers)


class _Pace:
    """Lets one call begin every so many seconds."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._next, self._turn = seconds, 0.0, threading.Lock()

    def wait(self) -> None:
        if self._seconds:
            with self._turn:
                time.sleep(max(self._next - time.monotonic(), 0))
                self._next = time.monotonic() + self._seconds
