"""Several rewards, each normalised in its group before they are added (GDPO, Liu et al. 2026)."""

from torch import Tensor

from hybridrl.algorithms.estimators.groups import normalised
from hybridrl.algorithms.estimators.written import placed, spread, whitened
from hybridrl.algorithms.settings import AdvantageSettings
from hybridrl.batch import Batch


def gdpo(batch: Batch, settings: AdvantageSettings) -> tuple[Tensor, Tensor]:
    """Each part of the reward as GRPO would have it, weighted and added, then whitened; returns are the same.

    Reads `reward_parts` [B, K] alone: what `token_rewards` hold, a KL penalty for one, is not seen. Whitening is over
    all written tokens of the step. `settings.part_weights` are K or none.
    """
    parts = batch.reward_parts.double().unbind(1)
    weights = settings.part_weights or (1.0,) * len(parts)
    weighted = (
        weight * normalised(part, batch.group, settings.normalise) for weight, part in zip(weights, parts, strict=True)
    )
    combined = spread(batch, sum(weighted))
    advantages = placed(batch, whitened(combined[batch.response_mask]))
    return advantages, advantages
