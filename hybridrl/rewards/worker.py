"""What a scoring process runs: load the reward once, then score what arrives until the driver goes.

Imports nothing heavy itself. Knows nothing of time limits: whoever waits for it kills it.
"""

import logging
import signal
from multiprocessing.connection import Connection

from hybridrl.config import ConfigError
from hybridrl.guard import end_with_parent
from hybridrl.rewards.load import load_reward
from hybridrl.rewards.score import score_answer


def main(descriptor: int, driver: int) -> None:
    """Receive a RewardConfig, send None or why it does not load; then, for lists of answers, a Score each."""
    end_with_parent(driver, signal.SIGKILL)
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
