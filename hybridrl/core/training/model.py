"""Hugging Face models that compute outputs for given tokens: log-probs and more of a causal language model, values of a
critic; with or without LoRA adapters.

Knows neither rewards, returns nor losses, and does not create adapters.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_layers import GenericForSequenceClassification, GenericForTokenClassification
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
    MODEL_MAPPING,
)

from hybridrl.checkpoint.read import ADAPTER, file_name
from hybridrl.config.findings import ConfigError
from hybridrl.config.schema import ModelConfig
from hybridrl.core.batch import Batch, token_rows
from hybridrl.core.pictures import placeholder_ids
from hybridrl.core.rounding import beyond_rounding, rounded_otherwise
from hybridrl.core.training import attention
from hybridrl.core.training.attention import gather_slices, slice_of
from hybridrl.core.training.heads import Head, LogitRule, TopTokens
from hybridrl.core.training.loading import blank_model, from_settings, load_settings
from hybridrl.core.training.packing import ModelInputs, each_token_once, pack_rows, read_at, separate_rows
from hybridrl.core.training.routes import RouterReplay
from hybridrl.core.training.token_outputs import LossGradient, OutputSpec, TokenOutputs, token_outputs
from hybridrl.core.training.vision import NEVER, Vision
from hybridrl.core.training.working_copies import WorkingCopies
from hybridrl.required import required

HOST = torch.device("cpu")
# Names of model settings and layer attributes that limit how many tokens back attention reaches.
REACH = re.compile("(sliding_|attention_|local_)window(_size)?|attention_chunk_size|index_topk")
SHORT_REACH = 3  # the limit in the checks, so that their short rows exceed it
SCORED = "ForSequenceClassification"  # ends the names of transformers' classes of reward models
MIXED = 0.1  # relative change of a hidden state that only another row can cause; rounding causes less


class TokenModel(nn.Module):
    """Computes outputs for the response tokens of rows, with a Hugging Face model."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        self.replay: RouterReplay | None = None
        self.copies: WorkingCopies | None = None  # on a single rank
        self.vision: Vision | None = None  # if the rows of the run have pictures
        # Larger ids are clamped: they are padding rows of the policy's head, hardly ever sampled.
        self.last_id = model.config.get_text_config().vocab_size - 1
        separate_rows(model)

    def hidden_states(self, inputs: ModelInputs) -> Tensor:
        """Return the head's inputs at the predictors [response tokens, width]; for a slice, at the slice's."""
        if self.copies is not None:
            self.copies.gather()
        if self.replay is not None:
            self.replay.begin(inputs.carried.get("routes"))
        pictures = {}
        if inputs.pictures is not None:
            pictures = required(self.vision).arguments(inputs.pictures)
        ids = inputs.input_ids.clamp(max=self.last_id)
        hidden = self.model.base_model(
            input_ids=ids, position_ids=inputs.position_ids, packed=inputs.packed, use_cache=False, **pictures
        ).last_hidden_state
        hidden, packed = hidden.flatten(0, 1), inputs.packed
        if packed is not None and packed.paths is not None:
            return read_at(hidden, inputs.predictors)
        return hidden[inputs.predictors]


