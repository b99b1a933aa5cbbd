"""What an entry of data.train_files names -> files of rows on this machine. Does not read them."""

import difflib
from collections.abc import Iterable
from pathlib import Path

from hybridrl.config.error import ConfigError
from hybridrl.config.row_files import WRITTEN, is_row_file, matches, taken_apart
from hybridrl.config.schema import DataConfig

TRAINING = "data.train_files"


def row_files(entries: Iterable[str], key: str = TRAINING) -> list[list[Path]]:
    """The files of each entry. Raises ConfigError for one that names none, or that leaves the split open."""
    return [_files_of(entry, key) for entry in entries]


def files_that_count(data: DataConfig) -> list[Path]:
    """The files that say which rows a run draws: those with the rows, and those with classes of the user's own."""
    own = [path.removeprefix("file://") for path in (data.custom_cls.path, data.sampler.class_path) if path]
    if data.custom_cls.path:
        files = [Path(entry) for entry in data.train_files]
    else:
        files = [file for found in row_files(data.train_files) for file in found]
    return [file for file in [*files, *map(Path, own)] if file.expanduser().is_file()]


def _files_of(entry: str, key: str) -> list[Path]:
    path, named = Path(entry).expanduser(), taken_apart(entry)
    if path.is_file():
        return [_of_known_kind(path, key)]
    if found := matches(str(path)):
        return [_of_known_kind(Path(file), key) for file in found]
    directory = Path(named.name).expanduser()
    if directory.is_dir():
        from hybridrl.data.hub import files_of_directory

        return [_of_known_kind(file, key) for file in files_of_directory(directory, named, key)]
    if named.name.count("/") == 1 and not is_row_file(path) and not path.is_absolute():
        from hybridrl.data.hub import files_of_hub

        return files_of_hub(named, key)
    if path.suffix:
        _of_known_kind(path, key)
    raise ConfigError(f"{key}={entry}: there is no such file{_near(path)}")


def _of_known_kind(path: Path, key: str) -> Path:
    if not is_row_file(path):
        raise ConfigError(f"{key}={path}: files of rows end in {', '.join(WRITTEN)}; convert it to one of these")
    return path


def _near(path: Path) -> str:
    names = [item.name for item in path.parent.iterdir()] if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, names, n=1)
    return f"; did you mean {near[0]}?" if near else ""
