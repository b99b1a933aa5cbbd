"""Tasks of several turns: text games whose best play is known, so that a learning curve can be compared with it, and
SkyRL's environment of GSM8K's questions."""

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

from hybridrl.agents.environments import Environment, Message, Response, Step, column, ground_truth, needed
from hybridrl.rewards.scorers.short_answers import score_gsm8k

REWARD, COST = 1.0, 0.02
TEXTS = {"prompt": "?", "low": "low", "high": "high", "invalid": "bad", "question": "guess"}
NUMBER = re.compile(r"\s*(\d+)\s*")
WORD = re.compile(r"\s*([a-z]{5})\s*", re.IGNORECASE)
FORMAT_SCORE = 0.2  # for all turns together
TRY_AGAIN = "Think step by step, and end with a tentative answer in exactly this format: '#### ANSWER'."
LAST_TURN = "Now give only the final number, in exactly this format: '#### ANSWER'."


class Game(Environment):
    """A game whose every move costs a little unless it wins.

    The configuration may have `reward` of the winning move (1), `cost` of any other one (0.02), `max_turns`, and the
    `texts` that the policy reads, by name. With `texts: {prompt: ...}` that replaces the messages of the row.
    """

    turns = 10

    def __init__(self, config: Mapping[str, Any], row: Mapping[str, Any]) -> None:
        super().__init__(config, row)
        self.texts = {**TEXTS, **config.get("texts", {})}
        self._reward, self._cost = float(config.get("reward", REWARD)), float(config.get("cost", COST))
        self._most = int(column(row, "max_turns", self.turns, config))
        self._moves, self._won = 0, False

    def reset(self, messages: list[Message]) -> list[Message]:
        replaced = "prompt" in self.config.get("texts", {})
        return [{"role": "user", "content": self.texts["prompt"]}] if replaced or not messages else messages

    async def step(self, response: Response) -> Step:
        self._moves += 1
        hint = self.hint(response.text)
        self._won = hint is None
        messages = [] if hint is None else [{"role": "user", "content": hint}]
        done = self._won or self._moves >= self._most
        return Step([] if done else messages, self._reward if self._won else -self._cost, done)

    def close(self) -> Mapping[str, float]:
        return {"won": float(self._won), "moves": float(self._moves)}

    def hint(self, move: str) -> str | None:
        """Return what the policy reads after a move; None if the move wins."""
        raise NotImplementedError


class GuessNumber(Game):
    """The policy finds the row's `target` between `low` and `high`; it reads whether its guess was too low or high."""

    def __init__(self, config: Mapping[str, Any], row: Mapping[str, Any]) -> None:
        super().__init__(config, row)
        self._target = int(needed(row, "target"))
        low, high = int(needed(row, "low")), int(needed(row, "high"))
        if not low <= self._target <= high:
            raise ValueError(f"target={self._target} is not between low={low} and high={high}")

    def hint(self, move: str) -> str | None:
        guess = NUMBER.fullmatch(move)
        if guess is None or len(guess[1]) > 18:
            return self.texts["invalid"]
        if int(guess[1]) == self._target:
            return None
        return self.texts["low"] if int(guess[1]) < self._target else self.texts["high"]


class Wordle(Game):
    """The policy finds the row's `target`, a word of five letters, in six moves.

    It reads for each letter of its guess G at its place, Y elsewhere in the word, - not in it.
    """

    turns = 6

    def __init__(self, config: Mapping[str, Any], row: Mapping[str, Any]) -> None:
        super().__init__(config, row)
        self._target = str(needed(row, "target")).lower()
        if not WORD.fullmatch(self._target):
            raise ValueError(f"target={self._target} is not a word of five letters")

    def hint(self, move: str) -> str | None:
        guess = WORD.fullmatch(move)
        if guess is None:
            return self.texts["invalid"]
        return None if guess[1].lower() == self._target else marks(guess[1].lower(), self._target)


def marks(guess: str, target: str) -> str:
    """The marks of a guess; a letter is marked Y as often as it is left in the target."""
    left = Counter(expected for letter, expected in zip(guess, target, strict=True) if letter != expected)
    result = ""
    for letter, expected in zip(guess, target, strict=True):
        if letter == expected:
            result += "G"
            continue
        result += "Y" if left[letter] else "-"
        left[letter] -= left[letter] > 0
    return result


def best_guessing(
    low: int, high: int, reward: float = REWARD, cost: float = COST, max_turns: int = Game.turns
) -> float:
    """The expected episode reward of binary search, which is the best play, over uniform targets of guess_number."""
    left, total, numbers = high - low + 1, 0.0, high - low + 1
    for move in range(max_turns):  # at most 2**move numbers are found by the next move
        hits = min(2**move, left)
        total += hits * (reward - cost * move)
        left -= hits
    return (total - left * cost * max_turns) / numbers


class Gsm8kMultiTurn(Environment):
    """The policy answers until it is right, at most `max_turns` (5) of the row or of the configuration.

    A turn's reward is 1 for the right number after ####, 0.2 / max_turns for another one, else 0. The configuration may
    have the texts `try_again` and `last_turn`.
    """

    def __init__(self, config: Mapping[str, Any], row: Mapping[str, Any]) -> None:
        super().__init__(config, row)
        self._truth = ground_truth(row)
        if self._truth is None:
            raise ValueError("the row has no reward_spec.ground_truth")
        self._most = int(column(row, "max_turns", 5, config))

    async def step(self, response: Response) -> Step:
        reward = score_gsm8k(response.text, self._truth, format_score=FORMAT_SCORE / self._most)
        left = self._most - response.turn - 1
        if reward == 1.0 or left <= 0:
            return Step(reward=reward, done=True)
        text = self.config.get("try_again", TRY_AGAIN) if left > 1 else self.config.get("last_turn", LAST_TURN)
        return Step([{"role": "user", "content": text}], reward=reward)
