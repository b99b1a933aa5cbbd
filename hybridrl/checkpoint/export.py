"""A model as a Hugging Face directory, written part by part: at most one tensor, or the experts of one layer, are in
memory beside the model."""

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.dynamic_module_utils import custom_object_save
from transformers.utils import GENERATION_CONFIG_NAME

from hybridrl.checkpoint.published import parts
from hybridrl.checkpoint.write import SHARD_BYTES, write_shards


def export_model(
    tensors: Iterable[tuple[str, Tensor]],
    model: PreTrainedModel,
    directory: Path,
    dtype: torch.dtype,
    *,
    writes: bool,
    limit: int = SHARD_BYTES,
) -> None:
    """Write config, generation config and weights of this type. `tensors` is walked through even where nothing is
    written, or cannot be: gathering them is a collective of all ranks."""
    tensors = iter(tensors)
    try:
        if writes:
            export_settings(model, directory, dtype)
            meta = {name: tensor for part in parts(model, dtype) for name, tensor in part.published.items()}
            write_shards(directory, meta, ((name, 0, tensor.cpu()) for name, tensor in tensors), limit)
    finally:
        for _ in tensors:
            pass


def export_settings(model: PreTrainedModel, directory: Path, dtype: torch.dtype) -> None:
    """Write config and generation config, for weights of this type, and the code that a model brought along."""
    directory.mkdir(parents=True, exist_ok=True)
    config = type(model.config).from_dict(model.config.to_dict())
    config.dtype = dtype
    if model.is_remote_code():  # the config's own code alone would be saved with it
        custom_object_save(model, directory, config=config)
    config.save_pretrained(directory)
    if model.can_generate() and model.generation_config is not None:
        # As it came: `save_pretrained` refuses the combinations of settings that some published models have.
        model.generation_config.to_json_file(directory / GENERATION_CONFIG_NAME)
