"""The gradient of learning from teachers, in whole training ranks, against models in float64."""

import json
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from hybridrl.checkpoint.read import read_shards
from hybridrl.config import load_ppo_config
from hybridrl.config.catalog import Divergence, LossTerm
from hybridrl.core.algorithms.algorithm import ForwardSpec, Signal, loss_terms
from hybridrl.core.algorithms.rollout_correction import Rejection, RolloutCorrection
from hybridrl.core.batch import Batch
from hybridrl.core.carried import CONTEXT, CONTEXT_LENGTHS, TEACHER
from hybridrl.core.cluster import Group, spawn
from hybridrl.core.training import losses
from hybridrl.core.training.fsdp import full_tensor
from hybridrl.core.training.learner import RankModel
from hybridrl.core.training.losses import LossConfig
from hybridrl.core.training.packing import as_read
from hybridrl.core.training.planning import Forest, MicroBatchBudget, MiniBatch, rank_mini_batches
from hybridrl.core.training.worker import TrainWorker
from hybridrl.core.training.worker_group import RankPlan, TrainWorkers
from hybridrl.required import required
from hybridrl.runs.ranks import build_models
from hybridrl.runs.settings import build_algorithm, build_policy_plan, ppo_worker_config, teaching_term
from tests.core.training.head_cases import diverge, of_top, top_of
from tests.core.training.on_ranks import begin_alike, whole_gradient
from tests.integration.test_resume import compared_metrics
from tests.integration.test_run import driver_of, finish, start, wait_for_step

NAMES = ("teacher.same", "teacher.larger")  # of the policy's shape; wider, and with 64 rows more in its head
TEMPERATURE, SCALE, ROWS = 0.7, 24.0, 7
MODES = ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
KINDS = [Divergence("reverse_kl"), Divergence("forward_kl"), Divergence("jsd", 0.3)]


class TaughtRank(TrainWorker):
    """A training rank whose gradients can be read."""

    def gradient(self, batch: Batch, mini_batch: MiniBatch, loss: LossConfig) -> dict[str, Tensor]:
        reject, loss = losses.prepare_rejection(self.actor, loss)
        return whole_gradient(self.actor, batch, mini_batch, self.objective(loss, []), reject)

    def inner_halves(self) -> dict[str, Tensor]:
        """The halves of the adapters that read the layers' inputs, by layer."""
        named = self.actor.model.named_parameters()
        return {name.partition(".lora_A")[0]: full_tensor(value.detach()) for name, value in named if ".lora_A" in name}


@pytest.fixture(scope="module")
def paths(config, tmp_path_factory) -> dict[str, str]:
    """The directories of the teachers."""
    made = {}
    for number, (name, more) in enumerate(zip(NAMES, (0, 64), strict=True)):
        settings = AutoConfig.from_pretrained(config.actor_rollout_ref.model.path)
        settings.vocab_size += more
        settings.hidden_size += more
        torch.manual_seed(number + 1)
        made[name] = str(tmp_path_factory.mktemp(name))
        AutoModelForCausalLM.from_config(settings).save_pretrained(made[name])
    return made


LAYOUTS = {
    "one": (1, {}),
    "two": (2, {}),
    "sharing": (2, {"ulysses_sequence_parallel_size": 2}),
    "four": (4, {}),
    "divided": (2, {"tensor_parallel_size": 2}),
    "padded": (2, {}),  # the policy's rows; its teachers' are packed
    "adapters": (2, {}),
}


