"""Rows that begin alike compute what they have in common once: outputs and gradients are those of each row alone."""

import dataclasses
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, FalconH1Config, Qwen2Config

from hybridrl.core.batch import Batch, pack, token_rows
from hybridrl.core.carried import CONTEXT, CONTEXT_LENGTHS, FIELDS, PICTURE_DIGEST, PICTURE_START, PICTURES, Carried
from hybridrl.core.training import model as models_of_ranks
from hybridrl.core.training.attention import attend, sequence_group, slice_of
from hybridrl.core.training.building import WorkerConfig, build_shards, is_random
from hybridrl.core.training.learner import RankModel
from hybridrl.core.training.model import check_log_probs, packed_rows_interact
from hybridrl.core.training.packing import (
    ModelInputs,
    PackedRows,
    Paths,
    as_read,
    each_token_once,
    pack_rows,
    read_at,
    shared_beginnings,
    tree_order,
)
from hybridrl.core.training.planning import Forest, MicroBatchBudget, Pieces, plan, plan_trees
from hybridrl.core.training.routes import RouterReplay
from hybridrl.required import required
from tests.core.training.families import FAMILIES, SMALL, SPECIAL, load_language_model, load_value_model, model_config
from tests.core.training.on_ranks import on_ranks
from tests.core.training.test_state import fsdp_config

# Rows of groups, prompt | response, a letter per token. In order: a star whose first two responses begin alike; turns
# as rows, of three levels; a response twice, and a row that begins with another; a row alone.
FOREST = [
    ["abcdef|ghij", "abcdef|gxyz", "abcdef|klm"],
    ["pq|rstu", "pqrstu|vw", "pqrstuvwx|yz", "pqr|a"],
    ["mno|pq", "mno|pq", "mno|pqrs"],
    ["zy|xwvut"],
]
SHUFFLED = [7, 2, 4, 10, 0, 8, 3, 6, 1, 9, 5]


def rows_of(groups: Sequence[Sequence[str]], order: Sequence[int] = SHUFFLED) -> Batch:
    texts = [(number, *row.split("|")) for number, group in enumerate(groups) for row in group]
    chosen = [texts[place] for place in (order or range(len(texts)))]
    group = torch.tensor([number for number, _, _ in chosen])
    ids = [[torch.tensor([ord(letter) - ord("a") + 1 for letter in text]) for text in row[1:]] for row in chosen]
    prompt_ids, prompt_lengths = pack([prompt.numpy() for prompt, _ in ids], torch.int32)
    response_ids, response_lengths = pack([response.numpy() for _, response in ids], torch.int32)
    mask = torch.ones(len(response_ids), dtype=torch.bool)
    return Batch(prompt_lengths, response_lengths, prompt_ids, response_ids, group, group, group, response_mask=mask)


def in_tree_order(batch: Batch) -> Batch:
    return batch.select(tree_order(batch))


def once(batch: Batch, ahead: int = 1) -> ModelInputs:
    return each_token_once(pack_rows(batch, padded=False, ahead=ahead), batch, ahead, shares=True)


def beginnings(batch: Batch) -> int:
    """Count the different beginnings of the rows of each group, the last token of a row left out."""
    texts = [
        (group, *row.prompt_ids.tolist(), *row.response_ids.tolist())
        for group, row in ((int(batch.group[place]), batch.select([place])) for place in range(len(batch)))
    ]
    return len({text[: end + 1] for text in texts for end in range(1, len(text) - 1)})


# -- lay-out -----------------------------------------------------------------------------------------------------------


