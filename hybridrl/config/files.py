"""Which files and directories a key may name: rows of a dataset, a model, a LoRA adapter, a script.

A model is one Hugging Face directory, or a folder of a checkpoint, such as .../global_step_N/actor: its weights in
shards (of hybridrl or verl), everything else in `huggingface/` below. Names of the Hugging Face hub are accepted; the
hub is not contacted here.
"""

import glob
import json
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from hybridrl.config.foreign_files import fault_in, read_mapping
from hybridrl.config.values import ValueFault

ROW_SUFFIXES = (".parquet", ".json", ".jsonl", ".json.gz", ".jsonl.gz", ".arrow")
WRITTEN = ROW_SUFFIXES[:-1]  # .arrow is what the library `datasets` keeps in its own directories
HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")
MOST_PARTS = 2  # configuration and split

HUGGINGFACE = "huggingface"
SHARDS = ".metadata"  # the index file that torch.distributed.checkpoint writes
VERL_SHARDS = "model_world_size_*_rank_*.pt"
ADAPTER_CONFIG = "adapter_config.json"  # peft's, of a LoRA adapter
WEIGHT_FILES = ("*.safetensors", "*.bin")
LFS_POINTER, LFS_FIX = b"version https://git-lfs.github.com/spec/", "download it: git lfs pull"


@dataclass(frozen=True)
class DatasetName:
    """The parts of `name:split` or `name:configuration:split`; `split` and `configuration` may be missing."""

    name: str
    configuration: str | None
    split: str | None


def holds_verl(directory: Path, kind: str = "model") -> bool:
    """Return whether a directory has files of this kind saved by verl."""
    return any(True for _ in directory.glob(VERL_SHARDS.replace("model", kind, 1)))


def parse_dataset_name(entry: str) -> DatasetName:
    """Parse an entry of data.train_files that is no file: a directory or hub name, configuration and split."""
    name, *parts = entry.rsplit(":", min(entry.count(":"), MOST_PARTS))
    return DatasetName(name, parts[0] if len(parts) == MOST_PARTS else None, parts[-1] if parts else None)


def is_row_file(path: Path) -> bool:
    return path.name.lower().partition("?")[0].endswith(ROW_SUFFIXES)  # a download may keep the query of its address


def is_lfs_pointer(file: Path) -> bool:
    """Whether a file only stands for one that Git LFS has not downloaded."""
    if not file.is_file():
        return False
    with file.open("rb") as opened:
        return opened.read(len(LFS_POINTER)) == LFS_POINTER


def matches(pattern: str) -> list[str]:
    """The files of a pattern (*, ?, [..], ** for directories between), sorted."""
    return sorted(name for name in glob.glob(pattern, recursive=True) if Path(name).is_file())


def resolve_model(path: str) -> Path:
    """The directory with a model's configuration, tokenizer and, unless it `is_sharded`, weights. Hub names are
    returned unchanged."""
    directory, below = Path(path), Path(path, HUGGINGFACE)
    return below if below.is_dir() and not (directory / "config.json").is_file() else directory


def is_sharded(path: str) -> bool:
    """Whether the directory has a model's weights in shards."""
    return any(True for pattern in (SHARDS, VERL_SHARDS) for _ in Path(path).glob(pattern))


def holds_adapter(path: str) -> bool:
    """Whether it is a LoRA adapter: peft's directory, or a folder of a checkpoint that was trained with LoRA."""
    return (resolve_model(path) / ADAPTER_CONFIG).is_file()


def adapter_settings(path: str) -> dict[str, Any]:
    """The contents of peft's adapter_config.json. Raises OSError or ValueError if it cannot be read."""
    return json.loads((resolve_model(path) / ADAPTER_CONFIG).read_text(encoding="utf-8"))


def one_or_more(value: list[str]) -> ValueFault | None:
    """A rule: at least one name. A shell variable that is not set, the usual cause, may be set on another machine."""
    return None if value else ValueFault("name one file or more: [a.jsonl, b.parquet]", absent=True)


def row_files(value: list[str]) -> ValueFault | None:
    """A rule: existing files, patterns or directories, or hub names."""
    return next((ValueFault(cause, absent=True) for entry in value if (cause := _missing_rows(entry))), None)


