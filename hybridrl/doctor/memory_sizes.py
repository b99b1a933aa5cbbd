"""The sizes of a run's models, read from config.json alone, and an estimate of the memory that each part takes.

Sizes are bytes. The factors were counted in a forward pass (the tensors that autograd keeps of a Llama-style layer)
and measured on CPU; docs/memory.md has the measurements. On CUDA they were not measured.
"""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import PreTrainedModel

from hybridrl.checkpoint.export import LAYER, parts
from hybridrl.config import PPOConfig
from hybridrl.config.schema import ModelConfig
from hybridrl.core.training.loading import layer_classes
from hybridrl.core.training.lora import add_adapter
from hybridrl.core.training.model import blank_language_model, blank_value_model, without_pairs
from hybridrl.core.weights.buckets import buffer_bytes, plan_buckets
from hybridrl.runs.settings import build_algorithm, ppo_worker_config

FULL = 4  # bytes of a float32
# Temporary memory of the log-probs of a chunk, in chunks of logits: two with entropies, and a half in half precision.
CHUNKS = 2.5
# On CPU vLLM keeps a second copy of matrices with fewer elements than this, and further copies of a tied embedding.
SMALL = 2**23
TIED_COPIES = 4

Bytes = Counter[str]  # by kind


@dataclass(frozen=True)
class ModelSizes:
    """Numbers of elements. `tied`: the head is the embedding; `intermediate` sums all experts that a token uses."""

    parameters: int
    trained: int  # all, or those of an adapter
    outside: int  # parameters outside the layers (embedding, head), which are gathered together
    layer: int  # parameters of the largest layer
    largest: int  # largest trained tensor
    small_fused: int  # parameters that an engine fuses into matrices of fewer elements than SMALL
    page_locked: int  # base parameters in fused matrices, each rounded up to a power of two as torch locks pages
    tied: bool
    layers: int
    hidden: int
    query: int
    key: int
    intermediate: int
    vocabulary: int

    def engine_weights(self, itemsize: int, *, on_cpu: bool) -> int:
        """Weights of an engine; on CPU vLLM packs them again and keeps the temporary copies."""
        copies = self.small_fused + TIED_COPIES * self.vocabulary * self.hidden * self.tied
        return (self.parameters + copies * on_cpu) * itemsize

    def row_cache(self, tokens: int, itemsize: int) -> int:
        """Keys and values of one row."""
        return 2 * self.layers * self.key * tokens * itemsize


@dataclass
class Shard:
    """One rank's share of a model: bytes per element as stored and as computed with, number of ranks that share it,
    and whether a layer's gathered parameters are freed after its forward pass."""

    sizes: ModelSizes
    stored: int
    computed: int
    ranks: int
    resharded: bool = True
    muon: bool = False

    def __post_init__(self) -> None:
        sizes, stored, computed, ranks = self.sizes, self.stored, self.computed, self.ranks
        adapted = sizes.trained < sizes.parameters
        # Frozen parameters under an adapter are stored in the computed type.
        self.parameters = (sizes.trained * stored + (sizes.parameters - sizes.trained) * computed) / ranks
        # Gradients are reduced in float32, then kept in the stored type.
        self.gradients = sizes.trained * stored / ranks
        # AdamW keeps two per parameter, Muon one per parameter inside the layers.
        moments = sizes.parameters + sizes.outside if self.muon and not adapted else 2 * sizes.trained
        self.moments = moments * stored / ranks
        # Temporary memory of AdamW: at most two tensors of the largest parameter's size.
        self.optimizer_step = 2 * sizes.largest * stored / ranks
        # Parameters gathered from other ranks: those outside the layers, one layer, and the next; or all.
        self.gathered = (sizes.outside + 2 * sizes.layer if self.resharded else sizes.parameters) * computed
        # Unsharded gradients of one group and their float32 copy that is reduced: either those outside the layers,
        # once the embedding has its gradient; or a layer's, while the head's gradient waits for the embedding's.
        outside, layer = sizes.outside * (computed + FULL), sizes.layer * (computed + FULL)
        self.reduced = 0 if adapted else max(outside, layer + sizes.vocabulary * sizes.hidden * computed)

    def activations(self, tokens: int, *, checkpointed: bool, selective: bool, by_rows: bool) -> float:
        """Activations that autograd keeps of a micro-batch, at most. Under checkpointing: every layer's input, and all
        of the layer whose backward pass runs; `selective` keeps the results of matrix products and attention as well.
        `by_rows`: attention runs row by row and its output is kept twice, per row and packed."""
        sizes, norms = self.sizes, 6 if self.computed == FULL else 8  # norms compute in float32
        attention = 2 * (sizes.query + sizes.key) + by_rows * sizes.query
        layer = norms * sizes.hidden + attention + 4 * sizes.intermediate
        products = 2 * (sizes.query + sizes.key + sizes.hidden + sizes.intermediate) if selective else 0
        held = sizes.layers * (sizes.hidden + products) + layer if checkpointed else sizes.layers * layer
        return tokens * held * self.computed

    def forward(self, tokens: int) -> float:
        """A forward pass without gradients: at most three MLP tensors and two of the residual stream at a time."""
        return tokens * (3 * self.sizes.intermediate + 2 * self.sizes.hidden) * self.computed

    def logits(self, tokens: int, at_once: int, *, on_cpu: bool) -> float:
        """A chunk of logits; on CUDA in the computed type, and the gradient is written in place."""
        return min(tokens, at_once) * self.sizes.vocabulary * (CHUNKS * FULL if on_cpu else self.computed)


