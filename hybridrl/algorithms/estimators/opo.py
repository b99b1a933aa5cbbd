"""On-policy RL with the optimal reward baseline, weighted by length (OPO, Hao et al. 2025)."""

from torch import Tensor

from hybridrl.algorithms.estimators.groups import group_sum, scores
from hybridrl.algorithms.estimators.written import spread, written_tokens
from hybridrl.algorithms.settings import AdvantageSettings
from hybridrl.batch import Batch


def opo(batch: Batch, settings: AdvantageSettings) -> tuple[Tensor, Tensor]:
    """Score less the group's mean score, each row weighted by its written tokens; returns are the same."""
    found, lengths = scores(batch), written_tokens(batch)[1].double()
    baselines = group_sum(lengths * found, batch.group) / group_sum(lengths, batch.group).clamp(min=1)
    advantages = spread(batch, found - baselines)
    return advantages, advantages
