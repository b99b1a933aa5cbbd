"""Weights and rejections of tokens, from the difference between training and rollout probabilities.

A log-ratio is the training log-prob less the rollout log-prob of a sampled token. This module depends neither on the
source of the log-probs nor on the loss that uses the weights. Options, bounds and metrics are verl's (August 2026),
except that metrics ignore rows without written tokens.
"""

import math
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from hybridrl.config.schema import AlgorithmConfig
from hybridrl.core.batch import Batch
from hybridrl.required import required

SAFE = 20.0  # log-ratios are clamped to [-20, 20] before they are exponentiated


@dataclass(frozen=True)
class Rejection:
    """Tokens (token_*) or complete rows (seq_*) are rejected if an estimate of the divergence is out of bounds. k1, k2
    and k3 estimate KL(engine || trainer) (Schulman, Approximating KL divergence, 2020). For k1 the bounds apply to
    exp(k1), as in verl: the engine's probability over the trainer's. k2 and k3 have no `lower`."""

    option: str
    lower: float | None
    upper: float

    @property
    def bounds(self) -> tuple[float, float]:
        """The least and the largest accepted estimate."""
        return (-math.inf, self.upper) if self.lower is None else (math.log(self.lower), math.log(self.upper))

    def divergence(self, log_ratio: Tensor, batch: Batch) -> Tensor:
        """The estimate [response tokens]; for rows, each token has the estimate of its row."""
        pool, form = self.option.rsplit("_", 1)
        log_ratio = written_only(log_ratio, batch).clamp(-SAFE, SAFE)
        match form:
            case "k1":
                tokens = -log_ratio
            case "k2":
                tokens = 0.5 * log_ratio.square()
            case _:
                tokens = log_ratio.expm1() - log_ratio
        match pool:
            case "token":
                return tokens
            case "seq_sum":
                rows = batch.per_row(tokens)
            case "seq_mean":
                rows = batch.trained_mean(tokens)
            case _:
                rows = tokens.new_zeros(len(batch)).scatter_reduce(0, batch.response_row, tokens, "amax")
        return rows[batch.response_row]

    def passes(self, divergence: Tensor) -> Tensor:
        """Return whether estimates are within the bounds; NaN never is."""
        low, high = self.bounds
        return (divergence >= low) & (divergence <= high)

    def metrics(self, log_ratio: Tensor, batch: Batch) -> dict[str, float]:
        """Metrics of the estimates, and of the tokens that this rejection alone would reject."""
        divergence, (low, high) = self.divergence(log_ratio, batch), self.bounds
        tokens, rows = of_written(divergence, batch, by_row=False), of_written(divergence, batch, by_row=True)
        estimates = tokens if self.option.startswith("token") else rows
        metrics = _summary(tokens, estimates, tokens.clamp(low, high), rows, ideal=0.0)
        metrics |= _fractions("fraction", estimates, low, high) | _fractions("seq_fraction", rows, low, high)
        if math.isinf(low):
            del metrics["seq_fraction_low"]
        return metrics | masked_fractions(self.passes(divergence), batch)


