"""Questions of GSM8K over several turns: SkyRL's environment, and verl's tool that checks answers."""

from collections.abc import Mapping
from typing import Any

from hybridrl.agents.environments.environment import Environment, Response, Step
from hybridrl.agents.environments.rows import field, ground_truth
from hybridrl.rewards.scorers.short_answers import score_gsm8k

FORMAT_SCORE = 0.2  # of all turns together
TRY_AGAIN = "Think step by step, and end with a tentative answer in exactly this format: '#### ANSWER'."
LAST_TURN = "Now give only the final number, in exactly this format: '#### ANSWER'."


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
        self._most = int(field(row, "max_turns", 5, config))

    async def step(self, response: Response) -> Step:
        reward = score_gsm8k(response.text, self._truth, format_score=FORMAT_SCORE / self._most)
        left = self._most - response.turn - 1
        if reward == 1.0 or left <= 0:
            return Step(reward=reward, done=True)
        text = self.config.get("try_again", TRY_AGAIN) if left > 1 else self.config.get("last_turn", LAST_TURN)
        return Step([{"role": "user", "content": text}], reward=reward)
