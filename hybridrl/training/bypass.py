"""Bypass mode's rejection: before each update, by the log-probs of the policy as it is then.

It narrows the response mask before the mini-batch is counted, as the rejection of the other mode does before the step's
updates: in both, what is rejected counts in no divisor and in no mean of the loss or of its metrics.
"""

from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from hybridrl.algorithms.aggregation import Totals
from hybridrl.batch import Batch, spans
from hybridrl.training.fsdp import reshard
from hybridrl.training.learner import Learner, MiniBatch, Prepare, Prepared, unchanged
from hybridrl.training.losses import LossConfig


def apart(learner: Learner, loss: LossConfig) -> tuple[Prepare, LossConfig]:
    """What rejects tokens before each update, where the loss rejects any, and the loss of what is left."""
    if loss.correction is None or not loss.correction.rejections:
        return unchanged, loss
    return partial(without_rejected, learner, loss), replace(loss, correction=None, tell_entropy=False)


def without_rejected(learner: Learner, loss: LossConfig, batch: Batch, mini_batch: MiniBatch) -> Prepared:
    """The rows less what is rejected, with importance weights where there are any; the share of tokens rejected, and
    the entropy of all that was written where it is to be measured."""
    assert loss.correction is not None
    present, entropies = _present(learner, loss, batch, mini_batch)
    log_ratio = present - batch.rollout_log_probs
    kept, weights = loss.correction.kept(log_ratio, batch), loss.correction.weights(log_ratio, batch)
    rows = [row for each in mini_batch.passes for row in each]
    before, after = (batch.per_row(mask.long())[rows] for mask in (batch.response_mask, kept))
    tokens = max(mini_batch.totals.tokens, 1)
    shares = {"rollout_rs_masked_fraction": (before - after).sum() / tokens}
    if loss.tell_entropy:
        shares["entropy"] = batch.per_row(torch.where(batch.response_mask, entropies, 0.0))[rows].sum() / tokens
    narrowed = replace(batch, response_mask=kept, importance_weights=weights)
    return narrowed, replace(mini_batch, totals=_over_ranks(learner, Totals.counted(after))), shares


@torch.no_grad()
def _present(learner: Learner, loss: LossConfig, batch: Batch, mini_batch: MiniBatch) -> tuple[Tensor, Tensor]:
    """Log-probs, and entropies where they are to be measured, of the mini-batch's rows by the policy as it is; 0 of
    other rows."""
    model = learner.model.eval()
    present, entropies = (torch.zeros(batch.response_ids.shape) for _ in range(2))
    for rows in mini_batch.passes:
        found = model(learner.inputs(batch.select(rows or [0])), loss.temperature, entropies=loss.tell_entropy)
        places = spans(batch.response_lengths, torch.tensor(rows, dtype=torch.int64))
        if rows:
            present[places] = found.log_probs.cpu()
        if rows and loss.tell_entropy:
            entropies[places] = found.entropies.cpu()
    reshard(model)
    model.train()
    return present, entropies


def _over_ranks(learner: Learner, own: Totals) -> Totals:
    """The sum over all ranks' rows; ranks that share rows have counted the same ones."""
    counted = torch.tensor([own.tokens, own.rows], device=learner.device)
    dist.all_reduce(counted)
    tokens, rows = (counted // (learner.group.size() if learner.group else 1)).tolist()
    return Totals(tokens, rows)
