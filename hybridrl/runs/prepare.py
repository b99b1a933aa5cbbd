"""Run inputs: algorithm, plans, tokenizer and data, checked against each other before devices are used.

`main_ppo` and the doctor call the same function, so both accept and reject the same configurations.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedConfig, PreTrainedTokenizerBase
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from hybridrl.checkpoint.read import open_tensors, stored_tensors
from hybridrl.config import ConfigError, PPOConfig, SFTConfig
from hybridrl.config.catalog import RANDOM, why_unsupported
from hybridrl.config.checks.model import IMPLIED, why_not_served
from hybridrl.config.custom_code import attempt, import_libraries, publish_own_keys
from hybridrl.config.files import is_sharded, resolve_model
from hybridrl.config.findings import Findings, nearest
from hybridrl.config.schema import ModelConfig, RowsConfig
from hybridrl.config.schema_parts import RolloutConfig
from hybridrl.core.algorithms import Algorithm
from hybridrl.core.device import release_host_memory
from hybridrl.core.training.planning import UpdatePlan
from hybridrl.core.training.worker_group import CriticPlan, PolicyPlan
from hybridrl.data.conversations import ConversationDataset, Replay, load_conversations
from hybridrl.data.order import Order, build_order
from hybridrl.data.processor import BLIND, PictureReader, picture_reader
from hybridrl.data.prompts import PromptDataset, load_prompts
from hybridrl.data.tokenizer import ResponseDecoder, end_tokens, load_tokenizer
from hybridrl.plugins import load
from hybridrl.required import required
from hybridrl.rewards.load import check_data_sources, scorer_of, uses_built_in
from hybridrl.runs.models import (
    CRITIC,
    POLICY,
    SCORER,
    check_adapter,
    check_pictures,
    check_readers,
    path_key,
    require_plans,
    run_models,
    text_settings,
)
from hybridrl.runs.reward_model import has_functions, scorer_tokenizer
from hybridrl.runs.settings import build_algorithm, build_policy_plan
from hybridrl.runs.teachers import with_teachers
from hybridrl.runs.trials import Subject, run_trials
from hybridrl.tracking.console import info


@dataclass
class RunInputs:
    """The parts of a run that need no device; rejected parts, and parts that depend on them, are None."""

    rejections: Findings = field(default_factory=Findings)
    messages: list[str] = field(default_factory=list)
    algorithm: Algorithm | None = None
    policy: PolicyPlan | None = None
    critic: CriticPlan | None = None
    tokenizer: PreTrainedTokenizerBase | None = None
    scorer_tokenizer: PreTrainedTokenizerBase | None = None  # the reward model's
    pictures: PictureReader | str = BLIND  # a reader, or why rows may not have any
    prompts: PromptDataset | None = None
    order: Order | None = None
    validation: PromptDataset | None = None
    runs_episodes: bool = False  # whether episodes of several turns run, in separate processes
    function_scores: bool = True  # false if environments or a reward model alone give the rewards

    @property
    def datasets(self) -> dict[str, PromptDataset]:
        """The datasets that were loaded, by key."""
        both = {"data.train_files": self.prompts, "data.val_files": self.validation}
        return {key: data for key, data in both.items() if data is not None}

    @property
    def scored(self) -> dict[str, PromptDataset]:
        """The datasets whose responses the reward function scores."""
        return self.datasets if self.function_scores else {}

    @property
    def environments(self) -> set[str]:
        """The names of environments in the rows' columns agent_name and env_class."""
        return {name for data in self.datasets.values() for name in data.environments}

    @property
    def data_sources(self) -> set[str]:
        return {source for data in self.datasets.values() for source in data.data_sources}


def prepare(config: PPOConfig, *, in_full: bool = False) -> RunInputs:
    """Make all inputs that need no device. Rejections are collected: close `rejections` to raise them together. If the
    user's files are rejected, models and rows, which may take minutes, are read only with `in_full`."""
    inputs = RunInputs()
    publish_own_keys(config.own)
    with inputs.rejections.gathered():
        import_libraries(config.actor_rollout_ref.model.external_lib)
    if inputs.rejections.errors:
        return inputs  # the library may register the model or the tokenizer
    load("episodes").load_episode_files(config, inputs.rejections)
    with inputs.rejections.gathered():
        inputs.algorithm = build_algorithm(config)
    with inputs.rejections.gathered():
        inputs.policy = build_policy_plan(config)
    if config.critic.enable:
        with inputs.rejections.gathered():
            inputs.critic = CriticPlan(config.critic, UpdatePlan.of(config.critic))
    run_trials(Subject(config), inputs.rejections)
    if inputs.rejections.errors and not in_full:
        return inputs
    with inputs.rejections.gathered():
        inputs.tokenizer = model_tokenizer(config.data, config.actor_rollout_ref.model)
    if inputs.tokenizer is not None:
        _check_models(config, inputs)
        _load_data(config, inputs.tokenizer, inputs)
        episodes = load("episodes")
        episodes.warn_of_unread_fields(config.actor_rollout_ref.rollout, inputs.datasets)
        run_trials(Subject(config, inputs.tokenizer, inputs.datasets), inputs.rejections)
    return inputs


