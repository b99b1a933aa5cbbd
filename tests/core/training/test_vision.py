"""Models that see: log-probs and gradients are those of transformers' own forward pass, row by row, however the rows
are divided; each distinct picture of a micro-batch is computed once."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AutoModelForImageTextToText, PreTrainedModel, Qwen3VLConfig

from hybridrl.core.algorithms.algorithm import loss_terms
from hybridrl.core.algorithms.objective import Divisors
from hybridrl.core.algorithms.rollout_correction import Rejection, RolloutCorrection
from hybridrl.core.batch import Batch, as_tensor, token_rows
from hybridrl.core.carried import PICTURE_DIGEST, PICTURE_START, PICTURES
from hybridrl.core.pictures import PixelRule, Pixels, placeholder_ids
from hybridrl.core.training.attention import sequence_group
from hybridrl.core.training.fsdp import shard_and_fill
from hybridrl.core.training.layout import layout
from hybridrl.core.training.learner import Learner
from hybridrl.core.training.lora import add_adapter
from hybridrl.core.training.losses import LossConfig, policy_objective, prepare_rejection
from hybridrl.core.training.model import HOST, LanguageModel, adapter_parameters, blank_language_model, check_log_probs
from hybridrl.core.training.optimizer import Optimizers
from hybridrl.core.training.packing import PictureInputs, pack_rows
from hybridrl.core.training.planning import MicroBatchBudget, MiniBatch, rank_mini_batches
from hybridrl.core.training.vision import READS, Grid, Vision, VisionConfig, freeze_tower, tower_weight
from hybridrl.required import required
from tests.core.algorithms.parameters import LOSS_PARAMETERS
from tests.core.training.families import model_config
from tests.core.training.on_ranks import on_ranks, whole_gradient
from tests.core.training.test_state import fsdp_config, optimizer_config
from tests.vision_models import FAMILIES, settings_that_see, write_model_that_sees

RULE = PixelRule(1 / 255, (0.5, 0.5, 0.5), (0.5, 0.25, 0.5))
SIZES = {11: (4, 4), 22: (2, 6), 33: (2, 2), 44: (6, 4)}  # of grids, by the digest of a picture
# Rows as texts, by their lengths, and digests of pictures. The first four are responses to one prompt.
ROWS = [
    [3, 11, 2, 22, 9],
    [3, 11, 2, 22, 5],
    [3, 11, 2, 22, 7],
    [3, 11, 2, 22, 4],
    [9],
    [2, 33, 6],
    [12],
    [4, 44, 5, 11, 3, 33, 8],
]
PICTURE, START, END = 4, 3, 5  # ids of the tests' tokenizer
MOST = 5e-6  # of the gradient's norm
LOSS = LossConfig(
    loss_terms("likelihood", 0.01, "k3", 0.1),
    aggregation="token-mean",
    scale=1.0,
    temperature=1.0,
    grad_clip=1.0,
    parameters=LOSS_PARAMETERS,
)
REJECTING = replace(LOSS, correction=RolloutCorrection(None, None, 2.0, False, (Rejection("token_k2", None, 1.0),)))


def pixels_of(digest: int, patch: int) -> Pixels:
    height, width = SIZES[digest]
    values = np.random.default_rng(digest).integers(0, 256, (height * width, 6 * patch**2), dtype=np.uint8)
    return {"pixel_values": values, "image_grid_thw": np.array([[1, height, width]])}


def tokens_of(digest: int) -> int:
    return SIZES[digest][0] * SIZES[digest][1] // 4


def rows_with_pictures(plans: Sequence[Sequence[int]] = ROWS) -> Batch:
    """Return rows whose response is their last text, but for its first two tokens; the first rows begin alike."""
    rows, digests, starts = [], [], []
    for number, plan in enumerate(plans):
        generator = torch.Generator().manual_seed(0 if number < 4 else number)
        ids: list[int] = []
        for place, item in enumerate(plan):
            if place % 2:
                ids.append(START)
                digests.append(item)
                starts.append(len(ids))
                ids += [PICTURE] * tokens_of(item) + [END]
            else:
                last = place == len(plan) - 1
                generator = torch.Generator().manual_seed(100 + number) if last else generator
                ids += torch.randint(20, 250, (item,), generator=generator).tolist()
        rows.append(ids)
    lengths = torch.tensor([plan[-1] - 2 for plan in plans])
    ids = [torch.tensor(row) for row in rows]
    tokens, generator = int(lengths.sum()), torch.Generator().manual_seed(5)
    old = -5 - torch.rand(tokens, generator=generator)
    return Batch(
        prompt_lengths=torch.tensor([len(row) for row in rows]) - lengths,
        response_lengths=lengths,
        prompt_ids=torch.cat([row[:-count] for row, count in zip(ids, lengths.tolist(), strict=True)]),
        response_ids=torch.cat([row[-count:] for row, count in zip(ids, lengths.tolist(), strict=True)]),
        group=torch.arange(len(rows)),
        position=torch.arange(len(rows)),
        sample=torch.zeros(len(rows), dtype=torch.int64),
        response_mask=torch.rand(tokens, generator=generator) > 0.1,
        old_log_probs=old,
        reference_log_probs=old + 0.1,
        advantages=torch.randn(tokens, generator=generator),
        carried={
            PICTURES: torch.tensor([len(plan) // 2 for plan in plans]),
            PICTURE_DIGEST: torch.tensor(digests, dtype=torch.int64),
            PICTURE_START: torch.tensor(starts, dtype=torch.int32),
        },
    )


@dataclass(frozen=True)
class Division:
    ranks: int = 1
    tokens: int = 10_000
    padded: bool = False
    sequence: int = 1
    tensor: int = 1
    expert: int = 1
    checkpointing: bool = False
    rows_of_ranks: tuple[tuple[int, ...], ...] = ()  # else they are balanced


DIVISIONS = {
    "one micro-batch": Division(),
    "micro-batches of 60 tokens": Division(tokens=60),
    "micro-batches of a row": Division(tokens=1),
    "padded": Division(tokens=120, padded=True),
    "computed again": Division(tokens=60, checkpointing=True),
    "two ranks": Division(ranks=2, tokens=60),
    "all pictures on one rank": Division(ranks=2, rows_of_ranks=((0, 1, 2, 3, 5, 7), (4, 6))),
    "all rows on one rank": Division(ranks=2, rows_of_ranks=((0, 1, 2, 3, 4, 5, 6, 7), ())),
    "Ulysses 2": Division(ranks=2, sequence=2),
    "tensor 2": Division(ranks=2, tensor=2),
    "expert 2": Division(ranks=2, expert=2, tokens=60),
}

# Division -> families that allow it: a recurrence needs complete rows, and others have no plan of their layers. One is
# enough where families do not differ.
DIVIDED = {
    "all rows on one rank": {"qwen3_vl"},
    "Ulysses 2": {*FAMILIES} - {"qwen3_5"},
    "tensor 2": {"qwen2_5_vl", "qwen3_vl_moe", "glm4v"},
    "expert 2": {"qwen3_vl_moe"},
}


def learner_of(path: str, division: Division, family: str, *, frozen: bool = False, rank: int = 0) -> Learner:
    """Build one rank's model as a run does."""
    vision = VisionConfig(
        RULE, pixels_of(33, patch_of(family)), [pixels_of(d, patch_of(family)) for d in (44, 22)], frozen
    )
    config = fsdp_config(tensor_parallel_size=division.tensor, expert_parallel_size=division.expert)
    section = replace(model_config(path), enable_gradient_checkpointing=division.checkpointing)
    if rank:
        section.lora_rank, section.lora_alpha, section.target_modules = rank, 16, ["all-linear"]
    blank = blank_language_model(section, torch.float32)
    if frozen:
        freeze_tower(blank.model)
    blank.vision = Vision(vision, blank.model)
    if rank:
        add_adapter(blank.model, section, torch.float32, 0, "the model")
        for name, parameter in adapter_parameters(blank.model).items():
            if "lora_B" in name:
                nn.init.normal_(parameter, std=0.05)
    meshes = layout("cpu", division.ranks, division.ranks, division.tensor, division.expert)
    model = shard_and_fill(blank, path, config, meshes, HOST)
    group = sequence_group(division.sequence, 60.0, division.tensor)
    built = Optimizers(model, optimizer_config(), 9)
    required(blank.vision).fetch = lambda digests: [pixels_of(digest, patch_of(family)) for digest in digests]
    return Learner(
        model, config, HOST, division.padded, group, division.tensor, READS, vision=blank.vision,
        optimizers=built, dump_prefix=Path("unused"),
    )  # fmt: skip