def test_rows_in_order_have_each_distinct_beginning_once_and_know_where_their_tokens_are() -> None:
    """su|AAA, su|AB, suCC|vD in letters of this file: the second row begins at its fourth token, the third at its third
    one; the last token of each row is left out."""
    batch = rows_of([["su|aaa", "su|ab", "succ|vd"]], order=())
    assert tree_order(batch).tolist() == [0, 1, 2] and shared_beginnings(batch).tolist() == [0, 3, 2]
    inputs = once(batch)
    s, u, a, c, v = 19, 21, 1, 3, 22
    assert inputs.input_ids.tolist() == [[s, u, a, a, c, c, v]]
    assert inputs.position_ids.tolist() == [[0, 1, 2, 3, 2, 3, 4]]
    packed = required(inputs.packed)
    assert packed.lengths == (4, 3), "the second row computes nothing and is left out"
    paths = required(packed.paths)
    assert paths.lengths == (4, 5) and paths.longest == 5 and paths.boundaries.tolist() == [0, 4, 9]
    assert paths.places.tolist() == [0, 1, 2, 3, 0, 1, 4, 5, 6]
    assert inputs.predictors.tolist() == [1, 2, 3, 1, 2, 5, 6]
    assert inputs.targets.tolist() == batch.response_ids.tolist()


def test_a_model_that_reads_last_tokens_computes_them() -> None:
    inputs = once(rows_of([["su|aaa", "su|ab", "su|ab"]], order=()), ahead=0)
    packed = required(inputs.packed)
    assert packed.lengths == (5, 1, 1) and required(packed.paths).places.tolist() == [*range(5), 0, 1, 2, 5, 0, 1, 2, 6]
    assert inputs.predictors.tolist() == [2, 3, 4, 2, 5, 2, 6]


def test_where_nothing_is_shared_only_last_tokens_are_left_out() -> None:
    batch = rows_of([["abc|de"], ["fg|h"]], order=())
    whole, alone = pack_rows(batch, padded=False), each_token_once(pack_rows(batch, False), batch, 1, shares=False)
    for inputs in (once(batch), alone):
        packed = required(inputs.packed)
        assert packed.lengths == (4, 2) and packed.paths is None
        assert inputs.input_ids.tolist() == [[1, 2, 3, 4, 6, 7]] and inputs.position_ids.tolist() == [
            [0, 1, 2, 3, 0, 1]
        ]
        assert inputs.predictors.tolist() == [2, 3, 5]
    for unchanged in (each_token_once(whole, batch, 0, shares=True), once(batch, ahead=0)):
        assert unchanged.input_ids.tolist() == whole.input_ids.tolist()
    padded = pack_rows(batch, padded=True)
    assert each_token_once(padded, batch, 1, shares=True) is padded


def test_the_rows_of_a_batch_in_order_compute_as_many_tokens_as_they_have_beginnings() -> None:
    batch = rows_of(FOREST)
    assert once(in_tree_order(batch)).computed == beginnings(batch) == 35
    assert once(batch).computed > 35, "in another order less is found, but it is right"


def test_every_carried_field_that_enters_a_model_ends_what_is_shared_where_it_differs() -> None:
    """Each field that enters is changed for one token of the second row; a context replaces the prompt instead."""
    batch = rows_of([["abcdef|gh", "abcdef|gi"]], order=())
    assert shared_beginnings(batch).tolist() == [0, 7]
    tokens = int(batch.lengths.sum())
    routes = torch.zeros(tokens, 2, 3, dtype=torch.int16)
    other_routes = routes.clone()
    other_routes[8 + 4, 1, 2] = other_routes[8 + 6, 0, 0] = 5
    pictures = {PICTURES: torch.tensor([2, 2]), PICTURE_START: torch.tensor([1, 4, 1, 4], dtype=torch.int32)}
    digests = torch.tensor([11, 22, 11, 22]), torch.tensor([11, 22, 11, 33])
    later = {**pictures, PICTURE_DIGEST: digests[0], PICTURE_START: torch.tensor([1, 4, 1, 5], dtype=torch.int32)}
    fewer = {PICTURES: torch.tensor([2, 1]), PICTURE_DIGEST: digests[0][:3], PICTURE_START: pictures[PICTURE_START][:3]}
    cases = {
        "routes": [({"routes": routes}, 7), ({"routes": other_routes}, 4)],
        PICTURE_DIGEST: [({**pictures, PICTURE_DIGEST: each}, end) for each, end in zip(digests, (7, 4), strict=True)],
        PICTURE_START: [(later, 4), (fewer, 4)],
        CONTEXT: [({CONTEXT: torch.tensor([1, 2, 9, 9, 1, 2, 9]), CONTEXT_LENGTHS: torch.tensor([4, 3])}, 3)],
    }
    assert cases.keys() == {name for name, field in FIELDS.items() if field.enters}
    for name, of_field in cases.items():
        for carried, end in of_field:
            read = as_read(replace(batch, carried=carried), (*carried, name))
            assert shared_beginnings(read).tolist() == [0, end], name
            assert shared_beginnings(as_read(replace(batch, carried=carried), ())).tolist() == [0, 7], "it is not read"


