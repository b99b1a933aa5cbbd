"""Models divided by tensor and expert parallelism: log-probs and gradients are those of one process."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM, Glm4MoeConfig, MixtralConfig, Qwen3Config, Qwen3MoeConfig

from hybridrl.core.batch import Batch
from hybridrl.core.training.attention import sequence_group
from hybridrl.core.training.fsdp import shard_and_fill
from hybridrl.core.training.layout import layout
from hybridrl.core.training.learner import Learner
from hybridrl.core.training.losses import LossConfig, policy_objective
from hybridrl.core.training.model import HOST, blank_language_model
from hybridrl.core.training.optimizer import Optimizers
from hybridrl.core.training.packing import MicroBatchBudget
from hybridrl.core.training.worker import columns_of
from hybridrl.core.training.worker_group import rank_mini_batches
from tests.core.training.families import SMALL, model_config
from tests.core.training.on_ranks import on_ranks, whole_gradient
from tests.core.training.test_state import fsdp_config, optimizer_config

MIXTURE = {"num_key_value_heads": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
FAMILIES = {
    "dense": Qwen3Config(**SMALL, num_key_value_heads=2, head_dim=8),
    "a mixture": Qwen3MoeConfig(**SMALL, **MIXTURE, num_experts=8, head_dim=8, norm_topk_prob=True),
    "mixtral": MixtralConfig(**SMALL, num_key_value_heads=2, num_experts_per_tok=2, num_local_experts=8),
    "shared experts": Glm4MoeConfig(
        **SMALL, **MIXTURE, n_routed_experts=8, n_shared_experts=1, first_k_dense_replace=1, n_group=1, topk_group=1
    ),
}
LOSS = LossConfig(
    policy_loss="vanilla",
    aggregation="token-mean",
    scale=1.0,
    temperature=0.9,
    grad_clip=1.0,
    parameters={"clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "clip_ratio_c": 3.0},
    entropy_coeff=0.01,
    kl_coef=0.0,
    kl_form=None,
    own_old_log_probs=True,
)


@dataclass(frozen=True)
class Sizes:
    ranks: int
    tensor: int = 1
    expert: int = 1
    sequence: int = 1


ALONE = Sizes(1)


@pytest.fixture(scope="module")
def paths(tmp_path_factory) -> dict[str, str]:
    found = {}
    for number, (family, config) in enumerate(FAMILIES.items()):
        torch.manual_seed(number)
        path = tmp_path_factory.mktemp("models") / str(number)
        AutoModelForCausalLM.from_config(config).save_pretrained(path)
        found[family] = str(path)
    return found


def computed(paths: list[str], rows: Batch, sizes: Sizes) -> list[tuple[dict[str, Tensor], dict[str, Tensor], float]]:
    """Each model's log-probs of this rank's rows, gradient of all rows, and its norm."""
    return [_computed(path, rows, sizes) for path in paths]


def _computed(path: str, rows: Batch, sizes: Sizes) -> tuple[dict[int, Tensor], dict[str, Tensor], float]:
    meshes = layout("cpu", sizes.ranks, sizes.ranks, sizes.tensor, sizes.expert)
    config = fsdp_config(tensor_parallel_size=sizes.tensor, expert_parallel_size=sizes.expert)
    model = shard_and_fill(blank_language_model(model_config(path), torch.float32), path, config, meshes, HOST)
    group = sequence_group(sizes.sequence, 60.0, sizes.tensor)
    built = Optimizers(model, optimizer_config(), 9)
    learner = Learner(model, built, config, HOST, False, Path("unused"), group, sizes.tensor)
    budget = MicroBatchBudget(12, devices=sizes.sequence * sizes.tensor)
    plans = rank_mini_batches(rows, sizes.ranks, [list(range(len(rows)))], budget)
    (mini_batch,) = plans[dist.get_rank()]
    with torch.no_grad():
        columns = columns_of(
            model, lambda part: (model(learner.inputs(part), 0.9).log_probs,), rows, mini_batch.micro_batches
        )
    places = [row for part in mini_batch.micro_batches for row in part]
    values = torch.from_numpy(columns[0]).split(rows.response_lengths[places].tolist()) if columns else ()
    parts = dict(zip(places, values, strict=True))
    objective = policy_objective(learner, LOSS, None, [])
    *_, norm = learner.gradient(rows, mini_batch, objective, torch.inf)
    learner.optimizers.zero_grad()
    return parts, whole_gradient(learner, rows, mini_batch, objective), norm


LAYOUTS = {
    "FSDP 2": Sizes(2),
    "TP 2": Sizes(2, tensor=2),
    "TP 2 x FSDP 2": Sizes(4, tensor=2),
    "EP 2": Sizes(2, expert=2),
    "EP 2 x FSDP 2": Sizes(4, expert=2),
    "EP 4 over TP 2 x FSDP 2": Sizes(4, tensor=2, expert=4),
    "Ulysses 2 x TP 2": Sizes(4, tensor=2, sequence=2),
    "Ulysses 2 x EP 2": Sizes(2, expert=2, sequence=2),
}


@pytest.fixture(scope="module")
def rows(make_batch) -> Batch:
    batch = make_batch([4, 1, 7, 3, 5, 2], prompts=[2, 5, 1, 3, 2, 4])
    generator = torch.Generator().manual_seed(0)
    batch.prompt_ids = torch.randint(SMALL["vocab_size"], batch.prompt_ids.shape, generator=generator)
    batch.response_ids = torch.randint(SMALL["vocab_size"], batch.response_ids.shape, generator=generator)
    tokens = len(batch.response_ids)
    batch.response_mask = torch.ones(tokens, dtype=torch.bool)
    batch.advantages = torch.randn(tokens, generator=generator)
    return batch


@pytest.fixture(scope="module")
def alone(paths, rows):
    return dict(zip(paths, on_ranks(1, computed, list(paths.values()), rows, ALONE)[0], strict=True))


@pytest.mark.parametrize("sizes", LAYOUTS.values(), ids=LAYOUTS)
def test_log_probs_and_gradients_are_those_of_one_process(paths, rows, alone, sizes) -> None:
    names = [name for name in paths if sizes.expert == 1 or name != "dense"]
    for parts in on_ranks(sizes.ranks, computed, [paths[name] for name in names], rows, sizes):
        for name, (log_probs, gradient, norm) in zip(names, parts, strict=True):
            right_log_probs, right, right_norm = alone[name]
            for row, values in log_probs.items():
                torch.testing.assert_close(values, right_log_probs[row], rtol=5e-6, atol=5e-6)
            assert gradient.keys() == right.keys()
            for parameter, value in gradient.items():
                assert (value - right[parameter]).norm() <= 5e-6 * right[parameter].norm() + 1e-9, (name, parameter)
            assert norm == pytest.approx(right_norm, rel=5e-6)
