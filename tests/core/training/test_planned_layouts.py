"""The memory plan of divided models: ranks hold, gather and receive as much as planned."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, PreTrainedModel

from hybridrl.core.batch import Batch
from hybridrl.core.training.fsdp import local
from hybridrl.core.training.losses import policy_objective
from hybridrl.core.training.model import blank_language_model
from hybridrl.doctor.memory_sizes import ModelSizes, Shard
from tests.core.training.families import SMALL, model_config
from tests.core.training.on_ranks import on_ranks
from tests.core.training.test_layout import FAMILIES, LOSS, Sizes, build, share
from tests.core.training.test_state import fsdp_config

pytestmark = pytest.mark.slow

DIVIDED = {
    "FSDP 4": Sizes(4),
    "TP 2 x FSDP 2": Sizes(4, tensor=2),
    "EP 4": Sizes(4, expert=4),
    "EP 2 x FSDP 2": Sizes(4, expert=2),
    "EP 4 over TP 2 x FSDP 2": Sizes(4, tensor=2, expert=4),
}


@pytest.fixture(scope="module")
def paths(tmp_path_factory) -> dict[str, str]:
    found = {family: str(tmp_path_factory.mktemp("model")) for family in FAMILIES}
    for family, path in found.items():
        AutoModelForCausalLM.from_config(FAMILIES[family]).save_pretrained(path)
    return found


def planned(path: str, sizes: Sizes) -> Shard:
    divided = {"tensor_parallel_size": sizes.tensor, "expert_parallel_size": sizes.expert}
    config = fsdp_config(fsdp_size=sizes.ranks, **divided)
    return Shard(ModelSizes(blank_language_model(model_config(path), torch.float32).model, config), config)


def elements(paths: list[str], sizes: Sizes) -> list[tuple[int, list[int]]]:
    """The elements of each model that this rank holds, and those of each layer while it is gathered."""
    return [_elements(build(path, sizes).model) for path in paths]


def _elements(model: nn.Module) -> tuple[int, list[int]]:
    held = sum(local(parameter).numel() for parameter in model.parameters())
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.unshard()
    layers = Counter[str]()
    for name, parameter in model.named_parameters():
        if ".layers." in name:
            layers[name.split(".")[3]] += local(parameter).numel()
    return held, [*layers.values()]


@pytest.mark.parametrize("name", DIVIDED)
def test_ranks_hold_and_gather_as_many_elements_as_planned(paths, name) -> None:
    sizes = DIVIDED[name]
    without_plan = {"dense": sizes.expert > 1, "attention sinks": sizes.tensor > 1}
    families = [family for family in paths if not without_plan.get(family)]
    ranks = on_ranks(4, elements, [paths[family] for family in families], sizes)
    for family, parts in zip(families, zip(*ranks, strict=True), strict=True):
        plan, held = planned(paths[family], sizes), [held for held, _ in parts]
        assert {max(layers) for _, layers in parts} == {plan.sizes.layer}, family
        assert sum(held) == plan.sizes.held, family
        if family != "a recurrence along the text":  # has matrices of a single row, which one rank has
            assert held == [plan.parameters / 4] * 4, family  # bytes of float32


class Received(TorchDispatchMode):
    """Records the bytes that a rank receives by kind, where collectives move as few as they can and tokens are spread
    evenly. Not recorded: numbers per token or per model, and the gradient of norms within heads."""

    def __init__(self, sizes: Sizes, hidden: int) -> None:
        super().__init__()
        self.sizes, self.hidden, self.bytes = sizes, hidden, Counter[str]()

    def __torch_dispatch__(self, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = call(*args, **(kwargs or {}))
        name, others = str(call).split(".")[1], 1 - 1 / self.sizes.tensor
        if name in ("_allgather_base_", "_reduce_scatter_base_"):
            self.bytes["parameters and gradients"] += abs(args[0].nbytes - args[1].nbytes)
        elif str(call).startswith("_c10d") and isinstance(args[0], Tensor) and args[0].shape[-1:] == (self.hidden,):
            if name == "all_to_all_single":
                self.bytes["tokens of experts"] += args[0].nbytes * (1 - 1 / self.sizes.expert)
            elif name == "all_reduce":
                self.bytes["sums of a tensor group"] += 2 * others * args[0].nbytes
            elif name == "all_gather_into_tensor":
                self.bytes["sums of a tensor group"] += others * result.nbytes
        return result


def received(path: str, rows: Batch, sizes: Sizes, recomputed: bool) -> tuple[dict[str, float], list[int]]:
    """Return the bytes that this rank receives in an update, and the tokens of its micro-batches."""
    learner, part = build(path, sizes), share(rows, sizes)
    model = learner.model.train().model
    assert isinstance(model, PreTrainedModel)
    if recomputed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    lengths = rows.prompt_lengths + rows.response_lengths
    with Received(sizes, SMALL["hidden_size"]) as record:
        learner.gradient(rows, part, policy_objective(learner, LOSS, None, []), torch.inf)
    return record.bytes, [int(lengths[places].sum()) for places in part.micro_batches]


@pytest.mark.drill
def test_ranks_receive_as_many_bytes_as_planned(paths, rows) -> None:
    rows = replace(rows, response_mask=rows.response_ids >= 0, advantages=rows.response_ids - 20.0)
    for family, name in (*(("a mixture", name) for name in DIVIDED), ("dense", "TP 2 x FSDP 2")):
        sizes, plan = DIVIDED[name], planned(paths[family], DIVIDED[name])
        for recomputed in (False, True):
            actual, expected = Counter[str](), Counter[str]()
            for recorded, micro_batches in on_ranks(4, received, paths[family], rows, sizes, recomputed):
                actual.update(recorded)
                for tokens in micro_batches:
                    layer = plan.moved(tokens, recomputed=recomputed)
                    expected.update({kind: 2 * size for kind, size in layer.items() if size})  # two equal layers
                    # Embedding and head stay gathered after the forward pass.
                    outside = plan.sizes.outside * (4 + 4) * (1 - 1 / plan.shards["dense"])
                    expected["parameters and gradients"] += outside
            assert actual == pytest.approx(expected), f"{family}, {name}, {recomputed=}"
