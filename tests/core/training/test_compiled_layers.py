"""Compiled layers where attention has a kernel, as on a GPU: one graph per layer, for any rows, also below FSDP2.

The kernel is replaced by an operator that torch cannot look into either, and that computes something simpler.
"""

from collections.abc import Iterator
from functools import cache
from itertools import accumulate, chain, pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch._inductor import metrics
from torch.distributed import fsdp
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, Qwen2Config

from hybridrl.core import device as devices
from hybridrl.core.training import attention
from hybridrl.core.training.fsdp import compile_layers
from hybridrl.core.training.packing import PackedRows, Paths
from hybridrl.core.training.working_copies import WorkingCopies

ROWS = [[3, 5], [4, 4, 9], [7], [2, 2, 2, 11]]
MOST_KERNELS = 37  # of a layer, forward and backward, besides the matrix products


@torch.library.custom_op("hybridrl_test::kernel", mutates_args={})
def kernel(query: Tensor, key: Tensor, value: Tensor, boundaries: Tensor, longest: int) -> Tensor:
    shared = query.shape[1] // key.shape[1]
    return query + (key + value).sum(0, keepdim=True).repeat_interleave(shared, dim=1)


@kernel.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, boundaries: Tensor, longest: int) -> Tensor:
    return torch.empty_like(query)


def _setup(ctx, inputs, output) -> None:
    ctx.shared, ctx.keys = inputs[0].shape[1] // inputs[1].shape[1], inputs[1].shape[0]


def _backward(ctx, gradient: Tensor) -> tuple[Tensor | None, ...]:
    shared = gradient.unflatten(1, (-1, ctx.shared)).sum((0, 2)).expand(ctx.keys, -1, -1).contiguous()
    return gradient, shared, shared.clone(), None, None


kernel.register_autograd(_backward, setup_context=_setup)


@pytest.fixture
def kernel_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    @cache
    def capability(device: torch.device) -> tuple[int, int]:
        open("/dev/null").close()  # as torch.cuda's, nothing that a graph can hold
        return (9, 0)

    @torch.compiler.assume_constant_result
    def has(device: torch.device) -> bool:
        return capability(device) >= (8, 0)

    def attended(query, key, value, boundaries, _, longest, __, *, scale=None, window_size=(-1, -1), enable_gqa=False):
        return kernel(query, key, value, boundaries, longest)

    monkeypatch.setattr(devices, "has_varlen_attention", has)
    monkeypatch.setattr(attention, "varlen_attn", attended)


@pytest.fixture
def one_rank() -> Iterator[None]:
    if begins := not dist.is_initialized():  # other tests of this process may have left a group
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    if begins:
        dist.destroy_process_group()


def model_of(layers: int) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = Qwen2Config(vocab_size=300, num_hidden_layers=layers, **sizes)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention.NAME, dtype=torch.bfloat16)


def gradients(
    model: torch.nn.Module, lengths: list[int], copies: WorkingCopies | None = None, *, shares: bool = False
) -> list[Tensor]:
    """Run a model forward and backward on rows of these lengths; if they share, all begin with two of the first's."""
    model.zero_grad()
    ids = torch.randint(300, (1, sum(lengths)), generator=torch.Generator().manual_seed(0))
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    starts, whole = [0, *accumulate(lengths)], [[*range(lengths[0])]]
    whole += [[0, 1, *range(*pair)] for pair in pairwise(starts[1:])]
    paths = Paths.of([*map(len, whole)], places=torch.tensor([*chain(*whole)]))
    packed = PackedRows.of(lengths, paths=paths if shares else None)
    if copies is not None:
        copies.gather()
    logits = model(input_ids=ids, position_ids=positions, packed=packed, use_cache=False).logits
    logits.float().square().mean().backward()
    if copies is not None:
        copies.release()
    return [gradient for parameter in model.parameters() if (gradient := parameter.grad) is not None]


@pytest.mark.parametrize("kind", ["plain", "sharing", "with copies", pytest.param("sharded", marks=pytest.mark.slow)])
def test_a_layer_is_one_graph_for_any_rows(kernel_of_a_gpu, one_rank, monkeypatch, kind):
    plain, model = model_of(9), model_of(9)
    copies = WorkingCopies(model.float(), torch.bfloat16) if kind == "with copies" else None
    backend = CompileCounterWithBackend("aot_eager")
    compile_layers(list(model.model.layers), backend)
    if kind == "sharded":
        for layer in model.model.layers:
            fsdp.fully_shard(layer)
        fsdp.fully_shard(model)
    torch.compiler.reset()
    counters.clear()
    compiled = []
    for lengths in ROWS:
        own = [
            gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
            for gradient in gradients(model, lengths, copies, shares=kind == "sharing")
        ]
        torch.testing.assert_close(own, gradients(plain, lengths, shares=kind == "sharing"), check_dtype=False)
        compiled.append(backend.frame_count)
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
    assert compiled[1:] == [compiled[1]] * (len(ROWS) - 1) and compiled[1] <= 2  # all layers share them


@pytest.mark.slow  # a compiler of C++ runs
def test_what_a_layer_computes_between_its_matrix_products_is_fused(kernel_of_a_gpu, one_rank):
    torch.compiler.reset()
    metrics.reset()
    model = model_of(2)
    compile_layers(list(model.model.layers))
    gradients(model, [3, 5])
    assert 0 < metrics.generated_kernel_count <= MOST_KERNELS
