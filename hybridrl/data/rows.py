"""Rows of files as plain Python values. Does not know what the columns mean.

JSON is read by the standard library on purpose: a reader that builds columns gives every row the fields of
all others, and turns the text "1" into the number 1 where another row of the column holds a list.
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

from hybridrl.config.error import ConfigError
from hybridrl.data.files import row_files

T = TypeVar("T")

SHOWN_FAULTS = 5
MOST_FAULTS = 1000
SILENT_ROWS = 20_000
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
PLACE = re.compile(r"(.*?(?:line|row)) (\d+): ")
BATCH = 1000  # rows of a columnar file made into Python values at a time


@dataclass(frozen=True)
class Row:
    """`number` counts the rows of all files from 0, `entry` the entries of the key that names the files; `place` is
    for the user ("train.jsonl, line 3")."""

    number: int
    place: str
    values: dict[str, Any]
    entry: int = 0


class Packed:
    """Rows end to end as bytes: as Python values they take several times the memory."""

    def __init__(self) -> None:
        self._bytes, self._ends = bytearray(), array("q", [0])
        self._places: list[str] = []
        self._place_of, self._line_of = array("i"), array("q")
        self.entry_of = array("i")

    def append(self, values: dict[str, Any], place: str, line: int, entry: int) -> None:
        """`place` and `line` together say where: "train.jsonl, line" and 3."""
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
    """The rows of these numbers in this order, each made into Python values when it is asked for."""

    packed: Packed
    numbers: np.ndarray  # [rows]

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def entries(self) -> np.ndarray:  # [rows], of which entry of the key each row is
        return np.array(self.packed.entry_of)[self.numbers]

    def __getitem__(self, index: int) -> Row:
        return self.packed.row(int(self.numbers[index]))


class Faults:
    """Gathers what is wrong with single rows, so that a user meets all of it in one message."""

    def __init__(self, key: str) -> None:
        self._key = key
        self._lines: list[str] = []

    def add(self, place: str, fault: str) -> None:
        self._lines.append(f"{place}: {fault}")
        if len(self._lines) == MOST_FAULTS:
            self.close()

    def close(self) -> None:
        """Raise ConfigError where anything was added."""
        if not self._lines:
            return
        count, more = len(self._lines), len(self._lines) - SHOWN_FAULTS
        lines = [f"{self._key}: {count}{' or more' * (count == MOST_FAULTS)} bad row{'s' * (count > 1)}"]
        lines += sorted(self._lines, key=_in_file_order)[:SHOWN_FAULTS]
        lines += [f"... and {more} more"] if more > 0 else []
        raise ConfigError("\n  ".join(lines))


def _in_file_order(line: str) -> tuple[str, int]:
    """A fault's file and number in it: rows may be looked into in a shuffled order."""
    place = PLACE.match(line)
    return (place[1], int(place[2])) if place else (line, 0)


def load_rows(entries: list[str], faults: Faults, *, key: str, max_samples: int, shuffle: bool, seed: int) -> Rows:
    """The rows of all files that the entries name, one after the other; lines that are no JSON objects go to `faults`.

    `max_samples` below 1 takes all; `shuffle` puts them into a seeded random order before they are counted.
    Raises ConfigError for no rows, and for a file that is missing, of another kind or broken as a whole;
    `key` is where the files were set (data.train_files, data.val_files).
    """
    rows = Packed()
    for entry, files in enumerate(row_files(entries, key)):
        for file in files:
            for place, line, values in _read(file, faults, key):
                if isinstance(values, dict):
                    rows.append(values, place, line, entry)
                else:
                    faults.add(f"{place} {line}", "not an object of columns ({...})")
    if not rows:
        faults.close()
        raise ConfigError(f"{key}={','.join(entries)}: there are no rows; name a file that holds some")
    return choose(rows, max_samples, shuffle=shuffle, seed=seed)


