"""The models of a run: one list, from the configuration, and a check that they all use the policy's token ids."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PreTrainedTokenizerBase

from hybridrl.config import ConfigError, PPOConfig
from hybridrl.config.custom_code import attempt
from hybridrl.config.files import adapter_settings, resolve_model
from hybridrl.config.findings import Findings
from hybridrl.config.schema import ModelConfig
from hybridrl.config.teachers import DistillationConfig
from hybridrl.core.algorithms import Algorithm
from hybridrl.data.prompts import PromptDataset, with_objects
from hybridrl.data.tokenizer import read_tokenizer
from hybridrl.runs.settings import REWARD_MODEL, TEACHERS, rank_model

POLICY, CRITIC = "actor_rollout_ref.model", "critic.model"
SCORER = "reward.reward_model"
SECTIONS = {"actor": POLICY, "reference": "actor_rollout_ref.ref.model", "critic": CRITIC, REWARD_MODEL: SCORER}


def run_models(config: PPOConfig, algorithm: Algorithm) -> dict[str, ModelConfig]:
    """The models that a run computes with, by the keys of their sections or their plug-ins; the policy is the first."""
    return {_section(name): rank_model(name, config).model for name in algorithm.models}


def _section(name: str) -> str:
    if name.startswith(TEACHERS):
        return f"distillation.teacher_models.{name.removeprefix(TEACHERS)}"
    return SECTIONS.get(name, f"model.{name}")


def path_key(section: str) -> str:
    """Return the key of a model's path."""
    return f"{section}.model_path" if section.startswith(("distillation.", SCORER)) else f"{section}.path"


def text_settings(model: ModelConfig) -> Any:
    """The text settings of a local or hub model, with `override_config`."""
    options = {"trust_remote_code": model.trust_remote_code, **model.override_config}
    return AutoConfig.from_pretrained(str(resolve_model(model.path)), **options).get_text_config()


def taught(prompts: PromptDataset, section: DistillationConfig) -> PromptDataset:
    """Return the prompts with the number of each one's teacher. Raises ConfigError if a row has none, or a teacher has
    no row."""
    key, models = section.teacher_key, section.teacher_models
    numbers = {name: number for number, name in enumerate(section.teachers)}
    by_key = {teacher.key: numbers.get(name, -1) for name, teacher in models.items()}
    rows = Counter(str(with_objects(row.values).get(key)) for row in prompts.rows)
    place, named = "distillation.teacher_models", ", ".join(f"{name} (key={each.key})" for name, each in models.items())
    unknown = {} if "*" in by_key else {value: count for value, count in rows.items() if value not in by_key}
    unused = [name for name, each in models.items() if each.key not in ("*", *rows)]
    causes = [f"{place}.{name}.key={models[name].key}: no row has it in the column {key}" for name in unused]
    if unknown:
        counts = ", ".join(f"{value} ({count} rows)" for value, count in sorted(unknown.items())[:8])
        causes.append(f"{place}: the column {key} has values without a teacher, {counts}; there are {named}")
    if causes:
        fix = f"give each value of {key} one teacher, key='*' for all others, or model_path=null for rows without one"
        raise ConfigError(*causes, fix=fix, keys=place)
    return replace(
        prompts, teacher_of=partial(_number, key, {value: by_key.get(value, by_key.get("*")) for value in rows})
    )


def _number(key: str, numbers: Mapping[str, int], columns: Mapping[str, Any]) -> int:
    """Return the number of a row's teacher."""
    return numbers[str(columns.get(key))]


def check_readers(models: Mapping[str, ModelConfig], tokenizer: PreTrainedTokenizerBase, rejections: Findings) -> None:
    """Reject models (the policy comes first) and bases of adapters with fewer tokens than the policy's `tokenizer`, or
    with other tokens at the same ids. Their numbers of positions are checked with the configuration."""
    policy = next(iter(models.values()))
    # Data and responses have no ids beyond these with a meaning.
    count = min(text_settings(policy).vocab_size, 1 + max(tokenizer.get_vocab().values()))
    for key, model in models.items():
        name, adapter = f"{path_key(key)}={model.path}", model.lora_adapter_path or ""
        places = {} if model.path == policy.path else {model.path: name}
        if (rows := text_settings(model).vocab_size) < count:
            cause = f"{name}: its embedding and head have {rows} rows, and the policy {count} tokens"
            rejections.error("input", cause, "name another model, or resize its token embeddings")
        if adapter and Path(adapter).is_dir():
            base = str(adapter_settings(adapter).get("base_model_name_or_path"))
            name = f"{key}.lora_adapter_path={adapter}"
            places |= {adapter: name} | ({base: f"{name}, trained on {base}"} if Path(base).is_dir() else {})
        for place, name in places.items():
            if difference := _other_tokens(tokenizer, place, count, trusted=model.trust_remote_code):
                fix = "name one with the policy's tokenizer; if it knows these tokens, save that tokenizer there"
                cause = f"{name}: it reads the policy's token ids, and {difference}"
                rejections.error("input", cause, fix, keys=name.partition("=")[0])


def _other_tokens(tokenizer: PreTrainedTokenizerBase, place: str, count: int, *, trusted: bool) -> str:
    """Describe how the tokenizer of a directory or hub name differs in the tokens of ids below `count`; empty if it
    does not differ, or if there is no tokenizer."""
    path = resolve_model(place)
    other = attempt(partial(read_tokenizer, str(path), trusted=trusted, local=path.is_dir()))
    if isinstance(other, Exception) or set(other.get_vocab()) <= set(other.all_special_tokens):
        return ""
    ours, theirs = ({number: token for token, number in reader.get_vocab().items()} for reader in (tokenizer, other))
    changed = [number for number, token in ours.items() if number < count and theirs.get(number) != token]
    if not changed:
        return ""
    number = min(changed)
    kind = "added token" if number in tokenizer.added_tokens_decoder else "token"
    token = repr(theirs[number]) if number in theirs else "no token"
    cause = f"its tokenizer has {token} where the policy's has the {kind} {ours[number]!r}, at {number}"
    return f"{cause} ({len(changed)} of {count} differ)"
