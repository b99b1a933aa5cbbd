"""Rules for keys that name files and directories: rows of a dataset, a model, a LoRA adapter, a script.

A model is one Hugging Face directory, or a folder of a checkpoint, such as .../global_step_N/actor: its weights in
shards (of hybridrl or verl), everything else in `huggingface/` below. Names of the Hugging Face hub are accepted; only
the hub's presence is checked. In files of other software, the first field with a value of a wrong kind is reported;
fields that are not listed here are left to the library.
"""

import glob
import json
import os
import re
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, NamedTuple
from urllib.parse import urlsplit
from urllib.request import getproxies

import yaml

from hybridrl.config.findings import ConfigError
from hybridrl.config.values import ValueFault
from hybridrl.plugins import row_source

CELLS = (".csv", ".tsv", ".csv.gz", ".tsv.gz")
COLUMNS = (".parquet", ".json", ".jsonl", ".json.gz", ".jsonl.gz", *CELLS, ".arrow")
LINES = (".txt", ".txt.gz")
ROW_SUFFIXES = (*COLUMNS, *LINES)  # text only if it is named: in a directory it is more likely a licence
WRITTEN = tuple(suffix for suffix in ROW_SUFFIXES if suffix != ".arrow")  # .arrow is the library's own
HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")
HUB_SECONDS = 2.0  # for a connection to the hub
MOST_PARTS = 2  # configuration and split

HUGGINGFACE = "huggingface"
SHARDS = ".metadata"  # the index file that torch.distributed.checkpoint writes
VERL_SHARDS = "model_world_size_*_rank_*.pt"
ADAPTER_CONFIG = "adapter_config.json"  # peft's file in a LoRA adapter
WEIGHT_FILES = ("*.safetensors", "*.bin")
LFS_POINTER, LFS_FIX = b"version https://git-lfs.github.com/spec/", "download it: git lfs pull"


def read_mapping(file: Path) -> dict[str, Any]:
    """Return the names and values in a JSON file, or a YAML file by its name. Raises ValueError with the reason if it
    cannot be read or holds other content."""
    try:
        text = file.read_text(encoding="utf-8")
        content = yaml.load(text, yaml.CSafeLoader) if file.suffix == ".yaml" else json.loads(text)
    except OSError as error:
        raise ValueError(error.strerror or str(error)) from error
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise ValueError(" ".join(str(error).split()) or type(error).__name__) from error
    if not isinstance(content, dict):
        raise ValueError(f"names and values are expected, not {type(content).__name__}")
    return content


class Kind(NamedTuple):
    """The values that a field may have: a description for messages, and a test."""

    description: str
    accepts: Callable[[Any], bool]


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < 1e30


def _are_token_ids(value: Any) -> bool:
    return all(type(item) is int and 0 <= item < 1 << 31 for item in (value if isinstance(value, list) else [value]))


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


COUNT = Kind("a positive whole number", lambda value: type(value) is int and 0 < value < 1 << 31)
WHOLE = Kind("a whole number", lambda value: type(value) is int and abs(value) < 1 << 31)
NUMBER = Kind("a number of at least 0", _is_number)
FLAG = Kind("true or false", lambda value: isinstance(value, bool))
TEXT = Kind("a text", lambda value: isinstance(value, str))
TEXTS = Kind("a list of texts", _are_texts)
MAPPING = Kind("names and values", lambda value: isinstance(value, dict))
TOKEN_IDS = Kind("a token id or a list of them", _are_token_ids)
TOKEN = Kind("a text or an added token", lambda value: isinstance(value, str | dict))
LAYERS = Kind("a text or a list of texts", lambda value: isinstance(value, str) or _are_texts(value))
TEMPLATE = Kind("a text or named texts", lambda value: isinstance(value, str | list | dict))
TOKENS = Kind("a list or names and values", lambda value: isinstance(value, list | dict))


