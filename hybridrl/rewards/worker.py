"""What a scoring process runs: load the reward once, then score what arrives until the driver goes.

Imports nothing heavy itself. Knows nothing of time limits: whoever waits for it kills it.
"""

import ctypes
import logging
import os
import signal
import sys
from multiprocessing.connection import Connection

from hybridrl.config import ConfigError
from hybridrl.rewards.load import load_reward
from hybridrl.rewards.score import score_answer

_PR_SET_PDEATHSIG = 1


def main(descriptor: int, driver: int) -> None:
    """Receive a RewardConfig, send None or why it does not load; then, for lists of answers, a Score each."""
    _die_with(driver)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the driver, which ends this process
    logging.basicConfig(format="%(asctime)s %(message)s")
    connection = Connection(descriptor)
    try:
        reward = load_reward(connection.recv())
    except ConfigError as error:
        connection.send(str(error))
        return
    connection.send(None)
    while True:
        try:
            answers = connection.recv()
        except EOFError:
            return
        for answer in answers:
            connection.send(score_answer(reward, answer))


def _die_with(driver: int) -> None:
    """Have the kernel kill this process when the driver's thread that started it ends, even by SIGKILL."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != driver:
        sys.exit("the driver was gone before this scoring process had started")