@pytest.mark.parametrize(
    ("axis", "values", "end"),
    [("row", [1, 2], 0), ("prompt", [*[1] * 8, 2, *[1] * 3], 2), ("response", [*[1] * 4, 1, 2], 7), ("row", [3, 3], 7)],
)
def test_a_field_of_others_that_enters_ends_what_is_shared_at_its_first_token(monkeypatch, axis, values, end) -> None:
    """A field of two rows of 6 and 2 tokens, of which the first 7 are equal; absent elsewhere."""
    name = f"mood of a {axis}"
    monkeypatch.setitem(FIELDS, name, Carried(axis, enters=True))
    batch = rows_of([["abcdef|gh", "abcdef|gi"]], order=())
    sizes = {"row": 2, "prompt": 12, "response": 4}
    carried = {name: torch.tensor(values[-sizes[axis] :])}
    assert shared_beginnings(as_read(replace(batch, carried=carried), (name,))).tolist() == [0, end]


def test_inputs_of_the_model_are_those_that_are_laid_out_or_compared() -> None:
    """A further tensor of `ModelInputs` needs a look at `each_token_once` and `shared_beginnings`."""
    tensors = {"input_ids", "position_ids", "predictors", "targets", "packed", "carried", "slice", "pictures"}
    assert {field.name for field in dataclasses.fields(ModelInputs)} == tensors


class Sums(TorchDispatchMode):
    """Records the type of each sum over readers; on CPU a sum in bfloat16 is exact whatever its type."""

    def __init__(self) -> None:
        super().__init__()
        self.types: list[torch.dtype] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket is torch.ops.aten.index_add_:
            self.types.append(args[0].dtype)
        return func(*args, **kwargs or {})


def test_the_gradient_of_a_token_with_many_readers_is_added_up_in_float32() -> None:
    values = torch.zeros(2, 4, dtype=torch.bfloat16, requires_grad=True)
    with Sums() as sums:
        read_at(values, torch.zeros(512, dtype=torch.int64)).sum().backward()
    assert sums.types == [torch.float32]
    assert required(values.grad).dtype == torch.bfloat16 and required(values.grad)[0].tolist() == [512.0] * 4


# -- models ------------------------------------------------------------------------------------------------------------


FALCON = FalconH1Config(
    **SMALL, num_key_value_heads=2, head_dim=8, mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8, mamba_d_state=8,
    mamba_chunk_size=4, lm_head_multiplier=0.3,
)  # fmt: skip


@pytest.fixture(scope="module")
def models(directories, tmp_path_factory) -> dict[str, str]:
    path = str(tmp_path_factory.mktemp("falcon"))
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(FALCON).save_pretrained(path)
    return {**directories, "attention and a recurrence in parallel": path}


NAMES = [*FAMILIES, *SPECIAL, "attention and a recurrence in parallel"]
Outputs = tuple[Tensor, Tensor, list[Tensor]]


def loss_of(log_probs: Tensor, entropies: Tensor) -> Tensor:
    weights = torch.linspace(-1, 1, len(log_probs))
    return (log_probs * weights + 0.1 * entropies * weights.flip(0)).sum()


