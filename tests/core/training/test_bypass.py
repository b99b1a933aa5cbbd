"""In bypass mode rejected tokens count in no divisor and in no mean, as if they were rejected before the update."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hybridrl.config.catalog import ENTROPY, LossTerm
from hybridrl.core.algorithms.algorithm import loss_terms
from hybridrl.core.algorithms.objective import Divisors
from hybridrl.core.algorithms.rollout_correction import Rejection, RolloutCorrection
from hybridrl.core.batch import Batch
from hybridrl.core.training.learner import BatchLoss, Learner
from hybridrl.core.training.losses import LossConfig, policy_loss, prepare_rejection
from hybridrl.core.training.packing import MicroBatch, pack_rows
from hybridrl.core.training.planning import MiniBatch
from hybridrl.required import required
from tests.core.algorithms.parameters import LOSS_PARAMETERS
from tests.core.training.families import VOCABULARY
from tests.core.training.on_ranks import on_ranks, whole_gradient
from tests.core.training.test_state import build

# Four responses of 4, 3, 3 and 2 tokens. The engine's log-probs are 0.1 below the policy's, so that every ratio is e to
# the 0.1, except those of the fourth and sixth token 2 above: k2 is 2 there. The policy did not write the first token.
LENGTHS, REJECTED, UNWRITTEN = [4, 3, 3, 2], [3, 5], 0
PASSES = {1: [[[0], [1, 2, 3]]], 2: [[[0, 3], [1]], [[2], []]]}
SUMS = (Rejection("token_k2", None, 1.0),)
LOSS = LossConfig(
    loss_terms("vanilla", 0.1, "k3", 0.3),
    "token-mean",
    scale=1.0,
    temperature=0.9,
    grad_clip=1e9,
    parameters=LOSS_PARAMETERS | {"clip_ratio_high": 0.05},
    correction=RolloutCorrection(None, None, 2.0, False, SUMS),
    log_entropy=True,
)
LOSSES = {mode: replace(LOSS, aggregation=mode) for mode in ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum")}
LOSSES["gspo"] = replace(LOSS, terms=loss_terms("gspo", 0.1, "k3", 0.3))
LOSSES["weights of rows"] = replace(
    LOSS,
    terms=loss_terms("reinforce", 0.1, "k3", 0.3),
    correction=RolloutCorrection("sequence", None, 9.0, False, SUMS),
)
EXTRA = LossTerm("extra", ENTROPY.function, 0.5, outputs=ENTROPY.outputs, mask="chosen")
LOSSES["a term with a mask"] = replace(LOSS, terms=(*LOSS.terms, EXTRA))


def batch_for(learner: Learner) -> tuple[Batch, Tensor]:
    """The rows, and the policy's entropies."""
    generator = torch.Generator().manual_seed(0)
    written = torch.ones(12, dtype=torch.bool)
    written[UNWRITTEN] = False
    batch = Batch(
        prompt_lengths=torch.full((4,), 2),
        response_lengths=torch.tensor(LENGTHS),
        prompt_ids=torch.randint(VOCABULARY, (8,), generator=generator),
        response_ids=torch.randint(VOCABULARY, (12,), generator=generator),
        group=torch.arange(4),
        position=torch.arange(4),
        sample=torch.arange(4),
        response_mask=written,
        chosen=torch.arange(12) % 2 == 1,
        advantages=torch.randn(12, generator=generator),
    )
    with torch.no_grad():
        found = learner.model(pack_rows(batch, padded=False), LOSS.temperature, entropies=True)
    rollout = found.log_probs - 0.1
    rollout[REJECTED] += 2.1
    reference = found.log_probs + 0.2
    return replace(
        batch, rollout_log_probs=rollout, old_log_probs=rollout, reference_log_probs=reference
    ), found.entropies


def loss_of(learner: Learner, loss: LossConfig) -> BatchLoss:
    def compute(part: MicroBatch, totals: Divisors | None) -> tuple[Tensor, dict[str, Tensor]]:
        found = learner.model(part.inputs, loss.temperature, entropies=True, entropy_gradient=True)
        return (0 * found.log_probs.sum(), {}) if totals is None else policy_loss(found, part.rows, totals, loss)

    return compute


def all_gradients(path: str) -> dict[str, tuple[dict[str, Tensor], dict[str, Tensor]]]:
    learner = build(path)
    batch, _ = batch_for(learner)
    return {name: gradients(learner, batch, name) for name in LOSSES}


def gradients(learner: Learner, batch: Batch, name: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """In bypass mode, and with the same tokens rejected beforehand."""
    loss, passes = LOSSES[name], PASSES[dist.get_world_size()][dist.get_rank()]
    reject, rest = prepare_rejection(learner, loss)
    found = whole_gradient(learner, batch, MiniBatch(passes, Divisors.of(batch)), loss_of(learner, rest), reject)

    kept = required(batch.response_mask).clone()
    kept[REJECTED] = False
    weights = None
    if name == "weights of rows":  # of all that was written, so of the rejected tokens too: three, three, three and two
        weights = torch.tensor([0.1 * 2 - 2, 0.1 * 2 - 2, 0.1 * 3, 0.1 * 2]).exp()[batch.response_row]
    beforehand = replace(batch, response_mask=kept, importance_weights=weights)
    plain, totals = loss_of(learner, replace(loss, correction=None)), Divisors.of(beforehand, loss.masks)
    assert (totals.tokens, totals.rows) == (9, 4)
    right = whole_gradient(learner, beforehand, MiniBatch(passes, totals), plain)
    return found, right


def metrics(path: str) -> tuple[dict[str, float], float]:
    learner, passes = build(path), PASSES[dist.get_world_size()][dist.get_rank()]
    batch, entropies = batch_for(learner)
    reject, rest = prepare_rejection(learner, LOSS)
    mini_batch = MiniBatch(passes, Divisors.of(batch))
    (shares,) = learner.update(batch, [mini_batch], loss_of(learner, rest), 1e9, step=1, prepare=reject)
    clipped = (batch.advantages > 0)[[1, 2, 4, 6, 7, 8, 9, 10, 11]]
    return shares, float(clipped.float().mean()), float(entropies[batch.response_mask].mean())


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_gradient_is_that_of_tokens_rejected_beforehand(directory, ranks):
    for found, right in on_ranks(ranks, all_gradients, directory)[0].values():
        assert found.keys() == right.keys()
        assert max(float(value.abs().max()) for value in right.values()) > 1e-3
        for parameter, value in right.items():
            torch.testing.assert_close(found[parameter], value, rtol=1e-4, atol=1e-6)


def test_metrics_are_means_over_the_kept_tokens_except_for_the_entropy(directory):
    on_each = on_ranks(2, metrics, directory)
    summed = {name: sum(shares[name] for shares, *_ in on_each) for name in on_each[0][0]}
    _, clipped, entropy = on_each[0]
    assert 0 < clipped < 1
    assert summed["ppo_kl"] == pytest.approx(-0.1, abs=1e-4)
    assert summed["pg_clipfrac"] == pytest.approx(clipped)
    assert summed["rollout_rs_masked_fraction"] == pytest.approx(2 / 11)
    assert summed["entropy"] == pytest.approx(entropy, rel=1e-5)
