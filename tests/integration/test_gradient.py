"""Invariant 2: the gradient does not depend on how a mini-batch is divided, nor on how many ranks share it."""

import math
from copy import deepcopy
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hybridrl.checkpoint.store import Store
from hybridrl.config.catalog import POLICY_LOSSES
from hybridrl.core.algorithms.algorithm import ForwardSpec, Signal, loss_terms
from hybridrl.core.algorithms.objective import Divisors
from hybridrl.core.algorithms.rollout_correction import Rejection, RolloutCorrection
from hybridrl.core.batch import Batch, as_tensor
from hybridrl.core.cluster import Group, spawn
from hybridrl.core.training import losses
from hybridrl.core.training.learner import RankModel
from hybridrl.core.training.losses import LossConfig
from hybridrl.core.training.planning import MicroBatchBudget, MiniBatch, Pieces, plan
from hybridrl.core.training.worker import TrainWorker
from hybridrl.core.training.worker_group import BrokenUpdates, CriticPlan, PolicyPlan, RankPlan, TrainWorkers
from hybridrl.doctor.replay import response_norms
from hybridrl.required import required
from hybridrl.runs.ranks import build_models
from hybridrl.runs.settings import build_algorithm, build_policy_plan, ppo_worker_config
from tests.core.algorithms.parameters import LOSS_PARAMETERS
from tests.core.training.on_ranks import whole_gradient

LOSS = LossConfig(
    loss_terms("vanilla", 0.01, "k3", 0.05),
    aggregation="token-mean",
    scale=1.0,
    temperature=0.9,
    grad_clip=1.0,
    parameters=LOSS_PARAMETERS,
)


REFERENCE = Signal(("reference_log_probs",), "reference")
# What a critic's loss reads of its section.
VALUE_LOSS = SimpleNamespace(cliprange_value=0.5, loss_agg_mode="token-mean", loss_scale_factor=None, grad_clip=1.0)
MODES = ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


class GradientRank(TrainWorker):
    """A training rank whose gradients can be read."""

    def gradient(
        self, batch: Batch, mini_batch: MiniBatch, loss: LossConfig | SimpleNamespace, padded: bool
    ) -> dict[str, torch.Tensor]:
        if isinstance(loss, LossConfig):
            learner = self.actor
            reject, loss = losses.prepare_rejection(learner, loss)
            objective = self.objective(loss, [])
        else:
            learner, reject = self.models["critic"], None
            objective = losses.critic_objective(learner, loss)
        learner.padded = padded
        return whole_gradient(learner, batch, mini_batch, objective, reject)


def ragged_batch(rows: int = 7) -> Batch:
    generator = torch.Generator().manual_seed(3)
    prompts = torch.randint(2, 9, (rows,), generator=generator)
    responses = torch.randint(1, 21, (rows,), generator=generator)
    tokens = int(responses.sum())
    old = -2 * torch.rand(tokens, generator=generator) - 4
    return Batch(
        prompt_lengths=prompts,
        response_lengths=responses,
        prompt_ids=torch.randint(3, 280, (int(prompts.sum()),), generator=generator),
        response_ids=torch.randint(3, 280, (tokens,), generator=generator),
        group=torch.arange(rows) // 2,
        position=torch.arange(rows) // 2,
        sample=torch.arange(rows) % 2,
        response_mask=torch.rand(tokens, generator=generator) > 0.1,
        old_log_probs=old,
        rollout_log_probs=old - 0.1 * torch.rand(tokens, generator=generator),
        reference_log_probs=old + 0.1,
        advantages=torch.randn(tokens, generator=generator),
        importance_weights=torch.rand(tokens, generator=generator),
        chosen=torch.rand(tokens, generator=generator) > 0.7,
        values=torch.randn(tokens, generator=generator),
        returns=torch.randn(tokens, generator=generator),
    )


@pytest.fixture(scope="module")
def other_model(config, tmp_path_factory) -> str:
    """A model with the same shapes and other weights."""
    torch.manual_seed(1)
    path = str(tmp_path_factory.mktemp("other"))
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(config.actor_rollout_ref.model.path)).save_pretrained(
        path
    )
    return path


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    return tmp_path_factory.mktemp("logs")


@pytest.fixture(scope="module")
def sharing(config):
    """The configuration with sequence parallelism over two ranks."""
    changed = deepcopy(config)
    changed.actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size = 2
    return changed


