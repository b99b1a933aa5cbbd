"""Rows of files as plain Python values. Does not know the meaning of columns.

JSON is read by the standard library on purpose: a reader that builds columns gives every row the fields of
all others, and turns the text "1" into the number 1 if another row of the column holds a list.
"""

import gzip
import json
import pickle
import re
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow
import pyarrow.ipc
import pyarrow.parquet
from rich.progress import track

from hybridrl.config.findings import ConfigError
from hybridrl.data.files import row_files

T = TypeVar("T")

SHOWN_FAULTS = 5
MAX_FAULTS = 1000
PROGRESS_BAR_ROWS = 20_000  # from this number of rows on, a progress bar is shown
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
PLACE = re.compile(r"(.*?(?:line|row)) (\d+): ")
BATCH = 1000  # rows of a columnar file converted to Python values at a time


@dataclass(frozen=True)
class Row:
    """One row: `number` counts the rows of all files from 0, `place` is shown to the user ("train.jsonl, line 3"), and
    `entry` is the index of its entry in the list of files."""

    number: int
    place: str
    values: dict[str, Any]
    entry: int = 0


class PackedRows:
    """Rows serialized into one byte array; as Python values they take several times the memory."""

    def __init__(self) -> None:
        self._bytes, self._ends = bytearray(), array("q", [0])
        self._places: list[str] = []
        self._place_of, self._line_of = array("i"), array("q")
        self.entry_of = array("i")

    def append(self, values: dict[str, Any], place: str, line: int, entry: int) -> None:
        """Add a row; `place` and `line` together locate it: "train.jsonl, line" and 3."""
        self._bytes += pickle.dumps(values, protocol=pickle.HIGHEST_PROTOCOL)
        self._ends.append(len(self._bytes))
        if not self._places or self._places[-1] != place:
            self._places.append(place)
        self._place_of.append(len(self._places) - 1)
        self._line_of.append(line)
        self.entry_of.append(entry)

    def __len__(self) -> int:
        return len(self._line_of)

    def row(self, number: int) -> Row:
        values = pickle.loads(memoryview(self._bytes)[self._ends[number] : self._ends[number + 1]])
        place = f"{self._places[self._place_of[number]]} {self._line_of[number]}"
        return Row(number, place, values, self.entry_of[number])


@dataclass(frozen=True)
class Rows(Sequence[Row]):
    """A selection of packed rows, each converted to Python values on access."""

    packed: PackedRows
    numbers: np.ndarray  # [rows]

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def entries(self) -> np.ndarray:  # [rows], the index of each row's entry in the list of files
        return np.array(self.packed.entry_of)[self.numbers]

    def __getitem__(self, index: int) -> Row:
        return self.packed.row(int(self.numbers[index]))


class Faults:
    """Collects the faults of single rows, so that a user sees all of them in one message."""

    def __init__(self, key: str) -> None:
        self._key = key
        self._lines: list[str] = []

    def add(self, place: str, fault: str) -> None:
        self._lines.append(f"{place}: {fault}")
        if len(self._lines) == MAX_FAULTS:
            self.close()

    def close(self) -> None:
        """Raise ConfigError if any fault was added."""
        if not self._lines:
            return
        count, more = len(self._lines), len(self._lines) - SHOWN_FAULTS
        lines = [f"{self._key}: {count}{' or more' * (count == MAX_FAULTS)} bad row{'s' * (count > 1)}"]
        lines += sorted(self._lines, key=_file_position)[:SHOWN_FAULTS]
        lines += [f"... and {more} more"] if more > 0 else []
        raise ConfigError("\n  ".join(lines))


def _file_position(line: str) -> tuple[str, int]:
    """A fault's file and line number, to sort by: rows may be checked in a shuffled order."""
    place = PLACE.match(line)
    return (place[1], int(place[2])) if place else (line, 0)


def load_rows(entries: list[str], faults: Faults, *, key: str, max_samples: int, shuffle: bool, seed: int) -> Rows:
    """Read the rows of all files that the entries name, in order; lines that are not JSON objects go to `faults`.

    `max_samples` below 1 takes all rows; `shuffle` draws the selection in a seeded random order. `key` names the
    setting of the files (data.train_files, data.val_files). Raises ConfigError if there are no rows, and for a file
    that is missing, of an unknown type or unreadable.
    """
    rows = PackedRows()
    for entry, files in enumerate(row_files(entries, key)):
        for file in files:
            for place, line, values in _read(file, faults, key):
                if isinstance(values, dict):
                    rows.append(values, place, line, entry)
                else:
                    faults.add(f"{place} {line}", "not an object of columns ({...})")
    if not rows:
        faults.close()
        raise ConfigError(f"{key}={','.join(entries)}: there are no rows", fix="name a file that holds some")
    return select(rows, max_samples, shuffle=shuffle, seed=seed)