def own(path: str, batch: Batch) -> Outputs:
    """Log-probs, entropies and gradient of transformers' own model, each row alone."""
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
    parts = []
    for place in range(len(batch)):
        row = batch.select([place])
        logits = model(torch.cat([row.prompt_ids, row.response_ids])[None].long()).logits[0]
        expected = torch.distributions.Categorical(logits=logits[len(row.prompt_ids) - 1 : -1])
        parts.append((expected.log_prob(row.response_ids), expected.entropy()))
    log_probs, entropies = (torch.cat([*column]) for column in zip(*parts, strict=True))
    loss_of(log_probs, entropies).backward()
    return log_probs, entropies, [required(parameter.grad) for parameter in model.parameters()]


def shared_outputs(path: str, batch: Batch, *, checkpointing: bool = False) -> Outputs:
    model = load_language_model(model_config(path, enable_gradient_checkpointing=checkpointing), torch.float32).train()
    found = model(once(batch), 1.0, entropies=True, entropy_gradient=True)
    entropies = required(found.entropies)
    loss_of(found.log_probs, entropies).backward()
    return found.log_probs, entropies, [required(parameter.grad) for parameter in model.parameters()]


def distance(actual: Sequence[Tensor], right: Sequence[Tensor]) -> float:
    """The norm of the difference over the norm."""
    gaps, norms = (
        torch.stack([each.norm() for each in values]).norm()
        for values in ([a - b for a, b in zip(actual, right, strict=True)], right)
    )
    return float(gaps / norms)


@pytest.mark.parametrize("name", NAMES)
def test_outputs_and_gradient_of_a_forest_are_those_of_transformers_row_by_row(models, name) -> None:
    batch = in_tree_order(rows_of(FOREST))
    right = own(models[name], batch)
    for checkpointing in (False, True):
        found = shared_outputs(models[name], batch, checkpointing=checkpointing)
        for actual, expected in zip(found[:2], right[:2], strict=True):
            torch.testing.assert_close(actual, expected, atol=1e-5, rtol=0)
        assert distance(found[2], right[2]) <= 1e-5


def test_rows_in_any_order_give_the_same(models) -> None:
    batch = rows_of(FOREST)
    found, right = (compute(models["qwen3"], batch) for compute in (shared_outputs, own))
    torch.testing.assert_close(found[0], right[0], atol=1e-5, rtol=0)
    assert distance(found[2], right[2]) <= 1e-5


@pytest.mark.parametrize("ahead", [1, 0], ids=["values", "scores"])
def test_values_and_scores_and_their_gradients_are_those_of_each_row_alone(models, ahead) -> None:
    """A score is computed from a row's last token, also of a row that is sampled twice."""
    batch = in_tree_order(rows_of(FOREST))
    if not ahead:
        rows = [batch.select([place]) for place in range(len(batch))]
        ids = [torch.cat([row.prompt_ids, row.response_ids]).tolist() for row in rows]
        batch = token_rows(ids, slice(-1, None))
    results = []
    for shares in (True, False):
        model = load_value_model(model_config(models["qwen3"]), torch.float32)
        torch.manual_seed(0)
        nn.init.normal_(model.model.get_submodule(model.head_name).weight)
        parts = [batch] if shares else [batch.select([place]) for place in range(len(batch))]
        inputs = [each_token_once(pack_rows(part, False, ahead), part, ahead, shares) for part in parts]
        values = torch.cat([model(part) for part in inputs])
        (values * torch.linspace(-1, 1, len(values))).sum().backward()
        results.append((values.detach(), [required(parameter.grad) for parameter in model.parameters()]))
    (found, gradient), (right, expected) = results
    torch.testing.assert_close(found, right, atol=1e-5, rtol=0)
    assert distance(gradient, expected) <= 1e-5


ATTENTION = {
    "a short prompt before long rows": (24, [400, 30, 700], None),
    "a long prompt before short rows": (500, [30, 1, 64], None),
    "half of a row is shared": (384, [384, 385, 383], None),
    "a window within what is shared": (60, [40, 400], 16),
    "a window beyond what is shared": (10, [400, 20], 64),
}


