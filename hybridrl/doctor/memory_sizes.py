"""The sizes of a run's models, read from config.json alone, and what one rank has of them. Sizes are bytes.

The factors were counted in a forward pass (the tensors that autograd keeps of a Llama-style layer) and measured on CPU;
docs/memory.md has the measurements.
"""

import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from hybridrl.checkpoint.export import LAYER, parts
from hybridrl.config import PPOConfig
from hybridrl.config.schema import FSDPConfig, ModelConfig
from hybridrl.core.training.building import BLANK
from hybridrl.core.training.layout import DISPATCH, division
from hybridrl.core.training.loading import KEPT, layer_classes
from hybridrl.core.training.lora import add_adapter
from hybridrl.core.training.model import without_pairs
from hybridrl.core.training.token_outputs import tokens_at_once
from hybridrl.core.weights.buckets import buffer_bytes, plan_buckets
from hybridrl.doctor.machine import GIB
from hybridrl.runs.models import SECTIONS
from hybridrl.runs.settings import build_algorithm, ppo_worker_config

ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}
FULL = 4  # bytes of a float32
# Temporary memory of the log-probs of a chunk, in chunks of logits: two with entropies, and a half in half precision.
CHUNKS = 2.5
# On CPU vLLM keeps a second copy of matrices with fewer elements than this, and of a tied embedding, of which a reload
# makes another.
SMALL, RELOAD_COPIES = 2**23, 1
SAMPLING_TABLES = 5  # vLLM's tables of float32 logits in sampling on CPU
ENTRY_BYTES = 2000  # per entry of a tokenizer, in driver and scoring actor; measured with 262,144 entries


class ModelSizes:
    """Numbers of elements of a model, which may be on the meta device and is divided as `fsdp` says. Raises ConfigError
    if the family has no plan of it."""

    def __init__(self, model: PreTrainedModel, fsdp: FSDPConfig | None = None) -> None:
        self.parameters, self.tower = sum(each.numel() for each in model.parameters()), _tower(model.config)
        self._divide(model, fsdp)
        text = model.config.get_text_config()
        values = text.to_dict()
        latent = values.get("kv_lora_rank") or 0  # an engine's cache has one such vector per token
        width = values.get("head_dim") or text.hidden_size // text.num_attention_heads
        width += (values.get("qk_nope_head_dim") or 0) * bool(latent)  # else that of the rotated part alone
        self.layers, self.hidden, self.vocabulary = text.num_hidden_layers, text.hidden_size, text.vocab_size
        self.query = text.num_attention_heads * width
        self.key = (values.get("num_key_value_heads") or text.num_attention_heads) * width
        self.cached = latent + values["qk_rope_head_dim"] if latent else 2 * self.key
        self.intermediate = values.get("intermediate_size") or 4 * text.hidden_size
        if experts := values.get("num_experts_per_tok") or 0:  # all that a token uses
            each = values.get("moe_intermediate_size") or self.intermediate
            experts += values.get("n_shared_experts") or 0
            self.intermediate = experts * each + (values.get("shared_expert_intermediate_size") or 0)
        self.per_token = values.get("num_experts_per_tok") or 0
        self.routed = self.per_token * text.hidden_size  # an input of each of them
        self.copied = sum(size for size in _fused(model) if size < SMALL)
        tied = model.get_output_embeddings() is not None and model.config.to_dict().get("tie_word_embeddings", False)
        self.tied = text.vocab_size * text.hidden_size * bool(tied)
        self.copied += self.tied
        with without_pairs(model):  # torch rounds what it page-locks up to powers of two
            self.page_locked = sum(1 << (size - 1).bit_length() for size in _fused(model))

    def engine_work(self, rows: float, itemsize: float) -> dict[str, float]:
        """The temporary memory of an engine on CPU by phase: it samples `rows` together, or reloads its weights."""
        sampling = SAMPLING_TABLES * rows * self.vocabulary * FULL
        return {"rollout": sampling, "weight sync": RELOAD_COPIES * self.tied * itemsize}

    def _divide(self, model: PreTrainedModel, fsdp: FSDPConfig | None) -> None:
        """Count what a rank has to gather: a part of what is cut, and all of the rest, of which each rank of a tensor
        group has its own shard."""
        self.tensor, self.expert = (fsdp.tensor_parallel_size, fsdp.expert_parallel_size) if fsdp else (1, 1)
        cuts, trained = division(model, self.tensor, self.expert), list[int]()
        by_layer, experts, self.held = Counter[str](), Counter[str](), 0
        for name, parameter in model.named_parameters():
            parts, style = cuts[name]
            layer, size = LAYER.match(name)[0], parameter.numel()
            copies = self.tensor if parts == 1 else 1
            by_layer[layer] += size // parts
            experts[layer] += (style == DISPATCH) * size // parts
            self.held += copies * size
            trained += [copies * size] * parameter.requires_grad
        self.trained, self.largest, self.unsharded = sum(trained), max(trained), by_layer.total()
        # Those outside the layers (embedding, head) are gathered together.
        self.outside, self.layer = by_layer.pop("", 0), max(by_layer.values())
        largest = max(by_layer, key=lambda layer: by_layer[layer])
        self.experts = experts[largest]  # elements in that layer
        styles = [style for name, (_, style) in cuts.items() if name.startswith(largest) and name.endswith("weight")]
        self.by_columns, self.by_rows = (sum(kind in style for style in styles) for kind in ("colwise", "rowwise"))
        self.heads = max((parts for name, (parts, _) in cuts.items() if "att" in name), default=1)  # number of parts


