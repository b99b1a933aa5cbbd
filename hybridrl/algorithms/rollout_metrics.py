"""Metrics of importance weights and rejections over a step's rows, under verl's names without their prefix.

They are verl's (August 2026), except that rows in which the policy wrote nothing are ignored. At least one row must
have a written token.
"""

import math

from torch import Tensor

from hybridrl.batch import Batch


def of_written(values: Tensor, batch: Batch, by_row: bool) -> Tensor:
    """The values of all tokens that the policy wrote, or their mean per row, for rows in which it wrote any."""
    if by_row:
        return batch.written_mean(values)[batch.per_row(batch.response_mask.long()) > 0]
    return values[batch.response_mask]


def weight_metrics(
    ratios: Tensor, weights: Tensor, batch: Batch, by_row: bool, lower: float | None, upper: float
) -> dict[str, float]:
    """Metrics of the weights, and the shares of the underlying ratios that are out of bounds.

    As in verl, extremes of row ratios are taken before truncation, those of token ratios after. The effective sample
    size is a share of all tokens.
    """
    low = 1 / upper if lower is None else lower
    tokens, rows = of_written(weights, batch, by_row=False), of_written(weights, batch, by_row=True)
    bounded, of_rows = of_written(ratios, batch, by_row), of_written(ratios, batch, by_row=True)
    extremes = bounded if by_row else tokens
    squares = float(tokens.square().mean())
    metrics = {
        "mean": float(tokens.mean()),
        "max": float(extremes.max()),
        "min": float(extremes.min()),
        "std": float(tokens.std(unbiased=False)),
        "eff_sample_size": float(tokens.mean()) ** 2 / squares if squares > 0 else 0.0,
    }
    metrics |= _fractions("ratio_fraction", bounded, low, upper)
    metrics |= _row_metrics(rows, ideal=1.0) | _fractions("seq_fraction", of_rows, low, upper)
    if lower is not None:
        metrics["oob_ratio"] = sum(_fractions("", of_written(ratios, batch, by_row=False), low, upper).values())
    return metrics


def rejection_metrics(
    divergence: Tensor, passes: Tensor, batch: Batch, by_row: bool, low: float, high: float
) -> dict[str, float]:
    """Metrics of a rejection's divergence estimates, and of what it alone would reject."""
    tokens, rows = of_written(divergence, batch, by_row=False), of_written(divergence, batch, by_row=True)
    estimates = rows if by_row else tokens
    metrics = {
        "mean": float(tokens.mean()),
        "max": float(estimates.max()),
        "min": float(estimates.min()),
        "std": float(tokens.clamp(low, high).std(unbiased=False)),
    }
    metrics |= _fractions("fraction", estimates, low, high)
    metrics |= _row_metrics(rows, ideal=0.0) | _fractions("seq_fraction", rows, low, high)
    if math.isinf(low):
        del metrics["seq_fraction_low"]
    return metrics | masked_fractions(passes, batch)


def masked_fractions(kept: Tensor, batch: Batch) -> dict[str, float]:
    """The share of written tokens that are not kept, and of rows that lose any."""
    lost = (~kept).float()
    return {
        "masked_fraction": float(of_written(lost, batch, by_row=False).mean()),
        "seq_masked_fraction": float((of_written(lost, batch, by_row=True) > 0).float().mean()),
    }


def _fractions(name: str, values: Tensor, low: float, high: float) -> dict[str, float]:
    return {f"{name}_high": float((values > high).float().mean()), f"{name}_low": float((values < low).float().mean())}


def _row_metrics(rows: Tensor, ideal: float) -> dict[str, float]:
    return {
        "seq_mean": float(rows.mean()),
        "seq_std": float(rows.std()) if len(rows) > 1 else 0.0,
        "seq_max": float(rows.max()),
        "seq_min": float(rows.min()),
        "seq_max_deviation": float((rows - ideal).abs().max()),
    }
