"""Rows of a custom dataset class (data.custom_cls), constructed as in verl."""

import inspect
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Protocol, runtime_checkable

from transformers import PreTrainedTokenizerBase

from hybridrl.config.compose import as_section
from hybridrl.config.custom_code import load_class, where
from hybridrl.config.findings import ConfigError
from hybridrl.config.schema import DataConfig
from hybridrl.data.rows import Faults, PackedRows, Rows, select, with_progress

KEY = "data.custom_cls.path"


@runtime_checkable
class MapStyle(Protocol):
    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any: ...


def custom_rows(
    config: DataConfig,
    files: list[str],
    tokenizer: PreTrainedTokenizerBase,
    faults: Faults,
    *,
    custom_keys: dict[str, Any],
    max_samples: int,
    shuffle: bool,
    seed: int,
) -> Rows:
    """Read every item of the dataset once, each a mapping of the columns that a file would have.

    The class gets those of data_files, tokenizer, processor, config and max_samples that it accepts.
    """
    path, name = str(config.custom_cls.path), str(config.custom_cls.name)
    arguments = {
        "data_files": files,
        "tokenizer": tokenizer,
        "processor": None,
        "config": as_section(asdict(config) | custom_keys),
        "max_samples": max_samples,
    }
    setting, dataset = f"{KEY}={path}", construct(load_class(path, name, KEY), arguments, KEY, path)
    if not isinstance(dataset, MapStyle):
        raise ConfigError(f"{setting}: {name} has no __len__ and __getitem__", fix="rows are read by index: add both")
    packed = PackedRows()
    for number in with_progress(range(len(dataset)), len(dataset), "reading"):
        try:
            values = dataset[number]
        except Exception as error:  # custom code can raise anything
            raise ConfigError(f"{setting}: {name}[{number}] fails: {where(error, path)}") from error
        if not isinstance(values, Mapping):
            faults.add(f"{name}, row {number}", f"a {type(values).__name__}, not a mapping of columns")
            continue
        columns = dict(values)
        if config.prompt_key not in columns and "raw_prompt" in columns:  # the name in verl's own dataset class
            columns[config.prompt_key] = columns["raw_prompt"]
        packed.append(columns, f"{name}, row", number, 0)
    if not packed:
        faults.close()
        raise ConfigError(f"{setting}: {name} has no rows")
    return select(packed, max_samples, shuffle=shuffle, seed=seed)


def construct(cls: type, arguments: dict[str, Any], key: str, path: str) -> Any:
    """Create an instance with those of the arguments that the class accepts; ConfigError names the failing line."""
    try:
        parameters = inspect.signature(cls).parameters.values()
        accepts_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
        names = {parameter.name for parameter in parameters}
        return cls(**{name: value for name, value in arguments.items() if accepts_all or name in names})
    except Exception as error:  # custom code can raise anything
        call = f"{cls.__name__}({', '.join(arguments)})"
        raise ConfigError(f"{key}={path}: {call} fails: {where(error, path)}") from error
