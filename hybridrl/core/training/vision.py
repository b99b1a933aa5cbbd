"""Pictures in training: features of a micro-batch's distinct pictures, their places among its tokens, and positions.

The tower, a model's part that turns pixels into features, runs exactly once per forward pass on every rank, or on none:
the collectives of FSDP count on it. It depends on a fact that all ranks know, whether the batch has any picture; a rank
whose rows have none then computes a blank picture. A picture that several rows have is computed once.

Models of a type see if the plug-ins have its family, `vision.MODEL_TYPE`; other distributions may add one.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel, vision_utils

from hybridrl.core.batch import Batch, as_tensor, places, token_rows
from hybridrl.core.carried import PICTURE_DIGEST, PICTURE_START, PICTURES, Encoded
from hybridrl.core.pictures import Picture, PixelRule, Pixels, digest_of, expanded, tokens_of
from hybridrl.core.training.attention import TOWER
from hybridrl.core.training.packing import ModelInputs, PictureInputs, pack_rows, read_at
from hybridrl.plugins import load, names
from hybridrl.required import required

NEVER = -3e4  # added to a placeholder's logit: its probability is 0, and entropies stay numbers
READS = (PICTURES, PICTURE_DIGEST, PICTURE_START)


@dataclass(frozen=True)
class VisionConfig:
    """The part of a model's processor for a rank. `blank` are the pixels of its smallest picture, `sample` those of two
    pictures that check the model. The tower takes `weight` times as long for a token, which has the id `placeholder`,
    as the rest of the model."""

    rule: PixelRule
    blank: Pixels
    sample: Sequence[Pixels]
    frozen: bool = False  # the tower is not trained
    placeholder: int = -1
    weight: float = 0.0


class VisionFamily(Protocol):
    """The differences between families of models that see."""

    def tokens(self, settings: PreTrainedConfig, pixels: Pixels) -> int:
        """Return the number of a picture's placeholders."""

    def positions(self, base: Any, ids: Tensor, pictured: Tensor, pixels: Sequence[Pixels]) -> Tensor:
        """Return positions of the tokens of one row [axes, T]; `pictured` is true at placeholders [T]."""

    def own(self, inputs: PictureInputs, pictured: Tensor) -> dict[str, Any]:
        """Return the arguments with which the model's own forward pass reads the pictures of one row."""

    def adapt(self, base: Any) -> None:
        """Replace the methods of transformers that make the host wait, and the attention of the tower."""

    def tower(self, base: Any, grids: Tensor) -> dict[str, Any]:
        """Return what the tower would compute from grids, here in host memory: positions and boundaries."""

    def features(self, base: Any, inputs: PictureInputs) -> dict[str, Any]:
        """Run the tower. Return the arguments with which the base reads the features `inputs.taken`."""