@pytest.mark.parametrize("name", ATTENTION)
def test_attention_over_shared_rows_is_that_over_each_row(name) -> None:
    """Two query heads per key, in float64; the first row has what the others share."""
    prompt, own_tokens, window = ATTENTION[name]
    lengths = [prompt + own_tokens[0], *own_tokens[1:]]
    total, generator = sum(lengths), torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(1, heads, total, 8, generator=generator, dtype=torch.float64, requires_grad=True)
        for heads in (4, 2, 2)
    )
    weights = torch.randn(1, total, 4, 8, generator=generator, dtype=torch.float64)
    starts = [0, *accumulate(lengths)]
    indices = [torch.cat([torch.arange(prompt), torch.arange(*pair)]) for pair in pairwise(starts[1:])]
    indices = [torch.arange(lengths[0]), *indices]
    paths = Paths.of([len(each) for each in indices], places=torch.cat(indices))
    module = nn.Module()
    found, _ = attend(module, q, k, v, None, sliding_window=window, packed=PackedRows.of(lengths, paths=paths))
    right = []
    for index, length in zip(indices, lengths, strict=True):
        query, key, value = (each[:, :, index] for each in (q, k, v))
        whole, _ = attend(module, query, key, value, None, sliding_window=window)
        right.append(whole[:, -length:])
    expected = torch.cat(right, 1)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    gradients = [torch.autograd.grad((each * weights).sum(), (q, k, v)) for each in (found, expected)]
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("changed", "computed"), [(None, 35), (0, 48), (4, 40), (6, 36)])
def test_routes_of_a_mixture_are_shared_up_to_the_token_where_they_differ(models, changed, computed) -> None:
    """Of the second row of the star, whose first seven tokens are the first row's: the route of one is another; then
    this token and those after it are computed, and the third row finds the others in the second."""
    batch = in_tree_order(rows_of(FOREST, order=()))
    generator = torch.Generator().manual_seed(0)
    choices = torch.stack([torch.randperm(5, generator=generator)[:2] for _ in range(64 * 2)]).view(64, 2, 2)
    ends = [0, *batch.lengths.cumsum(0).tolist()]
    routes = torch.cat([choices[: end - start] for start, end in pairwise(ends)]).to(torch.int16)
    if changed is not None:
        place = ends[1] + changed
        routes[place, 1] = (routes[place, 1] + 1) % 5
    batch = replace(batch, carried={"routes": routes})
    results = []
    for parts in ([batch], [batch.select([place]) for place in range(len(batch))]):
        model = load_language_model(model_config(models["experts"]), torch.float32).train()
        model.replay = RouterReplay(model.model)
        inputs = [once(part) for part in parts]
        found = [model(part, 1.0, entropies=True, entropy_gradient=True) for part in inputs]
        log_probs, entropies = (torch.cat([required(each[column]) for each in found]) for column in (0, 1))
        loss_of(log_probs, entropies).backward()
        results.append((log_probs.detach(), [required(parameter.grad) for parameter in model.parameters()], inputs))
    (found, gradient, inputs), (right, expected, _) = results
    torch.testing.assert_close(found, right, atol=1e-5, rtol=0)
    assert distance(gradient, expected) <= 1e-5
    assert inputs[0].computed == computed


def sliced(path: str, batch: Batch, ranks: int) -> tuple[Tensor, list[Tensor]]:
    """Outputs of all rows, and this rank's share of the gradient."""
    model = load_language_model(model_config(path), torch.float32)
    inputs = slice_of(once(batch), sequence_group(ranks, 60.0) if ranks > 1 else None)
    found = model(inputs, 1.0, entropies=True, entropy_gradient=True)
    loss_of(found.log_probs, required(found.entropies)).backward()
    return found.log_probs.detach(), [required(parameter.grad) for parameter in model.parameters()]


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", ["two heads a key", "capped scores and logits, a sliding window in the first layer"])
def test_ranks_that_share_rows_give_the_same(models, name, ranks) -> None:
    batch = in_tree_order(rows_of(FOREST))
    log_probs, _, right = own(models[name], batch)
    results = on_ranks(ranks, sliced, models[name], batch, ranks)
    for found, _ in results:
        torch.testing.assert_close(found, log_probs, atol=1e-5, rtol=0)
    gradient = [torch.stack(each).sum(0) for each in zip(*(gradient for _, gradient in results), strict=True)]
    assert distance(gradient, right) <= 1e-5