def model_tokenizer(
    data: RowsConfig, model: ModelConfig, key: str = "actor_rollout_ref.model.path"
) -> PreTrainedTokenizerBase:
    tokenizer = load_tokenizer(
        model.path,
        tokenizer_path=data.tokenizer or model.tokenizer_path,
        trust_remote_code=data.trust_remote_code or model.trust_remote_code,
        custom_chat_template=model.custom_chat_template,
        model_key=key,
    )
    release_host_memory()  # reading and probing 262,144 entries leaves twice their size unused
    return tokenizer


def tokenizer_elsewhere(data: RowsConfig, model: ModelConfig) -> PreTrainedTokenizerBase:
    """The tokenizer of a run, in another process than the driver's, where no library is imported yet."""
    import_libraries(model.external_lib)
    return model_tokenizer(data, model)


def decoder_elsewhere(data: RowsConfig, model: ModelConfig) -> ResponseDecoder:
    """The decoder of a run's responses, in another process than the driver's."""
    tokenizer = tokenizer_elsewhere(data, model)
    return ResponseDecoder(tokenizer, end_tokens(model.path, tokenizer))


def _check_models(config: PPOConfig, inputs: RunInputs) -> None:
    """Check models of the hub, weights and adapters; settings of local models were checked with the configuration."""
    algorithm, section, rejections = inputs.algorithm, config.actor_rollout_ref, inputs.rejections
    if algorithm is None:
        return
    models, before = run_models(config, algorithm), len(rejections.errors)
    for key, model in models.items():
        with rejections.gathered():
            served = section.rollout if model is section.model else None
            reject_hub_model(model, path_key(key), served, config.trainer.device)
            reject_damaged_weights(model, path_key(key))
    for key, division in {POLICY: section.actor.fsdp_config, CRITIC: config.critic.fsdp}.items():
        if key in models:
            with rejections.gathered():
                require_plans(models[key], division)
    for key, model in models.items():
        with rejections.gathered():
            if model.lora_rank:
                inputs.messages.append(check_adapter(model, key))
    scorer = models.pop(SCORER, None)  # it has token ids of its own
    if len(rejections.errors) == before:
        check_readers(models, required(inputs.tokenizer), rejections)
    if len(rejections.errors) == before and scorer is not None:
        with rejections.gathered():
            inputs.scorer_tokenizer = scorer_tokenizer(scorer)


def _load_data(config: PPOConfig, tokenizer: PreTrainedTokenizerBase, inputs: RunInputs) -> None:
    """Load prompts; reject rows with tokens that the model does not have, and data sources without a scorer."""
    data, rejections, user_keys = config.data, inputs.rejections, config.own.get("data")
    section, built_in = config.actor_rollout_ref, uses_built_in(config.reward)
    with rejections.gathered():
        inputs.pictures = picture_reader(data, section.model, tokenizer)
    options = {"needs_truth": built_in and config.distillation.rewarded, "pictures": inputs.pictures}
    read = partial(load_prompts, config=data, tokenizer=tokenizer, custom_keys=user_keys, **options)
    with rejections.gathered():
        limit, shuffle = data.train_max_samples, data.shuffle
        inputs.prompts = read(data.train_files, max_samples=limit, shuffle=shuffle, key="data.train_files")
    if data.val_files:
        with rejections.gathered():
            limit, shuffle = data.val_max_samples, data.validation_shuffle
            inputs.validation = read(data.val_files, max_samples=limit, shuffle=shuffle, key="data.val_files")
    if inputs.prompts is not None and config.distillation.enabled:
        with rejections.gathered():
            inputs.prompts = with_teachers(config, inputs.prompts, tokenizer, inputs.messages)
    if inputs.prompts is not None:
        with rejections.gathered():
            inputs.order = build_order(data, inputs.prompts, user_keys)
            if data.train_batch_size > inputs.order.size:
                key, size = "data.train_batch_size", inputs.order.size
                cause = f"{key}={data.train_batch_size}: data.train_files has {size} prompts"
                raise ConfigError(cause, fix=f"set {key}={size}, or less", keys=key)
    if inputs.datasets:
        with rejections.gathered():
            reject_unknown_tokens(section.model, "actor_rollout_ref.model.path", *inputs.datasets.values())
    inputs.runs_episodes = load("episodes").runs_episodes(section.rollout, inputs.environments)
    inputs.function_scores = has_functions(config.reward) and not (built_in and inputs.runs_episodes)
    with rejections.gathered():
        check_pictures(config, list(inputs.datasets.values()), episodes=inputs.runs_episodes)
    if built_in and inputs.scored:
        unscored = sorted(source for source in inputs.data_sources if not scorer_of(source))
        if not config.distillation.rewarded and unscored and not config.reward.name:
            config.reward.name, rows = "none", f"rows of {', '.join(unscored)}"
            inputs.messages.append(f"no reward function for {rows}: scores are 0, only teachers are learned from")
        with rejections.gathered():
            check_data_sources(inputs.data_sources, config.reward.name)


