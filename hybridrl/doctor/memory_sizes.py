"""The sizes of a model that memory follows from, told by its config.json: no weights are read."""

from collections import Counter
from collections.abc import Callable, Hashable, Mapping

import torch
from torch.nn import Parameter
from transformers import PreTrainedConfig, PreTrainedModel

from hybridrl.checkpoint.published import LAYER, parts
from hybridrl.config.schema import ModelConfig
from hybridrl.doctor.memory_formulas import SMALL, ModelSizes
from hybridrl.training.adapted import without_pairs
from hybridrl.training.lora import add_adapter
from hybridrl.training.model import blank_language_model
from hybridrl.training.value_model import blank_value_model
from hybridrl.weights.layout import buffer_bytes, plan_buckets


def blank(config: ModelConfig, key: str, *, values: bool = False) -> PreTrainedModel:
    """The model without memory for its weights, with its adapter if it has one. OSError where there is no config.json,
    ValueError or ConfigError where it cannot be trained as it is asked for."""
    model = (blank_value_model if values else blank_language_model)(config, torch.float32).model
    if config.lora_rank:
        add_adapter(model, config, torch.float32, 0, key)
    return model


def model_sizes(model: PreTrainedModel) -> ModelSizes:
    named = dict(model.named_parameters())
    trained = {name: parameter for name, parameter in named.items() if parameter.requires_grad}
    by_layer = _grouped(named, _layer)
    outside = by_layer.pop("", 0)
    text = model.config.get_text_config()
    told = text.to_dict()
    fused = _grouped(named, lambda name: (name.rsplit(".", 2)[0], named[name].shape[1:]))
    width = told.get("head_dim") or text.hidden_size // text.num_attention_heads
    return ModelSizes(
        parameters=sum(parameter.numel() for parameter in named.values()),
        trained=sum(parameter.numel() for parameter in trained.values()),
        outside=outside,
        layer=max(by_layer.values()),
        largest=max(parameter.numel() for parameter in trained.values()),
        small_fused=sum(size for size in fused.values() if size < SMALL),
        tied=bool(text.tie_word_embeddings),
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        query=text.num_attention_heads * width,
        key=(told.get("num_key_value_heads") or text.num_attention_heads) * width,
        intermediate=_intermediate(text),
        vocabulary=text.vocab_size,
    )


def _grouped(named: Mapping[str, Parameter], key: Callable[[str], Hashable]) -> Counter[Hashable]:
    """Elements by what a name's key is. An engine fuses a module's matrices that read the same (query, key, value)."""
    found = Counter[Hashable]()
    for name, parameter in named.items():
        found[key(name)] += parameter.numel()
    return found


def _layer(name: str) -> str:
    return LAYER.match(name)[0]


def _intermediate(text: PreTrainedConfig) -> int:
    told = text.to_dict()
    dense = told.get("intermediate_size") or 4 * text.hidden_size
    experts = told.get("num_experts_per_tok") or 0
    if not experts:
        return dense
    one, shared = told.get("moe_intermediate_size") or dense, told.get("n_shared_experts") or 0
    return (experts + shared) * one + (told.get("shared_expert_intermediate_size") or 0)


def hand_over_buffer(model: PreTrainedModel, dtype: str, limit: int) -> int:
    """Bytes of the memory that a rank hands its weights over in."""
    with without_pairs(model):
        published = [item for part in parts(model, getattr(torch, dtype)) for item in part.published.items()]
    buckets = plan_buckets([(name, tensor.shape, tensor.dtype) for name, tensor in published], limit)
    return buffer_bytes(buckets)