# -- the check at the start --------------------------------------------------------------------------------------------


class Mixed(nn.Module):
    """A layer that adds the mean of all tokens of the sequence, or with `shared` only where rows share tokens."""

    def __init__(self, layer: nn.Module, *, shared: bool) -> None:
        super().__init__()
        self.layer, self.shared = layer, shared

    def forward(self, hidden: Tensor, *arguments: Any, packed: PackedRows | None = None, **options: Any) -> Any:
        output = self.layer(hidden, *arguments, packed=packed, **options)
        mixes = packed is not None and (packed.paths is not None or not self.shared)
        return output + 3 * output.mean(1, keepdim=True) if mixes else output


@pytest.mark.parametrize("shared", [True, False])
def test_the_check_finds_layers_that_mix_shared_rows(models, shared) -> None:
    model = load_language_model(model_config(models["qwen3"]), torch.float32)
    assert not packed_rows_interact(model) and not packed_rows_interact(model, shares=True)
    check_log_probs(model, torch.float32, padded=False, shares=True)
    layers = model.model.model.layers
    layers[0] = Mixed(layers[0], shared=shared)
    layers[0].attention_type = "full_attention"
    assert packed_rows_interact(model, shares=True) and packed_rows_interact(model) is not shared
    with pytest.raises(ValueError, match="differ"):
        check_log_probs(model, torch.float32, padded=False, shares=True)
    if shared:
        check_log_probs(model, torch.float32, padded=False, shares=False)


def flags(path: str) -> dict[str, bool]:
    """Return which models share, where packed rows differ from the model's own once they share tokens."""

    def check(*_: object, shares: bool, **options: object) -> None:
        if shares:
            raise ValueError("they differ")

    section, fsdp, budget = model_config(path), fsdp_config(fsdp_size=1), MicroBatchBudget(40)
    ours = {name: RankModel(section, fsdp, budget) for name in ("actor", "reference")}
    ours["live"] = RankModel(section, fsdp, budget, weights="live")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(models_of_ranks, "check_log_probs", check)
        built = build_shards(WorkerConfig("cpu", ours, 60.0, 0, "unused"), 1, torch.device("cpu"))
    return {name: shard.shares for name, shard in built.items()}


def test_a_model_that_fails_the_check_with_shared_tokens_shares_none_nor_do_others_of_its_path(models) -> None:
    (shares,) = on_ranks(1, flags, models["qwen3"])
    assert shares == {"actor": False, "reference": False, "live": False}


@pytest.mark.parametrize(
    ("changes", "random"), [({}, False), ({"attention_dropout": 0.1}, True), ({"router_jitter_noise": 0.01}, True)]
)
def test_a_model_with_dropout_or_jitter_shares_nothing(changes, random) -> None:
    model = AutoModelForCausalLM.from_config(Qwen2Config(**SMALL, num_key_value_heads=2, **changes))
    assert is_random(model, model_config("unused")) is random
    section = model_config("unused")
    section.lora.dropout = 0.1
    assert is_random(model, section)


def test_a_critic_shares_as_transformers_dropout_before_its_head_is_not_computed(models) -> None:
    critic = load_value_model(model_config(models["qwen3"]), torch.float32)
    assert any(isinstance(module, nn.Dropout) and module.p for module in critic.model.modules())
    assert not is_random(critic.model, model_config("unused"))


# -- the plan ----------------------------------------------------------------------------------------------------------


def tokens_of(batch: Batch, rows: Sequence[int]) -> int:
    part = batch.select(rows)
    return int(part.lengths.sum() - shared_beginnings(part).sum())


