"""Answers of lengths laid down beforehand, the same for every side of a comparison, with the heavy tail of real ones.

As `actor_rollout_ref.model.external_lib` of a run it makes vLLM write as many tokens as are laid down for a draw.
"""

import random
import sys
from statistics import NormalDist
from typing import Any

from hybridrl.rollout.requests import request_seed

PROMPTS, SAMPLES, LONGEST = 16, 8, 512
SEED = 0  # trainer.seed of a run
MEDIAN, SPREAD = 90.0, 0.95  # of a log-normal distribution; what lies beyond LONGEST is cut


def _lengths() -> list[int]:
    """One quantile a row, mixed: the same rows in every step."""
    count = PROMPTS * SAMPLES
    normal = NormalDist()
    values = [MEDIAN * 2.718281828 ** (SPREAD * normal.inv_cdf((row + 0.5) / count)) for row in range(count)]
    lengths = [min(max(round(value), 4), LONGEST) for value in values]
    random.Random(0).shuffle(lengths)
    return lengths


LENGTHS = _lengths()


def length_of(position: int, sample: int) -> int:
    """Tokens of an answer, by its prompt's place in the run and its number in the group."""
    return LENGTHS[position % PROMPTS * SAMPLES + sample]


BY_SEED = {
    request_seed(SEED, position, sample): length_of(position, sample)
    for position in range(200 * PROMPTS)
    for sample in range(SAMPLES)
}


def impose(engine: Any) -> None:
    plain = engine.sampling_params

    def imposed(request: Any, sampling: Any) -> Any:
        parameters = plain(request, sampling)
        parameters.max_tokens = BY_SEED[request.seed]
        return parameters

    engine.sampling_params = imposed


# Imported by training ranks too, which know no vLLM, and by engines while they import that module.
if hasattr(sys.modules.get("hybridrl.rollout.vllm"), "sampling_params"):
    impose(sys.modules["hybridrl.rollout.vllm"])
