"""Files on this machine -> rows as plain Python values, independent of the meaning of their columns.

In a file with a header line every value is the text of its cell: no number is guessed, "007" stays "007".

JSON is read by the standard library on purpose: a reader that builds columns gives every row the fields of all others,
and turns the text "1" into the number 1 if another row of the column holds a list. Arrow does the same, and adds null
for a missing field. Such a null would be rendered into prompts, trained on in the arguments of calls, and passed to
tools, so null fields are left out. Only a structure that is itself a column, such as `extra_info`, keeps all its
fields: reward functions read them by name. A null inside a list, a map or a JSON text was in the data and stays.
"""

import csv
import functools
import gzip
import itertools
import json
import logging
import pickle
import re
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TextIO, TypeVar

import numpy as np
import pyarrow
import pyarrow.ipc
import pyarrow.parquet
from pyarrow import types
from rich.progress import track

from hybridrl.config.custom_code import attempt
from hybridrl.config.files import CELLS, LFS_FIX, LINES, is_lfs_pointer
from hybridrl.config.findings import ConfigError
from hybridrl.data.row_files import row_files

T = TypeVar("T")

SHOWN_FAULTS = 5
MAX_FAULTS = 1000
BATCH = 1000  # rows of a columnar file that are converted to Python values at a time
PROGRESS_BAR_ROWS = 20_000  # from this number of rows on, a progress bar is shown
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
PLACE = re.compile(r"(.*?(?:line|row)) (\d+)(?: \(line \d+\))?$")
DELIMITERS = {",": "comma", ";": "semicolon", "\t": "tab"}
LARGEST_CELL = 1 << 30  # characters; the standard library's limit is 131,072
UNDECODED = re.compile("[\udc80-\udcff]")  # a byte that is not UTF-8, with errors="surrogateescape"
QUOTES = 'a double quote that opens a cell is not closed, or text follows the closing one (write "" for a quote)'

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class DataRow:
    """One row: `number` counts the rows of all files from 0, `place` is shown to the user ("train.jsonl, line 3"), and
    `entry` is the index of its entry in the list of files."""

    number: int
    place: str
    values: dict[str, Any]
    entry: int = 0


class Rows(Sequence[DataRow]):
    """Rows, each serialized until it is read: Python values take several times the memory."""

    def __init__(self, packed: Iterable[bytes] = ()) -> None:
        self._packed = list(packed)

    def append(self, place: str, values: dict[str, Any], entry: int = 0) -> None:
        row = len(self._packed), place, values, entry
        packed = _pickled(row)
        if isinstance(packed, Exception):
            faulty = ((name, value) for name, value in values.items() if isinstance(_pickled(value), Exception))
            name, value = next(faulty)
            cause = f"{place}: the column {name} holds a {type(value).__name__}, which cannot be stored ({packed})"
            raise ConfigError(cause, fix="return text, numbers, lists and dicts") from packed
        self._packed.append(packed)

    def __len__(self) -> int:
        return len(self._packed)

    def __getitem__(self, index: int) -> DataRow:
        return DataRow(*pickle.loads(self._packed[index]))

    def of(self, indices: Iterable[int]) -> "Rows":
        """Return some of the rows; they are shared."""
        return Rows(self._packed[index] for index in indices)

    def sample(self, count: int, *, shuffle: bool, seed: int) -> "Rows":
        """Return `count` rows, the first or in a seeded random order; all if it is below 1."""
        indices = np.arange(len(self))
        if shuffle:
            # The spawn key separates this permutation from those of the epochs (order.py).
            indices = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(0,))).permutation(len(self))
        return self.of(indices[:count] if count > 0 else indices)


def _pickled(value: Any) -> bytes | Exception:  # the value may be any object, of a custom dataset
    return attempt(lambda: pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL))


