"""Directories, and data sets of the Hugging Face hub -> files of rows on this machine.

As the library `datasets` has it: splits by the names of files or by the README, what `save_to_disk` wrote, the hub's
cache. It is slow to import, so this module is imported for these alone.
"""

import functools
import logging
from collections.abc import Iterable
from pathlib import Path

import datasets
from datasets.exceptions import DatasetsError

from hybridrl.config.error import ConfigError
from hybridrl.config.row_files import Named, is_row_file

logger = logging.getLogger(__name__)

SAVED = ("dataset_info.json", "dataset_dict.json")  # save_to_disk leaves one of these
WRONG = (DatasetsError, OSError, ValueError, RuntimeError)  # what the library raises


def files_of_directory(directory: Path, named: Named, key: str) -> list[Path]:
    """The files of the split that is asked for. Raises ConfigError."""
    try:
        if any((directory / name).is_file() for name in SAVED):
            saved = datasets.load_from_disk(str(directory))
            tables = saved if isinstance(saved, datasets.DatasetDict) else {"train": saved}
            return _cached(tables[_split(tables, named, key)])
        builder = datasets.load_dataset_builder(str(directory), named.configuration)
        files = {str(split): [*map(Path, found)] for split, found in (builder.config.data_files or {}).items()}
        _tell_left_out(directory, [file for found in files.values() for file in found], key)
        return files[_split(files, named, key)]
    except ConfigError:
        raise
    except WRONG as error:
        raise ConfigError(f"{key}={directory}: no directory of rows ({_told(error)}); name files") from error


@functools.cache  # a hub that is out of reach is asked for half a minute
def files_of_hub(named: Named, key: str) -> list[Path]:
    """Those of the cache, into which a data set is fetched that is not there yet. Raises ConfigError."""
    try:
        builder = datasets.load_dataset_builder(named.name, named.configuration)
        split = _split(map(str, builder.info.splits or builder.config.data_files or {}), named, key)
        return _cached(datasets.load_dataset(named.name, named.configuration, split=split))
    except ConfigError:
        raise
    except WRONG as error:
        raise ConfigError(
            f"{key}={named.name}: neither a file here nor a data set that the hub gives ({_told(error)}); name files"
        ) from error


def _tell_left_out(directory: Path, read: list[Path], key: str) -> None:
    """Of a directory with several kinds of files the library reads one."""
    kinds = {file.suffix for file in directory.rglob("*") if is_row_file(file)} - {file.suffix for file in read}
    if kinds - {".json"}:  # of which many are no rows
        logger.warning("%s=%s: files that end in %s are not read", key, directory, ", ".join(sorted(kinds)))


def _cached(table: datasets.Dataset) -> list[Path]:
    return [Path(file["filename"]) for file in table.cache_files]


def _split(splits: Iterable[str], named: Named, key: str) -> str:
    """The split that is asked for; where none is, the only one, or for training the one called train."""
    names = list(splits)
    if named.split in names:
        return named.split
    if named.split is None and len(names) == 1:
        return names[0]
    if named.split is None and key == "data.train_files" and "train" in names:
        return "train"
    wrong = "has several splits" if named.split is None else f"has no split {named.split}"
    ways = ", ".join(f"{named.name}:{name}" for name in names) or "none"
    raise ConfigError(f"{key}={named.name}: {wrong}; name one: {ways}")


def _told(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
