"""Log-likelihoods, weighted or plain: without a ratio, nothing is clipped."""

from torch import Tensor

from hybridrl.algorithms.settings import LossSettings
from hybridrl.batch import Batch


def gpg(log_probs: Tensor, batch: Batch, settings: LossSettings) -> tuple[Tensor, dict[str, Tensor]]:
    """Group Policy Gradient (Chu et al. 2025): -A log p. Needs no old log-probs."""
    return -batch.advantages * log_probs, {}


def reinforce(log_probs: Tensor, batch: Batch, settings: LossSettings) -> tuple[Tensor, dict[str, Tensor]]:
    """REINFORCE (Williams 1992): -A log p, as in verl's bypass mode; off policy, importance weights correct it."""
    return -batch.advantages * log_probs, {"ppo_kl": batch.old_log_probs - log_probs.detach()}


def likelihood(log_probs: Tensor, batch: Batch, settings: LossSettings) -> tuple[Tensor, dict[str, Tensor]]:
    """Negative log-likelihood: supervised fine-tuning as the simplest policy loss."""
    return -log_probs, {}
