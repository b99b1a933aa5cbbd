"""Answers of lengths laid down beforehand, the same for every side of a comparison.

As `actor_rollout_ref.model.external_lib` of a run it makes vLLM write as many tokens as are laid down for a draw, those
of the answers that the environment variable IMPOSED names.
"""

import os
import random
import sys
from dataclasses import dataclass
from functools import cached_property
from math import exp
from statistics import NormalDist
from typing import Any

from hybridrl.rollout.types import request_seed

SEED = 0  # trainer.seed of a run


@dataclass(frozen=True)
class Answers:
    """A step's answers: lengths of a log-normal distribution, what lies beyond the longest cut."""

    prompts: int
    samples: int
    median: float
    spread: float
    longest: int

    @cached_property
    def lengths(self) -> list[int]:
        """One quantile a row, mixed: the same rows in every step."""
        count, normal = self.prompts * self.samples, NormalDist()
        quantiles = [normal.inv_cdf((row + 0.5) / count) for row in range(count)]
        lengths = [min(max(round(self.median * exp(self.spread * x)), 4), self.longest) for x in quantiles]
        random.Random(0).shuffle(lengths)
        return lengths

    def by_seed(self) -> dict[int, int]:
        """Tokens of an answer by the seed of its draw, for the first 200 steps."""
        places = [(position, sample) for position in range(200 * self.prompts) for sample in range(self.samples)]
        seeds = (request_seed(SEED, position, sample) for position, sample in places)
        return {seed: self.lengths[place % len(self.lengths)] for place, seed in enumerate(seeds)}


# 25m: the heavy tail of answers that reason; quickstart: about what its model writes.
ANSWERS = {"25m": Answers(16, 8, 90.0, 0.95, 512), "quickstart": Answers(32, 8, 28.0, 0.35, 64)}


def impose(engine: Any) -> None:
    plain, lengths = engine.sampling_params, ANSWERS[os.environ["IMPOSED"]].by_seed()

    def imposed(request: Any, sampling: Any) -> Any:
        parameters = plain(request, sampling)
        parameters.max_tokens = lengths[request.seed]
        return parameters

    engine.sampling_params = imposed


# Imported by training ranks too, which know no vLLM, and by engines while they import that module.
if hasattr(sys.modules.get("hybridrl.rollout.vllm.engine"), "sampling_params"):
    impose(sys.modules["hybridrl.rollout.vllm.engine"])