def _table(kinds: dict[Kind, str]) -> dict[str, Kind]:
    return {name: kind for kind, names in kinds.items() for name in names.split()}


FIELDS: dict[str, dict[str, Kind]] = {
    "config.json": _table(
        {
            COUNT: "vocab_size hidden_size num_hidden_layers num_attention_heads intermediate_size "
            " num_key_value_heads head_dim max_position_embeddings num_experts "
            "num_local_experts num_experts_per_tok moe_intermediate_size kv_lora_rank",
            NUMBER: "rms_norm_eps layer_norm_eps rope_theta initializer_range attention_dropout",
            FLAG: "tie_word_embeddings use_cache is_encoder_decoder",
            TEXT: "model_type hidden_act torch_dtype dtype",
            TEXTS: "architectures layer_types",
            MAPPING: "rope_scaling rope_parameters quantization_config auto_map",
            TOKEN_IDS: "eos_token_id",
            WHOLE: "bos_token_id pad_token_id",
        }
    ),
    "generation_config.json": _table(
        {
            TOKEN_IDS: "eos_token_id",
            WHOLE: "bos_token_id pad_token_id top_k max_length max_new_tokens",
            NUMBER: "temperature top_p repetition_penalty",
            FLAG: "do_sample",
        }
    ),
    "tokenizer_config.json": _table(
        {
            TOKEN: "eos_token bos_token pad_token unk_token",
            TEXT: "tokenizer_class padding_side",
            TEMPLATE: "chat_template",
            MAPPING: "added_tokens_decoder",
            TOKENS: "additional_special_tokens extra_special_tokens",
        }
    ),
    "adapter_config.json": _table(
        {
            COUNT: "r",
            NUMBER: "lora_alpha lora_dropout",
            LAYERS: "target_modules",
            TEXT: "peft_type base_model_name_or_path bias",
        }
    ),
}
REQUIRED = {
    "adapter_config.json": ("peft_type", "r", "lora_alpha", "target_modules")
}  # others have defaults in the library
NOT_NULL = {"vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", *REQUIRED["adapter_config.json"]}


def expected_kind(file: str, name: str, value: Any) -> str:
    """Describe the valid values of a field in a model's file; empty if this one is valid, or the field is unknown."""
    kind = FIELDS[file].get(name)
    if kind is None or (value is None and name not in NOT_NULL) or kind.accepts(value):
        return ""
    return kind.description


def fault_in(file: Path) -> str:
    """Describe the first invalid field of a model's file; empty if there is none, or no file."""
    if not file.exists() and not file.is_symlink():
        return ""
    try:
        settings = read_mapping(file)
    except ValueError as error:
        return f"its {file.name} cannot be read ({error})"
    for name in REQUIRED.get(file.name, ()):
        if name not in settings:
            return f"its {file.name} has no {name}"
    text = settings.get("text_config")
    for part in (settings, text if isinstance(text, dict) else {}):
        for name in (name for name in FIELDS[file.name] if name in part):
            if expected := expected_kind(file.name, name, part[name]):
                return f"its {file.name} has {name}={json.dumps(part[name]):.60}, and {expected} is expected"
    return ""


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
    """Parse an entry of data.train_files other than a file: a directory or hub name, configuration and split."""
    name, *parts = entry.rsplit(":", min(entry.count(":"), MOST_PARTS))
    return DatasetName(name, parts[0] if len(parts) == MOST_PARTS else None, parts[-1] if parts else None)


def is_row_file(path: Path, suffixes: tuple[str, ...] = ROW_SUFFIXES) -> bool:
    return path.name.lower().partition("?")[0].endswith(suffixes)  # a download may keep the query of its address


def is_lfs_pointer(file: Path) -> bool:
    """Whether a file is a pointer to a file that Git LFS has not downloaded."""
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
    """Whether a path is a LoRA adapter: peft's directory, or a folder of a checkpoint trained with LoRA."""
    return (resolve_model(path) / ADAPTER_CONFIG).is_file()


