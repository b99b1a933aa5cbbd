"""Rows that share tokens on a GPU: the kernel with fewer queries than keys, and the sum of many readers' gradients."""

from itertools import accumulate, pairwise

import pytest
import torch
from torch import Tensor, nn

from hybridrl.core.training.attention import attend
from hybridrl.core.training.packing import PackedRows, Paths, read_at

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

DEVICE = torch.device("cuda", 0)


def rows_of(prompt: int, own: list[int], *, shared: bool) -> tuple[PackedRows, Tensor]:
    """Return the rows of one prompt, and where each token of the rows alone is among the computed ones."""
    lengths = [prompt + own[0], *own[1:]]
    ends = [0, *accumulate(lengths)]
    later = [torch.cat([torch.arange(prompt), torch.arange(*pair)]) for pair in pairwise(ends[1:])]
    whole = [torch.arange(lengths[0]), *later]
    paths = Paths.of([len(each) for each in whole], places=torch.cat(whole))
    rows = PackedRows.of(lengths, paths=paths) if shared else PackedRows.of([len(each) for each in whole])
    return rows.map(lambda tensor: tensor.to(DEVICE)), paths.places.to(DEVICE)


def attended(inputs: list[Tensor], own: list[int], dtype: torch.dtype, window: int | None, *, shared: bool) -> list:
    """Return the attention at all tokens of the rows alone, and the gradients of a weighted sum of it."""
    leaves = [each.to(dtype, copy=True).requires_grad_() for each in inputs]
    rows, at = rows_of(PROMPT, own, shared=shared)
    query, key, value = leaves if shared else (read_at(each, at, 2) for each in leaves)
    output, _ = attend(nn.Module(), query, key, value, None, sliding_window=window, packed=rows)
    whole = output if not shared else output[:, at]
    weights = torch.linspace(-1, 1, whole.numel(), device=DEVICE).view(whole.shape)
    (whole.float() * weights).sum().backward()
    return [whole.detach(), *(leaf.grad for leaf in leaves)]


PROMPT = 1000


@pytest.mark.parametrize("heads", [(16, 16), (14, 2)])
@pytest.mark.parametrize("window", [None, 256])
def test_the_kernel_with_fewer_queries_than_keys_is_as_exact_as_with_equal_numbers(heads, window):
    torch.manual_seed(0)
    own = [100, 7, 1, 1500, 64]
    query, *others = (torch.randn(1, count, PROMPT + sum(own), 64, device=DEVICE) for count in (*heads, heads[1]))
    exact = attended([query, *others], own, torch.float32, window, shared=False)
    ours, alone = (attended([query, *others], own, torch.bfloat16, window, shared=each) for each in (True, False))
    for right, found, other in zip(exact, ours, alone, strict=True):
        assert (found.float() - right).norm() <= 1.3 * (other.float() - right).norm()


def test_gradients_of_many_readers_are_rounded_once():
    torch.manual_seed(0)
    values = torch.randn(64, 256, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    at = torch.randint(64, (4096,), device=DEVICE)
    gradient = torch.randn(4096, 256, device=DEVICE, dtype=torch.bfloat16)
    read_at(values, at).backward(gradient)
    exact = torch.zeros(64, 256, device=DEVICE).index_add_(0, at, gradient.float())
    found = values.grad
    assert found is not None and (found.float() - exact).abs().max() <= exact.abs().max() * 2**-8
