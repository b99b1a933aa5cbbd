"""Bypass mode's rejection: before each update, by the log-probs of the policy at that moment.

It narrows the response mask before the mini-batch is counted, as the rejection outside bypass mode does before the
step's updates: in both modes a rejected token counts in no divisor and in no mean of the loss or of its metrics.
"""

from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from hybridrl.algorithms.objective import Totals
from hybridrl.batch import Batch, spans
from hybridrl.training.fsdp import reshard
from hybridrl.training.learner import Learner, MiniBatch, Prepare, RunInputs, unchanged
from hybridrl.training.losses import LossConfig


def prepare_rejection(learner: Learner, loss: LossConfig) -> tuple[Prepare, LossConfig]:
    """The function that rejects tokens before each update, if the loss rejects any, and the loss of the others."""
    if loss.correction is None or not loss.correction.rejections:
        return unchanged, loss
    return partial(without_rejected, learner, loss), replace(loss, correction=None, log_entropy=False)


def without_rejected(learner: Learner, loss: LossConfig, batch: Batch, mini_batch: MiniBatch) -> RunInputs:
    """The rows without the rejected tokens, with importance weights if there are any; as metrics the share of tokens
    rejected and, if it is logged, the entropy of all tokens that the policy wrote."""
    assert loss.correction is not None
    log_probs, entropies = _current_outputs(learner, loss, batch, mini_batch)
    log_ratio = log_probs - batch.rollout_log_probs
    kept, weights = loss.correction.kept(log_ratio, batch), loss.correction.weights(log_ratio, batch)
    rows = [row for each in mini_batch.micro_batches for row in each]
    before, after = (batch.per_row(mask.long())[rows] for mask in (batch.response_mask, kept))
    tokens = max(mini_batch.totals.tokens, 1)
    shares = {"rollout_rs_masked_fraction": (before - after).sum() / tokens}
    if loss.log_entropy:
        shares["entropy"] = batch.per_row(torch.where(batch.response_mask, entropies, 0.0))[rows].sum() / tokens
    narrowed = replace(batch, response_mask=kept, importance_weights=weights)
    return narrowed, replace(mini_batch, totals=_over_ranks(learner, Totals.counted(after))), shares


@torch.no_grad()
def _current_outputs(learner: Learner, loss: LossConfig, batch: Batch, mini_batch: MiniBatch) -> tuple[Tensor, Tensor]:
    """Log-probs and, if it is logged, entropies of the mini-batch's rows by the current policy; 0 for other rows."""
    model = learner.model.eval()
    log_probs, entropies = (torch.zeros(batch.response_ids.shape) for _ in range(2))
    for rows in mini_batch.micro_batches:
        outputs = model(learner.inputs(batch.select(rows or [0])), loss.temperature, entropies=loss.log_entropy)
        places = spans(batch.response_lengths, torch.tensor(rows, dtype=torch.int64))
        if rows:
            log_probs[places] = outputs.log_probs.cpu()
        if rows and loss.log_entropy:
            entropies[places] = outputs.entropies.cpu()
    reshard(model)
    model.train()
    return log_probs, entropies


def _over_ranks(learner: Learner, own: Totals) -> Totals:
    """The sum over all ranks' rows; ranks that share rows have counted the same ones."""
    counts = torch.tensor([own.tokens, own.rows], device=learner.device)
    dist.all_reduce(counts)
    tokens, rows = (counts // (learner.group.size() if learner.group else 1)).tolist()
    return Totals(tokens, rows)