@dataclass(frozen=True)
class RolloutCorrection:
    """Importance weights, trainer over engine, and rejections. Both are computed from all tokens that the policy wrote.

    `level`: a token's weight is its own ratio (token; Yao et al. 2025), the product of its response's ratios (sequence;
    Liu et al. 2025) or their geometric mean (geometric; the ratio of GSPO, Zheng et al. 2025; not in verl); None: no
    weights.
    Weights are truncated at `upper` (Ionides 2008) or, given `lower`, 0 outside the bounds (IcePop, Ling Team 2025).
    """

    level: str | None
    lower: float | None
    upper: float
    batch_normalize: bool
    rejections: tuple[Rejection, ...]

    @classmethod
    def of(cls, algorithm: AlgorithmConfig) -> Self | None:
        """Return the correction of a configuration; None if it has neither weights nor rejections."""
        section = algorithm.rollout_correction
        if section.rollout_is is None and not section.rollout_rs:
            return None
        rejections = tuple(Rejection(*values) for values in section.rejections)
        return cls(section.rollout_is, *section.weight_bounds, section.rollout_is_batch_normalize, rejections)

    def weights(self, log_ratio: Tensor, batch: Batch) -> Tensor | None:
        """The weight of each token, without gradient [response tokens]; 0 where the policy did not write it.
        `batch_normalize` applies in `apply` only: here the rows may be a micro-batch, whose mean is not the batch's."""
        if self.level is None:
            return None
        ratios = self._ratios(log_ratio, batch)
        if self.lower is None:
            weights = ratios.clamp(max=self.upper)
        else:
            weights = torch.where((ratios >= self.lower) & (ratios <= self.upper), ratios, 0.0)
        return torch.where(required(batch.response_mask), weights, 0.0)

    def accepted(self, log_ratio: Tensor, batch: Batch) -> Tensor:
        """Tokens that the policy wrote and no rejection rejects [response tokens], bool."""
        accepted = required(batch.response_mask)
        for rejection in self.rejections:
            accepted = accepted & rejection.passes(rejection.divergence(log_ratio, batch))
        return accepted

    def apply(self, batch: Batch) -> tuple[Batch, dict[str, float]]:
        """Fill the weights and remove rejected tokens from the response mask; metrics of both. With `batch_normalize`
        the weights are divided by their mean, over tokens or over rows depending on `level`. Metrics describe the rows
        before that; there are none if the policy wrote nothing. An episode counts as one row."""
        rows, batch = batch, batch.by_episode()
        log_ratio = required(batch.old_log_probs) - required(batch.rollout_log_probs)
        weights, accepted = self.weights(log_ratio, batch), self.accepted(log_ratio, batch)
        groups: dict[str, dict[str, float]] = {}
        written = bool(required(batch.response_mask).any())
        if written and weights is not None:
            groups["is"] = self._weight_metrics(self._ratios(log_ratio, batch), weights, batch)
            if self.batch_normalize:
                mean = float(of_written(weights, batch, self._by_row).mean())
                factor = mean if mean > 1e-8 else 1.0  # every weight may be 0
                weights, groups["is"]["batch_norm_factor"] = weights / factor, factor
        if written and self.rejections:
            groups |= {f"rs_{each.option}": each.metrics(log_ratio, batch) for each in self.rejections}
            groups["rs"] = masked_fractions(accepted, batch)
        metrics = {f"rollout_{group}_{name}": groups[group][name] for group in groups for name in groups[group]}
        corrected = replace(rows, importance_weights=weights, response_mask=accepted)
        return corrected, {f"rollout_corr/{name}": value for name, value in metrics.items()}

    @property
    def fits_update(self) -> bool:
        """Return whether an update can correct by its own log-probs: rejections must be known before tokens are
        counted, and the mean of all weights before the first weight is used."""
        return not self.rejections and not self.batch_normalize

    @property
    def by_token(self) -> bool:
        """Return whether weight and rejection of a token depend on its own ratio only."""
        return self.level in (None, "token") and not self.rejections

    @property
    def _by_row(self) -> bool:
        return self.level != "token"

    def _ratios(self, log_ratio: Tensor, batch: Batch) -> Tensor:
        """Trainer over engine, not yet bounded [response tokens]."""
        log_ratio = written_only(log_ratio, batch)
        if self._by_row:
            rows = batch.per_row(log_ratio) if self.level == "sequence" else batch.trained_mean(log_ratio)
            log_ratio = rows[batch.response_row]
        return log_ratio.clamp(-SAFE, SAFE).exp()

    def _weight_metrics(self, ratios: Tensor, weights: Tensor, batch: Batch) -> dict[str, float]:
        """Metrics of the weights, and the shares of the underlying ratios that are out of bounds. As in verl, extremes
        of row ratios are taken before truncation, those of token ratios after. The effective sample size is a share of
        all tokens."""
        bounds = 1 / self.upper if self.lower is None else self.lower, self.upper
        tokens, rows = of_written(weights, batch, by_row=False), of_written(weights, batch, by_row=True)
        bounded, of_rows = of_written(ratios, batch, self._by_row), of_written(ratios, batch, by_row=True)
        metrics = _summary(tokens, bounded if self._by_row else tokens, tokens, rows, ideal=1.0)
        squares = float(tokens.square().mean())
        metrics["eff_sample_size"] = metrics["mean"] ** 2 / squares if squares > 0 else 0.0
        metrics |= _fractions("ratio_fraction", bounded, *bounds) | _fractions("seq_fraction", of_rows, *bounds)
        if self.lower is not None:
            metrics["oob_ratio"] = sum(_fractions("", of_written(ratios, batch, by_row=False), *bounds).values())
        return metrics


def written_only(log_ratio: Tensor, batch: Batch) -> Tensor:
    """Log-ratios without gradient, 0 where the policy did not write."""
    return torch.where(required(batch.response_mask), log_ratio.detach(), 0.0)


def of_written(values: Tensor, batch: Batch, by_row: bool) -> Tensor:
    """Return the values of all written tokens, or their mean per row, for rows with written tokens."""
    if by_row:
        return batch.trained_mean(values)[batch.per_row(required(batch.response_mask).long()) > 0]
    return values[batch.response_mask]


def masked_fractions(accepted: Tensor, batch: Batch) -> dict[str, float]:
    """Return the share of written tokens that are rejected, and the share of rows with rejected tokens."""
    masked = (~accepted).float()
    return {
        "masked_fraction": float(of_written(masked, batch, by_row=False).mean()),
        "seq_masked_fraction": float((of_written(masked, batch, by_row=True) > 0).float().mean()),
    }


def _fractions(name: str, values: Tensor, low: float, high: float) -> dict[str, float]:
    return {f"{name}_high": float((values > high).float().mean()), f"{name}_low": float((values < low).float().mean())}


def _summary(tokens: Tensor, extremes: Tensor, varied: Tensor, rows: Tensor, ideal: float) -> dict[str, float]:
    """Return the mean over tokens, their extremes and deviation (from the values that verl uses), and the same over
    rows."""
    return {
        "mean": float(tokens.mean()),
        "max": float(extremes.max()),
        "min": float(extremes.min()),
        "std": float(varied.std(unbiased=False)),
        "seq_mean": float(rows.mean()),
        "seq_std": float(rows.std()) if len(rows) > 1 else 0.0,
        "seq_max": float(rows.max()),
        "seq_min": float(rows.min()),
        "seq_max_deviation": float((rows - ideal).abs().max()),
    }
