"""Losses as functions of a model's outputs: a micro-batch's share of the mini-batch's loss and of each metric. Also the
rejection of tokens before each update in bypass mode."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hybridrl.config.schema import CriticConfig
from hybridrl.core.algorithms.algorithm import bind, find_policy_loss
from hybridrl.core.algorithms.objective import Divisors, kl_estimate, token_weights, value_loss
from hybridrl.core.algorithms.rollout_correction import RolloutCorrection
from hybridrl.core.batch import Batch, spans
from hybridrl.core.training.fsdp import reshard
from hybridrl.core.training.learner import Learner, Loss, Prepare, Prepared
from hybridrl.core.training.model import LanguageModel
from hybridrl.core.training.packing import ModelInputs
from hybridrl.core.training.planning import MiniBatch
from hybridrl.core.training.token_outputs import LossGradient, ReferenceOutputs, TokenOutputs
from hybridrl.required import required


@dataclass(frozen=True)
class LossConfig:
    """The loss of the policy, as plain values."""

    policy_loss: str  # a name, or path/to/file.py:function: custom functions cannot be pickled
    aggregation: str
    scale: float
    temperature: float
    grad_clip: float
    parameters: dict[str, Any] = field(default_factory=dict)  # by configuration key; a policy loss gets those it names
    entropy_coeff: float = 0.0
    kl_coef: float = 0.0
    kl_form: str | None = None  # form of the KL to the reference; None: no KL in the loss
    # Importance weights of current against rollout log-probs, in bypass mode and if the current log-probs are the old
    # ones. In bypass mode tokens are rejected before each update.
    correction: RolloutCorrection | None = None
    old_from_update: bool = False  # the micro-batch's own log-probs are the old ones: nothing has been updated since
    log_entropy: bool = False  # set if no forward pass before the update computed it


def policy_loss(
    outputs: TokenOutputs, part: Batch, totals: Divisors, loss: LossConfig
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the policy loss minus the entropy bonus plus the KL to the reference, and statistics of all three."""
    if loss.old_from_update:
        part = replace(part, old_log_probs=outputs.log_probs.detach())
    entry, function = find_policy_loss(loss.policy_loss)
    policy_weights = token_weights(part, entry.aggregation or loss.aggregation, totals, loss.scale)
    importance = part.importance_weights  # they correct for the difference to the rollout engine
    if loss.correction is not None:
        importance = loss.correction.weights(outputs.log_probs.detach() - required(part.rollout_log_probs), part)

    mask = required(part.response_mask)

    def written(values: Tensor | None) -> Tensor | None:
        """Return 0 on tokens that the policy did not write: a NaN there cannot reach the sums or their gradient."""
        return None if values is None else torch.where(mask, values, 0.0)

    rows = replace(part, old_log_probs=written(part.old_log_probs), advantages=written(part.advantages))
    per_token, statistics = bind(function, loss.parameters, rows=2)(written(outputs.log_probs), rows)
    per_token = required(written(per_token)) * (1.0 if importance is None else importance)
    shares = {"pg_loss": (per_token * policy_weights).sum()}
    total = shares["pg_loss"]
    weights = token_weights(part, loss.aggregation, totals, loss.scale)
    if loss.entropy_coeff:
        shares["entropy_loss"] = (required(outputs.entropies) * weights).sum()
        total = total - loss.entropy_coeff * shares["entropy_loss"]
    if loss.kl_form is not None:
        kl = outputs.reference_kl
        if loss.kl_form != "full":
            kl = kl_estimate(
                required(written(outputs.log_probs)), required(written(part.reference_log_probs)), loss.kl_form
            )
        shares["kl_loss"] = (required(written(kl)) * weights).sum()
        total = total + loss.kl_coef * shares["kl_loss"]
    if loss.log_entropy:
        statistics["entropy"] = required(outputs.entropies).detach()
    return total, shares | _token_means(statistics, part, totals)


def gradient_function(part: Batch, totals: Divisors, loss: LossConfig) -> LossGradient | None:
    """Return a function of a model's outputs: the gradient of `policy_loss` with respect to them, for computing it
    together with the outputs. None if the loss of a token may depend on the outputs of other tokens."""
    if not find_policy_loss(loss.policy_loss)[0].by_token or (loss.correction and not loss.correction.by_token):
        return None

    def gradient(outputs: TokenOutputs) -> TokenOutputs:
        with torch.enable_grad():
            leaves = [None if value is None else value.detach().requires_grad_() for value in outputs]
            total, _ = policy_loss(TokenOutputs._make(leaves), part, totals, loss)
        present = [value for value in leaves if value is not None]
        gradients = iter(torch.autograd.grad(total, present, allow_unused=True, materialize_grads=True))
        return TokenOutputs._make(None if value is None else next(gradients) for value in leaves)

    return gradient


