"""The models of a run: one list, from the configuration, and a check that they all use the policy's token ids."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import AutoConfig, PreTrainedTokenizerBase

from hybridrl.config import ConfigError, PPOConfig
from hybridrl.config.checks.engine import EPISODE_PICTURES, why_no_pictures
from hybridrl.config.custom_code import attempt
from hybridrl.config.files import adapter_settings, resolve_model
from hybridrl.config.findings import Findings
from hybridrl.config.schema import ActorRolloutRefConfig, FSDPConfig, ModelConfig
from hybridrl.config.schema_parts import RolloutConfig
from hybridrl.config.teachers import BASE, DistillationConfig
from hybridrl.config.teachers import POLICY as POLICY_ITSELF
from hybridrl.core.algorithms import Algorithm
from hybridrl.core.pictures import placeholder_ids
from hybridrl.core.training.layout import expert_plan, tensor_plan
from hybridrl.core.training.loading import from_settings, load_settings
from hybridrl.core.training.lora import add_adapter
from hybridrl.core.training.model import pairs
from hybridrl.core.training.vision import VisionConfig, family_of, tower_weight
from hybridrl.data.formats import with_objects
from hybridrl.data.processor import PictureReader
from hybridrl.data.prompts import PromptDataset
from hybridrl.data.tokenizer import read_tokenizer
from hybridrl.runs.settings import REWARD_MODEL, TEACHERS, rank_model

SAMPLE_SIZES = ((28, 28), (60, 40), (64, 96))  # heights and widths: a blank picture, and two that check models
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


def require_plans(config: ModelConfig, fsdp: FSDPConfig) -> None:
    """Raise ConfigError if layers or experts are to be sharded and the model's family has no plan for it."""
    if fsdp.tensor_parallel_size == fsdp.expert_parallel_size == 1:
        return
    with torch.device("meta"):
        model = from_settings(load_settings(config), config)
    if fsdp.tensor_parallel_size > 1:
        tensor_plan(model)
    if fsdp.expert_parallel_size > 1:
        expert_plan(model)


def check_adapter(config: ModelConfig, key: str) -> str:
    """Describe the trained parameters, from the configuration alone: no weights are read. Raises ConfigError if the
    model lacks the layers, or if the configured adapter belongs to another model."""
    settings = load_settings(config)
    with torch.device("meta"):
        model = from_settings(settings, config)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    add_adapter(model, config, torch.float32, 0, key)
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    layers = ", ".join(sorted({name.rsplit(".", 2)[-2] for name in pairs(model)}))
    return (
        f"{key}: an adapter of rank {config.lora_rank} on {layers} is trained, {trained:,} parameters "
        f"({trained / parameters:.2%} of the model's {parameters:,})"
    )


# -- pictures ----------------------------------------------------------------------------------------------------------


def vision_of(section: ActorRolloutRefConfig, prompts: Sequence[PromptDataset]) -> VisionConfig | None:
    """Return the part of the processor for training ranks; None if no context has a picture."""
    readers = [data.reader for data in prompts if data.reader is not None]
    return vision_with(section.model, readers[0]) if readers and section.rollout.limit_images else None


def vision_with(model: ModelConfig, reader: PictureReader) -> VisionConfig:
    """Return the part of the policy's processor for training ranks."""
    noise = np.random.default_rng(0)
    blank, *sample = (
        reader.pixels(Image.fromarray(noise.integers(0, 256, (height, width, 3), dtype=np.uint8)))
        for height, width in SAMPLE_SIZES
    )
    with torch.device("meta"):
        weight = tower_weight(from_settings(load_settings(model), model))
    return VisionConfig(reader.rule, blank, sample, placeholder=reader.placeholder, weight=weight)


def picture_settings(rollout: RolloutConfig, prompts: PromptDataset) -> list[str]:
    """Return the settings with which pictures are read; empty if no context has any."""
    reader = prompts.reader if rollout.limit_images else None
    return [reader.processor.image_processor.to_json_string()] if reader else []