class Grid:
    """Qwen's and GLM's families: a picture is a grid of patches, and positions have the axes time, height and width."""

    def tokens(self, settings: PreTrainedConfig, pixels: Pixels) -> int:
        return tokens_of(pixels, settings.vision_config.spatial_merge_size)

    def positions(self, base: Any, ids: Tensor, pictured: Tensor, pixels: Sequence[Pixels]) -> Tensor:
        grids = torch.cat([as_tensor(each["image_grid_thw"]) for each in pixels])
        return base.get_rope_index(ids[None], pictured[None].int(), image_grid_thw=grids)[0][:, 0]

    def own(self, inputs: PictureInputs, pictured: Tensor) -> dict[str, Any]:
        types = pictured[None].int()
        return {"pixel_values": inputs.pixels, "image_grid_thw": inputs.grids, "mm_token_type_ids": types}

    def adapt(self, base: Any) -> None:
        # Transformers looks for names with "flash" in them on the hub, unless they are set here.
        base.config.vision_config._attn_implementation = TOWER
        base.get_placeholder_mask = partial(_mask, base.config.image_token_id)
        if hasattr(base.language_model, "_deepstack_process"):
            base.language_model._deepstack_process = _added

    def tower(self, base: Any, grids: Tensor) -> dict[str, Any]:
        tower, size = base.visual, base.config.vision_config.spatial_merge_size
        arguments: dict[str, Any] = {"position_ids": vision_utils.get_vision_position_ids(grids, size)}
        arguments |= _boundaries("seq", vision_utils.get_vision_cu_seqlens(grids))
        if (side := getattr(tower, "num_grid_per_side", None)) is not None:
            options = tower.interpolation_mode, tower.interpolation_align_corners, size
            weighted = vision_utils.get_vision_interpolation_indices_and_weights(grids, side, *options)
            arguments |= dict(zip(("interp_indices", "interp_weights"), weighted, strict=True))
        if (window := getattr(tower, "window_size", None)) is not None:
            index, ends = vision_utils.get_vision_window_index(grids, size, window, tower.patch_size)
            arguments |= {"window_index": index, **_boundaries("window_seq", ends)}
        return arguments

    def features(self, base: Any, inputs: PictureInputs) -> dict[str, Any]:
        pixels, arguments = inputs.pixels.type(base.visual.dtype), {"grid_thw": inputs.grids, **inputs.tower}
        outputs = base.visual(pixels, return_dict=True, **arguments)
        outputs.pooler_output = [read_at(outputs.pooler_output, inputs.taken)]
        if (layers := getattr(outputs, "deepstack_features", None)) is not None:
            outputs.deepstack_features = [[read_at(layer, inputs.taken)] for layer in layers]
        return {"mm_encoder_outputs": {"image": outputs}}


class InterpolatedGrid(Grid):
    """GLM's, whose tower reads grids on its device too."""

    def tower(self, base: Any, grids: Tensor) -> dict[str, Any]:
        return {**super().tower(base, grids), "grid_thw": grids}


