"""Prompts with pictures, as vLLM takes them: with processed pixels, since it would expand the placeholders of raw
pictures once more."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from vllm import EngineArgs, TokensPrompt
from vllm.inputs.engine import MultiModalInput, mm_input
from vllm.multimodal.inputs import MultiModalKwargsItems, PlaceholderRange
from vllm.v1.engine.llm_engine import LLMEngine

from hybridrl.core.pictures import Pixels, placeholder_ids, tokens_of
from hybridrl.core.rollout.engine import RejectedRequest, Request

PIXELS = "pixel_values"
NORMALISES = "mm_device_do_normalize"  # an argument of vLLM since 0.32; what is used here is as new

warnings.filterwarnings("ignore", message="The given NumPy array is not writable")  # nothing writes into pixels


def picture_arguments(limit: int, device: str) -> dict[str, Any]:
    """Return vLLM's arguments for a model that sees, with at most `limit` pictures per prompt. With limit 0 the engine
    has no tower, and its sync skips the tower's weights."""
    return {
        "skip_tokenizer_init": False,  # vLLM's processor needs the tokenizer
        "limit_mm_per_prompt": {"image": limit, "video": 0},
        "mm_processor_cache_gb": 0,
        "skip_mm_profiling": device == "cpu",
    }


class PicturePrompts:
    """Makes the prompts of an engine, whose model may see. A prompt has at most `limit` pictures."""

    def __init__(self, engine: LLMEngine, limit: int) -> None:
        model = engine.model_config
        self.placeholders, self.limit = placeholder_ids(model.hf_config), limit
        self.rejects = ""  # why prompts may have no pictures
        if not self.placeholders:
            self.rejects = "the model does not see"
        elif not hasattr(EngineArgs, NORMALISES):
            self.rejects = "vLLM takes pictures since 0.32"
        elif not limit:
            self.rejects = "the engine was started without pictures (rollout.limit_images=0)"
        else:
            self.processor = engine.renderer.get_mm_processor()
            self.merged = model.hf_config.vision_config.spatial_merge_size
            self.on_device = model.multimodal_config.mm_device_do_normalize

    def places(self, request: Request, pixels: Mapping[int, Pixels]) -> list[range]:
        """Return the placeholders of each picture of a prompt; RejectedRequest if the engine cannot have them."""
        pictures = request.pictures
        if pictures and self.rejects:
            raise RejectedRequest(f"the prompt has {len(pictures)} pictures, and {self.rejects}")
        if len(pictures) > self.limit:
            cause = f"the prompt has {len(pictures)} pictures; one may have {self.limit} (rollout.limit_images)"
            raise RejectedRequest(cause)
        return [range(start, start + tokens_of(pixels[digest], self.merged)) for digest, start in pictures]

    def prompt(
        self, request: Request, places: Sequence[range], pixels: Mapping[int, Pixels]
    ) -> TokensPrompt | MultiModalInput:
        """Return the engine's input. Requests with the same picture refer to the same memory, until they end."""
        if not places:
            return TokensPrompt(prompt_token_ids=request.prompt_ids)
        items = [self._item(pixels[digest]) for digest, _ in request.pictures]
        hashes = [f"{digest:x}" for digest, _ in request.pictures]
        ranges = [PlaceholderRange(place.start, len(place)) for place in places]
        return mm_input(
            [*map(int, request.prompt_ids)],
            MultiModalKwargsItems({"image": items}),
            {"image": hashes},
            {"image": ranges},
        )

    def _item(self, pixels: Pixels) -> Any:
        """Return a picture for the engine, through the family's own rule. Pixels that the processor left as they are
        (uint8) are normalised here, unless the model does so."""
        tensors = {name: torch.from_numpy(array) for name, array in pixels.items()}
        raw = tensors[PIXELS].dtype == torch.uint8
        if self.on_device and not raw:
            raise RejectedRequest("the pixels are normalised, and this engine does so itself")
        if raw and not self.on_device:
            tensors[PIXELS] = self._normalised(tensors[PIXELS])
        fields = self.processor._get_mm_fields_config(tensors, {})
        return MultiModalKwargsItems.from_hf_inputs(tensors, fields)["image"][0]

    def _normalised(self, patches: torch.Tensor) -> torch.Tensor:
        """Return the pixels [patches, channels x values] as the model reads them, in float32."""
        rule = self.processor.info.get_hf_processor().image_processor
        mean, std = (torch.tensor(values)[None, :, None] for values in (rule.image_mean, rule.image_std))
        return ((patches.unflatten(-1, (mean.numel(), -1)) * rule.rescale_factor - mean) / std).flatten(1)
