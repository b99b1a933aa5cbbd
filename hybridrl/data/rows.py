"""Rows of .parquet, .json and .jsonl files as plain Python values. Does not know what the columns mean.

JSON is read by the standard library on purpose: a reader that builds columns gives every row the fields of
all others, and turns the text "1" into the number 1 where another row of the column holds a list.
"""

import difflib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow
import pyarrow.parquet
from rich.progress import track

from hybridrl.config.error import ConfigError

T = TypeVar("T")

SUFFIXES = (".parquet", ".json", ".jsonl")
SHOWN_FAULTS = 5
MOST_FAULTS = 1000
SILENT_ROWS = 20_000


@dataclass(frozen=True)
class Row:
    """`number` counts the rows of all files from 0; `place` is for the user ("train.jsonl, line 3")."""

    number: int
    place: str
    values: dict[str, Any]


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
        lines += self._lines[:SHOWN_FAULTS]
        lines += [f"... and {more} more"] if more > 0 else []
        raise ConfigError("\n  ".join(lines))


def load_rows(files: list[str], faults: Faults, *, key: str, max_samples: int, shuffle: bool, seed: int) -> list[Row]:
    """The rows of the files, one file after the other; lines that are no JSON objects go to `faults`.

    `max_samples` below 1 takes all; `shuffle` puts them into a seeded random order before they are counted.
    Raises ConfigError for no rows, and for a file that is missing, of another kind or broken as a whole;
    `key` is where the files were set (data.train_files, data.val_files).
    """
    rows: list[Row] = []
    for file in files:
        for place, values in _read(Path(file).expanduser(), faults, key):
            if isinstance(values, dict):
                rows.append(Row(len(rows), place, values))
            else:
                faults.add(place, "not an object of columns ({...})")
    if not rows:
        faults.close()
        raise ConfigError(f"{key}={','.join(files)}: there are no rows; name a file that holds some")
    if shuffle:
        # A spawn key of its own keeps this draw apart from those of the epochs (order.py).
        random = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(0,)))
        rows = [rows[i] for i in random.permutation(len(rows))]
    return rows[:max_samples] if max_samples > 0 else rows


def long_rows(over: list[tuple[int, Row]], count: int, limit: str) -> str:
    """In words: which of `count` rows exceed `limit` ("data.max_length=1024"), given their lengths."""
    length, first = over[0]
    longest = max(length for length, _ in over)
    return (
        f"{len(over)} of {count} rows are longer than {limit}; "
        f"the first is {first.place} with {length} tokens, the longest has {longest}"
    )


def with_progress(items: Iterable[T], count: int) -> Iterator[T]:
    """The items, with a progress bar where there are so many that they take a while."""
    yield from track(items, "tokenizing", total=count, disable=count <= SILENT_ROWS, transient=True)


def _read(path: Path, faults: Faults, key: str) -> Iterator[tuple[str, Any]]:
    path = _existing(path, key)
    try:
        yield from _read_parquet(path) if path.suffix.lower() == ".parquet" else _read_json(path, faults)
    except (pyarrow.ArrowException, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(f"{key}={path}: not a readable {path.suffix} file ({error}); write it anew") from error


def _existing(path: Path, key: str) -> Path:
    if path.suffix.lower() not in SUFFIXES:
        raise ConfigError(f"{key}={path}: files of rows end in {', '.join(SUFFIXES)}; convert it to one of these")
    if path.is_file():
        return path
    names = [item.name for item in path.parent.iterdir()] if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, names, n=1)
    raise ConfigError(f"{key}={path}: there is no such file" + (f"; did you mean {near[0]}?" if near else ""))


def _read_parquet(path: Path) -> Iterator[tuple[str, Any]]:
    with pyarrow.parquet.ParquetFile(path, memory_map=True) as file:
        rows = (values for batch in file.iter_batches() for values in batch.to_pylist())
        for number, values in enumerate(rows, 1):
            yield f"{path}, row {number}", values


def _read_json(path: Path, faults: Faults) -> Iterator[tuple[str, Any]]:
    """Lines of objects, or one list of them: both are found under both suffixes."""
    text = path.read_text(encoding="utf-8-sig")
    if text.lstrip().startswith("["):
        for number, values in enumerate(json.loads(text), 1):
            yield f"{path}, row {number}", values
        return
    for number, line in enumerate(text.split("\n"), 1):
        place = f"{path}, line {number}"
        try:
            if line.strip():
                yield place, json.loads(line)
        except json.JSONDecodeError as error:
            faults.add(place, f"not JSON ({error.msg} at column {error.colno})")
