import json
import os
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from hybridrl.checkpoint.files import CHUNK, MANIFEST, faults, write_manifest

LARGE = "actor/__0_0.distcp"
FILES = {LARGE: bytes(range(256)) * 16, "actor/.metadata": b"names", "state.json": b"{}", "empty": b""}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    for name, content in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    write_manifest(tmp_path)
    return tmp_path


def flip(path: Path, position: int, mask: int = 1) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= mask
    path.write_bytes(content)


def test_size_and_checksum_of_every_file_are_recorded(saved):
    files = json.loads((saved / MANIFEST).read_text())["files"]
    assert files == {
        name: {"bytes": len(content), "crc32": f"{zlib.crc32(content):08x}"} for name, content in FILES.items()
    }


CHANGES: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "nothing": (lambda saved: None, []),
    "a file that was added later": (lambda saved: (saved / "actor" / "notes.txt").write_text("mine"), []),
    "a truncated file": (lambda saved: os.truncate(saved / LARGE, 1024), [f"{LARGE}: 1024 of 4096 bytes"]),
    "a file that has grown": (lambda saved: (saved / "empty").write_bytes(b"x"), ["empty: 1 of 0 bytes"]),
    "no manifest": (lambda saved: (saved / MANIFEST).unlink(), [f"{MANIFEST}: missing"]),
    **{f"no {name}": (lambda saved, name=name: (saved / name).unlink(), [f"{name}: missing"]) for name in FILES},
}


@pytest.mark.parametrize("change", CHANGES)
def test_files_that_are_missing_or_of_another_size_are_named_and_others_are_ignored(saved, change):
    make, expected = CHANGES[change]
    make(saved)
    assert faults(saved) == expected


@pytest.mark.parametrize("name", [name for name, content in FILES.items() if content])
@pytest.mark.parametrize("position", [0, -1])
def test_a_file_with_one_bit_flipped_is_named(saved, name, position):
    flip(saved / name, position)
    assert faults(saved) == [f"{name}: changed since it was written"]


def test_every_bit_counts_if_a_file_is_read_in_many_pieces(tmp_path):
    (tmp_path / "large").write_bytes(bytes(2 * CHUNK + 7))
    write_manifest(tmp_path)
    assert faults(tmp_path) == []
    for position in (0, CHUNK - 1, CHUNK, 2 * CHUNK - 1, 2 * CHUNK, 2 * CHUNK + 6):
        flip(tmp_path / "large", position)
        assert faults(tmp_path) == ["large: changed since it was written"]
        flip(tmp_path / "large", position)


def test_a_file_that_cannot_be_read_is_named_with_the_reason(saved):
    (saved / "state.json").unlink()
    (saved / "state.json").symlink_to(saved / "state.json")
    assert faults(saved) == ["state.json: cannot be read (Too many levels of symbolic links)"]


def test_each_of_several_faults_is_named(saved):
    (saved / "state.json").unlink()
    flip(saved / "actor" / ".metadata", 2)
    assert faults(saved) == ["actor/.metadata: changed since it was written", "state.json: missing"]


def test_damage_to_the_manifest_is_not_blamed_on_a_file(saved):
    for position in range((saved / MANIFEST).stat().st_size):
        mask = 1 << position % 8
        flip(saved / MANIFEST, position, mask)
        assert faults(saved) == [f"{MANIFEST}: damaged"], position
        flip(saved / MANIFEST, position, mask)
    assert faults(saved) == []


@pytest.mark.parametrize("text", ["", "[]", "null", '{"files": {}}', '{"crc32": "'])
def test_a_file_that_is_not_a_manifest_is_a_fault(saved, text):
    (saved / MANIFEST).write_text(text)
    assert faults(saved) == [f"{MANIFEST}: damaged"]


def test_a_manifest_cut_at_any_length_is_a_fault(saved):
    text = (saved / MANIFEST).read_text()
    for length in range(len(text)):
        (saved / MANIFEST).write_text(text[:length])
        assert faults(saved) == [f"{MANIFEST}: damaged"]


def test_a_manifest_that_cannot_be_read_is_a_fault(saved):
    (saved / MANIFEST).unlink()
    (saved / MANIFEST).mkdir()
    assert faults(saved) == [f"{MANIFEST}: cannot be read (Is a directory)"]


def test_writing_the_manifest_again_describes_the_present_files(saved):
    (saved / "state.json").unlink()
    (saved / "empty").write_bytes(b"no more")
    write_manifest(saved)
    assert faults(saved) == []
    assert json.loads((saved / MANIFEST).read_text())["files"].keys() == FILES.keys() - {"state.json"}


def test_a_large_file_is_never_in_memory_as_one(tmp_path):
    with (tmp_path / "shard").open("wb") as file:
        file.truncate(32 << 20)
    tracemalloc.start()
    write_manifest(tmp_path)
    assert faults(tmp_path) == []
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 3 << 20
