"""The gradient of a policy loss, computed per token together with the log-probs, equals the one of a backward pass."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hybridrl.config.catalog import ENTROPY, EXACT_TEACHER, FULL_KL, POLICY_LOSSES, SAMPLED_TEACHER, LossTerm
from hybridrl.config.findings import ConfigError
from hybridrl.core.algorithms import algorithm
from hybridrl.core.algorithms.algorithm import loss_terms
from hybridrl.core.algorithms.objective import Divisors
from hybridrl.core.algorithms.rollout_correction import Rejection, RolloutCorrection
from hybridrl.core.batch import Batch, token_rows
from hybridrl.core.training import token_outputs
from hybridrl.core.training.fsdp import full_tensor, shard
from hybridrl.core.training.heads import ReferenceOutputs
from hybridrl.core.training.layout import layout
from hybridrl.core.training.losses import (
    LossConfig,
    critic_objective,
    gradient_function,
    kl_of_teachers,
    policy_loss,
    policy_objective,
)
from hybridrl.core.training.model import LanguageModel
from hybridrl.core.training.packing import MicroBatch, pack_rows
from hybridrl.core.training.token_outputs import TokenOutputs
from hybridrl.required import required
from tests.core.algorithms.parameters import LOSS_PARAMETERS
from tests.core.training.families import load_language_model, model_config
from tests.core.training.head_cases import chunks_of
from tests.core.training.on_ranks import on_ranks
from tests.core.training.test_state import fsdp_config

NO_INPUTS = pack_rows(token_rows([[0, 1]]), padded=False)  # for stand-ins of a model, which read none
LOSS = LossConfig(
    loss_terms("vanilla"), "seq-mean-token-mean", 1.0, temperature=0.9, grad_clip=1.0, parameters=LOSS_PARAMETERS
)
SHARDED, DTYPES = ("two heads a key", "all heads one key, tied head"), ("float32", "bfloat16")
BY_TOKEN = sorted(name for name, entry in POLICY_LOSSES.items() if entry.by_token)
OPTIONS = {
    "old log-probs of its own": {"old_from_update": True, "log_entropy": True},
    "entropy": {"terms": loss_terms("vanilla", 0.1)},
    "KL": {"terms": loss_terms("vanilla", 0.0, "k3", 0.3)},
    "exact KL and entropy": {"terms": loss_terms("vanilla", 0.1, "full", 0.3)},
    "weights a token": {"correction": RolloutCorrection("token", None, 1.1, False, ())},
}


@pytest.fixture(scope="module")
def part(rows) -> Batch:
    generator = torch.Generator().manual_seed(0)
    old, moved, advantages, weights = torch.randn(4, 15, generator=generator)
    return replace(
        rows,
        response_mask=torch.arange(15) % 5 != 1,
        old_log_probs=old - 4,
        rollout_log_probs=old + 0.1 * moved - 4,
        reference_log_probs=old - 4.1,
        advantages=advantages,
        importance_weights=weights.exp(),
        chosen=torch.arange(15) % 3 == 0,
    )


def small_chunks(patch: pytest.MonkeyPatch) -> None:
    chunks_of(4, patch)


def form_logits_once(patch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> None:
        raise AssertionError("logits are formed again")

    patch.setattr(token_outputs.Chunks, "gradients", never)


def update(model: LanguageModel, part: Batch, loss: LossConfig, *, fused: bool) -> tuple[Tensor, dict, list[Tensor]]:
    """Loss, shares of the metrics and gradient of a micro-batch."""
    inputs, totals, options = pack_rows(part, padded=False), Divisors.of(part), {}
    if loss.against == "reference":
        hidden = torch.randn(15, model.head.weight.shape[1], generator=torch.Generator().manual_seed(1))
        options["against"] = ReferenceOutputs(hidden, model.head._replace(bias=None))
    if fused:
        options["loss_gradient"] = gradient_function(part, totals, loss)
        assert options["loss_gradient"] is not None
    found = model(inputs, 0.9, **loss.options, **options)
    total, shares = policy_loss(found, part, totals, loss)
    # Scaled as a learner on three ranks does.
    (3 * total).backward()
    gradient = [full_tensor(parameter.grad).clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    return total, shares, gradient


def sharded(directories: dict[str, str], part: Batch) -> dict[tuple[str, str], list[tuple[Tensor, Tensor]]]:
    return {(family, dtype): both_gradients(directories[family], part, dtype) for family in SHARDED for dtype in DTYPES}


def both_gradients(path: str, part: Batch, dtype: str) -> list[tuple[Tensor, Tensor]]:
    """Each parameter's gradient, computed with the log-probs and by the backward pass."""
    ranks = dist.get_world_size()
    with pytest.MonkeyPatch.context() as patch:
        small_chunks(patch)
        model = load_language_model(model_config(path), torch.float32)
        shard(model, fsdp_config(dtype=dtype), layout("cpu", ranks, ranks))
        _, _, right = update(model, part, LOSS, fused=False)
        form_logits_once(patch)
        _, _, found = update(model, part, LOSS, fused=True)
    return list(zip(found, right, strict=True))


