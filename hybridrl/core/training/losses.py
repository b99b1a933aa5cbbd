"""Losses as functions of a model's outputs: a micro-batch's share of the mini-batch's loss and of each metric. Also the
rejection of tokens before each update in bypass mode."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from hybridrl.config.catalog import POLICY_TERM, LossTerm, PolicyLoss
from hybridrl.config.schema import CriticConfig
from hybridrl.core.algorithms.algorithm import bind, find_policy_loss, imported
from hybridrl.core.algorithms.objective import Divisors, kl_estimate, token_weights, value_loss
from hybridrl.core.algorithms.policy_losses import vanilla
from hybridrl.core.algorithms.rollout_correction import RolloutCorrection
from hybridrl.core.batch import Batch, spans
from hybridrl.core.carried import TEACHER, TEACHER_TOP
from hybridrl.core.training.attention import gather_slices
from hybridrl.core.training.fsdp import reshard
from hybridrl.core.training.heads import ReferenceOutputs, TopTokens
from hybridrl.core.training.learner import BatchLoss, Learner, Prepare, Prepared
from hybridrl.core.training.model import LanguageModel
from hybridrl.core.training.packing import MicroBatch, ModelInputs
from hybridrl.core.training.planning import MiniBatch
from hybridrl.core.training.token_outputs import LossGradient, TokenOutputs
from hybridrl.required import required

TermLoss = tuple[Tensor, dict[str, Tensor]]  # per response token, and statistics per token
# Other tokens than the policy's may have values in these fields; no term of its loss sees them.
WRITTEN_ONLY = ("old_log_probs", "reference_log_probs", "teacher_log_probs", "advantages")


@dataclass(frozen=True)
class LossConfig:
    """The loss of the policy, as plain values."""

    terms: tuple[LossTerm, ...]
    aggregation: str
    scale: float
    temperature: float
    grad_clip: float
    parameters: dict[str, Any] = field(default_factory=dict)  # by configuration key; a function gets those it names
    # With it `policy_loss` computes importance weights from its own log-probs: in bypass mode, in which tokens are
    # rejected before each update, and with `old_from_update`. None: the weights of the batch count, if it has any.
    correction: RolloutCorrection | None = None
    old_from_update: bool = False  # the micro-batch's own log-probs are the old ones: nothing has been updated since
    log_entropy: bool = False  # set if no forward pass before the update computed it
    teachers: tuple[str, ...] = ()  # models by the number that a row has, if a term compares the policy with them

    @property
    def entry(self) -> PolicyLoss:
        """Return the catalog entry of the policy loss among the terms; one without any property if there is none."""
        names = [term.function for term in self.terms if term.name == POLICY_TERM]
        return find_policy_loss(names[0])[0] if names else PolicyLoss("", "", by_token=True)

    @property
    def against(self) -> str:
        """Return the model, not a teacher, with which a term compares the policy; empty if none does."""
        return next((term.against for term in self.terms if term.against not in ("", TEACHER)), "")

    @property
    def masks(self) -> list[str]:
        """Return the masks of all terms."""
        return [*filter(None, dict.fromkeys(term.mask for term in self.terms))]

    @property
    def reads(self) -> tuple[str, ...]:
        """Return the fields of the batch that the ranks need."""
        corrected = () if self.correction is None else ("rollout_log_probs",)
        fields = ("response_mask", "episode_tokens", "masked_tokens", *corrected, *self.masks)
        return (*fields, *dict.fromkeys(name for term in self.terms for name in term.reads))

    @property
    def options(self) -> dict[str, Any]:
        """Return the options of `OutputSpec` for what the terms, the logs and the old policy's outputs need."""
        named = {name for term in self.terms for name in term.outputs}
        logged = {"entropies": "entropies" in named or self.old_from_update or self.log_entropy}
        divergences = [term.divergence for term in self.terms if term.against == TEACHER or TEACHER_TOP in term.reads]
        return logged | {name: True for name in named} | ({"divergence": divergences[0]} if divergences else {})