@pytest.fixture(scope="module")
def groups(config, sharing, session, other_model, logs):
    """Groups of training ranks with the same weights: one rank, two ranks, and two that share rows; each with a critic
    and a reference."""
    built = {}
    for key, ranks, settings in ((1, 1, config), (2, 2, config), ("sharing", 2, sharing)):
        files = [str(logs / f"{key}-{rank}.log") for rank in range(ranks)]
        environment = {"OMP_NUM_THREADS": "1"}
        actors = [spawn(GradientRank, session, r, environment, r, ranks, files[r]) for r in range(ranks)]
        group = Group(actors, "train worker", files)
        worker = ppo_worker_config(settings, build_algorithm(config), logs, steps=1)
        worker = replace(worker, models=three_models(worker.models["actor"], ranks, other_model))
        build_models(group, worker, 120)
        built[key] = group
    return built


def three_models(actor: RankModel, ranks: int, reference: str) -> dict[str, RankModel]:
    actor = replace(actor, fsdp=replace(actor.fsdp, fsdp_size=ranks))
    frozen = replace(actor, model=replace(actor.model, path=reference), trained=None, weights="copy", reads=())
    return {"actor": actor, "reference": frozen, "critic": replace(actor, head="value", reads=())}


def workers_of(groups: dict, key: object, policy: PolicyPlan, critic: CriticPlan | None = None) -> TrainWorkers:
    """Return the models of a group with these plans."""
    budgets, spec = replace(policy.updates.budget, tokens=40), policy.old.spec
    policy = replace(policy, old=replace(policy.old, spec=replace(spec, temperature=policy.loss.temperature)))
    frozen = RankModel(None, None, policy.updates.budget)
    models = {
        "actor": replace(frozen, reads=("routes",)),
        "reference": frozen,
        "critic": replace(frozen, budget=budgets),
    }
    return TrainWorkers(groups[key], RankPlan(models, policy, critic), "float32", 120)


def gradient(
    group: Group, budget: MicroBatchBudget, loss: LossConfig | SimpleNamespace = LOSS, batch: Batch | None = None
) -> dict[str, torch.Tensor]:
    batch = batch or ragged_batch()
    micro_batches = plan(Pieces.single(batch.lengths.tolist()), len(group), budget)
    parts = [(batch, MiniBatch(share, Divisors.of(batch)), loss, budget.padded) for share in micro_batches]
    return group.scatter(GradientRank.gradient, parts, timeout=120)[0]


def gradients_agree(groups, loss: LossConfig | SimpleNamespace, every: int = 1) -> None:
    """Assert that a mini-batch has the same gradient however it is divided; tries every `every`-th division."""
    expected = gradient(groups[1], MicroBatchBudget(10_000), loss)
    norm = torch.sqrt(sum(value.square().sum() for value in expected.values()))
    assert norm > 0.001
    divisions = [
        (groups["sharing"], MicroBatchBudget(60, devices=2)),
        (groups[2], MicroBatchBudget(30)),
        (groups[1], MicroBatchBudget(60, padded=True)),
        (groups[1], MicroBatchBudget(30)),
        (groups[1], MicroBatchBudget(10_000, rows=1)),
        (groups[2], MicroBatchBudget(10_000)),
        (groups[2], MicroBatchBudget(10_000, rows=2, padded=True)),
    ]
    for group, budget in divisions[::every]:
        actual = gradient(group, budget, loss)
        assert actual.keys() == expected.keys()
        difference = torch.sqrt(sum((actual[name] - expected[name]).square().sum() for name in expected))
        assert difference / norm < 3e-6, (len(group), budget)


@pytest.mark.parametrize("mode", MODES)
def test_micro_batches_ranks_and_padding_change_nothing(groups, mode):
    gradients_agree(groups, replace(LOSS, aggregation=mode, scale=24.0))


@pytest.mark.parametrize("mode", MODES)
def test_nor_do_they_for_the_critic(groups, mode):
    section = SimpleNamespace(**vars(VALUE_LOSS) | {"loss_agg_mode": mode, "loss_scale_factor": 24.0})
    gradients_agree(groups, section, every=2)


@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
def test_nor_in_any_policy_loss(groups, name):
    gradients_agree(groups, replace(LOSS, terms=loss_terms(name)), every=3)