class Faults:
    """Collects the faults of single rows, so that a user sees all of them in one message."""

    def __init__(self, key: str) -> None:
        self._key = key
        self._found: list[tuple[str, str]] = []  # place and fault
        self.notes: dict[str, str] = {}  # by file, shown with its faults

    def add(self, place: str, fault: str) -> None:
        self._found.append((place, fault))
        if len(self._found) == MAX_FAULTS:
            self.close()

    def close(self) -> None:
        """Raise ConfigError if any fault was added; rows with the same fault share a line, with the first of them."""

        def position(entry: tuple[str, str]) -> tuple[str, int]:  # rows may be checked in a shuffled order
            place = PLACE.match(entry[0])
            return (place[1], int(place[2])) if place else (entry[0], 0)

        if not self._found:
            return
        count, places = len(self._found), defaultdict[str, list[str]](list)
        for place, fault in sorted(self._found, key=position):
            places[fault].append(place)
        lines = [f"{self._key}: {count}{' or more' * (count == MAX_FAULTS)} bad row{'s' * (count > 1)}"]
        for fault, (first, *others) in list(places.items())[:SHOWN_FAULTS]:
            alike = f" (and {len(others)} more row{'s' * (len(others) > 1)})" if others else ""
            lines.append(f"{first}: {fault}{alike}")
        remaining = sum(map(len, list(places.values())[SHOWN_FAULTS:]))
        lines += [f"... and {remaining} more"] if remaining else []
        lines += [text for file, text in self.notes.items() if any(at.startswith(f"{file}, ") for at, _ in self._found)]
        raise ConfigError("\n  ".join(lines))


def load_rows(entries: list[str], faults: Faults, *, key: str, max_samples: int, shuffle: bool, seed: int) -> Rows:
    """Read the rows of all files that the entries name, in order; lines that cannot be read go to `faults`.

    `max_samples` below 1 takes all rows; `shuffle` draws the selection in a seeded random order. `key` names the
    setting of the files (data.train_files, data.val_files). Raises ConfigError if there are no rows, and for a file
    that is missing, of an unknown type or unreadable.
    """
    rows = Rows()
    for entry, files in enumerate(row_files(entries, key)):
        for place, values in (row for file in files for row in _read(file, faults, key)):
            if isinstance(values, dict):
                rows.append(place, values, entry)
            else:
                faults.add(place, "not an object of columns ({...})")
    if not rows:
        faults.close()
        raise ConfigError(f"{key}={','.join(entries)}: there are no rows", fix="name a file that holds some")
    return rows.sample(max_samples, shuffle=shuffle, seed=seed)


def report_overlong(
    overlong: list[tuple[int, str]], count: int, limit: str, *, key: str, outcome: str, fix: str
) -> None:
    """Log the rows (of `count`) that exceed `limit` ("data.max_length=1024"), by their lengths and places, and their
    `outcome`; ConfigError with `fix` if that is empty."""
    if not overlong:
        return
    length, first = overlong[0]
    message = (
        f"{key}: {len(overlong)} of {count} rows are longer than {limit}; "
        f"the first is {first} with {length} tokens, the longest has {max(overlong)[0]}"
    )
    if not outcome:
        raise ConfigError(message, fix=fix)
    logger.warning("%s; %s", message, outcome)


def with_progress(items: Iterable[T], count: int, description: str = "tokenizing") -> Iterator[T]:
    """Yield the items, with a progress bar if there are many."""
    yield from track(items, description, total=count, disable=count <= PROGRESS_BAR_ROWS, transient=True)


def _read(path: Path, faults: Faults, key: str) -> Iterator[tuple[str, Any]]:
    """Yield every row as its place and its values."""
    name = path.name.lower().partition("?")[0]
    try:
        if is_lfs_pointer(path):
            raise ConfigError(f"{path} is a Git LFS pointer, not the file that it stands for", fix=LFS_FIX)
        if name.endswith(CELLS):
            yield from _read_cells(path, "\t" if ".tsv" in name else "".join(DELIMITERS), faults, key)
        elif name.endswith(LINES):
            yield from _read_lines(path, faults)
        elif ".json" in name:
            yield from _read_json(path, faults)
        else:
            for number, values in enumerate(read_columns(path), 1):
                yield f"{path}, row {number}", values
    except ConfigError:  # a ValueError too, raised by too many faults
        raise
    except (pyarrow.ArrowException, OSError, EOFError, ValueError, RecursionError, zlib.error) as error:
        cause = f"{key}={path}: not a readable {path.suffix} file ({error})"
        raise ConfigError(cause, fix="write it again") from error


