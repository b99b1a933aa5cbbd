"""What a run has before it has devices: algorithm, plans, tokenizer and data, each checked against the others.

`main_ppo` and the doctor call the same function, so that neither accepts what the other refuses.
"""

from dataclasses import dataclass, field, replace
from functools import partial

from transformers import PreTrainedTokenizerBase

from hybridrl.algorithms import Algorithm
from hybridrl.config import PPOConfig
from hybridrl.config.custom_code import import_libraries, publish_own_keys
from hybridrl.config.error import Refusals
from hybridrl.data.order import Order
from hybridrl.data.prompts import PromptDataset, load_prompts
from hybridrl.data.sampler import build_order
from hybridrl.data.tokenizer import load_tokenizer
from hybridrl.rewards.built_in import check_data_sources
from hybridrl.rewards.load import uses_built_in
from hybridrl.runs.resume import adapted_models
from hybridrl.runs.settings import build_algorithm, build_critic_plan, build_policy_plan
from hybridrl.runs.setup import refuse_damaged_weights, refuse_hub_model, refuse_unknown_tokens
from hybridrl.training.lora import check_adapter
from hybridrl.training.worker_group import CriticPlan, PolicyPlan


@dataclass
class Prepared:
    """The parts of a run; where anything is refused, those that are refused or need such a one are None."""

    refusals: Refusals = field(default_factory=Refusals)
    remarks: list[str] = field(default_factory=list)
    algorithm: Algorithm | None = None
    policy: PolicyPlan | None = None
    critic: CriticPlan | None = None
    tokenizer: PreTrainedTokenizerBase | None = None
    prompts: PromptDataset | None = None
    order: Order | None = None
    validation: PromptDataset | None = None

    @property
    def data_sources(self) -> set[str]:
        return {source for data in (self.prompts, self.validation) if data is not None for source in data.data_sources}


def prepare(config: PPOConfig) -> Prepared:
    """Everything that can be made without a device. What is refused is collected: close `refusals` to raise it all."""
    prepared = Prepared()
    publish_own_keys(config.own)
    with prepared.refusals.gathered():
        import_libraries(config.actor_rollout_ref.model.external_lib)
    if prepared.refusals.lines:
        return prepared  # a model or a tokenizer may be what it registers
    _plan(config, prepared)
    with prepared.refusals.gathered():
        prepared.tokenizer = _tokenizer(config)
    if prepared.tokenizer is not None:
        _check_models(config, prepared)
        _load_data(config, prepared.tokenizer, prepared)
    return prepared


def _plan(config: PPOConfig, prepared: Prepared) -> None:
    refusals = prepared.refusals
    with refusals.gathered():
        prepared.algorithm = build_algorithm(config)
    with refusals.gathered():
        prepared.policy = build_policy_plan(config)
    if config.critic.enable:
        with refusals.gathered():
            prepared.critic = build_critic_plan(config)


def _tokenizer(config: PPOConfig) -> PreTrainedTokenizerBase:
    model = config.actor_rollout_ref.model
    return load_tokenizer(
        model.path,
        tokenizer_path=config.data.tokenizer or model.tokenizer_path,
        trust_remote_code=config.data.trust_remote_code or model.trust_remote_code,
        custom_chat_template=model.custom_chat_template,
    )


def _check_models(config: PPOConfig, prepared: Prepared) -> None:
    """Models of the hub, weights and adapters: the settings of models in directories are judged with the keys."""
    algorithm, section, refusals = prepared.algorithm, config.actor_rollout_ref, prepared.refusals
    if algorithm is None:
        return
    models = {"actor_rollout_ref.model.path": section.model}
    if algorithm.uses_reference:
        models["actor_rollout_ref.ref.model.path"] = replace(section.model, path=section.ref.model.path)
    if algorithm.uses_critic:
        models["critic.model.path"] = config.critic.model
    for key, model in models.items():
        with refusals.gathered():
            refuse_hub_model(model, key)
            refuse_damaged_weights(model, key)
    for key, model in adapted_models(config, algorithm).items():
        with refusals.gathered():
            prepared.remarks.append(check_adapter(model, key))


def _load_data(config: PPOConfig, tokenizer: PreTrainedTokenizerBase, prepared: Prepared) -> None:
    """Training and validation prompts; refuses rows with tokens that the model has not, or that no scorer can judge."""
    data, refusals, own = config.data, prepared.refusals, config.own.get("data")
    load = partial(load_prompts, config=data, tokenizer=tokenizer, own=own)
    with refusals.gathered():
        most, shuffle = data.train_max_samples, data.shuffle
        prepared.prompts = load(data.train_files, max_samples=most, shuffle=shuffle, key="data.train_files")
    if data.val_files:
        with refusals.gathered():
            most, shuffle = data.val_max_samples, data.validation_shuffle
            prepared.validation = load(data.val_files, max_samples=most, shuffle=shuffle, key="data.val_files")
    if prepared.prompts is not None:
        with refusals.gathered():
            prepared.order = build_order(data, prepared.prompts, own)
    loaded = [dataset for dataset in (prepared.prompts, prepared.validation) if dataset is not None]
    if loaded:
        with refusals.gathered():
            refuse_unknown_tokens(config.actor_rollout_ref.model, "actor_rollout_ref.model.path", *loaded)
    if uses_built_in(config.reward):
        with refusals.gathered():
            check_data_sources(prepared.data_sources)