def _tower(settings: PreTrainedConfig) -> tuple[int, int, int, int]:
    """Return the layers of a tower; and of a token of a picture its pixels, and a layer's hidden and inner elements."""
    names = ("depth", "patch_size", "spatial_merge_size", "hidden_size", "intermediate_size")
    depth, patch, merged, hidden, inner = (getattr(getattr(settings, "vision_config", None), name, 0) for name in names)
    return depth, (merged * patch) ** 2, merged**2 * hidden, merged**2 * inner


def _fused(model: PreTrainedModel) -> list[int]:
    """The sizes of an engine's matrices: it fuses a module's matrices with the same input (query, key, value)."""
    fused = Counter[tuple[str, torch.Size]]()
    for name, parameter in model.named_parameters():
        fused[name.rsplit(".", 2)[0], parameter.shape[1:]] += parameter.numel()
    return [*fused.values()]


class Models(NamedTuple):
    """The models that take memory on a rank, by name; `bucket` is the size of the weight sync buffers in bytes."""

    sizes: Mapping[str, ModelSizes]
    bucket: int

    @property
    def policy(self) -> ModelSizes:
        return self.sizes["actor"]


def read_models(config: PPOConfig) -> Models:
    """Read all models' sizes. Raises OSError, ValueError or ConfigError if one cannot be read or trained."""
    section, rollout = config.actor_rollout_ref, config.actor_rollout_ref.rollout
    worker = ppo_worker_config(config, build_algorithm(config), Path(), steps=1)
    models = {
        name: meta_model(entry.model, SECTIONS.get(name, name), entry.head)
        for name, entry in worker.models.items()
        if entry.weights not in ("live", "base")
    }
    try:
        layer_classes(models["actor"], section.actor.fsdp_config.wrap_policy.transformer_layer_cls_to_wrap)
    except ValueError as error:
        raise ValueError(f"actor_rollout_ref.actor.{error}") from error
    limit = rollout.checkpoint_engine.update_weights_bucket_megabytes << 20
    buffer = sync_buffer(models["actor"], rollout.dtype or "float32", limit)
    return Models({name: ModelSizes(model, worker.models[name].fsdp) for name, model in models.items()}, buffer)


def meta_model(config: ModelConfig, key: str, head: str = "language") -> PreTrainedModel:
    """Build the model, with its adapter if it has one, on the meta device. Raises OSError without a config.json,
    ValueError or ConfigError if the model cannot be trained as configured."""
    with torch.device("meta"):  # where parameters are allocated first: 30 GB for the experts of one large layer
        model = BLANK[head](config, torch.float32).model
    if config.lora_rank:
        add_adapter(model, config, torch.float32, 0, key)
    return model


