"""Policy losses: from the log-probs of sampled tokens to a loss per token.

A policy loss gets the log-probs of the response tokens and their complete rows. It returns the loss per token, and
statistics per token without gradient, which are averaged over the tokens that the policy wrote. Aggregation and
importance weights are not its part: the caller multiplies by both and sums. In the docstrings A, p and r are a token's
advantage, its probability, and the ratio of its probability to the old one.
"""

import torch
from torch import Tensor

from hybridrl.core.batch import Batch
from hybridrl.required import required

Loss = tuple[Tensor, dict[str, Tensor]]  # per token [response tokens], and statistics per token
TINY = 1e-8


# -- the ratio to the old probability, with a window around 1 or a smooth gate -----------------------------------------


def log_ratio(log_probs: Tensor, batch: Batch) -> Tensor:
    """Logarithm of the ratio per token, clamped to [-20, 20] so that the ratio stays finite."""
    return (log_probs - required(batch.old_log_probs)).clamp(-20, 20)


def clipped_loss(ratio: Tensor, batch: Batch, clip_ratio_low: float, clip_ratio_high: float) -> tuple[Tensor, Tensor]:
    """The larger of the losses with the ratio unchanged and clipped to its window; where clipping made it larger. A
    ratio that is clipped is constant."""
    factor = -required(batch.advantages)
    unclipped = factor * ratio
    clipped = factor * ratio.detach().clamp(1 - clip_ratio_low, 1 + clip_ratio_high)
    larger = clipped > unclipped
    return torch.where(larger, clipped, unclipped), larger


def vanilla(
    log_probs: Tensor, batch: Batch, *, clip_ratio_low: float, clip_ratio_high: float, clip_ratio_c: float
) -> Loss:
    """PPO's clipped loss (Schulman et al. 2017) with the dual clip for negative advantages (Ye et al. 2020).

    max(-A r, -A clip(r, 1 - clip_ratio_low, 1 + clip_ratio_high)), at most -A clip_ratio_c if A < 0.
    """
    change = log_ratio(log_probs, batch)
    pessimistic, clipped = clipped_loss(change.exp(), batch, clip_ratio_low, clip_ratio_high)
    advantages = required(batch.advantages)
    bound = -advantages * clip_ratio_c
    bounded = (advantages < 0) & (pessimistic > bound)
    return torch.where(bounded, bound, pessimistic), {
        "pg_clipfrac": clipped.float(),
        "pg_clipfrac_lower": bounded.float(),
        "ppo_kl": -change.detach(),
    }


def gspo(log_probs: Tensor, batch: Batch, *, clip_ratio_low: float, clip_ratio_high: float) -> Loss:
    """Group Sequence Policy Optimization (Zheng et al. 2025) in its token form, GSPO-token, as in verl.

    PPO's clipped loss of the row's ratio s = exp(mean log ratio of its written tokens): each token has the value of s
    and passes the gradient through its own log-prob only. With one advantage per row, the mean over a row's tokens is
    GSPO's sequence loss, in value and in gradient. log s is at most 10.
    """
    change = log_probs - required(batch.old_log_probs)
    sequence = batch.trained_mean(change.detach())[batch.response_row]
    ratio = (sequence + log_probs - log_probs.detach()).clamp(max=10).exp()
    loss, clipped = clipped_loss(ratio, batch, clip_ratio_low, clip_ratio_high)
    return loss, {"pg_clipfrac": clipped.float(), "ppo_kl": -change.detach()}


def geo_mean(log_probs: Tensor, batch: Batch, *, clip_ratio_low: float, clip_ratio_high: float) -> Loss:
    """Geometric-Mean Policy Optimization (GMPO, Zhao et al. 2025): -A exp(mean of the row's clipped log ratios).

    A log ratio is clipped at clip_ratio_high if A > 0 and at -clip_ratio_low if A < 0 (the window is one of logarithms;
    the paper's is 0.4 on both sides), and counts as 0 if A = 0. A is the mean of the row's advantages: the formula is
    the paper's if a row has one. Every token has its row's loss, so averaged over tokens, then rows, it is the mean
    over rows. As in verl `pg_clipfrac` is the share outside the window, on either side, if A > 0, `pg_clipfrac_lower`
    if A < 0.

    It differs from verl in two ways: importance weights multiply per token, so that a row counts by their mean, not by
    their geometric mean; and a row in which the policy wrote nothing does not count as a row.
    """
    change = log_probs - required(batch.old_log_probs)
    low, high, advantages = -clip_ratio_low, clip_ratio_high, required(batch.advantages)
    clipped = torch.where(advantages > 0, change.clamp(max=high), change.clamp(min=low))
    ratio = batch.trained_mean(clipped * (advantages != 0)).exp()
    loss = -batch.trained_mean(advantages) * ratio
    change = change.detach()
    outside = (change < low) | (change > high)
    return loss[batch.response_row], {
        "pg_clipfrac": (outside & (advantages > 0)).float(),
        "pg_clipfrac_lower": (outside & (advantages < 0)).float(),
        "ppo_kl": -change,
    }


