"""Entries of data.train_files -> files on this machine.

Directories and Hugging Face datasets are resolved by the library `datasets`: splits by file names or by the README, the
files of `save_to_disk`, the hub's cache. It is slow to import and therefore imported only in these cases.
"""

import difflib
import functools
import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from hybridrl.config.custom_code import attempt
from hybridrl.config.files import (
    COLUMNS,
    ROW_SUFFIXES,
    WRITTEN,
    DatasetName,
    hub_is_away,
    is_row_file,
    matches,
    names_rows,
    parse_dataset_name,
    rows_below,
)
from hybridrl.config.findings import ConfigError
from hybridrl.config.schema import DataConfig
from hybridrl.plugins import load, row_source

TRAINING = "data.train_files"
SAVED = ("dataset_info.json", "dataset_dict.json")  # save_to_disk writes one of these

logger = logging.getLogger(__name__)


def row_files(entries: Iterable[str], key: str = TRAINING) -> list[list[Path]]:
    """Return the files of each entry. Raises ConfigError for an entry without files, or with an ambiguous split."""
    return [_files_of(entry, key) for entry in entries]


def fingerprinted_files(data: DataConfig) -> list[Path]:
    """Return the files that determine a run's rows: row files and the files of custom classes."""
    custom = [path.removeprefix("file://") for path in (data.custom_cls.path, data.sampler.class_path) if path]
    if data.custom_cls.path:
        files = [Path(entry) for entry in data.train_files]
    else:
        files = [file for files in row_files(data.train_files) for file in files]
    return [file for file in [*files, *map(Path, custom)] if file.expanduser().is_file()]


def _files_of(entry: str, key: str) -> list[Path]:
    path, named = Path(entry).expanduser(), parse_dataset_name(entry)
    directory = Path(named.name).expanduser()
    if files := [path] if path.is_file() else matches(str(path)):
        return _checked(map(Path, files), key)
    if name := row_source(entry):
        return _checked(_files_of_plugin(name, entry, key), key)
    if directory.is_dir():
        return _checked(_files_of_directory(directory, named, key), key, COLUMNS)
    if named.name.count("/") == 1 and not is_row_file(path) and not path.is_absolute():
        return files_of_hub(named, key)
    if path.suffix:
        _checked([path], key)
    names = [item.name for item in path.parent.iterdir()] if path.parent.is_dir() else []
    near = [name for name in names if name.startswith(f"{path.name}?")]  # as it was downloaded
    near = near or difflib.get_close_matches(path.name, names, n=1)
    raise ConfigError(f"{key}={entry}: there is no such file", fix=f"did you mean {near[0]}?" if near else "")


@functools.cache  # the same files are then read, counted and fingerprinted
def _files_of_plugin(name: str, entry: str, key: str) -> list[Path]:
    """Return the files of an entry `scheme:rest`, which the plug-in of the scheme names or writes."""
    files = attempt(lambda: [Path(file) for file in load(name)(entry.partition(":")[2])])
    if isinstance(files, Exception):
        cause = f"{key}={entry}: the plug-in {name} failed ({type(files).__name__}: {files})"
        raise (files if isinstance(files, ConfigError) else ConfigError(cause)) from files
    return files


def _checked(files: Iterable[Path], key: str, suffixes: tuple[str, ...] = ROW_SUFFIXES) -> list[Path]:
    files = list(files)
    for file in files:
        if not is_row_file(file, suffixes):
            text = is_row_file(file)  # in a directory
            cause = f"{key}={file}: files of rows end in {', '.join(WRITTEN)}{', and .txt must be named itself' * text}"
            raise ConfigError(cause, fix="name the file" if text else "convert it to one of these")
    return files