def test_nor_with_the_exact_kl_to_the_reference(groups):
    exact = replace(LOSS, terms=loss_terms("vanilla", 0.01, "full", 1.0))
    gradients_agree(groups, exact, every=2)
    losses_ = exact, replace(LOSS, terms=loss_terms("vanilla", 0.01))
    with_it, without = (gradient(groups[1], MicroBatchBudget(30), loss) for loss in losses_)
    assert any((with_it[name] - without[name]).abs().max() > 1e-3 for name in without)


@pytest.mark.parametrize("rejections", [(), (Rejection("token_k2", None, 0.5),)])
def test_nor_if_the_loss_itself_corrects_for_the_rollout(groups, rejections):
    correction = RolloutCorrection("sequence", None, 2.0, False, rejections)
    gradients_agree(
        groups, replace(LOSS, terms=loss_terms("reinforce", 0.01, "k3", 0.05), correction=correction), every=3
    )


def test_a_custom_policy_loss_is_loaded_by_the_workers(groups, tmp_path):
    (tmp_path / "own.py").write_text("def twice(log_probs, batch, clip): return -2 * log_probs, {}\n")
    actual = {
        name: gradient(groups[1], MicroBatchBudget(10_000), replace(LOSS, terms=loss_terms(name)))
        for name in (f"{tmp_path}/own.py:twice", "likelihood")
    }
    for twice, once in zip(*(gradients.values() for gradients in actual.values()), strict=True):
        torch.testing.assert_close(twice, 2 * once)


def test_a_rank_without_rows_does_not_change_the_gradient(groups):
    batch = ragged_batch(1)
    one = MiniBatch([[0]], Divisors.of(batch))
    alone = groups[1].scatter(GradientRank.gradient, [(batch, one, LOSS, False)], timeout=120)[0]
    parts = [(batch, one, LOSS, False), (batch, MiniBatch([[]], Divisors.of(batch)), LOSS, False)]
    shared = groups[2].scatter(GradientRank.gradient, parts, timeout=120)[0]
    for name, value in alone.items():
        torch.testing.assert_close(shared[name], value, rtol=1e-4, atol=1e-7)


def test_the_norm_of_each_row_is_that_of_its_gradient_alone(groups, config, sharing):
    batch, totals = ragged_batch(3), Divisors.of(ragged_batch(3))
    expected = []
    for row in range(3):
        alone = [(batch, MiniBatch([[row]], totals), LOSS, False)]
        gradients = groups[1].scatter(GradientRank.gradient, alone, timeout=120)[0]
        expected.append(math.sqrt(sum(float(value.square().sum()) for value in gradients.values())))
    assert min(expected) > 1e-3
    for key, group in groups.items():
        plan_ = replace(build_policy_plan(sharing if key == "sharing" else config), loss=LOSS)
        workers = workers_of(groups, key, plan_)
        norms, [(rows, total)] = response_norms(workers, batch, step=1)
        assert norms == pytest.approx(expected, rel=1e-4) and sorted(rows) == [0, 1, 2]
        whole = gradient(group, plan_.updates.budget, batch=batch)
        assert total == pytest.approx(math.sqrt(sum(float(value.square().sum()) for value in whole.values())), rel=1e-4)


def test_the_norm_of_an_episode_is_that_of_all_its_rows_and_it_counts_as_one_response(groups, config):
    """In the mean over rows, of which there are two then; and in the mean over a row's tokens, those of the episode."""
    whole, mode = ragged_batch(3), "seq-mean-token-mean"
    batch = replace(whole, episode=torch.tensor([0, 0, 1]), group=torch.tensor([0, 0, 1]))
    counted, totals = batch.with_episode_tokens(), Divisors.of(batch)
    assert totals.rows == 2
    loss = replace(LOSS, aggregation=mode)
    expected = []
    for rows in ([0, 1], [2]):
        part = [(counted, MiniBatch([rows], totals), loss, False)]
        gradients = groups[1].scatter(GradientRank.gradient, part, timeout=120)[0]
        expected.append(math.sqrt(sum(float(value.square().sum()) for value in gradients.values())))
    plan_ = replace(build_policy_plan(config), loss=loss)
    norms, [(responses, _)] = response_norms(workers_of(groups, 1, plan_), batch, step=1)
    assert norms == pytest.approx(expected, rel=1e-4) and responses == [0, 1]


