"""Policy losses, one value a token. An own one is any function of the same form, named path/to/file.py:function.

They know neither how tokens are averaged nor importance weights: the caller multiplies by both and sums.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from hybridrl.algorithms.policy_losses.cispo import cispo
from hybridrl.algorithms.policy_losses.clip_cov import choose_clipped, clip_cov
from hybridrl.algorithms.policy_losses.dppo import dppo_kl, dppo_tv
from hybridrl.algorithms.policy_losses.dro import dro
from hybridrl.algorithms.policy_losses.geo_mean import geo_mean
from hybridrl.algorithms.policy_losses.gspo import gspo
from hybridrl.algorithms.policy_losses.kl_cov import choose_penalised, kl_cov
from hybridrl.algorithms.policy_losses.log_likelihood import gpg, likelihood, reinforce
from hybridrl.algorithms.policy_losses.sapo import sapo
from hybridrl.algorithms.policy_losses.vanilla import vanilla
from hybridrl.algorithms.settings import LossSettings
from hybridrl.batch import Batch

# (log-probs of the response tokens, their rows, each of them whole, settings) -> loss a token, and statistics a token
# without gradient, to be averaged over written tokens. A, p and r in the docstrings are a token's advantage, its
# probability and the ratio of that over the old one.
PolicyLoss = Callable[[Tensor, Batch, LossSettings], tuple[Tensor, dict[str, Tensor]]]

# (all rows of a mini-batch with old log-probs and advantages, settings, generator) -> the batch's `chosen`.
Chooser = Callable[[Batch, LossSettings, torch.Generator], Tensor]

POLICY_LOSSES: dict[str, PolicyLoss] = {
    "vanilla": vanilla,
    "gspo": gspo,
    "cispo": cispo,
    "sapo": sapo,
    "geo_mean": geo_mean,
    "gmpo": geo_mean,
    "gpg": gpg,
    "clip_cov": clip_cov,
    "kl_cov": kl_cov,
    "dppo_tv": dppo_tv,
    "dppo_kl": dppo_kl,
    "dro": dro,
    "reinforce": reinforce,
    "likelihood": likelihood,
}

# Losses that are averaged in one way whatever the configuration says, as in verl.
AGGREGATIONS: dict[str, str] = dict.fromkeys(("gspo", "sapo", "geo_mean", "gmpo"), "seq-mean-token-mean")

# Losses in which a token's share follows from its own log-prob alone, not from those of others in its row: their
# gradient is formed with the log-probs. A name too many costs time and no more, as the gradient is compared.
BY_TOKEN = POLICY_LOSSES.keys() - {"gspo", "geo_mean", "gmpo"}

# Losses that treat some tokens apart, and who chooses them, once for a mini-batch.
CHOOSERS: dict[str, Chooser] = {"clip_cov": choose_clipped, "kl_cov": choose_penalised}

__all__ = ["AGGREGATIONS", "BY_TOKEN", "CHOOSERS", "POLICY_LOSSES", "Chooser", "PolicyLoss"]
