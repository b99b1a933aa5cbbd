"""Group relative advantages: the other answers to the same prompt are the baseline (GRPO, Shao et al. 2024)."""

from torch import Tensor

from hybridrl.algorithms.estimators.groups import normalised, scores
from hybridrl.algorithms.estimators.written import spread
from hybridrl.algorithms.settings import AdvantageSettings
from hybridrl.batch import Batch


def grpo(batch: Batch, settings: AdvantageSettings) -> tuple[Tensor, Tensor]:
    """(score - group mean) / (group standard deviation + 1e-6), on every written token; returns are the same.

    Without `settings.normalise` nothing divides: Dr. GRPO (Liu et al. 2025).
    """
    advantages = spread(batch, normalised(scores(batch), batch.group, settings.normalise))
    return advantages, advantages
