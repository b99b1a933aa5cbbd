"""Group policy gradient: no deviation, but a scale for rows without reward (GPG, Chu et al. 2025)."""

from torch import Tensor

from hybridrl.algorithms.estimators.groups import centred, scores
from hybridrl.algorithms.estimators.written import spread
from hybridrl.algorithms.settings import AdvantageSettings
from hybridrl.batch import Batch


def gpg(batch: Batch, settings: AdvantageSettings) -> tuple[Tensor, Tensor]:
    """Score less the group's mean, times alpha, on every written token; returns are the same.

    As in verl alpha is the step's rows over its rows with a score other than 0; in the paper it counts the rows of
    groups whose scores differ.
    """
    found = scores(batch)
    alpha = len(batch) / found.count_nonzero().clamp(min=1)
    advantages = spread(batch, alpha * centred(found, batch.group))
    return advantages, advantages