def adapter_settings(path: str) -> dict[str, Any]:
    """The contents of peft's adapter_config.json. Raises OSError or ValueError if it cannot be read."""
    return json.loads((resolve_model(path) / ADAPTER_CONFIG).read_text(encoding="utf-8"))


def leads_outside(directory: Path, name: str) -> bool:
    """Whether a name in a file of a directory leads out of the directory. Links may lead to the blobs of the hub's
    cache, as in all files of a snapshot."""
    root, file = directory.resolve(), (directory / name).resolve()
    blobs = [parent.parent / "blobs" for parent in root.parents if parent.name == "snapshots"]
    return "://" in name or not any(file.is_relative_to(place) for place in (root, *blobs))


def one_or_more(value: list[str]) -> ValueFault | None:
    """A rule: at least one name. A shell variable that is not set, the usual cause, may be set on another machine."""
    return None if value else ValueFault("name one file or more: [a.jsonl, b.parquet]", absent=True)


def row_entries(value: list[str]) -> ValueFault | None:
    """A rule: existing files, patterns or directories, hub names, or entries of a plug-in."""
    return next((ValueFault(cause, absent=True) for entry in value if (cause := _missing_rows(entry))), None)


def _missing_rows(entry: str) -> str:
    """The reason why an entry names no rows; empty if it does."""
    name = parse_dataset_name(entry).name
    directory, parent = Path(name), Path(entry).parent
    if Path(entry).is_file() or matches(entry) or row_source(entry):
        return ""
    if directory.is_dir():
        has_rows = any(is_row_file(file, COLUMNS) for file in directory.rglob("*"))
        endings = ", ".join(ending for ending in COLUMNS[:-1] if not ending.endswith(".gz"))
        return "" if has_rows else f"the directory {directory} has no files that end in {endings}"
    if glob.has_magic(entry):
        plain, query, _ = entry.partition("?")
        if query and Path(plain).is_file():
            return f"no file matches {entry}, but there is {plain}: name that, without the query of an address"
        hint = " (a ? stands for any character: name the downloaded file, without the query of its address)"
        return f"no file matches {entry}{hint if query and is_row_file(Path(plain)) else ''}"
    if HUB_NAME.fullmatch(name) and not is_row_file(directory) and not directory.parent.is_dir():
        return _out_of_reach(name, "dataset")
    names = sorted(item.name for item in parent.iterdir() if is_row_file(item)) if parent.is_dir() else []
    others = f" and {len(names) - 5} more" if len(names) > 5 else ""
    names.sort(key=lambda name: not name.startswith(f"{Path(entry).name}?"))
    near = f" (in {parent} there are {', '.join(names[:5])}{others})" if names else _missing_parent(Path(entry))
    return f"there is no file {entry}{near}"


def path_or_hub(value: str) -> ValueFault | None:
    """A rule: a local directory or a hub name."""
    directory = Path(value)
    looks_local = value.startswith((".", "/")) or value.count("/") != 1 or directory.parent.is_dir()
    if directory.is_dir():
        return None
    if looks_local:
        return _no_directory(value)
    cause = _out_of_reach(value, "model")
    return ValueFault(cause, f"name a directory, or with a network: hf download {value}", True) if cause else None


def model_path(value: str) -> ValueFault | None:
    """A rule: a Hugging Face model (a directory with configuration and weights), a model of a checkpoint, or a hub
    name."""
    if not Path(value).is_dir():
        return path_or_hub(value)
    if holds_adapter(value):
        fix = "name its base model here and the adapter as lora_adapter_path, or merge them first: "
        fix += f"hybridrl merge --local_dir {value} --target_dir merged"
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
        there = ", ".join(sorted(os.listdir(value))[:8]) or "no files"
        return ValueFault(f"the directory has no config.json, so it is not a Hugging Face model (it has {there})")
    if cause := fault_in(config) or fault_in(directory / "generation_config.json"):
        return ValueFault(cause, "save or download the model again")
    if is_sharded(value) or any(True for pattern in WEIGHT_FILES for _ in directory.glob(pattern)):
        return None
    if is_sharded(str(above)):
        return ValueFault("the weights are in the folder above", f"name that: {above}")
    return ValueFault(f"the directory has no weights ({' or '.join(WEIGHT_FILES)})", "save or download the model again")


