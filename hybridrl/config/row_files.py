"""How rows are named: a file, a pattern, a directory, or a data set of the hub (which is not asked here)."""

import glob
import re
from dataclasses import dataclass
from pathlib import Path

from hybridrl.config.values import Absent, missing_parent

ROW_SUFFIXES = (".parquet", ".json", ".jsonl", ".json.gz", ".jsonl.gz", ".arrow")
WRITTEN = ROW_SUFFIXES[:-1]  # .arrow is what the library `datasets` keeps in directories of its own
HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")
PARTS = 2  # at most: configuration and split


@dataclass(frozen=True)
class Named:
    """`name:split`, or `name:configuration:split`, taken apart; `split` and `configuration` may be missing."""

    name: str
    configuration: str | None
    split: str | None


def taken_apart(entry: str) -> Named:
    """An entry of data.train_files that is no file: directory or hub name, configuration and split."""
    name, *parts = entry.rsplit(":", min(entry.count(":"), PARTS))
    return Named(name, parts[0] if len(parts) == PARTS else None, parts[-1] if parts else None)


def is_row_file(path: Path) -> bool:
    return path.name.lower().endswith(ROW_SUFFIXES)


def matches(pattern: str) -> list[str]:
    """The files of a pattern (*, ?, [..], ** for directories between), sorted."""
    return sorted(found for found in glob.glob(pattern, recursive=True) if Path(found).is_file())


@dataclass(frozen=True)
class RowFiles:
    """Files, patterns or directories that are there, or names of the hub; at least so many."""

    least: int = 0

    def fault(self, entries: list[str]) -> str | None:
        if len(entries) < self.least:
            # As where a shell variable is not set, which elsewhere may be.
            return Absent("name one file or more: [a.jsonl, b.parquet]")
        return next((fault for entry in entries if (fault := _fault(entry)) is not None), None)


def _fault(entry: str) -> str | None:
    named = taken_apart(entry)
    directory = Path(named.name)
    if Path(entry).is_file() or matches(entry):
        return None
    if directory.is_dir():
        held = any(is_row_file(file) for file in directory.rglob("*"))
        return None if held else Absent(f"the directory {directory} has no files that end in {', '.join(WRITTEN)}")
    if glob.has_magic(entry):
        return Absent(f"no file matches {entry}")
    if HUB_NAME.fullmatch(named.name) and not is_row_file(directory) and not directory.parent.is_dir():
        return None
    return Absent(f"there is no file {entry}" + (_rows_in(Path(entry).parent) or missing_parent(Path(entry))))


def _rows_in(directory: Path) -> str:
    if not directory.is_dir():
        return ""
    names = sorted(item.name for item in directory.iterdir() if is_row_file(item))
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return f" (in {directory} there are {', '.join(names[:5])}{more})" if names else ""