def built(config, session, logs: Path, keys: Sequence[str], frozen: Callable[[RankModel], dict[str, RankModel]]):
    """Groups of ranks by layout; `frozen` returns the models next to the policy."""
    groups = {}
    for key in keys:
        ranks, sizes = LAYOUTS[key]
        files = [str(logs / f"{key}-{rank}.log") for rank in range(ranks)]
        actors = [spawn(TaughtRank, session, r % 2, {"OMP_NUM_THREADS": "1"}, r, ranks, files[r]) for r in range(ranks)]
        groups[key] = Group(actors, "train worker", files)
        worker = ppo_worker_config(config, build_algorithm(config), logs, steps=1)
        whole = worker.models["actor"]
        shards = ranks // sizes.get("tensor_parallel_size", 1)
        whole = replace(whole, fsdp=replace(whole.fsdp, fsdp_size=shards, **sizes))
        actor = replace(whole, model=replace(whole.model, use_remove_padding=False)) if key == "padded" else whole
        if key == "adapters":
            actor = replace(whole, model=replace(whole.model, lora_rank=3, lora_alpha=6))
        build_models(groups[key], replace(worker, models={"actor": actor, **frozen(whole)}), 120)
    return groups


@pytest.fixture(scope="module")
def others(paths) -> Callable[[RankModel], dict[str, RankModel]]:
    """The teachers of NAMES."""
    return lambda actor: {
        name: replace(actor, model=replace(actor.model, path=paths[name]), trained=None) for name in NAMES
    }


@pytest.fixture(scope="module")
def groups(config, session, others, tmp_path_factory) -> dict[str, Group]:
    """One rank, two ranks, and two that share rows (Ulysses)."""
    return built(config, session, tmp_path_factory.mktemp("logs"), ("one", "two", "sharing"), others)


@pytest.fixture(scope="module")
def exact_models(config, paths) -> dict[str, torch.nn.Module]:
    """Policy and teachers in float64."""
    places = {"actor": config.actor_rollout_ref.model.path, **paths}
    return {name: AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64) for name, path in places.items()}


def rows_of(teachers: list[int] | None) -> Batch:
    """Seven rows of different lengths, whose responses have tokens that the policy did not write."""
    generator = torch.Generator().manual_seed(3)
    prompts = torch.randint(2, 9, (ROWS,), generator=generator)
    responses = torch.randint(1, 21, (ROWS,), generator=generator)
    tokens = int(responses.sum())
    numbers = torch.tensor(teachers or [])
    batch = Batch(
        prompt_lengths=prompts,
        response_lengths=responses,
        prompt_ids=torch.randint(3, 280, (int(prompts.sum()),), generator=generator),
        response_ids=torch.randint(3, 280, (tokens,), generator=generator),
        group=torch.arange(ROWS),
        position=torch.arange(ROWS),
        sample=torch.zeros(ROWS, dtype=torch.int64),
        response_mask=torch.rand(tokens, generator=generator) > 0.1,
        old_log_probs=torch.full((tokens,), -5.0),
        importance_weights=torch.rand(tokens, generator=generator),
        carried={TEACHER: numbers, "taught": numbers >= 0} if teachers else {},
    )
    shortest = batch.lengths.tolist()
    pairs = ((1, 0), (3, 2), (4, 3), (6, 5))
    return begin_alike(batch, *((row, other, min(shortest[row], shortest[other]) - 1) for row, other in pairs))


def loss_of(term: LossTerm, mode: str = "token-mean") -> LossConfig:
    """The loss of this term alone."""
    terms = loss_terms(None, teaching=term)
    exact = NAMES if term.against == TEACHER else ()
    return LossConfig(terms, mode, SCALE, TEMPERATURE, grad_clip=1.0, parameters={}, teachers=exact)


def term_of(config, **keys) -> LossTerm:
    section = deepcopy(config.distillation)
    section.enabled = True
    for key, value in {"use_task_rewards": False, **keys}.items():
        setattr(section.distillation_loss, key, value)
    return teaching_term(section)


def gradient(group: Group, batch: Batch, loss: LossConfig, budget: MicroBatchBudget) -> dict[str, Tensor]:
    forest = Forest.of([as_read(batch, ()), as_read(batch, (CONTEXT,))])
    options = {"masks": loss.masks, "teachers": loss.teachers, "forest": forest}
    plans = rank_mini_batches(batch, len(group), [range(len(batch))], budget, **options)
    counted = batch.with_episode_tokens(loss.masks)
    parts = [(counted, mini_batch, loss) for (mini_batch,) in plans]
    return group.scatter(TaughtRank.gradient, parts, timeout=120)[0]


