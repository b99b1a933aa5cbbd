"""Small random models that see, as directories that transformers and vLLM load without a network: weights, tokenizer,
chat template and the files of the processor."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedConfig, Qwen2Tokenizer

from hybridrl.core.pictures import PictureStore
from hybridrl.data.processor import PictureReader, load_processor

# By model type: the tokens before a picture, of a picture, after it and of a video.
QWEN = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>")
GLM = ("<|begin_of_image|>", "<|image|>", "<|end_of_image|>", "<|video|>")
FRAMES = ("<|begin_of_video|>", "<|end_of_video|>")  # GLM's engine looks them up
SPECIAL = ("<|endoftext|>", "<|im_end|>", "<|im_start|>")
TEMPLATE = """{%- for message in messages %}<|im_start|>{{ message['role'] }}
{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}\
{% if part['type'] == 'image' %}START%sEND{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}\
{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
VOCABULARY = 320
TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "initializer_range": 0.15,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
TOWER = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "out_hidden_size": 64,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "initializer_range": 0.15,  # with 0.02 a picture would barely change what the model says
}
DEEP = {"patch_size": 16, "num_position_embeddings": 64, "deepstack_visual_indexes": [0]}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}


def _positions(*sections: int, **more: Any) -> dict[str, Any]:
    parameters = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": list(sections), **more}
    return {"rope_parameters": parameters}


WOVEN = _positions(8, 4, 4, mrope_interleaved=True)
# By model type: what its language part and its tower have besides the above.
FAMILIES: Mapping[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "qwen3_vl": ({"head_dim": 32, **WOVEN}, DEEP),
    "qwen2_5_vl": (_positions(8, 4, 4), {"patch_size": 14, "window_size": 56, "fullatt_block_indexes": [1]}),
    "qwen3_5": (
        {
            "head_dim": 64,
            "layer_types": ["linear_attention", "full_attention"],
            **LINEAR,
            **_positions(4, 2, 2, mrope_interleaved=True, partial_rotary_factor=0.25),
        },
        {"patch_size": 16, "num_position_embeddings": 64},
    ),
    "qwen3_vl_moe": ({"head_dim": 32, **WOVEN, **EXPERTS}, DEEP),
    "glm4v": (_positions(4, 2, 2, partial_rotary_factor=0.5), {"patch_size": 14, "image_size": 112}),
}


def noise_picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """Return an RGB picture in which every pixel is random."""
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def write_model_that_sees(directory: Path, family: str = "qwen3_vl", seed: int = 0) -> Path:
    """Write a model of this type of transformers, with at most half a million parameters. A picture has at most 64
    tokens, each of 32 x 32 pixels, or 28 x 28 where a patch has 14."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = tokenizer_that_sees(family)
    ids = dict(
        zip(("start", "picture", "end", "video"), tokenizer.convert_tokens_to_ids([*tokens(family)]), strict=True)
    )
    before, after = ("image_start", "image_end") if family == "glm4v" else ("vision_start", "vision_end")
    named = {f"{before}_token_id": ids["start"], f"{after}_token_id": ids["end"]}
    settings = settings_that_see(family, ids["picture"], video_token_id=ids["video"], **named)
    settings.dtype = "float32"
    torch.manual_seed(seed)
    AutoModelForImageTextToText.from_config(settings).save_pretrained(directory)
    if family == "qwen3_vl_moe":
        _as_published(directory / "model.safetensors")
    tokenizer.save_pretrained(directory)
    write_processor(directory, family)
    return directory


def tokens(family: str) -> tuple[str, str, str, str]:
    """Return the tokens before a picture, of a picture, after it and of a video."""
    return GLM if family == "glm4v" else QWEN


def tokenizer_that_sees(family: str = "qwen3_vl") -> Qwen2Tokenizer:
    """Return a tokenizer of single bytes whose template writes one placeholder per part that is a picture."""
    start, picture, end, _ = tokens(family)
    padding, ending, *others = [*SPECIAL, *tokens(family), *(FRAMES if family == "glm4v" else ())]
    special = Qwen2Tokenizer(eos_token=ending, pad_token=padding, extra_special_tokens=others)
    trained = special.train_new_from_iterator([""], vocab_size=256 + 2 + len(others), show_progress=False)
    trained.chat_template = TEMPLATE.replace("START", start).replace("%s", picture).replace("END", end)
    return trained


def settings_that_see(family: str, placeholder: int, **more: int) -> PreTrainedConfig:
    """Return the settings of a small model, with this id of a picture's tokens."""
    text, tower = FAMILIES[family]
    parts: dict[str, Any] = {"text_config": TEXT | text, "vision_config": TOWER | tower, "tie_word_embeddings": False}
    return AutoConfig.for_model(family, **parts, image_token_id=placeholder, **more)


def _as_published(path: Path) -> None:
    """Transpose the experts' weights, which transformers transposes when it loads published files, and not back."""
    weights = load_file(path)
    for name, weight in weights.items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            weights[name] = weight.transpose(1, 2).contiguous()
    save_file(weights, path, metadata={"format": "pt"})


def reader_that_sees(directory: Path, family: str = "qwen3_vl", **arguments: Any) -> PictureReader:
    """Return a reader with the processor of a small model that sees, which is written without its weights."""
    tokenizer = tokenizer_that_sees(family)
    tokenizer.save_pretrained(directory)
    (directory / "config.json").write_text(json.dumps({"model_type": family, "vision_config": {}}))
    write_processor(directory, family)
    return PictureReader(load_processor(str(directory), tokenizer, arguments), PictureStore())


def write_processor(directory: Path, family: str) -> None:
    """Write the files of a model's processor next to its config.json and tokenizer."""
    patch = FAMILIES[family][1]["patch_size"]
    frames = 2 if family == "glm4v" else 1  # GLM counts the pixels of a picture once per frame of a patch
    token = (2 * patch) ** 2 * frames
    sizes = {"patch_size": patch, "temporal_patch_size": 2, "merge_size": 2}
    sizes |= {"size": {"shortest_edge": token, "longest_edge": 64 * token}}
    sizes |= {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.25, 0.5]}
    kind = {"glm4v": "Glm4v", "qwen2_5_vl": "Qwen2_5_VL"}.get(family, "Qwen3VL")
    pictures, videos = {"Glm4v": ("Glm4v", "Glm4v"), "Qwen2_5_VL": ("Qwen2VL", "Qwen2VL")}.get(kind, ("Qwen2VL", kind))
    files = {
        "preprocessor_config.json": {"image_processor_type": f"{pictures}ImageProcessor"},
        "video_preprocessor_config.json": {"video_processor_type": f"{videos}VideoProcessor"},
    }
    for name, values in files.items():
        text = json.dumps({**values, "processor_class": f"{kind}Processor", **sizes}, indent=1)
        (directory / name).write_text(text)
