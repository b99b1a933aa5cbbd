"""Rows shared by several ranks: the same outputs on each, and gradients that add up to those of one rank."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from hybridrl.config.catalog import Divergence
from hybridrl.core.batch import Batch
from hybridrl.core.training.attention import sequence_group, slice_of
from hybridrl.core.training.heads import Head, ReferenceOutputs
from hybridrl.core.training.model import check_log_probs
from hybridrl.core.training.packing import ModelInputs, pack_rows
from hybridrl.core.training.planning import MicroBatchBudget, Pieces, plan
from hybridrl.required import required
from tests.core.training.families import (
    FAMILIES,
    SPECIAL,
    VOCABULARY,
    load_language_model,
    load_value_model,
    model_config,
)
from tests.core.training.on_ranks import on_ranks

SOME = [
    "two heads a key",
    "all heads one key, tied head",
    "learned positions",
    "a sliding window in every layer",
    "capped scores and logits, a sliding window in the first layer",
    "experts",
]


def outputs_and_gradient(path: str, inputs: ModelInputs) -> list[Tensor]:
    """Outputs of a policy with a reference and a teacher, the values of a critic, and both gradients by parameter."""
    torch.manual_seed(0)
    head = torch.randn(VOCABULARY, 32)
    model, critic = (load(model_config(path), torch.float32) for load in (load_language_model, load_value_model))
    nn.init.normal_(critic.model.get_submodule(critic.head_name).weight)
    hidden = model.hidden_states(inputs).detach()
    wanted = {"entropies": True, "entropy_gradient": True, "sum_pi_squared": True}
    others = {"against": ReferenceOutputs(hidden, Head(head)), "teacher": ReferenceOutputs(-hidden, Head(head[:-2]))}
    actual = model(inputs, 0.8, divergence=Divergence("jsd", 0.3), **others, **wanted)
    columns = [*actual[:5], critic(inputs)]  # the mass that samples do not reach is estimated per slice
    # A different weight for every token, and a term that couples the tokens.
    weights = torch.linspace(-1, 1, len(actual.log_probs))
    terms = [(column * weights).sum() + column.mean().sin() for column in columns if column.requires_grad]
    torch.stack(terms).sum().backward()
    gradients = [parameter.grad for module in (model, critic) for parameter in module.parameters()]
    return [column.detach() for column in columns] + gradients


def shared(paths: list[str], inputs: ModelInputs, ranks: int) -> list[list[Tensor]]:
    """Of each model, on one of the ranks that share the rows."""
    torch.use_deterministic_algorithms(True)
    return [outputs_and_gradient(path, slice_of(inputs, sequence_group(ranks, 60.0))) for path in paths]


def assert_equal_to_the_rows_alone(paths: list[str], rows: Batch, ranks: int) -> None:
    inputs = pack_rows(rows, padded=False)
    by_rank = on_ranks(ranks, shared, paths, inputs, ranks)
    for path, *actual in zip(paths, *by_rank, strict=True):
        columns, gradients = zip(*actual, strict=True), outputs_and_gradient(path, inputs)
        for number, (values, right) in enumerate(zip(columns, gradients, strict=True)):
            if number < 6:
                for value in values:
                    torch.testing.assert_close(value, right, rtol=1e-5, atol=1e-5)
            else:
                torch.testing.assert_close(sum(values), right, rtol=1e-4, atol=2e-5)


def test_families_give_the_same_on_one_and_several_ranks(directories: dict[str, str], rows: Batch) -> None:
    assert {*SOME} <= (FAMILIES | SPECIAL).keys()
    assert_equal_to_the_rows_alone([directories[name] for name in SOME], rows, 2)


def test_more_ranks_than_key_heads_and_slices_without_a_response(directory: str, make_batch) -> None:
    """9 tokens on four ranks: the first holds only a prompt, the last only padding."""
    batch = make_batch([3, 1], prompts=[4, 1])
    batch.prompt_ids, batch.response_ids = torch.arange(5), torch.arange(7, 11)
    assert_equal_to_the_rows_alone([directory], batch, 4)


class Group:
    """Stands for one rank of a process group."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = lambda: rank, lambda: size


def test_a_slice_has_its_tokens_their_targets_and_the_boundaries_of_all_rows(make_batch) -> None:
    """100 | 0 1 and 101 102 103 | 2, and a padding token."""
    routes = torch.arange(7, dtype=torch.int16).view(7, 1, 1)
    inputs = pack_rows(make_batch([2, 1], prompts=[1, 3], carried={"routes": routes}), padded=False)
    first, second = (slice_of(inputs, Group(rank, 2)) for rank in (0, 1))
    assert first.input_ids.tolist() == [[100, 0, 1, 101]]
    assert second.input_ids.tolist() == [[102, 103, 2, 0]]
    assert second.position_ids.tolist() == [[1, 2, 3, 0]]
    assert [part.carried["routes"].flatten().tolist() for part in (first, second)] == [[0, 1, 2, 3], [4, 5, 6, -1]]
    assert (first.predictors.tolist(), second.predictors.tolist()) == ([0, 1], [1])
    assert (first.targets.tolist(), second.targets.tolist()) == ([0, 1], [2])
    assert required(first.packed).boundaries.tolist() == required(second.packed).boundaries.tolist() == [0, 3, 7, 8]
    slices = [required(part.slice) for part in (first, second)]
    assert [(each.at.tolist(), len(each.predictors)) for each in slices] == [([0, 1], 3), ([2], 3)]


def test_ranks_that_share_rows_have_the_same_micro_batches() -> None:
    # 9 and 7 go to the first two ranks and to the last two; 4 joins the 7.
    assert plan(Pieces.single([9, 4, 7]), 4, MicroBatchBudget(11, devices=2)) == [[[0]], [[0]], [[2, 1]], [[2, 1]]]


def too_few_heads(path: str) -> str:
    with pytest.raises(ValueError) as caught:
        model = load_language_model(model_config(path), torch.float32)
        check_log_probs(model, torch.float32, padded=False, group=sequence_group(3, 60.0))
    return str(caught.value)


def test_heads_that_cannot_be_divided_are_rejected(directory: str) -> None:
    message = "ulysses_sequence_parallel_size=3: must divide the model's 4 attention heads"
    assert on_ranks(3, too_few_heads, directory) == [message] * 3


def checked(path: str) -> bool:
    model = load_language_model(model_config(path), torch.float32)
    group = sequence_group(2, 60.0)
    check_log_probs(model, torch.float32, padded=False, group=group)
    model.model.base_model.layers[0].register_forward_pre_hook(
        lambda layer, inputs: (inputs[0] + inputs[0].cumsum(1), *inputs[1:])
    )
    with pytest.raises(ValueError, match="by 2 ranks together; set ulysses_sequence_parallel_size=1"):
        check_log_probs(model, torch.float32, padded=False, group=group)
    return dist.get_rank() in (0, 1)


def test_a_layer_that_mixes_tokens_outside_attention_is_rejected(directory: str) -> None:
    assert on_ranks(2, checked, directory) == [True, True]