@st.composite
def forests(draw: st.DrawFn) -> Batch:
    """Groups of rows: texts of two letters, of which many begin alike."""
    groups = []
    for _ in range(draw(st.integers(1, 8))):
        prompt = draw(st.text("ab", min_size=1, max_size=12))
        texts = draw(st.lists(st.text("ab", min_size=1, max_size=10), min_size=1, max_size=8))
        cuts = draw(st.lists(st.integers(0, 10), min_size=len(texts), max_size=len(texts)))
        groups.append([f"{prompt}{text[: min(cut, len(text) - 1)]}|{text[min(cut, len(text) - 1) :]}" for text, cut in
                       zip(texts, cuts, strict=True)])  # fmt: skip
    return rows_of(groups, order=())


@settings(max_examples=400, deadline=None)
@given(
    forests(),
    st.sampled_from([1, 2, 3, 8, 64]),
    st.integers(4, 120),
    st.sampled_from([None, 1, 2, 3]),
    st.sampled_from([1, 2]),
    st.sampled_from([1, 3]),
)
def test_plans_of_random_forests_keep_every_bound_of_single_rows(batch, ranks, tokens, rows, size, weight) -> None:
    if len(batch) % size:
        batch = batch.select(range(len(batch) - 1))
    if not len(batch):
        return
    budget, forest = MicroBatchBudget(tokens, rows), Forest.of([batch], size, lambda first: weight * first)
    pieces = Pieces.single(batch.lengths.numpy(), size=size, work=weight * batch.lengths.numpy())
    alone, found = plan(pieces, ranks, budget), plan_trees(pieces, forest, ranks, budget)
    flat = [row for planned in found for part in planned for row in part]
    assert sorted(flat) == [*range(len(batch))]
    assert len({len(planned) for planned in found}) == 1 and len(found[0]) <= len(alone[0])
    for part in (part for planned in found for part in planned if part):
        if rows is None:
            assert len(part) == size or tokens_of(batch, part) <= tokens
        else:
            assert len(part) <= max(rows, size)
        if size == 2:
            assert all(part[place + 1] == part[place] + 1 and part[place] % 2 == 0 for place in range(0, len(part), 2))

    def fullest(plans: Any, *, shares: bool) -> int:
        counted = [[tokens_of(batch, part) if shares else int(batch.lengths[part].sum()) for part in planned if part]
                   for planned in plans]  # fmt: skip
        return max(map(sum, counted))

    assert fullest(found, shares=True) <= fullest(alone, shares=False)
    if forest is None:
        assert found == alone
    else:
        assert all((np.diff(forest.place[part]) > 0).all() for planned in found for part in planned if part)


def test_whole_trees_are_together_where_they_fit() -> None:
    """Two prompts of 8 with four responses of 2 to 5: 46 and 46 tokens alone, 22 each shared."""
    groups = [
        [f"{prompt}|{letter}{'z' * size}" for size, letter in enumerate("abcd", 1)]
        for prompt in ("mnopqrst", "tsrqponm")
    ]
    batch = rows_of(groups, order=[0, 4, 1, 5, 2, 6, 3, 7])
    lengths, forest = batch.lengths.numpy(), Forest.of([batch])
    found = plan_trees(Pieces.single(lengths), forest, 2, MicroBatchBudget(40))
    assert found == [[[0, 2, 4, 6]], [[1, 3, 5, 7]]] or found == [[[1, 3, 5, 7]], [[0, 2, 4, 6]]]
    assert len(plan(Pieces.single(lengths), 2, MicroBatchBudget(40))[0]) == 2


def test_only_rows_of_the_same_mini_batch_count_as_sharing() -> None:
    batch = rows_of([["abcdefgh|i", "abcdefgh|j", "abcdefgh|k"]], order=())
    forest = required(Forest.of([batch]))
    assert forest.continues(np.array([0, 1, 2])).tolist() == [False, True, True]
    assert forest.continues(np.array([0, 2])).tolist() == [False, False]
    found = plan_trees(Pieces.single(batch.lengths.numpy(), [0, 2]), forest, 1, MicroBatchBudget(12))
    assert sorted(map(sorted, found[0])) == [[0], [2]], "20 tokens of two rows are not known to share"