class LanguageModel(TokenModel):
    """Computes log-probs and other outputs. All logits, also the reference's, are divided by the temperature."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        # Cohere and Falcon-H1 multiply their logits, Granite divides them, Gemma caps them.
        settings = model.config.to_dict()
        scale = (settings.get("logit_scale") or 1.0) / (settings.get("logits_scaling") or 1.0)
        scale *= settings.get("lm_head_multiplier") or 1.0
        self.rule = LogitRule(scale, settings.get("final_logit_softcapping"))
        self.never_sampled = placeholder_ids(model.config)
        self._placeholder_bias: Tensor | None = None

    def forward(
        self, inputs: ModelInputs, temperature: float, *, loss_gradient: LossGradient | None = None, **options: Any
    ) -> TokenOutputs:
        """Return the outputs requested by the options of `OutputSpec`. With the `loss_gradient` of a loss, the backward
        pass of this loss takes less time."""
        if inputs.slice is not None:
            loss_gradient = None  # a loss needs the outputs of all slices
            if isinstance(top := options.get("teacher"), TopTokens):
                options["teacher"] = TopTokens(top.hidden[inputs.slice.at])
        spec = OutputSpec(temperature, loss_gradient=loss_gradient, **options)
        # The class's method: that of an FSDP2 instance would gather the parameters again, after forward() did.
        hidden = TokenModel.hidden_states(self, inputs)
        outputs = token_outputs(hidden, self.head, inputs.targets.clamp(max=self.last_id), spec)
        return outputs.map(partial(gather_slices, slice_=inputs.slice))

    def route_statistics(self, inputs: ModelInputs) -> dict[str, Tensor]:
        """Return statistics of router replay by name [response tokens], for the last forward pass, of these inputs: the
        share of replayed experts that the router would not have chosen; and 1 for tokens without the engine's choice.
        Empty without replay; collective."""
        if self.replay is None:
            return {}
        slices = {name: values[inputs.predictors] for name, values in self.replay.statistics(inputs.input_ids).items()}
        return {name: gather_slices(values, inputs.slice) for name, values in slices.items()}

    @property
    def head(self) -> Head:
        """Return the head; unsharded only while the root's parameters are gathered."""
        linear = self.model.get_output_embeddings()
        return Head(linear.weight, self._bias(linear), self.rule)

    def _bias(self, linear: nn.Linear) -> Tensor | None:
        """Return the bias of the head. Engines sample no placeholder of a picture; here its logit is as low."""
        if not self.never_sampled:
            return linear.bias
        like, present = linear.weight, self._placeholder_bias
        if present is None or (present.device, present.dtype) != (like.device, like.dtype):
            present = like.new_zeros(len(like))
            present[self.never_sampled] = NEVER
            self._placeholder_bias = present
        return present if linear.bias is None else linear.bias + present

    def own_log_probs(self, row: Tensor, **pictures: Any) -> Tensor:
        """Return the log-probs of a row's tokens after the first, from the model's own forward pass."""
        if self.copies is not None:
            self.copies.gather()
        # In float64, as log_softmax in float32 loses small probabilities of a large vocabulary on CPU.
        logits = self.model(input_ids=row[None], use_cache=False, **pictures).logits[0, :-1].double()
        logits[:, self.never_sampled] += NEVER
        return logits.log_softmax(-1).gather(-1, row[1:, None]).squeeze(-1)


