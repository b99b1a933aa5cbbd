"""Losses of the log-likelihood itself: no ratio, so nothing is clipped."""

from torch import Tensor

from hybridrl.batch import Batch


def gpg(log_probs: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """Group Policy Gradient (Chu et al. 2025): -A log p. Needs no old log-probs."""
    return -batch.advantages * log_probs, {}


def reinforce(log_probs: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """REINFORCE (Williams 1992): -A log p, as in verl's bypass mode; importance weights correct it off policy."""
    return -batch.advantages * log_probs, {"ppo_kl": batch.old_log_probs - log_probs.detach()}


def dro(log_probs: Tensor, batch: Batch, *, dro_beta: float) -> tuple[Tensor, dict[str, Tensor]]:
    """Direct Reward Optimization (Richemond et al. 2024): -A log p + dro_beta / 2 (log r)^2, as in verl.

    In the paper the advantage is a single response's reward less a learned value; here it is the estimator's.
    """
    change = log_probs - batch.old_log_probs
    return -batch.advantages * log_probs + 0.5 * dro_beta * change.square(), {"ppo_kl": -change.detach()}


def likelihood(log_probs: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """Negative log-likelihood: supervised fine-tuning as the simplest policy loss."""
    return -log_probs, {}
