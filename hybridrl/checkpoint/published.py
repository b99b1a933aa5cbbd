"""Map a model's tensors to the names and layout of its family's published checkpoints, which other software reads.

The two differ where transformers fuses several tensors of a checkpoint into one, such as the experts of a layer;
transformers' own conversions are reverted here. A `Part` is the unit of conversion, so that models are converted
piece by piece.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from hybridrl.checkpoint.tensors import Chunk, Tensors, blank

LAYER = re.compile(r"(.*?\.\d+\.)?")  # prefix of a name up to its first number; empty outside the layers


@dataclass(frozen=True)
class Part:
    """Tensors of a model by `names`, and what they are `published` as: names, shapes and types, as meta tensors."""

    names: tuple[str, ...]
    published: dict[str, Tensor]

    def publish(self, model: PreTrainedModel, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Convert the tensors of this part to those of a published checkpoint."""
        if self.names == tuple(self.published):
            return dict(tensors)
        return revert_weight_conversion(model, dict(tensors))


def own_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return every tensor that a checkpoint must hold, once: parameters, then persistent buffers."""
    computed = {name for name, _ in model.named_non_persistent_buffers()}
    buffers = {name: buffer for name, buffer in model.named_buffers() if name not in computed}
    return dict(model.named_parameters()) | buffers


def parts(model: PreTrainedModel, dtype: torch.dtype | None = None) -> list[Part]:
    """Return the parts of a model, layer by layer, with parameters in `dtype` or in their own type."""
    own = {
        name: blank(tensor.shape, dtype if dtype and isinstance(tensor, torch.nn.Parameter) else tensor.dtype)
        for name, tensor in own_tensors(model).items()
    }
    result = []
    for _, names in groupby(own, lambda name: LAYER.match(name)[0]):
        group = {name: own[name] for name in names}
        published = revert_weight_conversion(model, group)
        same = [name for name in group if name in published and published[name].shape == group[name].shape]
        result += [Part((name,), {name: group[name]}) for name in same]
        if others := tuple(name for name in group if name not in same):
            result.append(Part(others, {name: published[name] for name in published if name not in same}))
    return result


def as_published(saved: Tensors, model: PreTrainedModel) -> Tensors:
    """Present tensors that were saved under the model's own names as published ones."""
    converted = {
        name: part
        for part in parts(model)
        if part.names != tuple(part.published) and saved.meta.keys() >= set(part.names)
        for name in part.published
    }
    if not converted:
        return saved
    used = {name for part in converted.values() for name in part.names}
    meta = {name: tensor for name, tensor in saved.meta.items() if name not in used}
    meta |= {name: part.published[name].to(saved.meta[part.names[0]].dtype) for name, part in converted.items()}

    @lru_cache(maxsize=1)  # the tensors of one part are read one after another
    def published(names: tuple[str, ...]) -> dict[str, Tensor]:
        return revert_weight_conversion(model, {name: saved.read(name) for name in names})

    def chunks(name: str) -> Iterable[Chunk]:
        if name not in converted:
            return saved.chunks(name)
        return [([0] * meta[name].dim(), published(converted[name].names)[name])]

    return replace(saved, meta=meta, chunks=chunks)