class ValueModel(TokenModel):
    """Computes the values of the states in which response tokens were sampled [response tokens], in float32. It is
    transformers' token classification with one label, so that a saved value model loads there as such, and can start
    from any causal language model. A reward model is its sequence classification, and computes the logit of the last
    label, without an activation."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        self.head_name = next(name for name, child in model.named_children() if isinstance(child, nn.Linear))

    def forward(self, inputs: ModelInputs) -> Tensor:
        hidden = self.hidden_states(inputs)
        head = self.model.get_submodule(self.head_name)
        # Skips transformers' dropout, which would add noise; in float32, as bfloat16 rounds 0.9 by up to 0.002.
        values = hidden.float() @ head.weight[-1].float()
        values = values if head.bias is None else values + head.bias[-1].float()
        return gather_slices(values, inputs.slice)


# -- loading -----------------------------------------------------------------------------------------------------------


def blank_language_model(config: ModelConfig, dtype: torch.dtype) -> LanguageModel:
    """Return the model of a directory or hub name without its weights, which `fill` reads once it is sharded."""
    settings = load_settings(config)
    return LanguageModel(blank_model(partial(from_settings, config=config), settings, config, dtype))


def blank_value_model(config: ModelConfig, dtype: torch.dtype) -> ValueModel:
    """Return the value model of a directory, or a language model with a new head, without its weights."""
    settings = load_settings(config, num_labels=1)
    place = f"critic.model.path={config.path}"
    family = _family(settings, place, MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING, GenericForTokenClassification)
    model = ValueModel(blank_model(family._from_config, settings, config, dtype))
    model.model.config.architectures = [family.__name__]
    return model


def blank_score_model(config: ModelConfig, dtype: torch.dtype, *, trained: bool = False) -> ValueModel:
    """Return the reward model of a directory or hub name, without its weights. If it is trained, it has one label, and
    may start from a language model. Raises ConfigError if it is another kind of model."""
    settings = load_settings(config, **({"num_labels": 1} if trained else {}))
    kind = next(iter(settings.architectures or ()), "model of no known class")
    place = f"model.path={config.path}" if trained else f"reward.reward_model.model_path={config.path}"
    family = _family(settings, place, MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, GenericForSequenceClassification)
    model = blank_model(family._from_config, settings, config, dtype)
    # The head of encoders, which may read later tokens, has other names.
    if not (trained or kind.endswith(SCORED)) or not isinstance(getattr(model, "score", None), nn.Linear):
        cause, fix = "an encoder or another model without a head `score`", "name one of a causal family"
        if not (trained or kind.endswith(SCORED)):
            cause, fix = (
                f"no {SCORED}",
                "train one: hybridrl rm; or if it writes its verdict, start it: hybridrl serve ",
            )
            fix += f"model.path={config.path} port=8001, and set reward.judge.base_url=http://127.0.0.1:8001/v1"
        cause = f"{place} is a {kind}: {cause}; a reward model is a decoder with a head that scores its last token"
        raise ConfigError(cause, fix=fix)
    model.config.architectures = [family.__name__]
    return ValueModel(model)


def _family(settings: PreTrainedConfig, place: str, classes: Any, generic: type) -> Any:
    """Return the class of a family among transformers' `classes`, or the `generic` one on the family's base, which
    knows the names of the layers to shard."""
    kind = type(settings)
    if kind in classes:
        return classes[kind]
    if kind not in MODEL_MAPPING:
        raise ValueError(
            f"{place}: transformers has no base of the family {settings.model_type} for a value head; name a model of "
            "another family"
        )
    base = MODEL_MAPPING[kind].__bases__[0]
    name = base.__name__.removesuffix("PreTrainedModel") + generic.__name__.removeprefix("Generic")
    return type(name, (generic, base), {})


def new_head(model: ValueModel) -> dict[str, Tensor]:
    """Return zeros for the head, if it is trained, of a directory that has none. Values then start at 0 however large
    the hidden states are, and are the same on every rank whatever its seed. One output has no symmetry to break: its
    gradient is the hidden state, so the first update already trains it."""
    head = model.model.get_submodule(model.head_name).named_parameters()
    return {f"{model.head_name}.{name}": torch.zeros(p.shape) for name, p in head if p.requires_grad}


# -- LoRA adapters -----------------------------------------------------------------------------------------------------


def pairs(model: PreTrainedModel) -> dict[str, LoraLayer]:
    """Return the adapted layers, by the name of their weight in the base model; empty without an adapter."""
    layers = ((name, module) for name, module in model.named_modules() if isinstance(module, LoraLayer))
    return {f"{name}.weight": layer for name, layer in layers}


def adapter_parameters(model: PreTrainedModel) -> dict[str, nn.Parameter]:
    """Return the trained parameters of an adapted model, by the names in peft's files."""
    return {file_name(name): value for name, value in model.named_parameters() if value.requires_grad}


@contextmanager
def adapter_off(model: PreTrainedModel) -> Iterator[None]:
    """Compute with the base model. (peft's own switch also freezes the adapter's parameters, while FSDP2 keeps the
    properties that a parameter has when it is first gathered.)"""
    layers = pairs(model).values()
    for layer in layers:
        layer.set_scale(ADAPTER, 0.0)
    try:
        yield
    finally:
        for layer in layers:
            layer.set_scale(ADAPTER, 1.0)


@contextmanager
def without_pairs(model: PreTrainedModel) -> Iterator[None]:
    """Temporarily remove the adapter's layers, to read and write the base model under its own names."""
    layers = {name.removesuffix(".weight"): layer for name, layer in pairs(model).items()}
    try:
        for name, layer in layers.items():
            model.set_submodule(name, layer.get_base_layer())
        yield
    finally:
        for name, layer in layers.items():
            model.set_submodule(name, layer)


# -- checks ------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def packed_rows_interact(model: TokenModel, device: torch.device = HOST, *, shares: bool = False) -> bool:
    """Return whether packed rows influence each other, as with attention that ignores boundaries; or with `shares`, if
    the tokens that they share are computed once. Collective, for a sharded model. Compares hidden states, since a new
    value head maps everything to zero."""
    settings, training = model.model.config, model.training
    batch = token_rows(_some_tokens(settings))
    model.eval()
    layouts = (each_token_once(pack_rows(batch, padded), batch, 1, shares) for padded in (False, True))
    packed, padded = (model.hidden_states(inputs.to(device)).float() for inputs in layouts)
    model.train(training)
    return bool(((packed - padded).norm(dim=-1) > MIXED * padded.norm(dim=-1)).any())