def _token_means(statistics: dict[str, Tensor], part: Batch, totals: Divisors) -> dict[str, Tensor]:
    """Return this micro-batch's share of each statistic's mean over the tokens that the policy wrote."""
    written = required(part.response_mask)
    return {name: torch.where(written, value, 0.0).sum() / max(totals.tokens, 1) for name, value in statistics.items()}


# -- as functions of rows ----------------------------------------------------------------------------------------------


def policy_objective(
    learner: Learner,
    loss: LossConfig,
    reference: Callable[[ModelInputs], ReferenceOutputs],
    outputs: list[TokenOutputs],
) -> Loss:
    """Return the policy's loss. It appends the model's outputs to `outputs` if they serve as the old policy's."""
    options = {
        "entropies": loss.entropy_coeff != 0 or loss.old_from_update or loss.log_entropy,
        "entropy_gradient": loss.entropy_coeff != 0,
    }

    def compute(part: Batch, totals: Divisors | None) -> tuple[Tensor, dict[str, Tensor]]:
        inputs = learner.inputs(part)
        against = reference(inputs) if loss.kl_form == "full" else None
        part = part.to(learner.device)
        early = None if totals is None else gradient_function(part, totals, loss)
        output = learner.model(inputs, loss.temperature, against=against, loss_gradient=early, **options)
        if loss.old_from_update:
            outputs.append(output.map(torch.detach))
        statistics = learner.model.route_statistics(inputs) if isinstance(learner.model, LanguageModel) else {}
        if totals is None:
            return 0 * output.log_probs.sum(), {}
        total, shares = policy_loss(output, part, totals, loss)
        return total, shares | _token_means(statistics, part, totals)

    return compute


def critic_objective(learner: Learner, section: CriticConfig) -> Loss:
    """Return the critic's loss: the clipped value loss."""

    def compute(part: Batch, totals: Divisors | None) -> tuple[Tensor, dict[str, Tensor]]:
        values = learner.model(learner.inputs(part))
        if totals is None:
            return 0 * values.sum(), {}
        part = part.to(learner.device)
        per_token, statistics = value_loss(values, part, section.cliprange_value)
        weights = token_weights(part, section.loss_agg_mode, totals, section.loss_scale_factor or 1.0)
        total = (per_token * weights).sum()
        return total, {"vf_loss": total} | _token_means(statistics, part, totals)

    return compute


# -- bypass mode -------------------------------------------------------------------------------------------------------

# Tokens are rejected by the log-probs of the policy just before an update, and leave the response mask before the
# mini-batch is counted. Outside bypass mode this happens before the step's updates. In both modes a rejected token
# counts in no divisor and in no mean of the loss or of its metrics.


def prepare_rejection(learner: Learner, loss: LossConfig) -> tuple[Prepare | None, LossConfig]:
    """Return the function that rejects tokens before each update (None: no rejection), and the loss of the rest."""
    if loss.correction is None or not loss.correction.rejections:
        return None, loss
    return partial(_without_rejected, learner, loss), replace(loss, correction=None, log_entropy=False)


@torch.no_grad()
def _without_rejected(learner: Learner, loss: LossConfig, batch: Batch, mini_batch: MiniBatch) -> Prepared:
    """Return rows and mini-batch without the rejected tokens, with importance weights if there are any. Metrics:
    the share of rejected tokens and, if it is logged, the entropy of all tokens that the policy wrote."""
    model = learner.model.eval()
    log_probs, entropies = (torch.zeros(batch.response_ids.shape) for _ in range(2))  # 0 for other ranks' rows
    for rows in mini_batch.micro_batches:
        outputs = model(learner.inputs(batch.select(rows or [0])), loss.temperature, entropies=loss.log_entropy)
        places = spans(batch.response_lengths, torch.tensor(rows, dtype=torch.int64))
        if rows:
            log_probs[places] = outputs.log_probs.cpu()
        if rows and loss.log_entropy:
            entropies[places] = required(outputs.entropies).cpu()
    reshard(model)
    model.train()

    log_ratio = log_probs - required(batch.rollout_log_probs)
    correction, mask = required(loss.correction), required(batch.response_mask)
    kept, weights = correction.kept(log_ratio, batch), correction.weights(log_ratio, batch)
    rows = [row for each in mini_batch.micro_batches for row in each]
    before, after = (batch.per_row(tokens.long())[rows] for tokens in (mask, kept))
    tokens = max(mini_batch.totals.tokens, 1)
    shares = {"rollout_rs_masked_fraction": (before - after).sum() / tokens}
    if loss.log_entropy:
        shares["entropy"] = batch.per_row(torch.where(mask, entropies, 0.0))[rows].sum() / tokens
    # Summed over all ranks' rows; ranks that share rows have counted the same ones.
    counts = torch.tensor([after.sum(), (after > 0).sum()], device=learner.device)
    dist.all_reduce(counts)
    totals = Divisors(*(counts // (learner.group.size() if learner.group else 1)).tolist())
    narrowed = replace(batch, response_mask=kept, importance_weights=weights)
    return narrowed, replace(mini_batch, totals=totals), shares