def _open(path: Path, mode: Any = "rt", **options: Any) -> IO[Any]:
    return (gzip.open if ".gz" in path.suffix.lower() else open)(path, mode, **options)


def _read_json(path: Path, faults: Faults) -> Iterator[tuple[str, Any]]:
    """Read one object per line, or one list of objects; both occur under both suffixes. Lines end with a line feed
    only, since JSON strings may hold the other line ends of Unicode."""
    with _open(path, "rb") as file:
        if file.read(1024).lstrip(BYTE_ORDER_MARK + b" \t\r\n").startswith(b"["):
            file.seek(0)
            for number, values in enumerate(_parse(file.read().removeprefix(BYTE_ORDER_MARK)), 1):
                yield f"{path}, row {number}", values
            return
        file.seek(0)
        for number, line in enumerate(file, 1):
            place = f"{path}, line {number}"
            if number == 1 and line.strip() == b"{":
                return faults.add(place, "an object over several lines; write one object per line, or a list of them")
            try:
                if line.strip():
                    yield place, _parse(line.removeprefix(BYTE_ORDER_MARK))
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


def _read_lines(path: Path, faults: Faults) -> Iterator[tuple[str, dict[str, Any]]]:
    """Read one prompt per line, without a ground truth."""
    with _open(path, encoding="utf-8-sig", errors="surrogateescape") as file:
        for number, line in enumerate(file, 1):
            place = f"{path}, line {number}"
            if fault := _not_utf8(line):
                faults.add(place, fault)
            elif line.strip():
                yield place, {"prompt": line.removesuffix("\n"), "reward_model": {"ground_truth": None}}


def _not_utf8(text: str) -> str:
    byte = UNDECODED.search(text)
    return f"not UTF-8 (byte 0x{ord(byte[0]) - 0xDC00:x}): save the file as UTF-8" if byte else ""


# -- cells below a header line -> rows ---------------------------------------------------------------------------------


