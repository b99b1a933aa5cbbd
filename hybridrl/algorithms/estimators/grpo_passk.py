"""Advantages for the best of k answers: only the best one of a group is reinforced (Tang et al. 2025)."""

import torch
from torch import Tensor

from hybridrl.algorithms.estimators.groups import EPSILON, deviation, scores
from hybridrl.algorithms.estimators.written import spread
from hybridrl.algorithms.settings import AdvantageSettings
from hybridrl.batch import Batch


def grpo_passk(batch: Batch, settings: AdvantageSettings) -> tuple[Tensor, Tensor]:
    """The best row of a group gets its lead over the second best, all others get 0, as do two that are best alike.

    With `settings.normalise` the lead is over the group's standard deviation + 1e-6. Returns are the same.
    """
    found = scores(batch)
    best_first = found.argsort(descending=True)
    by_group = best_first[batch.group[best_first].argsort(stable=True)]
    members = batch.group.unique(return_counts=True)[1]
    top = (members.cumsum(0) - members)[members > 1]
    best, second = by_group[top], by_group[top + 1]

    leads = torch.zeros_like(found).index_copy_(0, best, found[best] - found[second])
    if settings.normalise:
        leads = leads / (deviation(found, batch.group) + EPSILON)
    advantages = spread(batch, leads)
    return advantages, advantages
