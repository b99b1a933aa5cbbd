"""Rows of a custom dataset class (data.custom_cls), which is constructed as in verl."""

from collections.abc import Mapping
from typing import Any

from hybridrl.config.custom_code import calling, construct, load_class
from hybridrl.config.findings import ConfigError
from hybridrl.config.schema import DataConfig
from hybridrl.data.pictures import PictureFault, as_stored
from hybridrl.data.rows import Faults, Rows, with_progress

CUSTOM = "data.custom_cls.path"


def custom_rows(config: DataConfig, arguments: dict[str, Any], faults: Faults) -> Rows:
    """Read every item of the dataset once, each a mapping of the columns that a file would have.

    The class gets those of the arguments that it accepts.
    """
    path, name = str(config.custom_cls.path), str(config.custom_cls.name)
    setting, dataset = f"{CUSTOM}={path}", construct(load_class(path, name, CUSTOM), arguments, CUSTOM, path)
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise ConfigError(f"{setting}: {name} has no __len__ and __getitem__", fix="rows are read by index: add both")
    rows, pictured = Rows(), {config.prompt_key, "raw_prompt", config.image_key}
    for number in with_progress(range(len(dataset)), len(dataset), "reading"):
        with calling(f"{setting}: {name}[{number}]", path):
            values = dataset[number]
        if not isinstance(values, Mapping):
            faults.add(f"{name}, row {number}", f"a {type(values).__name__}, not a mapping of columns")
            continue
        try:
            columns = {key: as_stored(value) if key in pictured else value for key, value in values.items()}
        except PictureFault as fault:
            faults.add(f"{name}, row {number}", str(fault))
            continue
        if config.prompt_key not in columns and "raw_prompt" in columns:  # the name in verl's own dataset class
            columns[config.prompt_key] = columns["raw_prompt"]
        rows.append(f"{name}, row {number}", columns)
    if not rows:
        faults.close()
        raise ConfigError(f"{setting}: {name} has no rows")
    return rows
