import json
from collections import Counter
from dataclasses import asdict

import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridrl.core.weights.buckets import ALIGNMENT, Tensor, buffer_bytes, plan_buckets

FLOAT, HALF = torch.float32, torch.bfloat16


def parameter(name: str, *shape: int, dtype: torch.dtype = FLOAT):
    return name, torch.Size(shape), dtype


def names(bucket) -> list[str]:
    return [tensor.name for tensor in bucket.tensors]


# A layer takes 64 bytes for its matrix and 64 for its vector of 16.
MODEL = [
    parameter("model.embed_tokens.weight", 8, 4),
    *(parameter(f"model.layers.{n}.{kind}", *shape) for n in range(3) for kind, shape in (("w", (4, 4)), ("b", (4,)))),
    parameter("model.norm.weight", 4),
    parameter("lm_head.weight", 8, 4),
]


def test_layers_fill_a_bucket_to_the_limit_and_parameters_outside_layers_come_last():
    first, second, last = plan_buckets(MODEL, limit=512)
    assert names(first) == ["model.layers.0.w", "model.layers.0.b", "model.layers.1.w", "model.layers.1.b"]
    assert names(second) == ["model.layers.2.w", "model.layers.2.b"]
    assert names(last) == ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"]
    assert [bucket.bytes for bucket in (first, second, last)] == [256, 128, 128 + 64 + 128]


def test_of_two_buckets_that_follow_each_other_neither_overlaps_the_other():
    first, second, last = plan_buckets(MODEL, limit=512)
    assert [bucket.start for bucket in (first, second, last)] == [0, 320, 0]
    assert buffer_bytes([first, second, last]) == 320 + 128
    buffer = torch.zeros(448, dtype=torch.uint8)
    second.view(buffer).fill_(1)
    assert not first.view(buffer).any() and not last.view(buffer).any()


def test_a_tensor_has_its_offset_and_size():
    _, second, _ = plan_buckets(MODEL, limit=512)
    assert second.tensors == [
        Tensor("model.layers.2.w", [4, 4], "float32", offset=0, bytes=64),
        Tensor("model.layers.2.b", [4], "float32", offset=64, bytes=16),
    ]


def test_only_the_bytes_after_a_tensor_that_it_does_not_fill_are_cleared():
    _, second, _ = plan_buckets(MODEL, limit=512)  # at 320: 64 bytes, and 16 of the next 64
    buffer = torch.full((448,), 7, dtype=torch.uint8)
    second.clear_gaps(buffer)
    assert buffer.tolist() == [7] * (320 + 64 + 16) + [0] * 48


def test_one_byte_less_and_the_second_layer_does_not_fit():
    assert [len(bucket.tensors) for bucket in plan_buckets(MODEL, limit=511)] == [2, 2, 2, 3]


def test_a_layer_above_the_limit_gets_a_separate_bucket():
    parameters = [parameter("layers.0.w", 2), parameter("layers.1.w", 100), parameter("layers.2.w", 2)]
    assert [names(bucket) for bucket in plan_buckets(parameters, limit=256)] == [[name] for name, *_ in parameters]


def test_experts_stay_with_their_layer():
    parameters = [parameter(f"layers.0.experts.{n}.w", 16) for n in range(3)]
    assert len(plan_buckets(parameters, limit=128)) == 1


def test_a_model_without_layers_is_one_bucket_and_no_model_is_none():
    assert len(plan_buckets([parameter("a", 100), parameter("b", 100)], limit=20)) == 1
    assert plan_buckets([], limit=20) == []


def test_values_written_at_a_tensors_place_are_read_there():
    (bucket,) = plan_buckets(
        [parameter("a", 3, dtype=HALF), parameter("b", 2, 2), parameter("c", dtype=HALF)], limit=1000
    )
    memory = torch.zeros(bucket.bytes, dtype=torch.uint8)
    values = [torch.tensor([1, 2, 3], dtype=HALF), torch.tensor([[4.0, 5.0], [6.0, 7.0]]), torch.tensor(8, dtype=HALF)]
    for place, value in zip(bucket.tensors, values, strict=True):
        place.view(memory).copy_(value)
    for place, value in zip(bucket.tensors, values, strict=True):
        assert torch.equal(place.view(memory), value) and place.view(memory).dtype == value.dtype


def test_a_tensors_place_passes_as_plain_data():
    (place,) = plan_buckets([parameter("layers.0.w", 2, 3, dtype=HALF)], limit=1000)[0].tensors
    assert Tensor(**json.loads(json.dumps(asdict(place)))) == place


@given(
    st.lists(st.tuples(st.none() | st.integers(0, 4), st.integers(1, 60), st.sampled_from([FLOAT, HALF]))),
    st.integers(1, 600),
)
def test_any_model_is_partitioned_into_buckets_with_each_tensor_once_and_no_layer_split(tensors, limit):
    parameters = [
        (f"p{number}" if layer is None else f"layers.{layer}.p{number}", torch.Size([size]), dtype)
        for number, (layer, size, dtype) in enumerate(tensors)
    ]
    buckets = plan_buckets(parameters, limit)
    assert Counter(name for bucket in buckets for name in names(bucket)) == Counter(name for name, *_ in parameters)
    layers = [{name.split(".")[1] if "." in name else None for name in names(bucket)} for bucket in buckets]
    assert all(count == 1 for count in Counter(layer for held in layers for layer in held).values())
    assert all(None not in held for held in layers[:-1])
    for bucket, held in zip(buckets, layers, strict=True):
        assert bucket.bytes <= limit // 2 or len(held) == 1
        ends = [0, *(tensor.offset + tensor.bytes for tensor in bucket.tensors)]
        assert all(tensor.offset % ALIGNMENT == 0 for tensor in bucket.tensors)
        assert all(tensor.offset >= end for tensor, end in zip(bucket.tensors, ends, strict=False))
        assert ends[-1] <= bucket.bytes and bucket.bytes % ALIGNMENT == 0
