"""The numbers that estimators and losses take, as plain values."""

from dataclasses import dataclass


@dataclass(frozen=True)
class AdvantageSettings:
    """What an advantage estimator takes beside the rows."""

    gamma: float = 1.0  # discount of a later reward
    lam: float = 1.0  # GAE's lambda
    normalise: bool = True  # divide by the group's standard deviation, where the estimator knows groups
    part_weights: tuple[float, ...] = ()  # of the parts of the reward (GDPO); empty: all alike


@dataclass(frozen=True)
class LossSettings:
    """What a policy loss takes beside log-probs and rows; each loss reads its own few."""

    clip_low: float = 0.2  # the window of the probability ratio is [1 - clip_low, 1 + clip_high]
    clip_high: float = 0.2
    clip_dual: float = 3.0  # bound of the dual clip, or of the truncated ratio
    tau_positive: float = 1.0  # SAPO's temperatures
    tau_negative: float = 1.05
    clip_cov_share: float = 0.0002  # Clip-Cov: share of tokens without gradient,
    clip_cov_least: float = 1.0  # chosen among those whose covariance lies between these
    clip_cov_most: float = 5.0
    kl_cov_share: float = 0.0002  # KL-Cov: share of tokens with a penalty,
    kl_cov_weight: float = 1.0  # and its weight
    dro_weight: float = 1.0  # DRO's, of the squared log-ratio
