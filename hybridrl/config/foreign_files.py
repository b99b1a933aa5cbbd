"""Files of names and values that others write: reading them, and the first field of a model's files that is no value of
its kind. Fields that are not named here are the library's that reads them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import yaml


def read_mapping(file: Path) -> dict[str, Any]:
    """Return the names and values in a file of JSON, or of YAML by its name. Raises ValueError with the reason if it
    cannot be read or holds anything else."""
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


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 < value < 1 << 31


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < 1e30


def _are_token_ids(value: Any) -> bool:
    return all(type(item) is int and 0 <= item < 1 << 31 for item in (value if isinstance(value, list) else [value]))


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


COUNT = Kind("a positive whole number", _is_count)
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
    """Describe the values that a field of a model's file may have; empty if this is one, or they are not known here."""
    kind = FIELDS[file].get(name)
    if kind is None or (value is None and name not in NOT_NULL) or kind.accepts(value):
        return ""
    return kind.description


def fault_in(file: Path) -> str:
    """Describe the first field of a model's file that is no value of its kind; empty if there is none, or no file."""
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