def names_rows(directory: Path, key: str) -> bool:
    """Whether the README of a dataset, or the library's other file, names its files. Raises ConfigError if one of them
    is an address."""
    from huggingface_hub import metadata_load

    named: list[str] = []
    for name, read in {"README.md": metadata_load, ".huggingface.yaml": read_mapping}.items():
        with suppress(OSError, ValueError, yaml.YAMLError):  # the library rejects unreadable files
            configurations = (read(directory / name) or {}).get("configs") or []
            named += re.findall('"([^"]+)"', json.dumps(configurations, default=str))
    rows_below(directory, [name for name in named if "://" in name], key)
    return bool(named)


def rows_below(directory: Path, files: list[Any], key: str) -> list[Path]:
    """Return the files named in a file of a directory. Raises ConfigError for the first that is not below it."""
    if outside := [file for file in files if leads_outside(directory, str(file))]:
        cause = f"{key}={directory}: a file of the directory names {outside[0]} as its rows, which is not below it"
        raise ConfigError(cause, fix="name files that are on this machine")
    return [*map(Path, files)]


def adapter_path(value: str) -> ValueFault | None:
    """A rule: a LoRA adapter (peft's directory, or a folder of a checkpoint trained with LoRA)."""
    if not Path(value).is_dir():
        return _no_directory(value)
    if not holds_adapter(value):
        return ValueFault(f"the directory has no {ADAPTER_CONFIG}, so it is not a LoRA adapter")
    with suppress(ValueError):  # an unreadable file
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


def _out_of_reach(name: str, kind: str) -> str:
    """The reason why a name of the hub cannot be used (no access, and no copy in the cache); empty if it can."""
    home = os.environ.get("HF_HOME") or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", HUGGINGFACE)
    copies = [Path(os.environ.get("HF_HUB_CACHE") or f"{home}/hub", f"{kind}s--{name.replace('/', '--')}")]
    copies += [Path(os.environ.get("HF_DATASETS_CACHE") or f"{home}/datasets", name.replace("/", "___").lower())]
    if not hub_is_away() or any(copy.expanduser().is_dir() for copy in copies):
        return ""
    return "neither a directory here nor in the hub's cache, and the hub cannot be reached"


@cache
def hub_is_away() -> bool:
    """Whether the hub cannot be reached. Its libraries, if imported afterwards, then only read their caches: otherwise
    each would retry for 23 s, even for cached files."""
    server = urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co")
    port = server.port or {"http": 80}.get(server.scheme, 443)
    try:
        if not getproxies():  # a proxy may reach it
            socket.create_connection((server.hostname or "", port), HUB_SECONDS).close()
    except OSError:
        os.environ["HF_HUB_OFFLINE"] = "1"
    return os.environ.get("HF_HUB_OFFLINE", "0") == "1"


def _no_directory(path: str) -> ValueFault:
    return ValueFault(f"there is no such directory{_missing_parent(Path(path))}", absent=True)


def _missing_parent(path: Path) -> str:
    """The outermost missing directory of a path, in parentheses."""
    missing = [parent for parent in path.parents if not parent.exists()]
    return f" ({missing[-1]} does not exist)" if missing else ""


TrainFiles = Annotated[list[str], one_or_more, row_entries]
RowNames = Annotated[list[str], row_entries]
ModelPath = Annotated[str, model_path]
ModelOrTokenizer = Annotated[str, path_or_hub]
AdapterPath = Annotated[str, adapter_path]
Script = Annotated[str, script_file]