def check_pictures(config: PPOConfig, prompts: Sequence[PromptDataset], *, episodes: bool) -> None:
    """Set the most pictures that an engine must expect. Raises ConfigError if rows have pictures and a part of the run
    cannot read them, such as `episodes` of several turns."""
    causes, distillation = (
        limit_pictures(config.actor_rollout_ref.rollout, prompts, episodes=episodes),
        config.distillation,
    )
    if causes is None:
        return
    if distillation.endpoints or distillation.reads_contexts:
        causes.append("a teacher at an address, or with a context, reads text alone; name a model_path")
    causes += _blind_models(config, prompts)
    if config.critic.enable:
        causes.append(
            "critic.enable=true: models that see are trained without a critic; set algorithm.adv_estimator=grpo"
        )
    reject_pictures(causes)


def limit_pictures(rollout: RolloutConfig, prompts: Sequence[PromptDataset], *, episodes: bool) -> list[str] | None:
    """Set the most pictures that an engine must expect, and return the reasons why responses to such rows cannot be
    sampled; None if there are no pictures. The contexts of `episodes` may have more than rows do. Raises ConfigError if
    a row has more than is set."""
    key, most = "actor_rollout_ref.rollout.limit_images", max((data.most_pictures for data in prompts), default=0)
    if not most and not (episodes and rollout.limit_images):
        rollout.limit_images = 0
        return None
    if rollout.limit_images is not None and rollout.limit_images < most:
        raise ConfigError(f"{key}={rollout.limit_images}: a row has {most} pictures", fix=f"set {most}", keys=key)
    if rollout.limit_images is None:
        rollout.limit_images = max(most, EPISODE_PICTURES) if episodes else most
    if all(data.reader is None for data in prompts):
        raise ConfigError(f"{key}={rollout.limit_images}: the model reads no pictures", fix="leave it out", keys=key)
    if arguments := prompts[0].config.mm_processor_kwargs:  # an engine reserves room for the largest picture
        rollout.engine_kwargs.vllm.setdefault("mm_processor_kwargs", dict(arguments))
    reason = why_no_pictures(rollout.name)
    return [reason] if reason else []


def reject_pictures(causes: Sequence[str]) -> None:
    if causes:
        raise ConfigError(*(f"rows have pictures, and {cause}" for cause in causes))


def _blind_models(config: PPOConfig, prompts: Sequence[PromptDataset]) -> list[str]:
    """Describe the frozen models that get rows with pictures and read none, or others."""
    section, teachers = config.actor_rollout_ref, config.distillation.teacher_models
    paths = {"actor_rollout_ref.ref.model.path": section.ref.model.path}
    places = {name: f"distillation.teacher_models.{name}.model_path" for name in teachers}
    paths |= {places[name]: teacher.model_path for name, teacher in teachers.items()}
    others = {place: path for place, path in paths.items() if path and path not in (POLICY_ITSELF, BASE)}
    blind = {place: difference for place, path in others.items() if (difference := _difference(section.model, path))}
    chosen = all(data.teacher_of is not None for data in prompts if data.most_pictures)
    if chosen and any(place in blind for place in places.values()):
        numbers = {number for data in prompts for number in data.teachers_of_pictures()}
        taught = [places[name] for number, name in enumerate(config.distillation.teachers) if number in numbers]
        blind = {place: why for place, why in blind.items() if place in taught or place not in places.values()}
    return [f"{place}={paths[place]} cannot read them: {why}" for place, why in blind.items()]


def _difference(policy: ModelConfig, path: str) -> str:
    """Describe how a model reads pictures otherwise than the policy, whose pixels it gets; empty if it does not."""
    if path == policy.path:
        return ""
    ours, theirs = (load_settings(model) for model in (policy, replace(policy, path=path, override_config={})))
    if family_of(theirs) is None:
        return "it is a model of text"
    if placeholder_ids(ours) != placeholder_ids(theirs):
        return f"its placeholders are the ids {placeholder_ids(theirs)}, and the policy's {placeholder_ids(ours)}"
    for name in ("patch_size", "spatial_merge_size", "temporal_patch_size"):
        if getattr(ours.vision_config, name) != getattr(theirs.vision_config, name):
            return f"its {name} differs"
    return ""