def _read_cells(path: Path, delimiters: str, faults: Faults, key: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Read the rows below a header line. Of the delimiters the one that splits it into most columns is used. Raises
    ConfigError if the header cannot be used, or no row follows it."""
    csv.field_size_limit(LARGEST_CELL)
    with _open(path, encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        firsts = {delimiter: next(_records(path, file, delimiter), ("", [""])) for delimiter in delimiters}
        delimiter, (_, first) = max(firsts.items(), key=lambda item: len(item[1][1]))
        header = [name.strip() for name in first]
        names = [name for name in header if name]  # pandas gives its index a column without a name
        columns = f"{', '.join(names):.300} (delimiter: {DELIMITERS[delimiter]})"
        repeated = [f"two columns are named {name}" for name in names if names.count(name) > 1]
        if fault := _not_utf8("".join(header)) or "".join(repeated[:1]) or (QUOTES if not first else ""):
            raise ConfigError(f"{key}={path}, row 1: {fault}")
        if not names:
            raise ConfigError(f"{key}={path}: the file is empty", fix="give it a header line with names, and rows")
        faults.notes[str(path)] = f"{path}: the columns of its header line are {columns}"
        records, place = _records(path, file, delimiter), ""
        next(records)
        for place, cells in records:
            if fault := _cells_fault(cells, header, DELIMITERS[delimiter]):
                faults.add(place, fault)
            else:
                yield place, {name: cell for name, cell in zip(header, cells, strict=True) if name}
    if not place:
        raise ConfigError(f"{key}={path}: there is only a header line, {columns}", fix="add rows below it")


def _records(path: Path, file: TextIO, delimiter: str) -> Iterator[tuple[str, list[str]]]:
    """Yield each row of cells that is not blank, and its place; no cells if its quotes are wrong. Rows are counted as a
    spreadsheet shows them, the header as 1; a line of the file has another number after cells of several lines."""
    file.seek(0)
    reader = csv.reader(file, delimiter=delimiter, strict=True)
    for number in itertools.count(1):
        place = f"{path}, row {number}" + (f" (line {reader.line_num + 1})" if reader.line_num + 1 != number else "")
        try:
            cells = next(reader, None)
        except csv.Error:
            yield place, []
            continue
        if cells is None:
            return
        if cells:
            yield place, cells


def _cells_fault(cells: list[str], header: list[str], delimiter: str) -> str:
    """Describe what is wrong with a row of cells; empty if nothing is."""
    if not cells:
        return QUOTES
    counts = f"{len(cells)} cell{'s' * (len(cells) > 1)} for {len(header)} column{'s' * (len(header) > 1)}"
    if missing := header[len(cells) :]:
        return f"{counts}: there is none for {', '.join(missing)}"
    if len(cells) > len(header):
        return f"{counts} ({', '.join(header)}): put a text with the delimiter, {delimiter}, between double quotes"
    faults = ((name, _not_utf8(cell)) for name, cell in zip(header, cells, strict=True))
    return next((f"the column {name} is {fault}" for name, fault in faults if fault), "")


# -- columnar files -> rows --------------------------------------------------------------------------------------------


def read_columns(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file, which is memory-mapped instead of read at once. Raises pyarrow's errors."""
    with ExitStack() as stack:
        if path.suffix.lower() == ".arrow":
            batches = stack.enter_context(pyarrow.ipc.open_stream(stack.enter_context(pyarrow.memory_map(str(path)))))
        else:
            batches = _batches(stack.enter_context(pyarrow.parquet.ParquetFile(path, memory_map=True)))
        for batch in batches:
            kinds = {field.name: field.type for field in batch.schema}
            for row in batch.to_pylist(maps_as_pydicts="strict"):
                yield {name: _plain(value, kinds[name], whole=True) for name, value in row.items()}


def _batches(file: pyarrow.parquet.ParquetFile) -> Iterator[pyarrow.RecordBatch]:
    """Yield a file by batch, or by row group if a dictionary inside a structure prevents batches."""
    batches = file.iter_batches(BATCH)
    try:
        first = next(batches, None)
    except pyarrow.ArrowNotImplementedError:
        for group in range(file.num_row_groups):
            yield from file.read_row_group(group).to_batches(BATCH)
        return
    if first is not None:
        yield first
        yield from batches


def _plain(value: Any, kind: pyarrow.DataType, *, whole: bool = False) -> Any:
    """Return a value of a type without the fields that Arrow added, and JSON texts decoded; the fields of a `whole`
    column stay."""
    if value is None or not _is_nested(kind):
        return value
    if isinstance(kind, pyarrow.BaseExtensionType):
        return json.loads(value) if kind.extension_name == "arrow.json" else _plain(value, kind.storage_type)
    if types.is_struct(kind):
        fields = ((field.name, _plain(value[field.name], field.type)) for field in kind)
        return {name: item for name, item in fields if whole or item is not None}
    if types.is_map(kind):
        return {key: _plain(item, kind.item_type) for key, item in value.items()}
    return [_plain(item, kind.value_type) for item in value]


@functools.cache
def _is_nested(kind: pyarrow.DataType) -> bool:
    """Whether a type holds structures or JSON texts."""
    if isinstance(kind, pyarrow.BaseExtensionType):
        return kind.extension_name == "arrow.json" or _is_nested(kind.storage_type)
    if types.is_map(kind):
        return _is_nested(kind.item_type)
    lists = (types.is_list, types.is_large_list, types.is_fixed_size_list, types.is_list_view, types.is_large_list_view)
    return types.is_struct(kind) or (any(is_list(kind) for is_list in lists) and _is_nested(kind.value_type))
