import io
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from hybridrl.checkpoint.tensors import TYPES, Record, Unreadable, damaged, load


def values() -> dict[str, Tensor]:
    """Return a tensor of each type, and of each way to lie in a storage."""
    torch.manual_seed(0)
    matrix = torch.randn(5, 7)
    return {
        **{str(dtype): (torch.randn(3, 5) * 10).to(dtype) for dtype in TYPES},
        "turned": matrix.T,
        "part": matrix[1:4, 2:6],
        "other part of the same": matrix[4],
        "number": torch.tensor(2.5),
        "nothing": torch.empty(0, 3),
        "repeated": torch.ones(3, 1).expand(3, 4),
        "parameter": nn.Parameter(torch.randn(3)),
    }


def same(one: Tensor, other: Tensor) -> bool:
    assert (one.dtype, one.shape) == (other.dtype, other.shape)
    flat = (value.detach().clone().contiguous().reshape(-1) for value in (one, other))
    return torch.equal(*(value.view(torch.uint8) for value in flat))


def test_every_tensor_is_read_with_its_values_type_and_shape(tmp_path):
    torch.save(values(), tmp_path / "file")
    loaded = load(tmp_path / "file")
    assert loaded.keys() == values().keys()
    assert all(same(loaded[name].mapped(), value) for name, value in values().items())


@pytest.mark.parametrize("begin", [1, 4095, 4096, 10007])
def test_an_archive_is_read_from_within_a_file(tmp_path, begin):
    memory = io.BytesIO()
    torch.save(values(), memory)
    (tmp_path / "file").write_bytes(b"x" * begin + memory.getvalue() + b"y" * 100)
    loaded = load(tmp_path / "file", begin, len(memory.getvalue()))
    assert all(same(loaded[name].mapped(), value) for name, value in values().items())


def test_changing_a_mapped_tensor_does_not_change_the_file(tmp_path):
    torch.save({"a": torch.ones(3)}, tmp_path / "file")
    load(tmp_path / "file")["a"].mapped().zero_()
    assert load(tmp_path / "file")["a"].mapped().tolist() == [1, 1, 1]


class Thing:
    """An object with attributes, one of which is a tensor."""

    def __init__(self) -> None:
        self.size, self.value = 3, torch.ones(2)


def test_objects_become_records_of_their_attributes(tmp_path):
    torch.save([Thing(), {"plain": (1, "two", None)}], tmp_path / "file")
    thing, plain = load(tmp_path / "file")
    assert isinstance(thing, Record) and type(thing).__name__ == "Thing"
    assert thing.fields["size"] == 3
    assert thing.fields["value"].mapped().tolist() == [1, 1]
    assert plain == {"plain": (1, "two", None)}


class Call:
    """Its pickle is a call of a function."""

    def __init__(self, function: object, *arguments: object) -> None:
        self.call = function, arguments

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return self.call


def test_functions_that_a_file_names_are_not_called(tmp_path):
    trace = tmp_path / "trace"
    torch.save([Call(Path.touch, trace), Call(eval, "1 / 0"), Call(getattr, trace, "touch")], tmp_path / "file")
    assert all(isinstance(value, Record) or issubclass(value, Record) for value in load(tmp_path / "file"))
    assert not trace.exists()


@pytest.mark.parametrize(
    ("content", "reason"),
    [(b"", "cannot mmap an empty file"), (bytes(100), "File is not a zip file")],
    ids=["empty", "no archive"],
)
def test_a_file_that_torch_did_not_write_is_rejected(tmp_path, content, reason):
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(Unreadable, match=f"file cannot be read: {reason}"):
        load(tmp_path / "file")


def test_a_changed_byte_of_the_pickle_or_a_tensor_is_detected(tmp_path):
    torch.save({"a name": torch.full((4,), 2.0)}, tmp_path / "file")
    content = (tmp_path / "file").read_bytes()
    assert not damaged(tmp_path / "file")
    (tmp_path / "file").write_bytes(content.replace(b"a name", b"b name"))
    with pytest.raises(Unreadable, match="Bad CRC-32"):
        load(tmp_path / "file")
    (tmp_path / "file").write_bytes(content.replace(bytes(3) + b"\x40", bytes(3) + b"\x41"))
    assert load(tmp_path / "file")["a name"].mapped().tolist() == [8.0] * 4
    assert damaged(tmp_path / "file")