def test_without_advantages_the_gradient_is_exactly_zero(groups, config):
    """Which `optim.skip_zero_gradient` relies on; where neither entropy nor a KL is in the loss."""
    plan_ = replace(build_policy_plan(config), loss=replace(LOSS, terms=loss_terms("vanilla")))
    batch = ragged_batch(3)
    batch.advantages = torch.zeros_like(batch.advantages)
    workers = workers_of(groups, 2, plan_)
    assert response_norms(workers, batch, step=1) == ([0.0] * 3, [([0, 1, 2], 0.0)])


def test_a_dummy_row_cannot_spoil_an_update(groups):
    """The first rank has no row of the mini-batch; its dummy row would give a NaN."""
    batch = ragged_batch(2)
    batch.advantages[: batch.response_lengths[0]] = torch.nan
    totals = Divisors.of(batch.select([1]))
    parts = [(batch, MiniBatch([[]], totals), LOSS, False), (batch, MiniBatch([[1]], totals), LOSS, False)]
    actual = groups[2].scatter(GradientRank.gradient, parts, timeout=120)[0]
    alone = groups[1].scatter(GradientRank.gradient, [(batch, MiniBatch([[1]], totals), LOSS, False)], timeout=120)[0]
    for name, value in alone.items():
        torch.testing.assert_close(actual[name], value, rtol=1e-4, atol=1e-7)


def test_values_of_tokens_that_are_not_trained_on_cannot_spoil_an_update(groups):
    batch = ragged_batch()
    expected = gradient(groups[1], MicroBatchBudget(10_000))
    unwritten = ~batch.response_mask
    for name in ("old_log_probs", "advantages", "reference_log_probs"):
        vars(batch)[name][unwritten] = torch.nan
    mini_batch = MiniBatch([list(range(len(batch)))], Divisors.of(batch))
    actual = groups[1].scatter(GradientRank.gradient, [(batch, mini_batch, LOSS, False)], timeout=120)[0]
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("rows", [1, 7])
def test_every_forward_pass_fills_its_fields_even_if_a_rank_has_no_rows(groups, config, sharing, rows):
    """One row on two ranks, or shared by them, gives the same as on one rank."""
    batch, results = ragged_batch(rows), {}
    for key in groups:
        plan_ = build_policy_plan(sharing if key == "sharing" else config)
        everything = ForwardSpec(entropies=True, sum_pi_squared=True, against="reference")
        workers = workers_of(groups, key, replace(plan_, old=replace(plan_.old, spec=everything)))
        filled = workers.fill(workers.fill(workers.forward_log_probs(batch), REFERENCE), Signal(("values",), "critic"))
        results[key] = filled
        kl = required(filled.reference_kl)
        assert (kl > -1e-5).all() and kl.mean() > 1e-4
        assert (required(filled.old_log_probs) - required(filled.reference_log_probs)).abs().max() > 1e-3
    for name in ("old_log_probs", "entropies", "sum_pi_squared", "reference_kl", "reference_log_probs", "values"):
        for several in (results[2], results["sharing"]):
            torch.testing.assert_close(vars(results[1])[name], vars(several)[name], rtol=1e-4, atol=1e-5)


def test_a_refreshed_reference_is_the_policy(groups, config):
    """Changes the reference for the tests that follow."""
    workers = workers_of(groups, 2, build_policy_plan(config))
    workers.refresh("reference", 1.0)
    filled = workers.fill(workers.forward_log_probs(ragged_batch()), REFERENCE)
    torch.testing.assert_close(filled.reference_log_probs, filled.old_log_probs, rtol=1e-5, atol=1e-6)


def test_log_probs_are_the_same_on_one_and_two_ranks(groups):
    batch = ragged_batch()
    lengths = batch.lengths.tolist()
    actual = {}
    for ranks in (1, 2):
        group = groups[ranks]
        shares = plan(Pieces.single(lengths), ranks, MicroBatchBudget(40))
        parts = [("actor", batch, share, ForwardSpec(0.9)) for share in shares]
        by_rank = group.scatter(TrainWorker.forward, parts, timeout=120)
        rows = [row for share in shares for rows_ in share for row in rows_]
        values = torch.cat([as_tensor(columns[0]) for columns, _ in by_rank])
        order = batch.select(rows)
        by_row = dict(zip(rows, values.split(order.response_lengths.tolist()), strict=True))
        actual[ranks] = torch.cat([by_row[row] for row in range(len(batch))])
    torch.testing.assert_close(actual[1], actual[2], rtol=1e-5, atol=1e-6)