@pytest.mark.parametrize(
    "loss",
    [replace(LOSS, terms=loss_terms(name)) for name in BY_TOKEN] + [replace(LOSS, **more) for more in OPTIONS.values()],
    ids=[*BY_TOKEN, *OPTIONS],
)
def test_loss_metrics_and_gradient_are_the_same_and_logits_formed_once(directory, part, loss, monkeypatch):
    small_chunks(monkeypatch)
    model = load_language_model(model_config(directory), torch.float32)
    total, shares, gradient = update(model, part, loss, fused=False)
    form_logits_once(monkeypatch)
    found = update(model, part, loss, fused=True)
    assert torch.equal(found[0], total)
    assert found[1].keys() == shares.keys() and all(torch.equal(found[1][name], shares[name]) for name in shares)
    torch.testing.assert_close(found[2], gradient)
    assert any(value.any() for value in gradient)


@pytest.mark.parametrize(
    "change",
    [{"policy_loss": name} for name in ["own.py:plain", *sorted(POLICY_LOSSES.keys() - set(BY_TOKEN))]]
    + [
        {"correction": RolloutCorrection("sequence", None, 2.0, False, ())},
        {"correction": RolloutCorrection(None, None, 2.0, False, (Rejection("seq_mean_k1", 0.9, 1.1),))},
    ],
)
def test_no_gradient_comes_with_the_log_probs_where_a_token_may_depend_on_others(part, change, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text("def plain(log_probs, batch): return -log_probs, {}\n")
    if "policy_loss" in change:
        change = {"terms": loss_terms(change["policy_loss"])}
    assert gradient_function(part, Divisors.of(part), replace(LOSS, **change)) is None


def test_a_custom_loss_may_state_that_it_is_by_token(part, tmp_path):
    file = tmp_path / "stating.py"
    file.write_text("def plain(log_probs, batch): return -log_probs, {}\nplain.by_token = True\n")
    assert gradient_function(part, Divisors.of(part), replace(LOSS, terms=loss_terms(f"{file}:plain"))) is not None


@pytest.fixture(scope="module")
def pairs_of(directories, part):
    """The gradients of each sharded model, by its family and the type that it computes in."""
    return on_ranks(2, sharded, directories, part)[0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", SHARDED)
def test_a_sharded_model_has_the_same_gradient_either_way(pairs_of, family, dtype):
    pairs = pairs_of[family, dtype]
    assert len(pairs) > 20
    for found, right in pairs:
        torch.testing.assert_close(found, right, **({"atol": 0.02, "rtol": 0.02} if dtype == "bfloat16" else {}))


def test_the_loss_is_the_policy_loss_less_the_entropy_bonus_plus_the_kl_of_the_written_tokens(make_batch):
    batch = make_batch(
        [2, 1],
        advantages=[1.0, 2.0, 7.0],
        reference_log_probs=[-1.5, -2.0, -9.0],
        response_mask=[True, True, False],
    )
    outputs = TokenOutputs(torch.tensor([-1.0, -2.0, -3.0]), entropies=torch.tensor([0.5, 1.5, 9.0]))
    loss = LossConfig(loss_terms("gpg", 0.1, "k1", 0.6), "token-sum", 1.0, 1.0, 1.0)
    total, shares = policy_loss(outputs, batch, Divisors.of(batch), loss)
    # -A log p is 1 and 4, the entropies are 0.5 and 1.5, log p less the reference's is 0.5 and 0.
    assert shares == {"pg_loss": 5.0, "entropy_loss": 2.0, "kl_loss": 0.5}
    assert float(total) == pytest.approx(5 - 0.1 * 2 + 0.6 * 0.5)


def test_the_gradient_is_minus_the_advantage_and_zero_for_an_output_that_the_loss_does_not_read(make_batch):
    batch = make_batch([2], advantages=[1.0, 2.0])
    compute = gradient_function(batch, Divisors.of(batch), LossConfig(loss_terms("gpg"), "token-sum", 1.0, 1.0, 1.0))
    outputs = TokenOutputs(torch.tensor([-1.0, -2.0]), torch.tensor([0.5, 1.5]), torch.tensor([0.1, 0.2]))
    for value in outputs[:2]:
        required(value).requires_grad_()
    gradient = required(compute)(outputs, slice(0, 2))
    assert gradient.log_probs.tolist() == [-1, -2]
    assert required(gradient.entropies).tolist() == [0, 0]
    assert gradient.sum_pi_squared is None, "it has no gradient"


def test_the_early_gradient_of_a_span_is_the_same_part_of_the_gradient_of_all_tokens(part):
    loss = replace(LOSS, terms=loss_terms("vanilla", 0.1), aggregation="seq-mean-token-mean")
    compute = required(gradient_function(part, Divisors.of(part), loss))

    def gradient(span: slice) -> Tensor:
        values = torch.linspace(-3, -0.1, 15)
        leaves = [values[span].clone().requires_grad_(), (0.5 - values)[span].clone().requires_grad_()]
        of_log_probs, of_entropies, *_ = compute(TokenOutputs(*leaves), span)
        return torch.stack([of_log_probs, required(of_entropies)])

    parts = [gradient(slice(start, stop)) for start, stop in ((0, 4), (4, 5), (5, 15))]
    assert torch.equal(torch.cat(parts, 1), gradient(slice(0, 15)))
    assert gradient(slice(0, 15)).any(1).all()


def test_a_span_of_tokens_knows_the_rows_of_its_tokens(make_batch):
    batch = make_batch([2, 1, 3], advantages=[1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    span = batch.tokens(slice(1, 4))
    assert span.response_row.tolist() == [0, 1, 2]
    assert required(span.advantages).tolist() == [2.0, 3.0, 4.0]
    assert span.response_lengths.tolist() == [2, 1, 3], "the lengths of whole rows"


def test_a_model_is_given_the_gradient_of_the_loss_but_not_for_rows_that_only_keep_ranks_aligned(part):
    given = []

    def model(inputs, temperature, **options) -> TokenOutputs:
        given.append(options["loss_gradient"])
        return TokenOutputs(torch.zeros(15, requires_grad=True))  # certain tokens

    learner = SimpleNamespace(model=model, early_gradient=True)
    compute = policy_objective(learner, LOSS, hidden_of=pytest.fail, outputs=[])
    total, shares = compute(MicroBatch(part, NO_INPUTS), None)
    assert total.requires_grad and total.item() == 0 and shares == {}
    assert compute(MicroBatch(part, NO_INPUTS), Divisors.of(part))[0].item() != 0
    assert given[0] is None and callable(given[1])


def test_importance_weights_apply_to_the_policy_loss_alone(part):
    """Asynchronous training: the KL and entropy terms are means over the same tokens without weights."""
    terms = loss_terms("vanilla", 0.1, "k3", 0.3)
    log_probs, entropies = part.old_log_probs + 0.05, part.old_log_probs.exp()
    outputs, loss = TokenOutputs(log_probs, entropies=entropies), replace(LOSS, terms=terms)
    shares = [
        policy_loss(outputs, replace(part, importance_weights=weight * torch.ones(15)), Divisors.of(part), loss)[1]
        for weight in (1.0, 2.0)
    ]
    once, twice = ({name: float(value) for name, value in each.items()} for each in shares)
    assert twice["pg_loss"] == pytest.approx(2 * once["pg_loss"]) and once["pg_loss"] != 0
    assert all(twice[name] == once[name] for name in ("kl_loss", "entropy_loss"))


@pytest.mark.parametrize(("factor", "divisor"), [(4.0, 4), (None, 1)])
def test_a_critic_learns_from_each_counted_token_and_an_empty_mini_batch_has_no_gradient(part, factor, divisor):
    values = torch.linspace(-1, 1, 15).requires_grad_()
    learner = SimpleNamespace(model=lambda inputs: values)
    section = SimpleNamespace(cliprange_value=9.0, loss_agg_mode="seq-mean-token-sum-norm", loss_scale_factor=factor)
    rows = replace(part, values=torch.zeros(15), returns=torch.ones(15))
    compute, mask, error = critic_objective(learner, section), part.response_mask, values.detach() - 1
    loss, shares = compute(MicroBatch(rows, NO_INPUTS), Divisors.of(rows))
    loss.backward()
    divisor *= Divisors.of(rows).rows
    assert loss.item() == shares["vf_loss"].item() == pytest.approx(float(0.5 * error[mask].square().sum() / divisor))
    torch.testing.assert_close(values.grad, error * mask / divisor)
    nothing, shares = compute(MicroBatch(rows, NO_INPUTS), None)
    assert nothing.item() == 0 and not shares and not torch.autograd.grad(nothing, values)[0].any()


@pytest.mark.parametrize(("coefficient", "wanted"), [(0.0, False), (0.5, True), (1.0, True)])
def test_an_entropy_bonus_asks_for_entropies_with_their_gradient(part, coefficient, wanted):
    asked: dict[str, object] = {}

    def model(inputs: object, temperature: float, **options: object) -> TokenOutputs:
        asked.update(options)
        return TokenOutputs(*(torch.zeros(15, requires_grad=True) for _ in TokenOutputs._fields))

    learner = SimpleNamespace(model=model)
    terms = loss_terms("vanilla", coefficient)
    objective = policy_objective(learner, replace(LOSS, terms=terms), pytest.fail, [])
    loss, _ = objective(MicroBatch(part, NO_INPUTS), None)
    assert loss.item() == 0 and (asked["entropies"], asked.get("entropy_gradient", False)) == (wanted, wanted)


def masked(mask: str, mode: str | None = None) -> LossConfig:
    """The loss with a further term: twice the entropy of the tokens in a mask."""
    term = LossTerm("extra", ENTROPY.function, 2.0, outputs=ENTROPY.outputs, mask=mask, aggregation=mode)
    return LossConfig((*loss_terms("gpg"), term), "token-mean", 1.0, 1.0, 1.0)


def test_a_term_with_a_mask_is_a_mean_over_its_tokens_alone_however_rows_are_divided(make_batch):
    batch = make_batch([2, 3], advantages=[0.0] * 5, chosen=torch.tensor([True, False, False, True, True]))
    batch.response_mask = torch.tensor([True, True, True, False, True])
    outputs = TokenOutputs(torch.zeros(5), entropies=torch.arange(1.0, 6.0))
    loss, totals = masked("chosen"), Divisors.of(batch, ["chosen"])
    total, shares = policy_loss(outputs, batch, totals, loss)
    assert totals.masked["chosen"] == Divisors(2, 2) and totals.tokens == 4
    assert shares["extra_loss"] == (1 + 5) / 2 and total == 2 * 3
    parts = [(slice(0, 2), [0]), (slice(2, 5), [1])]
    halves = [policy_loss(outputs.map(lambda v, s=s: v[s]), batch.select(r), totals, loss)[0] for s, r in parts]
    assert sum(halves) == total


def test_a_mask_of_rows_counts_an_episode_by_its_rows_within_the_mask(make_batch):
    """One episode of two rows, of which the second, with two tokens, is in the mask, and another of one row."""
    batch = make_batch([2, 2, 1], group=[0, 0, 0], episode=[0, 0, 1], advantages=[0.0] * 5)
    batch = replace(batch, truncated=torch.tensor([False, True, True]))
    batch, totals = batch.with_episode_tokens(["truncated"]), Divisors.of(batch, ["truncated"])
    assert batch.episode_tokens.tolist() == [4, 4, 1] and batch.masked_tokens.tolist() == [[2], [2], [1]]
    outputs = TokenOutputs(torch.zeros(5), entropies=torch.arange(1.0, 6.0))
    _, shares = policy_loss(outputs, batch, totals, masked("truncated", "seq-mean-token-mean"))
    assert shares["extra_loss"] == ((3 + 4) / 2 + 5) / 2


def test_what_the_ranks_are_sent_and_compute_follows_from_the_terms():
    loss = LossConfig(
        (*loss_terms("vanilla", 0.1, "full", 0.3), *masked("chosen").terms[1:]), "token-mean", 1.0, 1.0, 1.0
    )
    assert loss.against == "reference" and loss.masks == ["chosen"]
    assert loss.options == {"entropies": True, "entropy_gradient": True}
    assert {"response_mask", "old_log_probs", "advantages", "chosen"} <= set(loss.reads)


def test_a_correction_has_the_rollouts_log_probs_whatever_the_terms():
    loss = LossConfig(loss_terms(None, teaching=EXACT_TEACHER), "token-mean", 1.0, 1.0, 1.0)
    corrected = replace(loss, correction=RolloutCorrection("token", None, 1.1, False, ()))
    assert "rollout_log_probs" not in loss.reads and "rollout_log_probs" in corrected.reads


def test_a_loss_compares_the_policy_with_one_model_alone(tmp_path, monkeypatch):
    """The table of logits has room for one other model's."""
    (tmp_path / "mine.py").write_text("def mine(log_probs, rows): return -log_probs, {}\nmine.terms = ('pull',)\n")
    other = LossTerm("pull", FULL_KL.function, against="first")
    monkeypatch.setattr(algorithm.plugins, "names", lambda kind: ["pull"])
    monkeypatch.setattr(algorithm.plugins, "load", {"term.pull": other}.__getitem__)
    assert loss_terms(f"{tmp_path}/mine.py:mine", 0.0, "k3")[-1] == other
    with pytest.raises(ConfigError, match=r"one model over the whole vocabulary: pg, kl \(reference\), pull \(first\)"):
        loss_terms(f"{tmp_path}/mine.py:mine", 0.0, "full")


def test_the_mean_divergence_is_that_of_the_tokens_with_a_teacher_and_no_teacher_gives_no_loss(part):
    """At a distance of 2 from the teacher's log-probs of 0; the others, at 9, count nowhere."""
    taught = torch.arange(len(part)) % 2 == 0
    rows = replace(part, carried={"taught": taught, "teacher_log_probs": torch.zeros(len(part.response_ids))})
    term = replace(SAMPLED_TEACHER, parameters={"form": "abs", "most": None}, mask="taught")
    loss = replace(LOSS, terms=loss_terms(None, teaching=term), correction=None)
    outputs = TokenOutputs(torch.where(taught[rows.response_row], -2.0, -9.0))
    total, shares = policy_loss(outputs, rows, Divisors.of(rows, ["taught"]), loss)
    assert float(shares["distillation/kl"]) == pytest.approx(2) and float(total) == pytest.approx(2)
    written = required(part.response_mask)
    share = (written & taught[rows.response_row]).sum() / written.sum()
    assert float(shares["distillation/taught_share"]) == pytest.approx(float(share))
    without = replace(rows, carried={"taught": torch.zeros(len(part), dtype=torch.bool)})
    total, shares = policy_loss(outputs, without, Divisors.of(without, ["taught"]), loss)
    assert float(total) == 0 and "distillation/kl" not in shares


def test_each_of_several_teachers_has_the_mean_divergence_of_its_own_tokens(part):
    """One at a distance of 2 and one of 9; a third teaches no row of this step."""
    numbers = torch.arange(len(part)) % 2
    rows = replace(part, carried={"teacher": numbers, "teacher_log_probs": torch.zeros(len(part.response_ids))})
    names = ("near", "far", "absent")
    term = replace(SAMPLED_TEACHER, parameters={"form": "abs", "most": None, "names": names})
    loss = replace(LOSS, terms=loss_terms(None, teaching=term), correction=None)
    outputs = TokenOutputs(torch.where(numbers[rows.response_row] == 0, -2.0, -9.0))
    _, shares = policy_loss(outputs, rows, Divisors.of(rows, []), loss)
    metrics = {name: float(value) for name, value in shares.items()}
    assert kl_of_teachers(metrics) == pytest.approx({"distillation/near/kl": 2, "distillation/far/kl": 9})
    assert metrics["distillation/near/share"] + metrics["distillation/far/share"] == pytest.approx(1)
    assert metrics["distillation/absent/share"] == 0


def test_a_divergence_is_bounded_on_both_sides(part):
    """log p - log q is -5 at each token; beyond -1 it has no gradient."""
    rows = replace(part, carried={"teacher_log_probs": torch.zeros(len(part.response_ids))})
    loss = replace(
        LOSS,
        correction=None,
        terms=loss_terms(None, teaching=replace(SAMPLED_TEACHER, parameters={"form": "k1", "most": 1.0})),
    )
    outputs = TokenOutputs(torch.full((len(part.response_ids),), -5.0, requires_grad=True))
    total, shares = policy_loss(outputs, rows, Divisors.of(rows, []), loss)
    total.backward()
    assert float(total) == pytest.approx(-1) and float(shares["distillation/clamped_share"]) == pytest.approx(1)
    assert float(shares["distillation/kl"]) == pytest.approx(-5) and not required(outputs.log_probs.grad).any()
