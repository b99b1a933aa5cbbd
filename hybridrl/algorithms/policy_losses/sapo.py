"""SAPO: a soft gate in place of the clip."""

import torch
from torch import Tensor

from hybridrl.algorithms.policy_losses.ratio import log_ratio
from hybridrl.algorithms.settings import LossSettings
from hybridrl.batch import Batch


def sapo(log_probs: Tensor, batch: Batch, settings: LossSettings) -> tuple[Tensor, dict[str, Tensor]]:
    """Soft Adaptive Policy Optimization (Gao et al. 2025): -A (4 / tau) sigmoid(tau (r - 1)).

    tau is `tau_positive` where A > 0, else `tau_negative`; the higher, the sooner the gradient fades away from r = 1.
    """
    change = log_ratio(log_probs, batch)
    tau = torch.full_like(change, settings.tau_negative).masked_fill(batch.advantages > 0, settings.tau_positive)
    gate = 4 / tau * torch.sigmoid(tau * (change.exp() - 1))
    return -batch.advantages * gate, {"ppo_kl": -change.detach()}