def cispo(log_probs: Tensor, batch: Batch, *, clip_ratio_low: float, clip_ratio_high: float) -> Loss:
    """CISPO (MiniMax-M1, 2025): -A clip(r, 1 - clip_ratio_low, 1 + clip_ratio_high) log p, the clipped ratio constant.
    Every token keeps its gradient. The paper leaves the lower side open; verl clips on both sides, and so does this.
    `clip_ratio_low=1` is the paper's."""
    change = log_ratio(log_probs.detach(), batch)
    ratio = change.exp()
    weight = ratio.clamp(1 - clip_ratio_low, 1 + clip_ratio_high)
    return -required(batch.advantages) * weight * log_probs, {
        "pg_clipfrac": (weight != ratio).float(),
        "ppo_kl": -change,
    }


def sapo(log_probs: Tensor, batch: Batch, *, tau_pos: float, tau_neg: float) -> Loss:
    """Soft Adaptive Policy Optimization (Gao et al. 2025): -A (4 / tau) sigmoid(tau (r - 1)).

    tau is `tau_pos` if A > 0, else `tau_neg`; the higher tau is, the faster the gradient decays away from r = 1.
    """
    change = log_ratio(log_probs, batch)
    tau = torch.full_like(change, tau_neg).masked_fill(required(batch.advantages) > 0, tau_pos)
    gate = 4 / tau * torch.sigmoid(tau * (change.exp() - 1))
    return -required(batch.advantages) * gate, {"ppo_kl": -change.detach()}


# -- the log-likelihood itself: no ratio, so nothing is clipped --------------------------------------------------------


def group_policy_gradient(log_probs: Tensor, batch: Batch) -> Loss:
    """Group Policy Gradient (Chu et al. 2025): -A log p. Needs no old log-probs."""
    return -required(batch.advantages) * log_probs, {}


def reinforce(log_probs: Tensor, batch: Batch) -> Loss:
    """REINFORCE (Williams 1992): -A log p, as in verl's bypass mode; importance weights correct it off policy."""
    return -required(batch.advantages) * log_probs, {"ppo_kl": required(batch.old_log_probs) - log_probs.detach()}


def dro(log_probs: Tensor, batch: Batch, *, dro_beta: float) -> Loss:
    """Direct Reward Optimization (Richemond et al. 2024): -A log p + dro_beta / 2 (log r)^2, as in verl.

    In the paper the advantage is a single response's reward less a learned value; here it is the estimator's.
    """
    change = log_probs - required(batch.old_log_probs)
    return -required(batch.advantages) * log_probs + 0.5 * dro_beta * change.square(), {"ppo_kl": -change.detach()}


def likelihood(log_probs: Tensor, batch: Batch) -> Loss:
    """Negative log-likelihood: supervised fine-tuning as the simplest policy loss."""
    return -log_probs, {}


# -- a trust region of probabilities rather than of their ratio: Divergence PPO (Qi et al. 2026) -----------------------


def dppo_tv(
    log_probs: Tensor, batch: Batch, *, clip_ratio_low: float, clip_ratio_high: float, clip_ratio_c: float
) -> Loss:
    """Divergence PPO with the binary total variation |p - p_old|.

    A token whose probability moved along its advantage by more than `clip_ratio_high` (A > 0) or `clip_ratio_low` is
    masked. The others have the loss -A min(r, clip_ratio_c) log p, the ratio constant; `clip_ratio_c` is meant to be
    large (verl's default of 3 is small).
    """
    change = log_probs.detach().exp() - required(batch.old_log_probs).exp()
    unmasked = torch.where(required(batch.advantages) > 0, change <= clip_ratio_high, change >= -clip_ratio_low)
    return _masked_loss(log_probs, batch, clip_ratio_c, unmasked)