def patch_of(family: str) -> int:
    return FAMILIES[family][1]["patch_size"]


def mini_batch_of(rows: Batch, division: Division) -> MiniBatch:
    rank = dist.get_rank()
    if division.rows_of_ranks:
        return MiniBatch([list(division.rows_of_ranks[rank])], Divisors.of(rows))
    budget = MicroBatchBudget(division.tokens, padded=division.padded, devices=division.sequence * division.tensor)
    return rank_mini_batches(rows, division.ranks, [list(range(len(rows)))], budget)[rank][0]


def gradients(
    paths: dict[str, str], rows: Batch, division: Division, loss: LossConfig = LOSS, **options: object
) -> dict[str, dict[str, Tensor]]:
    """Return the gradient of all rows, by family."""
    found = {}
    for family, path in paths.items():
        learner = learner_of(path, division, family, **options)
        part = mini_batch_of(rows, division)
        reject, rest = prepare_rejection(learner, loss)
        found[family] = whole_gradient(learner, rows, part, policy_objective(learner, rest, None, []), reject)
    return found


def own_rows(model: PreTrainedModel, rows: Batch, patch: int) -> list[Tensor]:
    """Return the logits [tokens of the response, vocabulary] of each row, by transformers' own forward pass."""
    dtype, logits, done = model.dtype, [], 0
    prompts, responses = (
        rows.prompt_ids.split(rows.prompt_lengths.tolist()),
        rows.response_ids.split(rows.response_lengths.tolist()),
    )
    for prompt, response, count in zip(prompts, responses, rows.carried[PICTURES].tolist(), strict=True):
        digests, done = rows.carried[PICTURE_DIGEST][done : done + count].tolist(), done + count
        ids, pictures = torch.cat([prompt, response]), {}
        if count:
            pixels = [pixels_of(digest, patch) for digest in digests]
            values = (
                torch.cat([as_tensor(each["pixel_values"]) for each in pixels]).to(dtype).unflatten(1, (3, -1)) / 255
            )
            values = (values - 0.5) / torch.tensor([0.5, 0.25, 0.5], dtype=dtype)[:, None]
            pictures = {
                "pixel_values": values.flatten(1),
                "image_grid_thw": torch.cat([as_tensor(each["image_grid_thw"]) for each in pixels]),
                "mm_token_type_ids": (ids == PICTURE)[None].int(),
            }
        whole = model(input_ids=ids[None], use_cache=False, **pictures).logits[0]
        whole[:, placeholder_ids(model.config)] -= 3e4
        logits.append(whole[len(prompt) - 1 : -1])
    return logits


