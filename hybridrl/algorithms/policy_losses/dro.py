"""DRO: a quadratic penalty on the log-ratio in place of clipping."""

from torch import Tensor

from hybridrl.algorithms.settings import LossSettings
from hybridrl.batch import Batch


def dro(log_probs: Tensor, batch: Batch, settings: LossSettings) -> tuple[Tensor, dict[str, Tensor]]:
    """Direct Reward Optimisation (Richemond et al. 2024): -A log p + dro_weight / 2 (log r)^2, as in verl.

    In the paper the advantage is a single response's reward less a learnt value; here it is the estimator's.
    """
    change = log_probs - batch.old_log_probs
    return -batch.advantages * log_probs + 0.5 * settings.dro_weight * change.square(), {"ppo_kl": -change.detach()}