def choose(rows: Packed, max_samples: int, *, shuffle: bool, seed: int) -> Rows:
    """As many of the rows as asked for; all where that is below 1."""
    numbers = np.arange(len(rows))
    if shuffle:
        # A spawn key of its own keeps this draw apart from those of the epochs (order.py).
        numbers = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(0,))).permutation(len(rows))
    return Rows(rows, numbers[:max_samples] if max_samples > 0 else numbers)


def long_rows(over: list[tuple[int, str]], count: int, limit: str) -> str:
    """In words: which of `count` rows exceed `limit` ("data.max_length=1024"), given lengths and places."""
    length, first = over[0]
    longest = max(length for length, _ in over)
    return (
        f"{len(over)} of {count} rows are longer than {limit}; "
        f"the first is {first} with {length} tokens, the longest has {longest}"
    )


def with_progress(items: Iterable[T], count: int, doing: str = "tokenizing") -> Iterator[T]:
    """The items, with a progress bar where there are so many that they take a while."""
    yield from track(items, doing, total=count, disable=count <= SILENT_ROWS, transient=True)


def _read(path: Path, faults: Faults, key: str) -> Iterator[tuple[str, int, Any]]:
    """Every row as its place, its number there and its values."""
    try:
        if ".json" in (suffix.lower() for suffix in path.suffixes[-2:]) or ".jsonl" in path.name.lower():
            yield from _read_json(path, faults)
        else:
            rows = (values for batch in _batches(path) for values in batch.to_pylist(maps_as_pydicts="strict"))
            for number, values in enumerate(rows, 1):
                yield f"{path}, row", number, values
    except (pyarrow.ArrowException, OSError, EOFError, ValueError, RecursionError) as error:
        raise ConfigError(f"{key}={path}: not a readable {path.suffix} file ({error}); write it anew") from error


def _batches(path: Path) -> Iterator[pyarrow.RecordBatch]:
    """Of a file of columns, which is mapped into memory and not read as a whole."""
    if path.suffix.lower() == ".arrow":
        with pyarrow.memory_map(str(path)) as mapped, pyarrow.ipc.open_stream(mapped) as stream:
            yield from stream
        return
    with pyarrow.parquet.ParquetFile(path, memory_map=True) as file:
        yield from file.iter_batches(BATCH)


def _read_json(path: Path, faults: Faults) -> Iterator[tuple[str, int, Any]]:
    """Lines of objects, or one list of them: both are found under both suffixes. A line ends with a line feed alone:
    JSON's texts may hold what else Unicode calls the end of a line."""
    opened = gzip.open if path.suffix.lower() == ".gz" else open
    with opened(path, "rb") as file:
        if file.read(1024).lstrip(BYTE_ORDER_MARK + b" \t\r\n").startswith(b"["):
            file.seek(0)
            for number, values in enumerate(_parsed(file.read().removeprefix(BYTE_ORDER_MARK)), 1):
                yield f"{path}, row", number, values
            return
        file.seek(0)
        for number, line in enumerate(file, 1):
            if number == 1 and line.strip() == b"{":
                return faults.add(
                    f"{path}, line 1", "an object over several lines; write one a line, or a list of them"
                )
            try:
                if line.strip():
                    yield f"{path}, line", number, _parsed(line.removeprefix(BYTE_ORDER_MARK))
            except json.JSONDecodeError as error:
                faults.add(f"{path}, line {number}", f"not JSON ({error.msg} at column {error.colno})")
            except UnicodeDecodeError as error:
                faults.add(f"{path}, line {number}", f"not UTF-8 (byte {error.start + 1})")
            except (ValueError, RecursionError) as error:
                faults.add(f"{path}, line {number}", f"not readable ({error})")


def _parsed(text: bytes) -> Any:
    values = json.loads(text.decode())
    if b"\\ud" in text.lower():
        _refuse_half_characters(values)
    return values


def _refuse_half_characters(values: Any) -> None:
    """JSON lets one half of a surrogate pair stand alone, and no tokenizer takes that."""
    try:
        json.dumps(values, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"half a character: \\u{ord(error.object[error.start]):x} stands alone") from error