IN_FLOAT32 = ("qwen3_vl_moe", "qwen3_5", "glm4v")  # no grouped product in float64; rounding of others is amplified


def own_gradient(path: str, family: str, rows: Batch, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    dtype = torch.float32 if family in IN_FLOAT32 else dtype
    model = AutoModelForImageTextToText.from_pretrained(path, dtype=dtype)
    log_probs = torch.cat(own_rows(model, rows, patch_of(family))).log_softmax(-1)
    of_tokens = log_probs.gather(-1, rows.response_ids.long()[:, None]).squeeze(-1)
    entropies = -(log_probs.exp() * log_probs).sum(-1)
    ahead = required(rows.reference_log_probs).to(dtype) - of_tokens
    loss = -of_tokens - 0.01 * entropies + 0.1 * (ahead.exp() - ahead - 1).clamp(max=10)
    mask = required(rows.response_mask).to(dtype)
    ((loss * mask).sum() / mask.sum()).backward()
    return {f"model.{name}": p.grad.float() for name, p in model.named_parameters() if p.grad is not None}


def differences(actual: dict[str, Tensor], right: dict[str, Tensor]) -> tuple[float, float]:
    """Return the relative error of the whole gradient, and the largest of a parameter of the tower."""
    assert actual.keys() == right.keys()
    norm = torch.stack([value.norm() for value in right.values()]).norm()
    whole = torch.stack([(actual[name] - right[name]).norm() for name in right]).norm() / norm
    own = [
        (actual[name] - right[name]).norm() / right[name].norm()
        for name in right
        if ".visual." in name and right[name].norm() > 1e-6 * norm
    ]
    return float(whole), float(max(own, default=torch.tensor(0.0)))


@pytest.fixture(scope="module")
def paths(tmp_path_factory) -> dict[str, str]:
    made = tmp_path_factory.mktemp("models")
    return {family: str(write_model_that_sees(made / family, family)) for family in FAMILIES}


@pytest.fixture(scope="module")
def rows() -> Batch:
    return rows_with_pictures()


@pytest.fixture(scope="module")
def right(paths, rows) -> dict[str, dict[str, Tensor]]:
    return {family: own_gradient(path, family, rows) for family, path in paths.items()}


@pytest.mark.parametrize("name", DIVISIONS)
def test_the_gradient_is_that_of_transformers_row_by_row(paths, rows, right, name) -> None:
    division = DIVISIONS[name]
    some = {family: path for family, path in paths.items() if family in DIVIDED.get(name, FAMILIES)}
    for of_rank in on_ranks(division.ranks, gradients, some, rows, division):
        for family, gradient in of_rank.items():
            whole, of_tower = differences(gradient, right[family])
            # A reference in float32 has as much rounding of its own: 1.1e-5 together on one CPU, less on others.
            assert whole <= MOST and of_tower <= (2e-5 if family in IN_FLOAT32 else 1e-5), family


def other_models(paths: dict[str, str], rows: Batch) -> dict[str, dict[str, Tensor]]:
    """Return the gradient with a frozen tower, and that of an adapter."""
    alone, one = DIVISIONS["two ranks"], {"qwen3_vl": paths["qwen3_vl"]}
    frozen = gradients(one, rows, alone, frozen=True)["qwen3_vl"]
    return {"frozen": frozen, "adapter": gradients(one, rows, alone, rank=4)["qwen3_vl"]}


def test_a_frozen_tower_changes_no_other_gradient_and_an_adapter_is_none_of_the_tower_s(paths, rows, right) -> None:
    for of_rank in on_ranks(2, other_models, paths, rows):
        rest = {name: value for name, value in right["qwen3_vl"].items() if ".visual." not in name}
        assert differences(of_rank["frozen"], rest)[0] <= MOST
        assert of_rank["adapter"] and all(".language_model." in name for name in of_rank["adapter"])


def test_tokens_that_an_engine_saw_otherwise_are_rejected_before_the_gradient(paths, rows) -> None:
    """The engine's log-probs are transformers' own, but for two tokens after pictures, for which k2 is 2."""
    one, disputed = {"qwen3_vl": paths["qwen3_vl"]}, torch.tensor([3, 11])
    model = AutoModelForImageTextToText.from_pretrained(one["qwen3_vl"])
    with torch.no_grad():
        logits = torch.cat(own_rows(model, rows, patch_of("qwen3_vl")))
    engine = logits.log_softmax(-1).gather(-1, rows.response_ids.long()[:, None]).squeeze(-1)
    sampled = replace(rows, rollout_log_probs=engine.index_add(0, disputed, torch.tensor([2.0, -2.0])))
    mask = required(rows.response_mask)
    assert mask[disputed].all()
    right = own_gradient(one["qwen3_vl"], "qwen3_vl", replace(rows, response_mask=mask.index_fill(0, disputed, False)))
    for of_rank in on_ranks(2, gradients, one, sampled, DIVISIONS["two ranks"], REJECTING):
        whole, of_tower = differences(of_rank["qwen3_vl"], right)
        assert whole <= MOST and of_tower <= 1e-5


def patches_of(path: str, rows: Batch) -> list[int]:
    """Return the patches that the tower computes in each forward pass of a gradient."""
    learner, seen = learner_of(path, DIVISIONS["one micro-batch"], "qwen3_vl"), []
    tower = required(learner.vision).base.visual
    tower.register_forward_pre_hook(lambda _, inputs: seen.append(len(inputs[0])))
    part = replace(mini_batch_of(rows, Division()), micro_batches=[[0, 1, 2, 3], [4], [5, 7], [6]])
    learner.gradient(rows, part, policy_objective(learner, LOSS, None, []), 1.0)
    without = rows.select([4, 6])
    text = replace(without, carried={})
    learner.gradient(text, MiniBatch([[0, 1]], Divisors.of(text)), policy_objective(learner, LOSS, None, []), 1.0)
    return seen


def test_each_distinct_picture_of_a_micro_batch_is_computed_once_and_none_in_a_batch_of_text(paths, rows) -> None:
    """16 and 12 patches of the prompt with four responses; a blank picture of 4; 24, 16 and 4, which two rows share."""
    assert on_ranks(1, patches_of, paths["qwen3_vl"], rows) == [[28, 4, 44, 4]]


def checks(paths: dict[str, str]) -> dict[str, list[str]]:
    """Return what the check of a model says of each family: as it is, with other positions, and without features."""
    said = {}
    for family, path in paths.items():
        learner = learner_of(path, Division(), family)
        model, vision = learner.model, required(learner.vision)
        before = {name: vars(part).get("_attn_implementation_internal") for name, part in parts_of(model)}
        said[family] = [_said(model)]
        assert {name: vars(part).get("_attn_implementation_internal") for name, part in parts_of(model)} == before
        for wrong in (FlatPositions(), Blind()):
            vision.family = wrong
            said[family].append(_said(model))
    return said


def parts_of(model: nn.Module) -> list[tuple[str, object]]:
    return [(name, module.config) for name, module in model.named_modules() if isinstance(module, PreTrainedModel)]


def _said(model: LanguageModel) -> str:
    try:
        check_log_probs(model, torch.float32, padded=False)
    except ValueError as error:
        return str(error)
    return ""


class FlatPositions(Grid):
    def positions(self, base: Any, ids: Tensor, pictured: Tensor, pixels: Sequence[Pixels]) -> Tensor:
        return torch.arange(len(ids)).expand(3, -1)


class Blind(Grid):
    def features(self, base: Any, inputs: PictureInputs) -> dict[str, Any]:
        return super().features(base, replace(inputs, pixels=torch.zeros_like(inputs.pixels)))


def test_the_check_of_a_model_compares_pictures(paths) -> None:
    for family, (passes, flat, blind) in on_ranks(1, checks, paths)[0].items():
        assert passes == "", family
        assert "the training log-probs differ from the model's own" in flat, family
        assert "pictures do not change the log-probs of this family" in blind, family


def test_a_placeholder_is_never_sampled_and_log_probs_and_entropies_stay_numbers(paths) -> None:
    model = LanguageModel(AutoModelForImageTextToText.from_pretrained(paths["qwen3_vl"], dtype=torch.float32)).eval()
    batch = token_rows([[30, 31, PICTURE, 32]])
    outputs = model(pack_rows(batch, padded=False), 1.0, entropies=True)
    assert outputs.log_probs[1].item() < -1e4
    assert outputs.log_probs.isfinite().all() and outputs.entropies.isfinite().all()
    assert placeholder_ids(model.model.config) == [PICTURE, 6]


def test_the_tower_weighs_as_much_as_its_share_of_the_multiplications_of_a_published_model():
    text = {"hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8}
    text |= {"intermediate_size": 12288, "head_dim": 128, "vocab_size": 151936}
    tower = {"hidden_size": 1152, "depth": 27, "intermediate_size": 4304, "num_heads": 16, "out_hidden_size": 4096}
    settings = Qwen3VLConfig(text_config=text, vision_config=tower | {"deepstack_visual_indexes": [8, 16, 24]})
    with torch.device("meta"):  # Qwen3-VL-8B: 0.58 of 8.77 billion parameters, and four patches a token
        weight = tower_weight(AutoModelForImageTextToText.from_config(settings))
    assert weight == pytest.approx(4 * 0.577 / 8.19, rel=0.01)


def test_of_a_mixture_only_the_experts_of_a_token_weigh() -> None:
    weights = []
    for experts in (4, 8):
        settings = settings_that_see("qwen3_vl_moe", PICTURE)
        settings.text_config.num_experts = experts
        with torch.device("meta"):
            weights.append(tower_weight(AutoModelForImageTextToText.from_config(settings)))
    assert weights[1] == pytest.approx(weights[0], rel=0.02)
