"""GSPO: the ratio of whole sequences."""

from torch import Tensor

from hybridrl.algorithms.policy_losses.ratio import clipped_loss
from hybridrl.algorithms.settings import LossSettings
from hybridrl.batch import Batch


def gspo(log_probs: Tensor, batch: Batch, settings: LossSettings) -> tuple[Tensor, dict[str, Tensor]]:
    """Group Sequence Policy Optimization (Zheng et al. 2025) in its token form, GSPO-token, as in verl.

    PPO's clipped loss of the row's ratio s = exp(mean log ratio of its written tokens): each token has the value of s
    and lets the gradient through its own log-prob alone. With one advantage a row, the mean over a row's tokens is
    GSPO's sequence loss, in value and in gradient. log s is at most 10.
    """
    change = log_probs - batch.old_log_probs
    sequence = batch.written_mean(change.detach())[batch.response_row]
    ratio = (sequence + log_probs - log_probs.detach()).clamp(max=10).exp()
    loss, clipped = clipped_loss(ratio, batch, settings)
    return loss, {"pg_clipfrac": clipped.float(), "ppo_kl": -change.detach()}