def teacher_log_probs(models, batch: Batch, numbers: list[int]) -> Tensor:
    """The teachers' log-probs of the response tokens, 0 where a row has none, in float64."""
    values = []
    for row, number in enumerate(numbers):
        log_p, ids = _log_probs(models[NAMES[number]], batch, row)
        values.append(log_p.gather(-1, ids[:, None]).squeeze(-1).detach() if number >= 0 else torch.zeros(len(ids)))
    return torch.cat([value.double() for value in values])


def _log_probs(model: torch.nn.Module, batch: Batch, row: int) -> tuple[Tensor, Tensor]:
    """The log-probs of a row's predictors [response tokens, vocabulary], and its response."""
    one = batch.select([row])
    ids = torch.cat([one.prompt_ids, one.response_ids])
    logits = model(input_ids=ids[None]).logits[0, len(one.prompt_ids) - 1 : -1]
    return (logits / TEMPERATURE).log_softmax(-1), one.response_ids


def expected_gradient(models, batch: Batch, numbers: list[int], mode: str, kind: Divergence) -> dict[str, Tensor]:
    """The gradient of the mean divergence, one row at a time, weighted by the definition of the mode."""
    policy = models["actor"]
    policy.zero_grad()
    masks = [required(batch.select([row]).response_mask).double() for row in range(ROWS)]
    counted = [row for row in range(ROWS) if numbers[row] >= 0 and masks[row].sum() > 0]
    tokens = sum(float(masks[row].sum()) for row in counted)
    for row in counted:
        log_p, _ = _log_probs(policy, batch, row)
        log_q, _ = _log_probs(models[NAMES[numbers[row]]], batch, row)
        common = log_q.detach()[:, : log_p.shape[1]].log_softmax(-1)
        of_row = float(masks[row].sum())
        weight = {
            "token-mean": 1 / tokens,
            "token-sum": 1.0,
            "seq-mean-token-sum": 1 / len(counted),
            "seq-mean-token-mean": 1 / (len(counted) * of_row),
            "seq-mean-token-sum-norm": 1 / (len(counted) * SCALE),
        }[mode]
        (weight * (masks[row] * diverge(log_p, common, kind)).sum()).backward()
    return {name: value.grad.clone() for name, value in policy.named_parameters() if value.grad is not None}