def test_an_update_gives_the_same_on_one_two_and_two_ranks_that_share_rows(groups, config, sharing):
    """Its metrics, and the old log-probs that it fills."""
    actual = {}
    for key in groups:
        plan_ = replace(build_policy_plan(sharing if key == "sharing" else config), loss=LOSS)
        workers = workers_of(groups, key, plan_, CriticPlan(VALUE_LOSS, plan_.updates))
        filled, metrics = workers.update_policy(replace(ragged_batch(), old_log_probs=None), step=1)
        metrics |= workers.update_critic(filled, step=1)
        actual[key] = {name: value for name, value in metrics.items() if not name.startswith(("timing_s", "perf"))}
        actual[key]["old_log_probs"] = required(filled.old_log_probs).tolist()
    assert {"actor/grad_norm", "actor/pg_loss", "critic/vf_loss"} <= actual[1].keys()
    for key in (2, "sharing"):
        assert actual[key] == {name: pytest.approx(value, rel=1e-4, abs=1e-5) for name, value in actual[1].items()}


@pytest.mark.parametrize("ranks", [1, 2, "sharing"])
def test_an_update_that_is_not_finite_is_skipped_counted_and_its_rows_written(
    groups, config, sharing, logs, tmp_path, ranks
):
    plan_ = build_policy_plan(sharing if ranks == "sharing" else config)
    plan_ = replace(plan_, updates=replace(plan_.updates, prompts_per_update=2), loss=LOSS)
    workers = workers_of(groups, ranks, plan_)
    store = Store(tmp_path)
    batch = ragged_batch()
    batch.advantages[0] = torch.nan  # in the first of the two updates
    budget = replace(plan_.updates.budget, tokens=10_000)
    before = gradient(groups[ranks], budget)
    workers.update_mini_batches(batch, [[0, 1, 2, 3]], LOSS, step=1)
    assert workers.skipped_in_a_row["actor"] == 1
    after = gradient(groups[ranks], budget)
    assert all(torch.equal(before[name], after[name]) for name in before), "a skipped update changes no weight"
    (file,) = (logs / "skipped_updates").glob("actor-step-1-update-1-rank-*.pt")
    rows = torch.load(file, weights_only=True)
    assert rows["advantages"].isnan().sum() == 1
    workers.stop_if_broken(2, store.directory, store.last)
    updates = workers.update_policy(batch, step=2)
    metrics = updates[1]
    assert metrics["actor/skipped_updates"] == 1
    assert all(math.isfinite(value) for value in metrics.values())
    assert workers.skipped_in_a_row["actor"] == 0, "the second update of the step was finite"
    for step in (3, 4):
        workers.update_mini_batches(batch, [[0, 1, 2, 3]], LOSS, step)
    with pytest.raises(BrokenUpdates, match=r"2 updates in a row .* there is no good checkpoint: start again with"):
        workers.stop_if_broken(2, store.directory, store.last)
    for file in (logs / "skipped_updates").iterdir():
        file.unlink()


@pytest.mark.parametrize("level", ["token", "geometric"])
def test_an_update_weights_its_tokens_by_itself_as_after_a_forward_pass(groups, config, level):
    correction = RolloutCorrection(level, None, 2.0, False, ())
    workers = workers_of(groups, 1, replace(build_policy_plan(config), loss=LOSS, correction=correction))
    batch = replace(ragged_batch(), old_log_probs=None, importance_weights=None)
    expected, metrics = correction.apply(workers.forward_log_probs(batch))
    assert required(expected.importance_weights).std() > 0.1, "otherwise there would be nothing to weight"
    own = replace(LOSS, old_from_update=True, correction=correction)
    by_update, by_pass = (
        gradient(groups[1], MicroBatchBudget(30), loss, rows) for loss, rows in ((own, batch), (LOSS, expected))
    )
    for name, value in by_pass.items():
        torch.testing.assert_close(by_update[name], value, rtol=1e-4, atol=1e-7)
    updated, of_update = workers.update_policy(batch, step=1)
    torch.testing.assert_close(updated.importance_weights, expected.importance_weights)
    assert {name: of_update[name] for name in metrics} == pytest.approx(metrics, rel=1e-4)