def _mask(placeholder: int, ids: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
    """Return the mask of a picture's placeholders, and none of videos; transformers also counts them."""
    return (ids == placeholder)[..., None], None


def _added(hidden: Tensor, mask: Tensor, features: Tensor) -> Tensor:
    """Add features to the hidden states [B, T, width] where the mask [B, T] is true. With the mask as an index, as
    transformers adds them, the host would wait for their number."""
    at = mask.flatten().nonzero_static(size=len(features)).flatten()
    return hidden.flatten(0, 1).index_add(0, at, features.to(hidden.dtype)).view_as(hidden)


def _boundaries(name: str, ends: Tensor) -> dict[str, Any]:
    """Return the boundaries of pictures or windows, and the longest one, for which the host would wait."""
    return {f"cu_{name}lens": ends, f"max_{name}len": int(ends.diff().max())}


GRID, INTERPOLATED = Grid(), InterpolatedGrid()


def family_of(settings: PreTrainedConfig) -> VisionFamily | None:
    """Return the family of a model that sees; None for all others."""
    return load(f"vision.{settings.model_type}") if settings.model_type in names("vision") else None


def with_pictures(
    settings: PreTrainedConfig, pictures: Sequence[Pixels], before: Sequence[int], after: Sequence[int]
) -> Encoded:
    """Return a prompt of text before the first picture, and the same text after each picture."""
    family, ids = required(family_of(settings)), [*before]
    for _ in pictures:
        ids += [settings.image_token_id, *after]
    marked = [Picture(digest_of(pixels), family.tokens(settings, pixels), pixels) for pixels in pictures]
    return expanded(ids, settings.image_token_id, marked)


def tower_weight(model: PreTrainedModel) -> float:
    """Return the multiplications of the tower for one token, relative to those of the other layers: the parameters
    that a token passes through, which are a share of a mixture's experts, and one patch or several per token."""
    text, size = model.config.get_text_config(), model.config.vision_config.spatial_merge_size
    share = getattr(text, "num_experts_per_tok", 1) / getattr(text, "num_experts", 1)
    sizes = {
        name: parameter.numel() * (share if ".experts." in name else 1) for name, parameter in model.named_parameters()
    }
    others = {id(parameter) for parameter in model.get_decoder().parameters()}
    others |= {id(parameter) for parameter in model.get_output_embeddings().parameters()}
    tower = sum(sizes[name] for name, parameter in model.named_parameters() if id(parameter) not in others)
    return tower * size**2 / (sum(sizes.values()) - tower)


def freeze_tower(model: PreTrainedModel) -> None:
    """Freeze all of a model that sees but its embeddings, decoder and head."""
    trained = {id(parameter) for parameter in model.get_decoder().parameters()}
    for parameter in model.base_model.parameters():
        if id(parameter) not in trained:
            parameter.requires_grad_(False)


class Vision:
    """The pictures of one model on one rank."""

    def __init__(self, config: VisionConfig, model: PreTrainedModel) -> None:
        self.config, self.settings, self.base = config, model.config, model.base_model
        self.family = required(family_of(model.config))
        self.family.adapt(self.base)
        self._rule = [torch.tensor(values)[:, None] for values in (config.rule.mean, config.rule.std)]
        self.sample = {digest_of(pixels): pixels for pixels in config.sample}
        self.fetch: Callable[[Sequence[int]], Sequence[Pixels]] = no_pixels  # by digests; see `TrainWorker.see`

    def inputs(self, rows: Batch, inputs: ModelInputs) -> ModelInputs:
        """Return the inputs with positions and pictures; unchanged if the batch of these rows has no picture."""
        if PICTURES not in rows.carried:
            return inputs
        counts, digests = rows.carried[PICTURES], rows.carried[PICTURE_DIGEST].tolist()
        sent = [digest for digest in dict.fromkeys(digests) if digest not in self.sample]
        fetched = self.sample | dict(zip(sent, self.fetch(sent), strict=True))
        pixels = {digest: fetched[digest] for digest in dict.fromkeys(digests)}
        tokens = {digest: self.family.tokens(self.settings, each) for digest, each in pixels.items()}
        ends = torch.tensor([*tokens.values()], dtype=torch.int64).cumsum(0).tolist()
        first = {digest: end - tokens[digest] for digest, end in zip(tokens, ends, strict=True)}
        sizes, lengths = torch.tensor([tokens[digest] for digest in digests], dtype=torch.int64), rows.lengths
        padded = inputs.packed is None
        starts = torch.arange(len(rows)) * inputs.input_ids.shape[1] if padded else lengths.cumsum(0) - lengths
        at = places(rows.carried[PICTURE_START].long() + starts.repeat_interleave(counts), sizes)
        arrays = [*pixels.values()] or [self.config.blank]
        grids = torch.cat([as_tensor(each["image_grid_thw"]) for each in arrays])
        pictures = PictureInputs(
            pixels=torch.cat([as_tensor(each["pixel_values"]) for each in arrays]),
            grids=grids,
            taken=places(torch.tensor([first[digest] for digest in digests], dtype=torch.int64), sizes),
            at=at,
            tower=self.family.tower(self.base, grids),
        )
        of_rows = [[pixels[digest] for digest in part] for part in split(digests, counts.tolist())]
        spans = [slice(start, start + length) for start, length in zip(starts.tolist(), lengths.tolist(), strict=True)]
        return replace(inputs, position_ids=self._positions(inputs, spans, of_rows, at), pictures=pictures)

    def _positions(
        self, inputs: ModelInputs, spans: Sequence[slice], pictures: Sequence[Sequence[Pixels]], at: Tensor
    ) -> Tensor:
        """Return the positions of rows, which are `spans` of the flattened input, with their `pictures`. Rows of text
        keep theirs; without any picture positions have no axes."""
        ids, flat = inputs.input_ids.flatten(), inputs.position_ids.flatten()
        pictured = torch.zeros_like(flat, dtype=torch.bool).index_fill_(0, at, True)
        rows = [
            (span, self.family.positions(self.base, ids[span], pictured[span], pixels))
            for span, pixels in zip(spans, pictures, strict=True)
            if pixels
        ]
        if not rows:
            return inputs.position_ids
        positions = flat.repeat(len(rows[0][1]), 1)
        for span, own in rows:
            positions[:, span] = own
        return positions.unflatten(1, inputs.input_ids.shape)

    def sample_rows(self, before: Sequence[int], after: Sequence[int]) -> Batch:
        """Return a row of text, one in which each picture of the sample stands between texts, and a row of text."""
        pictured = with_pictures(self.settings, self.config.sample, before, after)
        carried = {name: torch.from_numpy(value) for name, value in pictured.carried.items()}
        counts = torch.tensor([0, len(self.sample), 0])
        return replace(token_rows([before, pictured.ids, after]), carried={PICTURES: counts, **carried})

    def own_arguments(self, row: Batch) -> dict[str, Any]:
        """Return the arguments with which the model's own forward pass reads the pictures of one row; {} for none."""
        inputs = self.inputs(row, pack_rows(row, padded=False))
        if inputs.pictures is None or not len(inputs.pictures.at):
            return {}
        pictured = torch.zeros(len(inputs.input_ids[0]), dtype=torch.bool).index_fill_(0, inputs.pictures.at, True)
        return self.family.own(self.normalised(inputs.pictures), pictured)

    def arguments(self, pictures: PictureInputs) -> dict[str, Any]:
        """Run the tower; return the arguments with which the base reads its features."""
        with torch.no_grad() if self.config.frozen else nullcontext():
            return self.family.features(self.base, self.normalised(pictures))

    def normalised(self, pictures: PictureInputs) -> PictureInputs:
        """Return pictures whose pixels are the tower's inputs, in float32."""
        rule, pixels = self.config.rule, pictures.pixels
        if self._rule[0].device != pixels.device:  # moved once: the host would wait for each copy
            self._rule = [values.to(pixels.device) for values in self._rule]
        mean, std = self._rule
        values = (pixels.float().unflatten(1, (len(rule.mean), -1)) * rule.scale - mean) / std
        return replace(pictures, pixels=values.flatten(1))


def work_of(vision: VisionConfig | None, batch: Batch, first: np.ndarray | None = None) -> np.ndarray | None:
    """Return the work of each row in tokens, or of its `first` ones [rows], for a model that sees; None: it is their
    number. The tower takes `weight` times what the language model takes for a token of a picture."""
    if vision is None or PICTURES not in batch.carried:
        return first
    counted, prompts = batch.lengths.numpy() if first is None else first, batch.prompt_lengths.numpy()
    parts = (
        (batch.prompt_ids, prompts, np.minimum(counted, prompts)),
        (batch.response_ids, batch.response_lengths.numpy(), np.maximum(counted - prompts, 0)),
    )
    pictured = sum(_count(ids.numpy() == vision.placeholder, lengths, of_row) for ids, lengths, of_row in parts)
    return counted + np.rint(vision.weight * pictured).astype(np.int64)


def _count(marked: np.ndarray, lengths: np.ndarray, first: np.ndarray) -> np.ndarray:
    """Return the number of marked elements among the first ones of each row; rows are concatenated."""
    before, starts = np.append(0, marked.cumsum()), lengths.cumsum() - lengths
    return before[starts + first] - before[starts]


def computed_share(batch: Batch, shares: Sequence[Sequence[Sequence[int]]]) -> dict[str, float]:
    """Return how many pictures towers compute, those of each micro-batch once, over the pictures in rows."""
    if PICTURES not in batch.carried:
        return {}
    of_rows = batch.carried[PICTURE_DIGEST].split(batch.carried[PICTURES].tolist())
    read = [torch.cat([of_rows[row] for row in rows]) for share in shares for rows in share if rows]
    total = sum(map(len, read))
    return {"pictures/computed_share": sum(len(digests.unique()) for digests in read) / total} if total else {}


def split(items: Sequence[int], counts: Sequence[int]) -> list[Sequence[int]]:
    """Return as many items as each count says, one after another."""
    ends = [*accumulate(counts)]
    return [items[end - count : end] for end, count in zip(ends, counts, strict=True)]


def no_pixels(digests: Sequence[int]) -> list[Pixels]:
    """Return the pixels of no pictures; KeyError for all others, whose pixels have not been sent."""
    if digests:
        raise KeyError(f"pixels of the pictures {digests[:3]} have not been sent to this rank")
    return []