def policy_loss(
    outputs: TokenOutputs, part: Batch, totals: Divisors, loss: LossConfig
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return this micro-batch's share of the loss, the sum of its weighted terms, and metrics: each
    term's unweighted share, and statistics."""
    mask = required(part.response_mask)
    total, shares, statistics = torch.zeros((), device=mask.device), {}, {}
    of_terms = zip(loss.terms, _weights(part, totals, loss), _token_losses(outputs, _written(part), loss), strict=True)
    for term, weights, (per_token, of_term) in of_terms:
        shares[f"{term.name}_loss"] = share = (torch.where(mask, per_token, 0.0) * weights).sum()
        total = total + term.weight * share
        shares |= _token_means(of_term, *_counted(term, part, totals, loss))
        if term.mask == "taught" and (taught := part.value(term.mask)) is not None:
            statistics["distillation/taught_share"] = taught[part.response_row].float()
    if loss.log_entropy:
        statistics["entropy"] = required(outputs.entropies).detach()
    return total, shares | _token_means(statistics, part, totals)


def _weights(part: Batch, totals: Divisors, loss: LossConfig) -> list[Tensor]:
    """Return the weights of each term's tokens."""
    counted = (_counted(term, part, totals, loss) for term in loss.terms)
    return [
        token_weights(inside, term.aggregation or loss.aggregation, divisors, loss.scale)
        for term, (inside, divisors) in zip(loss.terms, counted, strict=True)
    ]


def _counted(term: LossTerm, part: Batch, totals: Divisors, loss: LossConfig) -> tuple[Batch, Divisors]:
    """Return the rows with the mask of the tokens that count in a term, and their numbers in the mini-batch."""
    if not term.mask:
        return part, totals
    return part.masked(term.mask, loss.masks.index(term.mask)), totals.masked[term.mask]


def _written(part: Batch) -> Batch:
    """Return the rows with 0 in WRITTEN_ONLY on the tokens that the policy did not write."""
    for name in WRITTEN_ONLY:
        if (value := part.value(name)) is not None:
            part = part.put(name, torch.where(required(part.response_mask), value, 0.0))
    return part


def _token_losses(outputs: TokenOutputs, rows: Batch, loss: LossConfig) -> Iterator[TermLoss]:
    """Yield each term's loss per token and statistics, given rows of `_written`. The terms see 0 for the outputs of
    tokens that the policy did not write: a NaN there cannot reach the gradient."""
    mask = required(rows.response_mask)
    if not any("entropies" in term.outputs for term in loss.terms):  # they are logged
        outputs = outputs._replace(entropies=None)
    outputs = outputs.map(lambda values: torch.where(mask, values, 0.0))
    own = outputs.log_probs.detach()
    if loss.old_from_update:
        rows = replace(rows, old_log_probs=own)
    if loss.correction is not None:  # for the difference to the rollout engine
        rows = replace(rows, importance_weights=loss.correction.weights(own - required(rows.rollout_log_probs), rows))
    for term in loss.terms:
        yield _function(term, loss.parameters)(outputs, rows)


def _function(term: LossTerm, values: Mapping[str, Any]) -> Callable[[TokenOutputs, Batch], TermLoss]:
    """Return the function of a term, with its keyword arguments bound."""
    if term.name != POLICY_TERM:
        return bind(imported(term.function), {**values, **term.parameters}, rows=2)
    function = bind(find_policy_loss(term.function)[1], values, rows=2)

    def corrected(outputs: TokenOutputs, rows: Batch) -> TermLoss:
        per_token, statistics = function(outputs.log_probs, rows)
        return per_token if rows.importance_weights is None else per_token * rows.importance_weights, statistics

    return corrected


def entropy(outputs: TokenOutputs, rows: Batch) -> TermLoss:
    """The entropy of the policy; its weight is negative."""
    return required(outputs.entropies), {}


def sampled_kl(outputs: TokenOutputs, rows: Batch, *, form: str) -> TermLoss:
    """An estimate of the KL to the reference from the log-probs of sampled tokens."""
    return kl_estimate(outputs.log_probs, required(rows.reference_log_probs), form), {}


def full_kl(outputs: TokenOutputs, rows: Batch) -> TermLoss:
    """The exact KL to the reference."""
    return required(outputs.reference_kl), {}


def exact_divergence(outputs: TokenOutputs, rows: Batch, *, most: float | None, names: Sequence[str] = ()) -> TermLoss:
    """The exact divergence from the teacher, at most so large; 0 in rows without one. `names`: those of several
    teachers, by number."""
    if outputs.teacher_divergence is None:
        return 0 * outputs.log_probs, {}
    distances, statistics = _bounded(outputs.teacher_divergence, rows, most, names)
    return distances, statistics | {"distillation/unreached": required(outputs.unreached)}


def sampled_divergence(
    outputs: TokenOutputs, rows: Batch, *, form: str, most: float | None, names: Sequence[str] = ()
) -> TermLoss:
    """An estimate of the divergence from the teacher, from the log-probs of sampled tokens; 0 if no row of the step has
    one."""
    teacher = rows.value("teacher_log_probs")
    if teacher is None:
        return 0 * outputs.log_probs, {}
    distances, statistics = _bounded(kl_estimate(outputs.log_probs, teacher, form), rows, most, names)
    return distances, statistics | {"distillation/teacher_log_prob": teacher}


def teacher_reward(
    outputs: TokenOutputs,
    rows: Batch,
    *,
    form: str,
    most: float | None,
    clip: Mapping[str, float],
    names: Sequence[str] = (),
) -> TermLoss:
    """The clipped policy loss, whose advantage is less an estimate of the divergence from the teacher at each token."""
    detached = outputs.map(torch.detach)
    distances, statistics = sampled_divergence(detached, rows, form=form, most=most, names=names)
    clipped, _ = vanilla(outputs.log_probs, replace(rows, advantages=-distances), **clip)
    return clipped if rows.importance_weights is None else clipped * rows.importance_weights, statistics


def _bounded(distances: Tensor, rows: Batch, most: float | None, names: Sequence[str]) -> TermLoss:
    """Return distances [tokens] within +-most, beyond which they have no gradient, and statistics. A teacher's `kl`
    is its part of all, which its `share` of the tokens makes a mean (`kl_of_teachers`)."""
    statistics = {"distillation/kl": distances.detach()}
    for number, name in enumerate(names):
        own = (rows.carried[TEACHER] == number)[rows.response_row].float()
        statistics |= {f"distillation/{name}/kl": own * distances.detach(), f"distillation/{name}/share": own}
    if most is None:
        return distances, statistics
    beyond = (distances.detach().abs() > most).float()
    return distances.clamp(-most, most), statistics | {"distillation/clamped_share": beyond}


def kl_of_teachers(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the mean divergence from each of several teachers, over the tokens that it teaches in a step."""
    shares = {name: share for name, share in metrics.items() if name.endswith("/share") and share > 0}
    return {kl: metrics[kl] / share for name, share in shares.items() if (kl := f"{name[:-6]}/kl") in metrics}


def gradient_function(part: Batch, totals: Divisors, loss: LossConfig) -> LossGradient | None:
    """Return a function of a model's outputs for a span of the response tokens: the gradient of `policy_loss` with
    respect to them, for computing it together with the outputs. None if the loss of a token may depend on the outputs
    of other tokens."""
    if not all(term.by_token for term in loss.terms) or (loss.correction and not loss.correction.by_token):
        return None
    rows = replace(_written(part), token_row=part.response_row)  # once, as spans are many
    weights = [term.weight * each for term, each in zip(loss.terms, _weights(part, totals, loss), strict=True)]

    def gradient(outputs: TokenOutputs, span: slice) -> TokenOutputs:
        with torch.enable_grad():
            per_token = [losses for losses, _ in _token_losses(outputs, rows.tokens(span), loss)]
        learned = [(each, weight[span]) for each, weight in zip(per_token, weights, strict=True) if each.requires_grad]
        leaves = [value for value in outputs if value is not None and value.requires_grad]
        ends, by = zip(*learned, strict=True)
        gradients = iter(torch.autograd.grad(ends, leaves, by, allow_unused=True, materialize_grads=True))
        learns = (value is not None and value.requires_grad for value in outputs)
        return TokenOutputs._make(next(gradients) if each else None for each in learns)

    return gradient


def _token_means(statistics: dict[str, Tensor], part: Batch, totals: Divisors) -> dict[str, Tensor]:
    """Return this micro-batch's share of each statistic's mean over the tokens that the policy wrote."""
    written = required(part.response_mask)
    return {name: torch.where(written, value, 0.0).sum() / max(totals.tokens, 1) for name, value in statistics.items()}


# -- as functions of rows ----------------------------------------------------------------------------------------------


def policy_objective(
    learner: Learner,
    loss: LossConfig,
    hidden_of: Callable[[str, ModelInputs], ReferenceOutputs],
    outputs: list[TokenOutputs],
) -> BatchLoss:
    """Return the policy's loss; `hidden_of` computes another model's hidden states for the same rows. It appends the
    model's outputs to `outputs` if they serve as the old policy's."""
    options = loss.options

    def compute(part: MicroBatch, totals: Divisors | None) -> tuple[Tensor, dict[str, Tensor]]:
        rows, inputs = part.rows, part.inputs
        others = {
            name: _in_slice(hidden_of(name, of_other), of_other, inputs) for name, of_other in part.others.items()
        }
        early = gradient_function(rows, totals, loss) if totals and learner.early_gradient else None
        top = rows.value(TEACHER_TOP)
        teacher = others.get(part.teacher) if top is None else TopTokens(top)
        compared = {"against": others.get(loss.against), "teacher": teacher}
        output = learner.model(inputs, loss.temperature, **compared, loss_gradient=early, **options)
        if loss.old_from_update:
            outputs.append(output.map(torch.detach))
        statistics = learner.model.route_statistics(inputs) if isinstance(learner.model, LanguageModel) else {}
        if totals is None:
            return 0 * output.log_probs.sum(), {}
        total, shares = policy_loss(output, rows, totals, loss)
        return total, shares | _token_means(statistics, rows, totals)

    return compute


def _in_slice(outputs: ReferenceOutputs, inputs: ModelInputs, policy: ModelInputs) -> ReferenceOutputs:
    """Return another model's hidden states at the response tokens of the policy's slice. The slices differ where a
    context makes its rows longer, or the rows share more or fewer tokens in one of the models; collective then."""
    ours, theirs = policy.slice, inputs.slice
    if ours is None or theirs is None:
        return outputs
    if policy.input_ids.shape == inputs.input_ids.shape and torch.equal(ours.predictors, theirs.predictors):
        return outputs
    return outputs._replace(hidden=gather_slices(outputs.hidden, theirs)[ours.at])


def critic_objective(learner: Learner, section: CriticConfig) -> BatchLoss:
    """Return the critic's loss: the clipped value loss."""

    def compute(part: MicroBatch, totals: Divisors | None) -> tuple[Tensor, dict[str, Tensor]]:
        values, rows = learner.model(part.inputs), part.rows
        if totals is None:
            return 0 * values.sum(), {}
        per_token, statistics = value_loss(values, rows, section.cliprange_value)
        weights = token_weights(rows, section.loss_agg_mode, totals, section.loss_scale_factor or 1.0)
        total = (per_token * weights).sum()
        return total, {"vf_loss": total} | _token_means(statistics, rows, totals)

    return compute


def pair_objective(learner: Learner, center: float) -> BatchLoss:
    """Return a reward model's loss for pairs of rows, the better first: that of the model of Bradley and Terry, and
    `center` times the squared sum of the two scores. `rewards` of the better row is the margin between them."""

    def compute(part: MicroBatch, totals: Divisors | None) -> tuple[Tensor, dict[str, Tensor]]:
        scores = learner.model(part.inputs)
        if totals is None:
            return 0 * scores.sum(), {}
        chosen, rejected = scores.view(-1, 2).unbind(-1)
        gaps = chosen - rejected
        losses = F.softplus(required(part.rows.rewards)[::2] - gaps) + center * (chosen + rejected).square()
        metrics = {"accuracy": (gaps > 0).float(), "margin": gaps, "chosen": chosen, "rejected": rejected}
        pairs = totals.rows / 2
        return losses.sum() / pairs, {name: value.detach().sum() / pairs for name, value in metrics.items()}

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
    parts = (part for part, _ in learner.micro_batches(batch, mini_batch))
    outputs = [model(part.inputs, loss.temperature, entropies=loss.log_entropy) for part in parts]
    rows = [row for each in mini_batch.micro_batches for row in each]
    places = spans(batch.response_lengths, torch.tensor(rows, dtype=torch.int64))
    for into, column in zip((log_probs, entropies), zip(*outputs, strict=True), strict=False):
        real = [values for values, each in zip(column, mini_batch.micro_batches, strict=True) if each]
        if real and real[0] is not None:
            into[places] = torch.cat(real).cpu()
    reshard(model)
    model.train()

    log_ratio = log_probs - required(batch.rollout_log_probs)
    correction, mask = required(loss.correction), required(batch.response_mask)
    accepted, weights = correction.accepted(log_ratio, batch), correction.weights(log_ratio, batch)
    before, after = (batch.per_row(tokens.long())[rows] for tokens in (mask, accepted))
    tokens = max(mini_batch.totals.tokens, 1)
    shares = {"rollout_rs_masked_fraction": (before - after).sum() / tokens}
    if loss.log_entropy:
        shares["entropy"] = batch.per_row(torch.where(mask, entropies, 0.0))[rows].sum() / tokens
    narrowed = replace(batch, response_mask=accepted, importance_weights=weights)
    inside = [
        after,
        *(narrowed.per_row(required(narrowed.masked(mask).response_mask).long())[rows] for mask in loss.masks),
    ]
    # Summed over all ranks' rows; ranks that share rows have counted the same ones.
    counts = torch.tensor([[each.sum(), (each > 0).sum()] for each in inside], device=learner.device)
    dist.all_reduce(counts)
    whole, *masked = (
        Divisors(*of_mask) for of_mask in (counts // (learner.group.size() if learner.group else 1)).tolist()
    )
    totals = replace(whole, masked=dict(zip(loss.masks, masked, strict=True)))
    return narrowed, replace(mini_batch, totals=totals), shares
