import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hybridrl.core.training.attention import attend, grouped_option, kernel_supports
from hybridrl.core.training.packing import PackedRows

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=6)
OPTIONS = st.sampled_from(
    [
        {},
        {"sliding_window": 5},
        {"softcap": 1.5},
        {"softcap": 1.5, "sliding_window": 5},
        {"s_aux": torch.tensor([0.5, -1.0, 2.0, 0.0])},
        {"s_aux": torch.tensor([0.5, -1.0, 2.0, 0.0]), "sliding_window": 5},
    ]
)
HEADS = st.sampled_from([(4, 4), (4, 2), (3, 1)])
WIDTH = 8


def drawn(lengths: list[int], heads: tuple[int, int], seed: int) -> list[Tensor]:
    """Query, key and value [1, heads, T, width] with a model's memory layout: one token after another."""
    draw = torch.Generator().manual_seed(seed)
    return [
        torch.randn(1, sum(lengths), count, WIDTH, generator=draw).transpose(1, 2).requires_grad_()
        for count in (heads[0], heads[1], heads[1])
    ]


def packed_attention(inputs: list[Tensor], lengths: list[int], **options: object) -> Tensor:
    """Attention output [T, heads, width]."""
    query, key, value = inputs
    return attend(torch.nn.Identity(), query, key, value, None, packed=PackedRows.of(lengths), **options)[0][0]


def by_the_formula(inputs: list[Tensor], lengths: list[int], sliding_window=10**6, softcap=None, s_aux=None) -> Tensor:
    """Softmax over the scores of what each token attends to, in float64; a sink adds to its divisor."""
    query, key, value = (tensor[0].double() for tensor in inputs)
    key, value = (tensor.repeat_interleave(len(query) // len(key), dim=0) for tensor in (key, value))
    row = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    distance = torch.arange(len(row))[:, None] - torch.arange(len(row))
    seen = (row[:, None] == row) & (distance >= 0) & (distance < sliding_window)
    scores = query @ key.mT / WIDTH**0.5
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    exponentials = scores.exp() * seen
    divisor = exponentials.sum(-1, keepdim=True) + (0 if s_aux is None else s_aux.double().exp()[:, None, None])
    return (exponentials / divisor @ value).transpose(0, 1)


@given(LENGTHS, HEADS, OPTIONS, st.integers(0, 99))
def test_output_and_gradient_match_the_formula(lengths, heads, options, seed):
    inputs = drawn(lengths, heads, seed)
    if "s_aux" in options:
        options = options | {"s_aux": options["s_aux"][: heads[0]]}
    actual, expected = packed_attention(inputs, lengths, **options), by_the_formula(inputs, lengths, **options)
    torch.testing.assert_close(actual, expected.float(), atol=1e-5, rtol=1e-5)
    weights = torch.linspace(-1, 1, actual.numel()).view_as(actual)
    ours = torch.autograd.grad(actual, inputs, weights)
    right = torch.autograd.grad(expected, inputs, weights.double())
    torch.testing.assert_close(ours, right, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("length", [3, 100, 600])
@pytest.mark.parametrize("neighbour", [1, 70, 900])
def test_a_row_gives_the_same_bits_whatever_rows_it_is_packed_with(length, neighbour):
    inputs = drawn([neighbour, length], (4, 2), seed=0)
    alone = [tensor[:, :, neighbour:].detach().requires_grad_() for tensor in inputs]
    packed, single = packed_attention(inputs, [neighbour, length])[neighbour:], packed_attention(alone, [length])
    assert torch.equal(packed, single)
    gradients = (torch.autograd.grad(output.square().sum(), of) for output, of in ((packed, inputs), (single, alone)))
    for together, own in zip(*gradients, strict=True):
        assert torch.equal(together[:, :, neighbour:], own)


def test_the_grouped_query_option_is_passed_only_to_a_kernel_that_has_it():
    assert grouped_option(lambda query, key, *, enable_gqa=False: query) == {"enable_gqa": True}
    assert grouped_option(lambda query, key, *, scale=None: query) == {}


@pytest.mark.parametrize(
    ("dtype", "widths", "taken"),
    [
        (torch.bfloat16, (128, 128), True),
        (torch.float16, (64, 64), True),
        (torch.float32, (64, 64), False),
        (torch.bfloat16, (512, 512), False),
        (torch.bfloat16, (20, 20), False),
        (torch.bfloat16, (192, 128), False),  # those of DeepSeek's latent attention
    ],
)
def test_the_kernel_is_used_for_the_types_and_widths_that_it_supports(dtype, widths, taken):
    query, value = (torch.empty(1, 2, 3, width, dtype=dtype) for width in widths)
    assert kernel_supports(query, value) == taken