def load_sft_inputs(
    config: SFTConfig,
) -> tuple[PreTrainedTokenizerBase, ConversationDataset, ConversationDataset | None]:
    """Tokenizer, training and validation conversations of a supervised run; raises ConfigError."""
    data, model, rejections = config.data, config.model, Findings()
    if config.pairs.center is not None:
        raise ConfigError("pairs.center is a key of reward models", fix="train one: hybridrl rm", keys="pairs.center")
    import_libraries(model.external_lib)
    run_trials(Subject(config), rejections)
    rejections.close()
    tokenizer = model_tokenizer(data, model, "model.path")
    reject_hub_model(model, "model.path")
    require_plans(model, config.engine.fsdp_config)
    if model.lora_rank:
        info(check_adapter(model, "model"))
    check_readers({"model": model}, tokenizer, rejections)
    rejections.close()
    read = partial(load_conversations, config=data, tokenizer=tokenizer, replay=_replay(model.path, data, tokenizer))
    limit, shuffle = data.train_max_samples, data.shuffle
    training, validation = read(data.train_files, max_samples=limit, shuffle=shuffle, key="data.train_files"), None
    if data.val_files:
        validation = read(data.val_files, max_samples=data.val_max_samples, shuffle=False, key="data.val_files")
    reject_unknown_tokens(model, "model.path", training, validation)
    return tokenizer, training, validation


def _replay(model: str, data: RowsConfig, tokenizer: PreTrainedTokenizerBase) -> Replay:
    """Return a function that renders a conversation turn by turn. It is built when a row first needs it; if that fails,
    the fault of the row names the reason."""

    @cache
    def dialogue() -> Any:
        ends = end_tokens(model, tokenizer)
        return load("dialogue")(tokenizer, ends, arguments=data.apply_chat_template_kwargs)

    return lambda *chat: dialogue().replay(*chat)


def reject_damaged_weights(model: ModelConfig, key: str) -> None:
    """Reject a local model whose weight files cannot be read, by their headers."""
    directory = resolve_model(model.path)
    try:
        if is_sharded(model.path):
            open_tensors(Path(model.path))
        elif directory.is_dir():
            stored_tensors(directory)
    except ConfigError as error:
        raise ConfigError(f"{key}={model.path}: {error}", fix="save or download the model again") from error


def reject_unknown_tokens(model: ModelConfig, key: str, *datasets: PromptDataset | ConversationDataset | None) -> None:
    """Reject rows with a token id beyond the model's embedding; embedding rows without a token do no harm."""
    tokens = text_settings(model).vocab_size
    largest = max(dataset.largest_id for dataset in datasets if dataset is not None)
    if largest >= tokens:
        raise ConfigError(
            f"{key}={model.path}: the model has {tokens} tokens, and the data has token {largest} of its tokenizer",
            fix="name the model's own tokenizer in data.tokenizer, or resize the model's token embeddings",
        )


