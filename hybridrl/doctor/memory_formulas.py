"""How much memory each part of a run takes, in bytes, from sizes alone. Knows no model's files and no configuration.

The factors were counted in a forward pass (which tensors autograd keeps of a layer of the Llama kind) and measured on
CPU; docs/memory.md has the figures. On CUDA they were not measured.
"""

from dataclasses import dataclass

# What forming the log-probs of a chunk holds, in chunks of logits: with entropies two, and in half precision a half.
CHUNKS = 2.5
# On CPU: an engine that has taken new weights keeps as much again of matrices of fewer elements than this.
SMALL = 2**23
# Of an embedding that is the head as well, as it is taken in and packed in the place of another of its size.
TIED_COPIES = 4
FULL = 4  # bytes of a float32
GIB = 2**30
# Assumed, and not measured here. The CUDA context of each process that uses a GPU, with the kernels that are loaded:
# 543 MiB were reported of a process without tensors (pytorch/pytorch#81257).
CONTEXT_BYTES = 0.5 * GIB
# Of an engine that sleeps, which frees weights and cache and keeps its CUDA graphs, the workspaces of its kernels and
# NCCL's buffers: 1.4 GiB of graphs were reported of a large model (vllm-project/vllm#47654).
ASLEEP_BYTES = 1.5 * GIB


@dataclass(frozen=True)
class ModelSizes:
    """Numbers of elements. `tied`: the head is the embedding; `intermediate` is that of all experts a token goes
    through."""

    parameters: int
    trained: int  # all, or an adapter's
    outside: int  # of parameters that are in no layer (embedding, head), which are gathered together
    layer: int  # of the largest layer's parameters
    largest: int  # of the largest tensor that is trained
    small_fused: int  # of parameters that an engine fuses into matrices of fewer elements than SMALL
    tied: bool
    layers: int
    hidden: int
    query: int
    key: int
    intermediate: int
    vocabulary: int

    @property
    def adapted(self) -> bool:
        return self.trained < self.parameters


@dataclass(frozen=True)
class Kept:
    """How a rank keeps a model: bytes per element, as stored and as computed with, over how many ranks it is sharded,
    and whether a layer's gathered parameters are freed after its forward pass."""

    stored: int
    computed: int
    shards: int
    resharded: bool = True


def parameters(model: ModelSizes, kept: Kept) -> float:
    """A rank's shard. Beside an adapter the rest is stored in the type that it computes in."""
    frozen = model.parameters - model.trained
    return (model.trained * kept.stored + frozen * kept.computed) / kept.shards


def gradients(model: ModelSizes, kept: Kept) -> float:
    """A rank's shard: reduced in float32, then kept in the stored type."""
    return model.trained * kept.stored / kept.shards


def moments(model: ModelSizes, kept: Kept, *, muon: bool = False) -> float:
    """AdamW has two of each parameter, Muon one of what lies in the layers."""
    count = 2 * model.trained
    if muon and not model.adapted:
        count = model.parameters + model.outside
    return count * kept.stored / kept.shards


def optimizer_step(model: ModelSizes, kept: Kept) -> float:
    """What AdamW makes on its way, parameter by parameter: at most two tensors of its size."""
    return 2 * model.largest * kept.stored / kept.shards


def gathered(model: ModelSizes, kept: Kept) -> float:
    """What a rank gathers of the others' shards: what is in no layer, one layer, and the next; or all of it."""
    return (model.outside + 2 * model.layer if kept.resharded else model.parameters) * kept.computed


def reduced(model: ModelSizes, kept: Kept) -> float:
    """Gradients of one group, unsharded, and their copy in float32 that is reduced: of what is in no layer, when the
    embedding has its gradient too; or of a layer, while the head's gradient waits for that."""
    if model.adapted:
        return 0
    waiting = model.vocabulary * model.hidden * kept.computed
    return max(model.outside * (kept.computed + FULL), model.layer * (kept.computed + FULL) + waiting)


def activations(
    model: ModelSizes, kept: Kept, tokens: int, *, checkpointed: bool, selective: bool, by_rows: bool
) -> float:
    """What autograd keeps of a pass over so many tokens, in its last layer's backward pass where the others' are
    recomputed; `selective`: of these the results of matrix products and attention are there. `by_rows`: attention goes
    row by row, and its output is kept twice, in rows and in one line."""
    norms = 6 if kept.computed == FULL else 8  # a norm computes in float32
    attention = 2 * (model.query + model.key) + by_rows * model.query
    layer = norms * model.hidden + attention + 4 * model.intermediate
    products = 2 * (model.query + model.key + model.hidden + model.intermediate) if selective else 0
    held = model.layers * (model.hidden + products) + layer if checkpointed else model.layers * layer
    return tokens * held * kept.computed


def passing(model: ModelSizes, kept: Kept, tokens: int) -> float:
    """The widest of a layer's tensors in a pass without gradients: three of the MLP and two of the stream at a time."""
    return tokens * (3 * model.intermediate + 2 * model.hidden) * kept.computed


def logits(model: ModelSizes, kept: Kept, tokens: int, at_once: int, *, on_cpu: bool) -> float:
    """Those of so many tokens at once; on CUDA in the type of the computation, and the gradient takes their place."""
    return min(tokens, at_once) * model.vocabulary * (CHUNKS * FULL if on_cpu else kept.computed)


def pass_tokens(budget: int, rows_at_once: int | None, rows: int, longest: int) -> int:
    """The most tokens of a pass, where a rank has so many rows and each is as long as may be."""
    if rows_at_once is not None:
        return min(rows_at_once, rows) * longest
    return max(longest, min(budget, rows * longest))


def rollout_weights(model: ModelSizes, itemsize: int, *, on_cpu: bool) -> int:
    """An engine's; on CPU vLLM packs them anew, and what that takes on the way is kept."""
    further = model.small_fused + TIED_COPIES * model.vocabulary * model.hidden * model.tied
    return (model.parameters + further * on_cpu) * itemsize


def cache_of_row(model: ModelSizes, tokens: int, itemsize: int) -> int:
    """Keys and values of one row of so many tokens."""
    return 2 * model.layers * model.key * tokens * itemsize
