"""REINFORCE with a leave-one-out baseline (RLOO, Ahmadian et al. 2024)."""

from torch import Tensor

from hybridrl.algorithms.estimators.groups import centred, group_size, scores
from hybridrl.algorithms.estimators.written import spread
from hybridrl.algorithms.settings import AdvantageSettings
from hybridrl.batch import Batch


def rloo(batch: Batch, settings: AdvantageSettings) -> tuple[Tensor, Tensor]:
    """Score less the mean score of the group's other rows, on every written token; returns are the same."""
    members = group_size(batch.group)
    # Leaving a row out of its group's mean stretches its distance from that mean by n / (n - 1).
    stretch = members / (members - 1).clamp(min=1)
    advantages = spread(batch, centred(scores(batch), batch.group) * stretch)
    return advantages, advantages