@torch.no_grad()
def check_log_probs(
    language_model: LanguageModel,
    dtype: torch.dtype,
    device: torch.device = HOST,
    *,
    padded: bool,
    shares: bool = False,
    group: ProcessGroup | None = None,
) -> None:
    """Raise ValueError if log-probs computed here in this type differ from those of the model's own forward pass, one
    row at a time; collective, for a sharded model. They differ if a family transforms its logits otherwise than
    `LogitRule`, or if its attention needs more than masks, windows, caps and sinks. A limited reach of attention is
    shortened here, as rows longer than the configured limit would cost too much. If the run has pictures, they are
    compared too, and must change the log-probs. With `shares` the rows compute what they have in common once."""
    model, texts, vision = language_model.model, _some_tokens(language_model.model.config), language_model.vision
    batch, training, name = token_rows(texts), model.training, str(dtype).removeprefix("torch.")
    batch = vision.sample_rows(*texts) if vision else batch
    language_model.eval()
    with _short_reach(model):
        inputs = pack_rows(batch, padded)
        inputs = vision.inputs(batch, inputs) if vision else inputs
        inputs = slice_of(each_token_once(inputs, batch, 1, shares), group).to(device)
        ours = language_model(inputs, 1.0).log_probs
        if inputs.pictures is not None:
            black = replace(inputs.pictures, pixels=torch.zeros_like(inputs.pictures.pixels))
            unseen = torch.equal(language_model(replace(inputs, pictures=black), 1.0).log_probs, ours)
        else:
            unseen = False
        model.set_attn_implementation("eager")
        own = [partial(_own_log_probs, language_model, batch.select([row]), device) for row in range(len(batch))]
        theirs = torch.cat([compute() for compute in own])
        with rounded_otherwise(name):
            again = torch.cat([compute() for compute in own])
        model.set_attn_implementation(attention.implementation(model.config))
        if vision:
            vision.family.adapt(vision.base)
    language_model.train(training)
    if unseen:
        raise ValueError(f"{model.config.model_type}: pictures do not change the log-probs of this family")
    sampled = ~torch.isin(batch.response_ids, torch.tensor(language_model.never_sampled, dtype=torch.int64))
    ours, theirs, again = (values.cpu()[sampled] for values in (ours, theirs, again))
    if difference := beyond_rounding(ours, theirs, name, again):
        together = f" by {group.size()} ranks together; set ulysses_sequence_parallel_size=1" if group else ""
        raise ValueError(
            f"{model.config.model_type}: the training log-probs differ from the model's own {difference}, so "
            f"this family cannot be trained here{together}"
        )


def _own_log_probs(language_model: LanguageModel, row: Batch, device: torch.device) -> Tensor:
    pictures = language_model.vision.own_arguments(row) if language_model.vision else {}
    ids = torch.cat([row.prompt_ids, row.response_ids]).to(device)
    return language_model.own_log_probs(ids, **{name: value.to(device) for name, value in pictures.items()})


@torch.no_grad()
def check_replay(
    language_model: LanguageModel, device: torch.device = HOST, *, padded: bool, group: ProcessGroup | None = None
) -> None:
    """Raise ValueError if the family's routers cannot choose given experts; collective, for a sharded model."""
    model, batch = language_model.model, token_rows(_some_tokens(language_model.model.config))
    replay = required(language_model.replay)
    routes = torch.arange(replay.per_token, dtype=torch.int16).expand(int(batch.lengths.sum()), replay.layers, -1)
    with _short_reach(model):
        language_model(slice_of(pack_rows(replace(batch, carried={"routes": routes}), padded), group).to(device), 1.0)


@contextmanager
def _short_reach(model: PreTrainedModel) -> Iterator[None]:
    parts = {id(part): part for part in (model.config, model.config.get_text_config(), *model.modules())}.values()
    limited = [(part, name, reach) for part in parts for name, reach in vars(part).items() if REACH.fullmatch(name)]
    limited = [(part, name, reach) for part, name, reach in limited if type(reach) is int and reach > SHORT_REACH]
    for part, name, _ in limited:
        setattr(part, name, SHORT_REACH)
    try:
        yield
    finally:
        for part, name, reach in limited:
            setattr(part, name, reach)


def _some_tokens(settings: PreTrainedConfig) -> list[list[int]]:
    ids = (torch.arange(14) * 37 % min(settings.get_text_config().vocab_size, 4096)).tolist()
    return [ids[:7], [*ids[:4], *ids[7:]]]