# -- sizes of the models -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Models:
    """The models of a run; `bucket` is the size of the weight sync buffers in bytes."""

    policy: ModelSizes
    bucket: int
    reference: ModelSizes | None = None
    critic: ModelSizes | None = None


def read_models(config: PPOConfig) -> Models:
    """Read all models' sizes. Raises OSError, ValueError or ConfigError if one cannot be read or trained."""
    section, rollout = config.actor_rollout_ref, config.actor_rollout_ref.rollout
    worker = ppo_worker_config(config, build_algorithm(config), Path(), steps=1)
    policy = blank(section.model, "actor_rollout_ref.model")
    try:
        layer_classes(policy, section.actor.fsdp_config.wrap_policy.transformer_layer_cls_to_wrap)
    except ValueError as error:
        raise ValueError(f"actor_rollout_ref.actor.{error}") from error
    limit = rollout.checkpoint_engine.update_weights_bucket_megabytes << 20
    reference = critic = None
    if worker.reference:
        reference = model_sizes(blank(worker.reference_model, "actor_rollout_ref.ref.model"))
    if worker.critic:
        critic = model_sizes(blank(config.critic.model, "critic.model", values=True))
    return Models(model_sizes(policy), sync_buffer(policy, rollout.dtype or "float32", limit), reference, critic)


def blank(config: ModelConfig, key: str, *, values: bool = False) -> PreTrainedModel:
    """Build the model, with its adapter if it has one, on the meta device. Raises OSError without a config.json,
    ValueError or ConfigError if the model cannot be trained as configured."""
    model = (blank_value_model if values else blank_language_model)(config, torch.float32).model
    if config.lora_rank:
        add_adapter(model, config, torch.float32, 0, key)
    return model


def model_sizes(model: PreTrainedModel) -> ModelSizes:
    trained = [parameter.numel() for parameter in model.parameters() if parameter.requires_grad]
    by_layer = Counter[str]()
    for name, parameter in model.named_parameters():
        by_layer[LAYER.match(name)[0]] += parameter.numel()
    parameters, outside = by_layer.total(), by_layer.pop("", 0)
    text = model.config.get_text_config()
    values = text.to_dict()
    width = values.get("head_dim") or text.hidden_size // text.num_attention_heads
    intermediate = values.get("intermediate_size") or 4 * text.hidden_size
    if experts := values.get("num_experts_per_tok") or 0:
        one, shared = values.get("moe_intermediate_size") or intermediate, values.get("n_shared_experts") or 0
        intermediate = (experts + shared) * one + (values.get("shared_expert_intermediate_size") or 0)
    with without_pairs(model):
        base = _fused(model)
    return ModelSizes(
        parameters=parameters,
        trained=sum(trained),
        outside=outside,
        layer=max(by_layer.values()),
        largest=max(trained),
        small_fused=sum(size for size in _fused(model) if size < SMALL),
        page_locked=sum(1 << (size - 1).bit_length() for size in base),
        tied=bool(text.tie_word_embeddings),
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        query=text.num_attention_heads * width,
        key=(values.get("num_key_value_heads") or text.num_attention_heads) * width,
        intermediate=intermediate,
        vocabulary=text.vocab_size,
    )


def _fused(model: PreTrainedModel) -> list[int]:
    """The sizes of an engine's matrices, which fuse those of a module that read the same input (query, key, value)."""
    fused = Counter[tuple[str, torch.Size]]()
    for name, parameter in model.named_parameters():
        fused[name.rsplit(".", 2)[0], parameter.shape[1:]] += parameter.numel()
    return [*fused.values()]


def sync_buffer(model: PreTrainedModel, dtype: str, limit: int) -> int:
    """Bytes of the buffers through which a rank sends its weights."""
    with without_pairs(model):
        published = [item for part in parts(model, getattr(torch, dtype)) for item in part.published.items()]
    return buffer_bytes(plan_buckets([(name, tensor.shape, tensor.dtype) for name, tensor in published], limit))


@dataclass
class Held:
    """Bytes of one device, of its share of the machine's host memory, and of a device that has only an engine."""

    device: Bytes = field(default_factory=Counter)
    engine: Bytes = field(default_factory=Counter)
    host: Bytes = field(default_factory=Counter)

    def add(self, kind: str, size: float, *, host: bool, device: bool) -> None:
        for place, there in ((self.host, host), (self.device, device)):
            if there:
                place[kind] += size
