"""Responses of imposed lengths, the same for every side of a comparison.

As `actor_rollout_ref.model.external_lib` of a run it makes vLLM generate the imposed number of tokens for each request;
the environment variable IMPOSED selects the lengths from RESPONSES.
"""

import os
import random
import sys
from dataclasses import dataclass
from functools import cached_property
from math import exp
from statistics import NormalDist
from typing import Any

SEED = 0  # trainer.seed of a run


@dataclass(frozen=True)
class Responses:
    """The responses of a step: lengths from a log-normal distribution, limited to `longest`."""

    prompts: int
    samples: int
    median: float
    spread: float
    longest: int

    @cached_property
    def lengths(self) -> list[int]:
        """Return one quantile per response, shuffled: the same in every step."""
        count, normal = self.prompts * self.samples, NormalDist()
        quantiles = [normal.inv_cdf((row + 0.5) / count) for row in range(count)]
        lengths = [min(max(round(self.median * exp(self.spread * x)), 4), self.longest) for x in quantiles]
        random.Random(0).shuffle(lengths)
        return lengths

    def length(self, request: Any) -> int:
        """Return the tokens of a request's response, also where its prompt has the number of its place in the run."""
        return self.lengths[request.prompt % self.prompts * self.samples + request.sample]


# 25m: heavy-tailed as in reasoning; quickstart, pretrained: similar to what their models generate; pictures: short;
# tail: long reasoning, in which few responses have most of the tokens; tiny: for --tiny, in any case.
RESPONSES = {
    "25m": Responses(16, 8, 90.0, 0.95, 512),
    "quickstart": Responses(32, 8, 28.0, 0.35, 64),
    "pretrained": Responses(16, 8, 5.0, 0.6, 16),
    "pictures": Responses(32, 8, 12.0, 0.5, 32),
    "tail": Responses(32, 8, 60.0, 1.2, 2048),
    "tiny": Responses(4, 2, 8.0, 0.5, 16),
}


def impose(engine: Any) -> None:
    plain, responses = engine.checked_params, RESPONSES[os.environ["IMPOSED"]]

    def imposed(request: Any, *limits: Any) -> Any:
        parameters = plain(request, *limits)
        parameters.max_tokens = responses.length(request) - request.begun
        return parameters

    engine.checked_params = imposed


# Training ranks import this file without vLLM, and an engine's further processes before that module is complete.
if hasattr(engine := sys.modules.get("hybridrl.core.rollout.vllm.engine"), "VllmEngine"):
    impose(engine)
