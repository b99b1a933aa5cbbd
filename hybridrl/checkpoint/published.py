"""A model's tensors as the checkpoints of its family have them: other software reads those, and never the model's own.

They differ where transformers lays several tensors of a checkpoint into one, such as the experts of a layer; its own
conversions are made backwards here. Between the two stand parts, so that a model is converted piece by piece.
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

from hybridrl.checkpoint.tensors import Part as Region
from hybridrl.checkpoint.tensors import Tensors, blank

LAYER = re.compile(r"(.*?\.\d+\.)?")  # the beginning of a name up to its first number, empty outside the layers


@dataclass(frozen=True)
class Part:
    """Tensors of a model by `names`, and what they are published as: names, shapes and types, on the meta device."""

    names: tuple[str, ...]
    published: dict[str, Tensor]

    def publish(self, model: PreTrainedModel, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of this part under the names of a checkpoint."""
        if self.names == tuple(self.published):
            return dict(tensors)
        return revert_weight_conversion(model, dict(tensors))


def own_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """Every tensor that a checkpoint has to hold, once: parameters, then buffers that are not made anew."""
    made_anew = {name for name, _ in model.named_non_persistent_buffers()}
    buffers = {name: buffer for name, buffer in model.named_buffers() if name not in made_anew}
    return dict(model.named_parameters()) | buffers


def parts(model: PreTrainedModel, dtype: torch.dtype | None = None) -> list[Part]:
    """The model in parts, layer by layer, its parameters in this type or in their own."""
    own = {
        name: blank(tensor.shape, dtype if dtype and isinstance(tensor, torch.nn.Parameter) else tensor.dtype)
        for name, tensor in own_tensors(model).items()
    }
    found = []
    for _, names in groupby(own, lambda name: LAYER.match(name)[0]):
        group = {name: own[name] for name in names}
        published = revert_weight_conversion(model, group)
        same = [name for name in group if name in published and published[name].shape == group[name].shape]
        found += [Part((name,), {name: group[name]}) for name in same]
        if others := tuple(name for name in group if name not in same):
            found.append(Part(others, {name: published[name] for name in published if name not in same}))
    return found


def as_published(saved: Tensors, model: PreTrainedModel) -> Tensors:
    """Tensors that were saved under the model's own names as those that they are published as."""
    made = {
        name: part
        for part in parts(model)
        if part.names != tuple(part.published) and saved.meta.keys() >= set(part.names)
        for name in part.published
    }
    if not made:
        return saved
    used = {name for part in made.values() for name in part.names}
    meta = {name: tensor for name, tensor in saved.meta.items() if name not in used}
    meta |= {name: part.published[name].to(saved.meta[part.names[0]].dtype) for name, part in made.items()}

    @lru_cache(maxsize=1)  # one part's tensors, which are asked for one after another
    def published(names: tuple[str, ...]) -> dict[str, Tensor]:
        return revert_weight_conversion(model, {name: saved.read(name) for name in names})

    def regions(name: str) -> Iterable[Region]:
        if name not in made:
            return saved.parts(name)
        return [([0] * meta[name].dim(), published(made[name].names)[name])]

    return replace(saved, meta=meta, parts=regions)