def distance(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The norm of the difference over the norm."""
    names = {name: next(other for other in actual if other.endswith(name)) for name in expected}
    gaps = sum(float((actual[names[name]].double() - expected[name].double()).square().sum()) for name in expected)
    return (gaps / sum(float(value.double().square().sum()) for value in expected.values())) ** 0.5


UNEVEN = [0, 0, 1, 0, 0, 0, 0]
LEFT_OUT = [0, -1, 1, 0, -1, 0, 1]
DIVISIONS = [
    ("one", MicroBatchBudget(10_000)),
    ("one", MicroBatchBudget(10_000, rows=1)),
    ("two", MicroBatchBudget(30)),
    ("sharing", MicroBatchBudget(60, devices=2)),
]


@pytest.mark.parametrize("numbers", [UNEVEN, LEFT_OUT], ids=["all", "some"])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_exact_divergences_have_the_gradient_of_models_in_float64(groups, config, exact_models, kind, numbers):
    term = term_of(config, loss_mode=kind.kind, beta=kind.beta)
    term = replace(term, mask="taught" if -1 in numbers else "")
    batch = rows_of(numbers)
    for mode in MODES:
        expected = expected_gradient(exact_models, batch, numbers, mode, kind)
        for key, budget in DIVISIONS if mode == "token-mean" else DIVISIONS[2:3]:
            actual = gradient(groups[key], batch, loss_of(term, mode), budget)
            assert distance(actual, expected) <= 1e-5, (mode, key, budget)


@pytest.mark.parametrize("least", [None, -6.0])
def test_the_divergence_over_most_probable_tokens_has_the_gradient_of_models_in_float64(
    groups, config, exact_models, least
):
    batch, policy = rows_of([0] * ROWS), exact_models["actor"]
    tables = [top_of(_log_probs(exact_models[NAMES[1]], batch, row)[0].detach().float(), 5) for row in range(ROWS)]
    batch = batch.put("teacher_top", torch.cat([table.hidden for table in tables]))
    policy.zero_grad()
    of_rows = [of_top(_log_probs(policy, batch, row)[0], tables[row], least) for row in range(ROWS)]
    mask = required(batch.response_mask).double()
    (torch.cat(of_rows) * mask / mask.sum()).sum().backward()
    expected = {name: value.grad.clone() for name, value in policy.named_parameters() if value.grad is not None}
    term = term_of(config, loss_mode="forward_kl_topk", log_prob_min_clamp=least)
    for key, budget in DIVISIONS:
        assert distance(gradient(groups[key], batch, loss_of(term), budget), expected) <= 1e-5, (key, budget)


@pytest.mark.slow
def test_an_adapters_gradient_is_that_of_the_weights_projected_to_it(config, session, others, exact_models, tmp_path):
    """At first W + s B A = W, as B is 0, so that dB = s dW A^T."""
    rank, alpha = 3, 6
    group = built(config, session, tmp_path, ["adapters"], others)["adapters"]
    layers = group.scatter(TaughtRank.inner_halves, [()] * len(group), timeout=120)[0]
    term = replace(term_of(config, loss_mode="reverse_kl"), mask="taught")
    whole = expected_gradient(exact_models, rows_of(LEFT_OUT), LEFT_OUT, "token-mean", KINDS[0])
    expected = {}
    for layer, half in layers.items():
        name = next(name for name in whole if layer.endswith(name.removesuffix(".weight")))
        expected[f"{layer}.lora_B.default.weight"] = alpha / rank * whole[name] @ half.double().T
    actual = gradient(group, rows_of(LEFT_OUT), loss_of(term), MicroBatchBudget(30))
    assert len(expected) > 4 and distance(actual, expected) <= 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("key", "budget"),
    [
        ("four", MicroBatchBudget(30)),
        ("divided", MicroBatchBudget(60, devices=2, tensor=2)),
        ("padded", MicroBatchBudget(60, padded=True)),
    ],
)
def test_the_gradient_is_the_same_in_further_layouts(config, session, others, exact_models, tmp_path, key, budget):
    group = built(config, session, tmp_path, [key], others)[key]
    for kind, numbers in zip(KINDS, (UNEVEN, LEFT_OUT, LEFT_OUT), strict=True):
        term = replace(term_of(config, loss_mode=kind.kind, beta=kind.beta), mask="taught" if -1 in numbers else "")
        expected = expected_gradient(exact_models, rows_of(numbers), numbers, "seq-mean-token-mean", kind)
        actual = gradient(group, rows_of(numbers), loss_of(term, "seq-mean-token-mean"), budget)
        assert distance(actual, expected) <= 1e-5, kind


@pytest.mark.slow
def test_a_dense_model_teaches_a_mixture_whose_experts_are_divided(overrides, mixture, session, paths, tmp_path):
    name, fsdp = NAMES[0], "actor_rollout_ref.actor.fsdp_config"
    more = {
        "actor_rollout_ref.model.path": mixture,
        f"{fsdp}.expert_parallel_size": 2,
        "distillation.enabled": True,
        "+distillation.teacher_models.same.model_path": paths[name],
        "actor_rollout_ref.ref.model.path": paths[name],
        "actor_rollout_ref.actor.use_kl_loss": True,
    }
    config = load_ppo_config(overrides(tmp_path, more))
    files = [str(tmp_path / f"{rank}.log") for rank in range(2)]
    actors = [spawn(TaughtRank, session, rank, {"OMP_NUM_THREADS": "1"}, rank, 2, files[rank]) for rank in range(2)]
    group, worker = (
        Group(actors, "train worker", files),
        ppo_worker_config(config, build_algorithm(config), tmp_path, 1),
    )
    sizes = {each: entry.fsdp.expert_parallel_size for each, entry in worker.models.items()}
    assert sizes == {"actor": 2, "reference": 1, name: 1}
    build_models(group, worker, 120)
    places = {"actor": mixture, name: paths[name]}
    options = {"dtype": torch.float64, "experts_implementation": "eager"}
    models = {key: AutoModelForCausalLM.from_pretrained(path, **options) for key, path in places.items()}
    term, numbers = term_of(config, loss_mode="forward_kl"), [0] * ROWS
    expected = expected_gradient(models, rows_of(numbers), numbers, "token-mean", Divergence("forward_kl"))
    loss = replace(loss_of(term), teachers=(name,))
    actual = gradient(group, rows_of(numbers), loss, MicroBatchBudget(30))
    assert distance(actual, expected) <= 1e-5


def test_rejected_tokens_count_in_no_divisor_though_they_leave_rows_of_one_teacher_only(groups, config, exact_models):
    batch, kind = rows_of(UNEVEN), KINDS[0]
    log_p = [_log_probs(exact_models["actor"], batch, row) for row in range(ROWS)]
    sampled = torch.cat([each.gather(-1, ids[:, None]).squeeze(-1) for each, ids in log_p]).detach().float()
    of_first = batch.response_row != UNEVEN.index(1)
    batch = replace(batch, rollout_log_probs=sampled + 3.0 * of_first)
    term = replace(term_of(config, loss_mode=kind.kind), mask="taught")
    correction = RolloutCorrection(None, None, 2.0, False, (Rejection("token_k2", None, 0.5),))
    left = replace(batch, response_mask=required(batch.response_mask) & ~of_first)
    for mode in MODES:
        expected = expected_gradient(exact_models, left, UNEVEN, mode, kind)
        loss = replace(loss_of(term, mode), correction=correction)
        actual = gradient(groups["two"], batch, loss, MicroBatchBudget(30))
        assert distance(actual, expected) <= 1e-5, mode


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("form", ["abs", "k2", "k3", "k3+", "k1"])
def test_sampled_divergences_as_losses_and_as_rewards(groups, config, exact_models, form, mode):
    batch = rows_of(None)
    numbers = [1] * ROWS
    teacher = teacher_log_probs(exact_models, batch, numbers)
    batch = batch.put("teacher_log_probs", teacher.float())
    for as_reward in {form == "k1", "+" not in form and form != "k2"}:
        term = term_of(config, loss_mode=form, use_policy_gradient=as_reward, loss_max_clamp=3.0)
        loss = loss_of(term, mode)
        actual = gradient(groups["two"], batch, loss, MicroBatchBudget(30))
        expected = _sampled(exact_models["actor"], batch, teacher, form, mode, as_reward=as_reward)
        assert distance(actual, expected) <= 1e-5


def _sampled(policy, batch: Batch, teacher: Tensor, form: str, mode: str, *, as_reward: bool) -> dict[str, Tensor]:
    policy.zero_grad()
    log_p = torch.cat(
        [lp.gather(-1, ids[:, None]).squeeze(-1) for lp, ids in (_log_probs(policy, batch, row) for row in range(ROWS))]
    )
    gap = log_p - teacher
    k2, k3 = gap.square() / 2, (-gap).exp() - 1 + gap
    value = {"k1": gap, "abs": gap.abs(), "k2": k2, "k3": k3, "k3+": k3.detach() + k2 - k2.detach()}[form]
    value = value.clamp(-3.0, 3.0)
    if as_reward:
        ratio, advantage = (log_p - batch.old_log_probs).exp(), -value.detach()
        worse = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2))
        value = torch.where(advantage < 0, torch.minimum(worse, -3.0 * advantage), worse) * batch.importance_weights
    mask = required(batch.response_mask).double()
    of_rows = [part.sum() for part in mask.split(batch.response_lengths.tolist())]
    rows = sum(float(each > 0) for each in of_rows)
    of_row = torch.cat([total.expand(n) for total, n in zip(of_rows, batch.response_lengths.tolist(), strict=True)])
    weights = {
        "token-mean": mask / mask.sum(),
        "token-sum": mask,
        "seq-mean-token-sum": mask / rows,
        "seq-mean-token-mean": mask / (rows * of_row.clamp(min=1)),
        "seq-mean-token-sum-norm": mask / (rows * SCALE),
    }[mode]
    (weights * torch.where(mask > 0, value, 0.0)).sum().backward()
    return {name: value.grad.clone() for name, value in policy.named_parameters() if value.grad is not None}


def test_the_signal_of_each_teacher_fills_its_rows(groups, config, exact_models):
    batch, models = rows_of(LEFT_OUT), {"actor": RankModel(None, None, MicroBatchBudget(40))}
    models |= {name: replace(models["actor"], reads=()) for name in NAMES}
    workers = TrainWorkers(groups["two"], RankPlan(models, build_policy_plan(config)), "float32", 120)
    for number, name in enumerate(NAMES):
        signal = Signal(("teacher_log_probs",), name, ForwardSpec(TEMPERATURE), (TEACHER, number), "teacher")
        batch = workers.fill(batch, signal)
    filled, row = required(batch.value("teacher_log_probs")), batch.response_row
    right = teacher_log_probs(exact_models, batch, LEFT_OUT)
    taught = torch.tensor(LEFT_OUT)[row] >= 0
    torch.testing.assert_close(filled[taught], right[taught].float(), rtol=1e-4, atol=1e-5)


def test_a_nan_on_a_token_that_the_policy_did_not_write_reaches_no_gradient(groups, config):
    batch = rows_of(None).put("teacher_log_probs", torch.full((int(rows_of(None).response_lengths.sum()),), -4.0))
    loss, budget = loss_of(term_of(config, loss_mode="k3")), MicroBatchBudget(30)
    expected = gradient(groups["two"], batch, loss, budget)
    spoiled = torch.where(required(batch.response_mask), required(batch.value("teacher_log_probs")), torch.nan)
    actual = gradient(groups["two"], batch.put("teacher_log_probs", spoiled), loss, budget)
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


# -- a teacher with a context: the policy itself, or an average of its weights -----------------------------------------

LIVE, MEAN = "teacher.live", "teacher.mean"


@pytest.fixture(scope="module")
def own_groups(config, session, tmp_path_factory) -> dict[str, Group]:
    """Ranks as in `groups`, whose teachers are the policy and an average of it; both read contexts."""

    def frozen(actor: RankModel) -> dict[str, RankModel]:
        plain = replace(actor, trained=None, reads=(CONTEXT,))
        return {LIVE: replace(plain, weights="live"), MEAN: replace(plain, weights="average")}

    return built(config, session, tmp_path_factory.mktemp("own"), ("one", "two", "sharing"), frozen)


def with_contexts(batch: Batch) -> Batch:
    """Contexts that are longer and shorter than the prompts; the third row has none."""
    lengths = torch.tensor([30, 3, 0, 17, 1, 9, 40])
    ids = torch.randint(3, 280, (int(lengths.sum()),), generator=torch.Generator().manual_seed(7))
    numbers = torch.where(lengths > 0, 0, -1)
    fields = {CONTEXT: ids.int(), CONTEXT_LENGTHS: lengths, TEACHER: numbers, "taught": numbers >= 0}
    return replace(batch, carried=fields)


@pytest.mark.parametrize("name", [LIVE, MEAN])
def test_a_policy_learns_from_itself_with_a_context(own_groups, config, exact_models, name):
    batch, mode, kind = with_contexts(rows_of(None)), "seq-mean-token-mean", Divergence("reverse_kl")
    term = replace(term_of(config, loss_mode=kind.kind), mask="taught")
    policy = exact_models["actor"]
    policy.zero_grad()
    read, taught = batch.in_context(), [row for row in range(ROWS) if batch.carried["taught"][row]]
    masks = {row: required(batch.select([row]).response_mask).double() for row in taught}
    taught = [row for row in taught if masks[row].sum() > 0]
    for row in taught:
        log_p, log_q = _log_probs(policy, batch, row)[0], _log_probs(policy, read, row)[0].detach()
        of_row = (masks[row] * diverge(log_p, log_q, kind)).sum() / masks[row].sum()
        (of_row / len(taught)).backward()
    expected = {name: value.grad.clone() for name, value in policy.named_parameters() if value.grad is not None}
    loss = replace(loss_of(term, mode), teachers=(name,))
    for key, budget in DIVISIONS:
        assert distance(gradient(own_groups[key], batch, loss, budget), expected) <= 1e-5, (key, budget)


def test_the_log_probs_of_a_teacher_are_those_of_the_response_after_its_context(own_groups, config, exact_models):
    batch = with_contexts(rows_of(None))
    models = {LIVE: RankModel(None, None, MicroBatchBudget(40), reads=(CONTEXT,))}
    workers = TrainWorkers(own_groups["two"], RankPlan(models, build_policy_plan(config)), "float32", 120)
    signal = Signal(("teacher_log_probs",), LIVE, ForwardSpec(TEMPERATURE), (TEACHER, 0), "teacher")
    filled, read = required(workers.fill(batch, signal).value("teacher_log_probs")), batch.in_context()
    for row in range(ROWS):
        log_q, ids = _log_probs(exact_models["actor"], read, row)
        right = log_q.gather(-1, ids[:, None]).squeeze(-1).detach().float()
        right = right if batch.carried["taught"][row] else torch.zeros_like(right)
        torch.testing.assert_close(filled[batch.response_row == row], right, rtol=1e-4, atol=1e-5)


@pytest.mark.drill
def test_a_killed_run_of_an_average_and_another_model_ends_as_one_that_was_never_killed(overrides, tiny, tmp_path):
    """Their names are those of other models of a run, which has a critic too."""
    rows = [json.loads(line) for line in (tiny / "train.jsonl").read_text().splitlines()[:64]]
    kinds = ({**row, "kind": "abc"[number % 3]} for number, row in enumerate(rows))
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kinds))

    def arguments(directory: Path) -> list[str]:
        mean, other, start = (f"+distillation.teacher_models.{name}" for name in ("actor", "reference", "critic"))
        more = {
            "data.train_files": tmp_path / "rows.jsonl",
            "trainer.n_gpus_per_node": 1,
            "trainer.total_training_steps": 4,
            "trainer.save_freq": 1,
            "actor_rollout_ref.actor.ppo_mini_batch_size": 4,
            "actor_rollout_ref.actor.checkpoint.save_contents": "[model,optimizer,extra]",
            "distillation.enabled": True,
            "distillation.teacher_key": "kind",
            f"{mean}.key": "a",
            f"{mean}.model_path": "policy",
            f"{mean}.ema": 0.1,
            f"{mean}.context": "[sibling]",
            f"{mean}.threshold": -1e9,
            f"{other}.key": "b",
            f"{other}.model_path": tiny / "model",
            f"{start}.key": "c",
            f"{start}.model_path": "base",
            "algorithm.adv_estimator": "gae",
            "critic.ppo_mini_batch_size": 4,
            "critic.checkpoint.save_contents": "[model,optimizer,extra]",
        }
        return overrides(directory, more)

    unbroken, killed = tmp_path / "unbroken", tmp_path / "killed"
    finish(start("main_ppo", arguments(unbroken)))
    process = start("main_ppo", arguments(killed))
    wait_for_step(process, killed, 2)
    driver_of(process).kill()
    process.communicate(timeout=60)
    finish(start("main_ppo", arguments(killed)))
    assert compared_metrics(killed) == compared_metrics(unbroken)
    for values in compared_metrics(killed).values():
        assert values["distillation/without_context"] == 0
        assert {f"distillation/{name}/kl" for name in ("actor", "reference", "critic")} <= values.keys()
    last = [place / "global_step_4" for place in (killed, unbroken)]
    saved = {"actor", "critic", "teacher.actor"}
    assert {path.name for path in last[0].iterdir() if (path / ".metadata").is_file()} == saved
    for name in saved:
        resumed, expected = (read_shards(place / name, section="") for place in last)
        assert all(torch.equal(resumed.read(each), expected.read(each)) for each in expected.meta)