ROPE = "rope_parameters"
ROPE_TYPES = ["default", *ROPE_INIT_FUNCTIONS]
# Settings that the types of rotary embeddings read.
ROPE_SETTINGS = {
    *("rope_type", "type", "rope_theta", "partial_rotary_factor", "factor", "original_max_position_embeddings"),
    *("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    *("short_factor", "long_factor", "low_freq_factor", "high_freq_factor", "mrope_section", "mrope_interleaved"),
}


def reject_hub_model(model: ModelConfig, key: str, served: RolloutConfig | None = None, device: str = "") -> None:
    """Reject a hub model if it is missing, or cannot be trained, or cannot be served with the settings `served`. Local
    models were checked with the configuration."""
    if resolve_model(model.path).is_dir():
        return
    try:
        settings = AutoConfig.from_pretrained(model.path, trust_remote_code=model.trust_remote_code).to_dict()
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"{key}={model.path} is neither a directory nor a model that the hub provides ({reason})"
        ) from error
    settings |= model.override_config
    reason = why_unsupported(settings)
    if served and not reason:
        reason = why_not_served(settings, served.max_model_len or 0, served.name, device)
    if reason:
        raise ConfigError(f"{key}={model.path}: {reason}")


def reject_unusable_overrides(model: ModelConfig, key: str) -> None:
    """Reject names in `override_config` that are settings of neither the model's family nor its config.json, and
    invalid values."""
    path, changes = str(resolve_model(model.path)), model.override_config
    if not changes:
        return
    read = partial(AutoConfig.from_pretrained, path, trust_remote_code=model.trust_remote_code)
    try:
        plain, (written, _) = read(), PreTrainedConfig.get_config_dict(path)
    except (OSError, ValueError):
        return  # reported with the model
    causes = list(_unknown(changes, plain, written, key))
    if not causes and (error := _fault(read, changes)) and not _fault(read, {}):
        alone = next((name for name in changes if _fault(read, {name: changes[name]})), None)
        per_layer = alone == "num_hidden_layers" and getattr(plain, "layer_types", None)
        fix = f"; set {key}.layer_types too" if per_layer else ""
        causes = [f"{key}.{alone or ', '.join(changes)}: {_reason(error)}{fix}"]
    if causes:
        raise ConfigError(*causes)


def _unknown(
    changes: Mapping[str, Any], plain: PreTrainedConfig, written: Mapping[str, Any], key: str
) -> Iterator[str]:
    """Describe unknown names, also nested ones. `plain` has the settings of the family, `written` those of
    config.json."""
    implied = IMPLIED.get(plain.model_type, {})
    for name, value in changes.items():
        own = getattr(plain, name, None)
        if name == ROPE and isinstance(value, Mapping):
            yield from _unknown_rope(value, written.get(ROPE) or written.get("rope_scaling") or {}, f"{key}.{name}")
        elif isinstance(own, PreTrainedConfig) and isinstance(value, Mapping):
            yield from _unknown(value, own, written.get(name) or {}, f"{key}.{name}")
        # Any kind of dropout may be turned off, even one that the family does not have.
        elif not (hasattr(plain, name) or name in written or name in implied or (RANDOM.search(name) and not value)):
            settings = {*plain.to_dict(), *written, "rope_scaling", "rope_theta"}
            cause = f"{key}.{name}: neither models of type {plain.model_type} nor its config.json have such a setting"
            yield f"{cause}; {_nearest(name, settings)}"


def _unknown_rope(values: Mapping[str, Any], written: Mapping[str, Any], key: str) -> Iterator[str]:
    for name, value in values.items():
        if isinstance(value, Mapping) and name not in ROPE_SETTINGS:  # settings of one type of layers
            yield from _unknown_rope(value, written.get(name) or {}, f"{key}.{name}")
        elif name not in ROPE_SETTINGS and name not in written:
            yield f"{key}.{name}: no type of rotary embeddings has such a setting; {_nearest(name, ROPE_SETTINGS)}"
        elif name in ("rope_type", "type") and value not in (*ROPE_TYPES, written.get(name)):
            yield f"{key}.{name}={value}: there is no such type; {_nearest(str(value), set(ROPE_TYPES))}"


def _nearest(name: str, settings: set[str]) -> str:
    near = nearest(name, sorted(settings))
    return f"did you mean {' or '.join(near)}?" if near else "leave it out, or add it to config.json"


def _fault(read: Callable[..., PreTrainedConfig], changes: Mapping[str, Any]) -> Exception | None:
    """Return the error of reading, writing and re-reading the changed settings, and of rotating positions; or None."""

    def used() -> None:
        settings = read(**changes)
        settings = type(settings).from_dict(settings.to_dict())  # this validates them
        rope = getattr(settings, ROPE, None) or {}
        if rotary := ROPE_INIT_FUNCTIONS.get(str(rope.get("rope_type"))):
            rotary(settings, torch.device("cpu"))

    return attempt(used)


def _reason(error: Exception) -> str:
    text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    return " ".join(text.split()) or type(error).__name__