def _missing_rows(entry: str) -> str:
    """Why an entry names no rows; empty if it does."""
    name = parse_dataset_name(entry).name
    directory, parent = Path(name), Path(entry).parent
    if Path(entry).is_file() or matches(entry):
        return ""
    if directory.is_dir():
        has_rows = any(is_row_file(file) for file in directory.rglob("*"))
        return "" if has_rows else f"the directory {directory} has no files that end in {', '.join(WRITTEN)}"
    if glob.has_magic(entry):
        plain, query, _ = entry.partition("?")
        if query and Path(plain).is_file():
            return f"no file matches {entry}, but there is {plain}: name that, without the query of an address"
        hint = " (a ? stands for any character: name the downloaded file, without the query of its address)"
        return f"no file matches {entry}{hint if query and is_row_file(Path(plain)) else ''}"
    if HUB_NAME.fullmatch(name) and not is_row_file(directory) and not directory.parent.is_dir():
        return ""
    names = sorted(item.name for item in parent.iterdir() if is_row_file(item)) if parent.is_dir() else []
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    names.sort(key=lambda name: not name.startswith(f"{Path(entry).name}?"))
    near = f" (in {parent} there are {', '.join(names[:5])}{more})" if names else _missing_parent(Path(entry))
    return f"there is no file {entry}{near}"


def path_or_hub(value: str) -> ValueFault | None:
    """A rule: a local directory or a hub name."""
    directory = Path(value)
    looks_local = value.startswith((".", "/")) or value.count("/") != 1 or directory.parent.is_dir()
    return _no_directory(value) if looks_local and not directory.is_dir() else None


def model_path(value: str) -> ValueFault | None:
    """A rule: a Hugging Face model, that is a directory with configuration and weights, a model of a checkpoint, or a
    hub name."""
    if not Path(value).is_dir():
        return path_or_hub(value)
    if holds_adapter(value):
        fix = "name its base model here and the adapter as lora_adapter_path, or merge them first: "
        fix += f"python -m hybridrl.model_merger merge --local_dir {value} --target_dir merged"
        return ValueFault("it is a LoRA adapter", fix)
    directory, above = resolve_model(value), Path(value).parent
    config = directory / "config.json"
    if not config.is_file():
        if Path(value, "actor").is_dir():
            return ValueFault("a checkpoint may hold several models", f"name one of them: {Path(value, 'actor')}")
        steps = {path.name.removeprefix("global_step_"): path / "actor" for path in Path(value).glob("global_step_*")}
        numbers = [int(step) for step, actor in steps.items() if step.isdecimal() and actor.is_dir()]
        if numbers:
            fix = f"name the model of a checkpoint, the newest one: {steps[str(max(numbers))]}"
            return ValueFault("it is the directory of a run", fix)
        return ValueFault("the directory has no config.json, so it is no Hugging Face model")
    if cause := fault_in(config) or fault_in(directory / "generation_config.json"):
        return ValueFault(cause, "save or download the model again")
    if is_sharded(value) or any(True for pattern in WEIGHT_FILES for _ in directory.glob(pattern)):
        return None
    if is_sharded(str(above)):
        return ValueFault("the weights are in the folder above", f"name that: {above}")
    return ValueFault(f"the directory has no weights ({' or '.join(WEIGHT_FILES)})", "save or download the model again")


def adapter_path(value: str) -> ValueFault | None:
    """A rule: a LoRA adapter, that is peft's directory, or a folder of a checkpoint that was trained with LoRA."""
    if not Path(value).is_dir():
        return _no_directory(value)
    if not holds_adapter(value):
        return ValueFault(f"the directory has no {ADAPTER_CONFIG}, so it is no LoRA adapter")
    with suppress(ValueError):  # of a file that cannot be read
        kind = read_mapping(resolve_model(value) / ADAPTER_CONFIG).get("peft_type")
        if isinstance(kind, str) and kind != "LORA":
            return ValueFault(f"it is an adapter of the type {kind}; only LORA can be trained")
    cause = fault_in(resolve_model(value) / ADAPTER_CONFIG)
    return ValueFault(cause, "save the adapter again") if cause else None


def script_file(value: str) -> ValueFault | None:
    """A rule: a .py file as a plain path or file://path, or an installed module as pkg://name."""
    if value.startswith("pkg://") or Path(value.removeprefix("file://")).is_file():
        return None
    return ValueFault("there is no such file", "give the path of a .py file", absent=True)


def _no_directory(path: str) -> ValueFault:
    return ValueFault(f"there is no such directory{_missing_parent(Path(path))}", absent=True)


def _missing_parent(path: Path) -> str:
    """The outermost missing directory of a path, in parentheses."""
    missing = [parent for parent in path.parents if not parent.exists()]
    return f" ({missing[-1]} does not exist)" if missing else ""


TrainFiles = Annotated[list[str], one_or_more, row_files]
RowNames = Annotated[list[str], row_files]
Model = Annotated[str, model_path]
ModelOrTokenizer = Annotated[str, path_or_hub]
Adapter = Annotated[str, adapter_path]
Script = Annotated[str, script_file]