def _files_of_directory(directory: Path, named: DatasetName, key: str) -> list[Path]:
    """Return the files of the named split in a directory. Raises ConfigError."""
    import datasets

    with _library_errors(f"{key}={directory}: not a directory of rows"):
        if any((directory / name).is_file() for name in SAVED):
            saved = datasets.load_from_disk(str(directory))
            tables = saved if isinstance(saved, datasets.DatasetDict) else {"train": saved}
            files = [file["filename"] for file in tables[_split(tables, named, key)].cache_files]
            return rows_below(directory, files, key)
        named_there = names_rows(directory, key)
        builder, named = _builder(str(directory), named, key)
        splits = {str(split): [*map(Path, files)] for split, files in (builder.config.data_files or {}).items()}
        # The library reads only one type of the files in a directory.
        read = {file.suffix for files in splits.values() for file in files}
        skipped = {file.suffix for file in directory.rglob("*") if is_row_file(file, COLUMNS)} - read
        if skipped - {".json"}:  # JSON files are often not rows
            logger.warning("%s=%s: files that end in %s are not read", key, directory, ", ".join(sorted(skipped)))
        files = splits[_split(splits, named, key)]
        return rows_below(directory, files, key) if named_there else files


@functools.cache  # an unreachable hub takes half a minute to fail
def files_of_hub(named: DatasetName, key: str) -> list[Path]:
    """Return the cached files of a hub dataset, which is downloaded if needed. Raises ConfigError."""
    import datasets

    if snapshot := _snapshot(named.name):
        return _files_of_directory(snapshot, named, key)
    with _library_errors(f"{key}={named.name}: neither a file here nor a dataset that can be loaded from the hub"):
        builder, named = _builder(named.name, named, key)
        split = _split(map(str, builder.info.splits or builder.config.data_files or {}), named, key)
        table = datasets.load_dataset(named.name, named.configuration, split=split)
        return [Path(file["filename"]) for file in table.cache_files]


def _snapshot(name: str) -> Path | None:
    """Return a dataset's directory in the hub's cache if the hub cannot be reached. The library `datasets` then reads
    only tables that it has prepared itself; these are preferred."""
    import datasets
    from huggingface_hub import snapshot_download

    prepared = Path(datasets.config.HF_DATASETS_CACHE, name.replace("/", "___").lower())
    if not hub_is_away() or prepared.is_dir():
        return None
    directory = attempt(lambda: snapshot_download(name, repo_type="dataset", local_files_only=True))
    return None if isinstance(directory, Exception) else Path(directory)


def _builder(path: str, named: DatasetName, key: str) -> tuple[Any, DatasetName]:
    """Return the library's reader of a dataset, and its name with a configuration, which may have been its last part.
    Raises ConfigError with the configurations if there are others."""
    import datasets

    try:
        return datasets.load_dataset_builder(path, named.configuration), named
    except ValueError:
        names = attempt(lambda: datasets.get_dataset_config_names(path))
        if isinstance(names, Exception) or len(names) < 2 or named.configuration in names:
            raise
    if named.configuration is None and named.split in names:
        named = replace(named, configuration=named.split, split=None)
        return datasets.load_dataset_builder(path, named.configuration), named
    cause = f"has no configuration {named.configuration}" if named.configuration else "has several configurations"
    raise ConfigError(
        f"{key}={named.name}: {cause}", fix=f"name one: {', '.join(f'{named.name}:{name}' for name in names)}"
    )


@contextmanager
def _library_errors(cause: str) -> Iterator[None]:
    """Turn an exception of the library `datasets` into a ConfigError with its reason."""
    from datasets.exceptions import DatasetsError

    try:
        yield
    except ConfigError:
        raise
    except (DatasetsError, OSError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise ConfigError(f"{cause} ({reason})", fix="name files") from error


def _split(splits: Iterable[str], named: DatasetName, key: str) -> str:
    """Return the named split; if none is named, the only one, or for training the one called train."""
    names = list(splits)
    if named.split in names:
        return named.split
    if named.split is None and len(names) == 1:
        return names[0]
    if named.split is None and key == TRAINING and "train" in names:
        return "train"
    cause = "has several splits" if named.split is None else f"has no split {named.split}"
    whole = ":".join(filter(None, [named.name, named.configuration]))
    choices = ", ".join(f"{whole}:{name}" for name in names) or "none"
    raise ConfigError(f"{key}={whole}: {cause}", fix=f"name one: {choices}")