def dppo_kl(
    log_probs: Tensor, batch: Batch, *, clip_ratio_low: float, clip_ratio_high: float, clip_ratio_c: float
) -> Loss:
    """`dppo_tv` with the binary divergence KL(p_old || p) of the token against all others together."""
    log_new, log_old = log_probs.detach(), required(batch.old_log_probs)
    new, old = log_new.exp(), log_old.exp()
    # Rounding may lift a probability above 1.
    others_old, others_new = (1 - old).clamp(min=0), (1 - new).clamp(min=0)
    divergence = old * (log_old - log_new) + others_old * ((others_old + TINY) / (others_new + TINY)).log()
    rises_within = (divergence <= clip_ratio_high) | (new <= old)
    falls_within = (divergence <= clip_ratio_low) | (new >= old)
    unmasked = torch.where(required(batch.advantages) > 0, rises_within, falls_within)
    return _masked_loss(log_probs, batch, clip_ratio_c, unmasked)


def _masked_loss(log_probs: Tensor, batch: Batch, clip_ratio_c: float, unmasked: Tensor) -> Loss:
    change = log_ratio(log_probs.detach(), batch)
    ratio = change.exp()
    loss = -required(batch.advantages) * ratio.clamp(max=clip_ratio_c) * log_probs * unmasked
    return loss, {
        "pg_clipfrac": (~unmasked).float(),
        "pg_clipfrac_lower": (unmasked & (ratio > clip_ratio_c)).float(),
        "ppo_kl": -change,
    }


# -- separate treatment for the tokens that lower the entropy most: Clip-Cov and KL-Cov (Cui et al. 2025) --------------

# A token lowers the entropy by its part of the covariance of log-prob and advantage. The tokens are selected once per
# mini-batch, before its first gradient: verl selects in each micro-batch, from the current log-probs (and Clip-Cov
# among tokens that PPO has not clipped), but the gradient must not depend on how a mini-batch is cut.


def clip_cov(log_probs: Tensor, batch: Batch, *, clip_ratio_low: float, clip_ratio_high: float) -> Loss:
    """Clip-Cov: PPO's clipped loss, without a dual clip, and 0 for the selected tokens. As in verl `pg_clipfrac` is the
    share of the selected tokens."""
    change = log_probs - required(batch.old_log_probs)
    loss, _ = clipped_loss(change.exp(), batch, clip_ratio_low, clip_ratio_high)
    chosen = required(batch.chosen)
    return torch.where(chosen, 0.0, loss), {"pg_clipfrac": chosen.float(), "ppo_kl": -change.detach()}


def kl_cov(log_probs: Tensor, batch: Batch, *, ppo_kl_coef: float) -> Loss:
    """KL-Cov: -A r, plus `ppo_kl_coef` |log r| for the selected tokens. Nothing is clipped.

    As in verl `ppo_kl` is |log r|.
    """
    change = log_probs - required(batch.old_log_probs)
    penalty = ppo_kl_coef * change.abs()
    loss = -required(batch.advantages) * change.exp() + torch.where(required(batch.chosen), penalty, 0.0)
    return loss, {"ppo_kl": change.detach().abs()}


def select_clipped(
    batch: Batch, generator: torch.Generator, *, clip_cov_ratio: float, clip_cov_lb: float, clip_cov_ub: float
) -> Tensor:
    """Sample the share `clip_cov_ratio` of a mini-batch's written tokens from those with a covariance in the bounds."""
    covariances = covariance(batch)
    candidates = ((covariances > clip_cov_lb) & (covariances < clip_cov_ub)).nonzero().squeeze(1)
    drawn = torch.randperm(len(candidates), generator=generator)[: share_of_written(batch, clip_cov_ratio)]
    return torch.zeros_like(required(batch.response_mask)).index_fill_(0, candidates[drawn], True)


def select_penalized(batch: Batch, generator: torch.Generator, *, kl_cov_ratio: float) -> Tensor:
    """The share `kl_cov_ratio` of a mini-batch's written tokens that have the highest covariance."""
    top = covariance(batch).topk(share_of_written(batch, kl_cov_ratio)).indices
    return torch.zeros_like(required(batch.response_mask)).index_fill_(0, top, True)


def covariance(batch: Batch) -> Tensor:
    """(A - mean A)(log p - mean log p) per token, means over all written tokens; -inf where the policy did not write.
    The log-probs are those before the step's updates."""
    written, of_tokens = required(batch.response_mask), (required(batch.advantages), required(batch.old_log_probs))
    advantages, log_probs = (values - values[written].mean() for values in of_tokens)
    return torch.where(written, advantages * log_probs, -torch.inf)


def share_of_written(batch: Batch, share: float) -> int:
    """Number of tokens in a share of the written ones: rounded down, but at least one if any are written."""
    written = int(required(batch.response_mask).sum())
    return min(max(int(share * written), 1), written)