def select(rows: PackedRows, max_samples: int, *, shuffle: bool, seed: int) -> Rows:
    """Select `max_samples` rows, or all if that is below 1."""
    numbers = np.arange(len(rows))
    if shuffle:
        # The spawn key separates this permutation from those of the epochs (order.py).
        numbers = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(0,))).permutation(len(rows))
    return Rows(rows, numbers[:max_samples] if max_samples > 0 else numbers)


def describe_overlong(overlong: list[tuple[int, str]], count: int, limit: str) -> str:
    """Describe which of `count` rows exceed `limit` ("data.max_length=1024"), given their lengths and places."""
    length, first = overlong[0]
    longest = max(length for length, _ in overlong)
    return (
        f"{len(overlong)} of {count} rows are longer than {limit}; "
        f"the first is {first} with {length} tokens, the longest has {longest}"
    )


def with_progress(items: Iterable[T], count: int, description: str = "tokenizing") -> Iterator[T]:
    """Yield the items, with a progress bar if there are many."""
    yield from track(items, description, total=count, disable=count <= PROGRESS_BAR_ROWS, transient=True)


def _read(path: Path, faults: Faults, key: str) -> Iterator[tuple[str, int, Any]]:
    """Yield every row as its place, its number there and its values."""
    try:
        if ".json" in (suffix.lower() for suffix in path.suffixes[-2:]) or ".jsonl" in path.name.lower():
            yield from _read_json(path, faults)
        else:
            rows = (values for batch in _batches(path) for values in batch.to_pylist(maps_as_pydicts="strict"))
            for number, values in enumerate(rows, 1):
                yield f"{path}, row", number, values
    except ConfigError:  # a ValueError too, raised by too many faults
        raise
    except (pyarrow.ArrowException, OSError, EOFError, ValueError, RecursionError) as error:
        raise ConfigError(f"{key}={path}: not a readable {path.suffix} file ({error})", fix="write it again") from error


def _batches(path: Path) -> Iterator[pyarrow.RecordBatch]:
    """Yield the batches of a columnar file, which is memory-mapped instead of read at once."""
    if path.suffix.lower() == ".arrow":
        with pyarrow.memory_map(str(path)) as mapped, pyarrow.ipc.open_stream(mapped) as stream:
            yield from stream
        return
    with pyarrow.parquet.ParquetFile(path, memory_map=True) as file:
        yield from file.iter_batches(BATCH)


def _read_json(path: Path, faults: Faults) -> Iterator[tuple[str, int, Any]]:
    """Read one object per line, or one list of objects; both occur under both suffixes. Lines end with a line feed
    only, since JSON strings may hold the other line ends of Unicode."""
    with (gzip.open if path.suffix.lower() == ".gz" else open)(path, "rb") as file:
        if file.read(1024).lstrip(BYTE_ORDER_MARK + b" \t\r\n").startswith(b"["):
            file.seek(0)
            for number, values in enumerate(_parse(file.read().removeprefix(BYTE_ORDER_MARK)), 1):
                yield f"{path}, row", number, values
            return
        file.seek(0)
        for number, line in enumerate(file, 1):
            place = f"{path}, line {number}"
            if number == 1 and line.strip() == b"{":
                return faults.add(place, "an object over several lines; write one object per line, or a list of them")
            try:
                if line.strip():
                    yield f"{path}, line", number, _parse(line.removeprefix(BYTE_ORDER_MARK))
            except json.JSONDecodeError as error:
                faults.add(place, f"not JSON ({error.msg} at column {error.colno})")
            except UnicodeDecodeError as error:
                faults.add(place, f"not UTF-8 (byte {error.start + 1})")
            except (ValueError, RecursionError) as error:
                faults.add(place, f"not readable ({error})")


def _parse(text: bytes) -> Any:
    values = json.loads(text.decode())
    if b"\\ud" in text.lower():  # JSON permits an unpaired surrogate, but no tokenizer accepts one
        try:
            json.dumps(values, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            code = ord(error.object[error.start])
            raise ValueError(f"half a character: the surrogate \\u{code:x} is unpaired") from error
    return values
