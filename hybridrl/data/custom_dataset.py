"""Rows from a data set class of the user's own (data.custom_cls), constructed as verl does it."""

import inspect
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Protocol, runtime_checkable

from transformers import PreTrainedTokenizerBase

from hybridrl.config.compose import as_section
from hybridrl.config.custom_code import load_class, where
from hybridrl.config.error import ConfigError
from hybridrl.config.schema import DataConfig
from hybridrl.data.rows import Faults, Packed, Rows, choose, with_progress

KEY = "data.custom_cls.path"


@runtime_checkable
class MapStyle(Protocol):
    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any: ...


def own_rows(
    config: DataConfig,
    files: list[str],
    tokenizer: PreTrainedTokenizerBase,
    faults: Faults,
    *,
    own: dict[str, Any],
    max_samples: int,
    shuffle: bool,
    seed: int,
) -> Rows:
    """Every item once, as a row: a mapping with the columns that a file would have, or `raw_prompt` for its messages.

    The class gets those of data_files, tokenizer, processor, config and max_samples that it takes.
    """
    path, name = str(config.custom_cls.path), str(config.custom_cls.name)
    given = {
        "data_files": files,
        "tokenizer": tokenizer,
        "processor": None,
        "config": as_section(asdict(config) | own),
        "max_samples": max_samples,
    }
    asked = f"{KEY}={path}"
    dataset = constructed(load_class(path, name, KEY), given, KEY, path)
    if not isinstance(dataset, MapStyle):
        raise ConfigError(f"{asked}: {name} has no __len__ and __getitem__; rows are drawn by number, so it needs both")
    packed = Packed()
    for number in with_progress(range(len(dataset)), len(dataset), "reading"):
        try:
            values = dataset[number]
        except Exception as error:  # whatever the user's own lines raise
            raise ConfigError(f"{asked}: {name}[{number}] fails: {where(error, path)}") from error
        if isinstance(values, Mapping):
            packed.append(_plain(values, config.prompt_key), f"{name}, row", number, 0)
        else:
            faults.add(f"{name}, row {number}", f"a {type(values).__name__}, not a mapping of columns")
    if not packed:
        faults.close()
        raise ConfigError(f"{asked}: {name} has no rows")
    return choose(packed, max_samples, shuffle=shuffle, seed=seed)


def constructed(cls: type, given: dict[str, Any], key: str, path: str) -> Any:
    """An instance from those of the given arguments that the class takes; ConfigError shows the user's own line."""
    try:
        parameters = inspect.signature(cls).parameters.values()
        any_name = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
        names = {parameter.name for parameter in parameters}
        return cls(**{name: value for name, value in given.items() if any_name or name in names})
    except Exception as error:  # whatever the user's own lines raise
        known = ", ".join(given)
        raise ConfigError(f"{key}={path}: {cls.__name__}({known}) fails: {where(error, path)}") from error


def _plain(values: Mapping[str, Any], prompt_key: str) -> dict[str, Any]:
    """The columns under the names that a file has: verl's own class calls the messages raw_prompt."""
    columns = dict(values)
    if prompt_key not in columns and "raw_prompt" in columns:
        columns[prompt_key] = columns["raw_prompt"]
    return columns
