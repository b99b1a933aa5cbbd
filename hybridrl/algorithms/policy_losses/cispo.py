"""CISPO: every token keeps its gradient, weighted by a clipped ratio."""

from torch import Tensor

from hybridrl.algorithms.policy_losses.ratio import log_ratio
from hybridrl.algorithms.settings import LossSettings
from hybridrl.batch import Batch


def cispo(log_probs: Tensor, batch: Batch, settings: LossSettings) -> tuple[Tensor, dict[str, Tensor]]:
    """CISPO (MiniMax-M1, 2025): -A clip(r, 1 - clip_low, 1 + clip_high) log p, the clipped ratio a constant.

    The paper leaves the lower side open; verl clips on both sides, and so does this. `clip_low=1` is the paper's.
    """
    change = log_ratio(log_probs.detach(), batch)
    ratio = change.exp()
    weight = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    return -batch.advantages * weight * log_probs, {"pg_clipfrac": (weight != ratio).float(), "ppo_kl": -change}