def sync_buffer(model: PreTrainedModel, dtype: str, limit: int) -> int:
    """Bytes of the buffers through which a rank sends its weights."""
    with without_pairs(model):
        published = [item for part in parts(model, getattr(torch, dtype)) for item in part.published.items()]
    return buffer_bytes(plan_buckets([(name, tensor.shape, tensor.dtype) for name, tensor in published], limit))


class Shard:
    """One rank's share of a model, `frozen` or trained; `whole`: on a single rank, where it is not sharded."""

    def __init__(
        self, sizes: ModelSizes, fsdp: FSDPConfig, *, muon: bool = False, frozen: bool = False, whole: bool = False
    ) -> None:
        self.sizes, self.computed, ranks = sizes, ITEMSIZE[fsdp.dtype or "float32"], fsdp.fsdp_size
        computed, self.adapted, self.reshards = self.computed, sizes.trained < sizes.held, fsdp.reshard_after_forward
        self.compiled = bool(fsdp.compile_layers)
        # By how many ranks the same part is sharded, for dense parameters and for experts.
        self.shards = {"dense": ranks // sizes.tensor, "experts": ranks // sizes.expert}
        stored = computed if frozen else ITEMSIZE[fsdp.model_dtype]
        # Frozen parameters under an adapter are stored in the computed type.
        self.parameters = (sizes.trained * stored + (sizes.held - sizes.trained) * computed) / ranks
        # Gradients are reduced in float32, then kept in the stored type.
        self.gradients = sizes.trained * stored / ranks
        # AdamW keeps two per parameter, Muon one per parameter inside the layers.
        moments = sizes.held + sizes.outside if muon and not self.adapted else 2 * sizes.trained
        self.moments = moments * stored / ranks
        # Temporary memory of AdamW: at most two tensors of the largest parameter's size.
        self.optimizer_step = 2 * sizes.largest * stored / ranks
        # Parameters gathered from other ranks: those outside the layers, one layer, and the next; or all.
        gathered = sizes.outside + 2 * sizes.layer if self.reshards else sizes.unsharded
        self.gathered = gathered * computed
        # Unsharded gradients of one group and their float32 copy that is reduced: either those outside the layers,
        # once the embedding has its gradient; or a layer's, while the head's gradient waits for the embedding's.
        outside, layer = sizes.outside * (computed + FULL), sizes.layer * (computed + FULL)
        self.reduced = 0 if self.adapted else max(outside, layer + sizes.vocabulary * sizes.hidden * computed)
        if whole and computed == FULL:  # a matrix's gradient, of which there may be a sum already
            self.gathered, self.reduced = 0, sizes.largest * FULL
        elif whole:  # copies of the parameters; a gradient, and in float32
            self.gathered, self.reduced = sizes.trained * computed, sizes.largest * (computed + FULL)

    def activations(self, tokens: int, model: ModelConfig, *, by_rows: bool) -> float:
        """Activations that autograd keeps of a micro-batch, at most. Of recomputed layers: their inputs, and all of the
        layer whose backward pass runs; of layers compiled under selective checkpointing: a share, and all of that one.
        `by_rows`: attention runs row by row and its output is kept twice, per row and packed. Of a tensor group each
        rank has its heads, its part of the width, and the experts of its part of the tokens."""
        sizes, norms = self.sizes, 6 if self.computed == FULL else 8  # norms compute in float32
        attention, inner = (sizes.query + sizes.key) / sizes.heads, sizes.intermediate / sizes.tensor
        routed = 2 * sizes.routed / sizes.tensor  # a mixture's inputs and outputs of experts
        layer = norms * sizes.hidden + 2 * attention + by_rows * sizes.query / sizes.heads + 4 * inner + routed
        every = model.recomputes_every
        recomputed = -(-sizes.layers // every) if every else 0
        share = KEPT if model.selective_checkpointing and self.compiled else 1
        saved = (sizes.layers - recomputed) * layer * share + recomputed * sizes.hidden
        saved += layer * (every > 0 or share < 1)
        return tokens * saved * self.computed

    def pictures(self, tokens: int, config: PPOConfig) -> float:
        """Activations that autograd keeps of a trained tower if prompts in a micro-batch are nothing but distinct
        pictures, at most: of recomputed layers their inputs, and all of one layer. Ranks that divide a row's tokens all
        compute its pictures. Before the rows are read, `limit_images` says whether they have any."""
        section, data, (layers, area, hidden, inner) = config.actor_rollout_ref, config.data, self.sizes.tower
        images, most = section.rollout.limit_images, data.mm_processor_kwargs.get("max_pixels")
        if not images or section.actor.freeze_vision_tower or self.adapted:
            return 0
        norms = 6 if self.computed == FULL else 8
        layer, every = (norms + 4) * hidden + 4 * inner, section.model.recomputes_every
        recomputed = -(-layers // every) if every else 0
        saved = (layers - recomputed) * layer + recomputed * hidden + layer * (every > 0)
        seen = min(data.max_prompt_length, images * most / area if isinstance(most, int) else math.inf)
        return tokens * seen / (data.max_prompt_length + data.max_response_length) * saved * self.computed

    def forward(self, tokens: int) -> float:
        """A forward pass without gradients: at most three MLP tensors and two of the residual stream at a time, and a
        mixture's inputs and outputs of experts."""
        inner = (3 * self.sizes.intermediate + 2 * self.sizes.routed) / self.sizes.tensor
        return tokens * (inner + 2 * self.sizes.hidden) * self.computed

    def compared(self, tokens: int) -> float:
        """A copy of the head, and hidden states: the loss of a policy that is compared with this model has both."""
        return (self.sizes.vocabulary + tokens) * self.sizes.hidden * self.computed

    def logits(self, tokens: int, device: str) -> float:
        """A chunk of logits; on CUDA in the computed type, and the gradient is written in place."""
        at_once = tokens_at_once(device, self.sizes.vocabulary)
        return min(tokens, at_once) * self.sizes.vocabulary * (CHUNKS * FULL if device == "cpu" else self.computed)

    def moved(self, tokens: int, *, recomputed: int) -> dict[str, float]:
        """Return the bytes that a rank receives for the largest layer in one micro-batch of an update, by kind. This is
        arithmetic: tokens are spread evenly over the experts. `recomputed`: N, if the forward pass of
        every N-th layer runs twice.

        FSDP gathers the other ranks' shards, before the backward pass again if they were freed, and reduces gradients
        in float32 (Rajbhandari et al., arXiv:1910.02054, section 7). In each pass, tokens travel to their experts and
        back (Lepikhin et al., arXiv:2006.16668). A tensor group sums the outputs of each matrix cut by rows and the
        input's gradient of each cut by columns (Shoeybi et al., arXiv:1909.08053, section 3; there matrices with the
        same input share a sum, in transformers they do not)."""
        sizes = self.sizes
        absent = {kind: 1 - 1 / count for kind, count in self.shards.items()}
        parameters = (sizes.layer - sizes.experts) * absent["dense"] + sizes.experts * absent["experts"]
        routed = tokens / sizes.tensor * sizes.routed * self.computed
        twice = 1 / recomputed if recomputed else 0
        # A layer's last sum is not computed again. What experts return and its gradient are gathered: together a sum.
        again = twice * (sizes.by_rows - (not sizes.routed))
        sums = sizes.by_rows + sizes.by_columns + again + (sizes.expert > 1)
        return {
            "parameters and gradients": parameters * ((1 + self.reshards) * self.computed + FULL * (not self.adapted)),
            "tokens of experts": 2 * routed * (2 + twice) * (1 - 1 / sizes.expert),
            "sums of a tensor group": 2 * sums * tokens * sizes.hidden * self.computed * (1 - 1 / sizes.tensor),
        }


def in_gib(size: float) -> str:
    return f"{size / GIB:.2f}" if size else "-"
