"""Tokens weighed, or left out, by how far the trainer's probabilities are from those of the engine that sampled them.

A log-ratio is the trainer's log-prob less the engine's, of a sampled token. Knows neither where the log-probs come from
nor which loss takes the weights.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hybridrl.algorithms.rollout_metrics import masked_fractions, of_written, weight_metrics
from hybridrl.algorithms.rollout_rejection import SAFE, Rejection, parse_rejections, parse_threshold, written_only
from hybridrl.batch import Batch

__all__ = ["Rejection", "RolloutCorrection", "parse_rejections", "parse_threshold"]


@dataclass(frozen=True)
class RolloutCorrection:
    """Importance weights, trainer over engine, and rejections. Both look at all tokens that the policy wrote.

    `level`: a token weighs its own ratio (token; Yao et al. 2025), the product of its row's ratios (sequence; Liu et
    al. 2025) or their geometric mean (geometric; the ratio of GSPO, Zheng et al. 2025; not in verl); None: no weights.
    Weights are truncated at `upper` (Ionides 2008) or, given `lower`, 0 out of the bounds (IcePop, Ling Team 2025).
    """

    level: str | None
    lower: float | None
    upper: float
    batch_normalise: bool
    rejections: tuple[Rejection, ...]

    def weights(self, log_ratio: Tensor, batch: Batch) -> Tensor | None:
        """The weight of each token, without gradient [response tokens]; 0 where the policy did not write it.

        `batch_normalise` works in `apply` alone: the rows here may be those of one pass, whose mean is not the batch's.
        """
        if self.level is None:
            return None
        ratios = self._ratios(log_ratio, batch)
        if self.lower is None:
            weights = ratios.clamp(max=self.upper)
        else:
            weights = torch.where((ratios >= self.lower) & (ratios <= self.upper), ratios, 0.0)
        return torch.where(batch.response_mask, weights, 0.0)

    def kept(self, log_ratio: Tensor, batch: Batch) -> Tensor:
        """Which tokens the policy wrote and every rejection lets pass [response tokens], bool."""
        kept = batch.response_mask
        for rejection in self.rejections:
            kept = kept & rejection.passes(rejection.divergence(log_ratio, batch))
        return kept

    def apply(self, batch: Batch) -> tuple[Batch, dict[str, float]]:
        """Fill in the weights and take what is rejected out of the response mask; metrics of both.

        With `batch_normalise` the weights are divided by their mean, over tokens or over rows as `level` says. Metrics
        are of the rows as they came; there are none where the policy wrote nothing.
        """
        log_ratio = batch.old_log_probs - batch.rollout_log_probs
        weights, kept = self.weights(log_ratio, batch), self.kept(log_ratio, batch)
        metrics: dict[str, float] = {}
        if batch.response_mask.any():
            metrics = self._metrics(log_ratio, weights, kept, batch)
            if weights is not None and self.batch_normalise:
                mean = float(of_written(weights, batch, self._by_row).mean())
                # Every weight may be 0.
                factor = mean if mean > 1e-8 else 1.0
                weights, metrics["rollout_corr/rollout_is_batch_norm_factor"] = weights / factor, factor
        return replace(batch, importance_weights=weights, response_mask=kept), metrics

    @property
    def by_token(self) -> bool:
        """Whether what becomes of a token follows from its own ratio alone."""
        return self.level in (None, "token") and not self.rejections

    @property
    def _by_row(self) -> bool:
        return self.level != "token"

    def _ratios(self, log_ratio: Tensor, batch: Batch) -> Tensor:
        """Trainer over engine, not yet bounded [response tokens]."""
        log_ratio = written_only(log_ratio, batch)
        if self._by_row:
            rows = batch.per_row(log_ratio) if self.level == "sequence" else batch.written_mean(log_ratio)
            log_ratio = rows[batch.response_row]
        return log_ratio.clamp(-SAFE, SAFE).exp()

    def _metrics(self, log_ratio: Tensor, weights: Tensor | None, kept: Tensor, batch: Batch) -> dict[str, float]:
        found = {}
        if weights is not None:
            ratios = self._ratios(log_ratio, batch)
            found["is"] = weight_metrics(ratios, weights, batch, self._by_row, self.lower, self.upper)
        if self.rejections:
            found |= {f"rs_{each.option}": each.metrics(log_ratio, batch) for each in self.rejections}
            found["rs"] = masked_fractions(kept, batch)
        return {f"rollout_corr/rollout_{of}_{name}": value for of in found for name, value in found[of].items()}
