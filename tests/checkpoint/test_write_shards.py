import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from hybridrl.checkpoint.export import shard_names, write_shards
from hybridrl.checkpoint.tensors import TYPES

INDEX = "model.safetensors.index.json"
# Odd numbers of elements, so that a wide type after a narrow one would be misaligned.
SHAPES = [(3,), (), (5, 3), (0, 4), (1, 1, 7)]


def tensors() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {
        f"{dtype} {list(shape)}": (torch.randn(shape) * 10).to(dtype)
        for dtype in sorted(TYPES, key=lambda dtype: dtype.itemsize)
        for shape in SHAPES
    }


def write(directory: Path, values: dict[str, Tensor], limit: int, order: list[str]) -> dict[str, str]:
    meta = {name: value.to("meta") for name, value in values.items()}
    return write_shards(directory, meta, ((name, 0, values[name]) for name in order), limit)


def same(one: Tensor, other: Tensor) -> bool:
    assert (one.dtype, one.shape) == (other.dtype, other.shape)
    return one.reshape(-1).view(torch.uint8).tolist() == other.reshape(-1).view(torch.uint8).tolist()


@pytest.mark.parametrize("limit", [1 << 20, 100], ids=["one file", "several files"])
@pytest.mark.parametrize("backwards", [False, True], ids=["in order", "backwards"])
def test_safetensors_reads_what_was_written_in_any_order(tmp_path, limit, backwards):
    values = tensors()
    files = write(tmp_path, values, limit, list(values)[:: -1 if backwards else 1])
    assert set(files.values()) == {path.name for path in tmp_path.glob("*.safetensors")}
    assert (len(set(files.values())) > 1) == (limit == 100)
    for file in set(files.values()):
        loaded = load_file(tmp_path / file)
        assert loaded.keys() == {name for name, place in files.items() if place == file}
        assert all(same(value, values[name]) for name, value in loaded.items())
        with safe_open(tmp_path / file, "pt") as opened:
            assert opened.metadata() == {"format": "pt"}


def test_each_tensor_is_aligned_to_its_element_size(tmp_path):
    values = tensors()
    write(tmp_path, values, 1 << 20, list(values))
    content = (tmp_path / "model.safetensors").read_bytes()
    length = int.from_bytes(content[:8], "little")
    assert length % 8 == 0
    header = json.loads(content[8 : 8 + length])
    for name, value in values.items():
        assert header[name]["data_offsets"][0] % value.itemsize == 0


def test_the_index_names_each_tensors_file_and_counts_their_bytes(tmp_path):
    values = tensors()
    files = write(tmp_path, values, 100, list(values))
    index = json.loads((tmp_path / INDEX).read_text())
    assert index == {"metadata": {"total_size": sum(value.nbytes for value in values.values())}, "weight_map": files}


def test_tensors_that_are_not_contiguous_are_written_in_logical_order(tmp_path):
    value = torch.arange(12.0).view(3, 4).T
    write(tmp_path, {"a": value}, 1 << 20, ["a"])
    assert torch.equal(load_file(tmp_path / "model.safetensors")["a"], value)


def test_a_tensor_may_be_written_in_pieces(tmp_path):
    value = torch.arange(12.0).view(4, 3)
    pieces = [("a", 9, value[3:]), ("a", 0, value[:1]), ("a", 3, value[1:3])]
    write_shards(tmp_path, {"a": value.to("meta")}, pieces, 1 << 20)
    assert torch.equal(load_file(tmp_path / "model.safetensors")["a"], value)


@pytest.mark.parametrize("pieces", [[], [("b", 0, torch.ones(1))]], ids=["none", "a piece"])
def test_an_incomplete_tensor_is_rejected(tmp_path, pieces):
    meta = {"a": torch.ones(2, device="meta"), "b": torch.ones(2, device="meta")}
    with pytest.raises(AssertionError, match="1 tensors were not written exactly once: b"):
        write_shards(tmp_path, meta, [("a", 0, torch.ones(2)), *pieces], 1 << 20)


def test_a_tensor_written_twice_does_not_hide_a_missing_one(tmp_path):
    meta = {"a": torch.ones(2, device="meta"), "b": torch.ones(2, device="meta")}
    with pytest.raises(AssertionError, match="2 tensors were not written exactly once: a, b"):
        write_shards(tmp_path, meta, [("a", 0, torch.ones(2))] * 2)


def test_pieces_are_rounded_to_the_written_type(tmp_path):
    value = torch.randn(700_000, generator=torch.Generator().manual_seed(0))
    meta = {"a": torch.empty(700_000, dtype=torch.bfloat16, device="meta")}
    write_shards(tmp_path, meta, [("a", 650_000, value[650_000:]), ("a", 0, value[:650_000])])
    assert torch.equal(load_file(tmp_path / "model.safetensors")["a"], value.bfloat16())


def test_large_pieces_are_written_completely(tmp_path):
    value = torch.arange(40_000_003, dtype=torch.int32)
    pieces = [("a", 0, value[:1000]), ("a", 39_000_000, value[39_000_000:]), ("a", 1000, value[1000:39_000_000])]
    write_shards(tmp_path, {"a": value.to("meta")}, pieces)
    assert torch.equal(load_file(tmp_path / "model.safetensors")["a"], value)


def test_a_full_disk_is_detected_before_anything_is_written(tmp_path, full_disk):
    def no_pieces():
        raise AssertionError("a piece was requested")
        yield

    full_disk(1 << 20)
    with pytest.raises(OSError, match=r"model\.safetensors"):
        write_shards(tmp_path, {"a": torch.empty(1 << 20, device="meta")}, no_pieces())


def test_shards_are_filled_in_order_and_a_large_tensor_has_its_own():
    sizes = {"a": 30, "b": 4, "c": 6, "d": 1, "e": 30, "f": 2}
    files = shard_names(sizes, limit=10)
    assert [int(files[name].split("-")[1]) for name in sizes] == [1, 2, 2, 3, 4, 5]
    assert files["a"] == "model-00001-of-00005.safetensors"
    assert set(shard_names(sizes, limit=73).values()) == {"model.safetensors"}
