"""Make the inputs of the picture quickstart: a tiny model that sees, its tokenizer and processor, questions without a
picture, and pictures to name the colour of.

The demonstrations are of somebody who does not look: each names any of four colours, so that one in four would be
right. They teach the form of an answer. Reinforcement learning finds out that it pays to look.

    <image>What colour is it?
    red
"""

import argparse
import json
import random
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from make_data import build_tokenizer, prompt_row
from PIL import Image
from transformers import Qwen2Tokenizer, Qwen3VLConfig, Qwen3VLForConditionalGeneration
from transformers.utils import logging

COLOURS = {"red": (190, 60, 60), "green": (60, 190, 60), "blue": (60, 60, 190), "yellow": (190, 190, 60)}
QUESTION = "What colour is it?"
SIZE, NOISE = 32, 60  # pixels of a side; each value changes by up to this much
PATCH, MERGE = 16, 2  # a picture is one token
TRAIN_PICTURES, VAL_PICTURES = 2000, 200
WARMUP_ROWS = 80 * 32  # one epoch is 80 steps of 32
SPECIAL = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\\n' }}"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}"
    "{{ '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def picture(colour: str, draw: np.random.Generator) -> bytes:
    """Return a noisy square of this colour as a PNG file."""
    noise = draw.integers(-NOISE, NOISE + 1, (SIZE, SIZE, 3))
    pixels = (np.array(COLOURS[colour]) + noise).clip(0, 255).astype(np.uint8)
    file = BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def rows(split: str, count: int) -> Iterator[dict[str, Any]]:
    """Yield rows in the form of verl's own data of pictures; they are the same for every seed."""
    names, draw = random.Random(f"pictures {split}"), np.random.default_rng(len(split))
    for index in range(count):
        colour = names.choice(list(COLOURS))
        row = prompt_row("colours", f"<image>{QUESTION}", 0, split, index)
        row["reward_model"]["ground_truth"] = colour
        yield row | {"images": [{"bytes": picture(colour, draw), "path": None}]}


def warmup_rows(seed: int) -> Iterator[dict[str, Any]]:
    draw = random.Random(f"warmup {seed}")
    for _ in range(WARMUP_ROWS):
        answer = {"role": "assistant", "content": draw.choice(list(COLOURS))}
        yield {"messages": [{"role": "user", "content": QUESTION}, answer]}


def build_model(tokenizer: Qwen2Tokenizer, seed: int) -> Qwen3VLForConditionalGeneration:
    """Return a model of 0.5 M random parameters, most of them in its tower."""
    torch.manual_seed(seed)
    start, image, end, video = tokenizer.convert_tokens_to_ids(list(SPECIAL))
    positions = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [8, 4, 4], "mrope_interleaved": True}
    text = {
        "vocab_size": -(-len(tokenizer) // 64) * 64,
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "rope_parameters": positions,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    tower = {
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_heads": 2,
        "out_hidden_size": 64,
        "patch_size": PATCH,
        "spatial_merge_size": MERGE,
        "temporal_patch_size": 2,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0],
        # With the usual 0.02 a picture barely changes what the model says.
        "initializer_range": 0.15,
    }
    ids = {"image_token_id": image, "video_token_id": video, "vision_start_token_id": start, "vision_end_token_id": end}
    config = Qwen3VLConfig(text_config=text, vision_config=tower, tie_word_embeddings=True, **ids)
    config.dtype = "float32"
    return Qwen3VLForConditionalGeneration(config)


def write_processor(directory: Path) -> None:
    """Write the files of the processor: pictures of one to 16 tokens."""
    token = (PATCH * MERGE) ** 2
    sizes = {"patch_size": PATCH, "temporal_patch_size": 2, "merge_size": MERGE}
    sizes |= {"size": {"shortest_edge": token, "longest_edge": 16 * token}}
    sizes |= {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "processor_class": "Qwen3VLProcessor"}
    for name, kind in (
        ("preprocessor_config.json", {"image_processor_type": "Qwen2VLImageProcessor"}),
        ("video_preprocessor_config.json", {"video_processor_type": "Qwen3VLVideoProcessor"}),
    ):
        (directory / name).write_text(json.dumps(kind | sizes, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the picture quickstart's model, processor and data.")
    parser.add_argument("--out", type=Path, required=True, help="directory to write to")
    parser.add_argument("--seed", type=int, default=0, help="seed of the model's weights and of the demonstrations")
    arguments = parser.parse_args()
    logging.disable_progress_bar()
    model = arguments.out / "model"
    model.mkdir(parents=True, exist_ok=True)
    tokenizer = build_tokenizer(QUESTION, *COLOURS, template=CHAT_TEMPLATE, special=SPECIAL)
    tokenizer.save_pretrained(model)
    build_model(tokenizer, arguments.seed).save_pretrained(model)
    write_processor(model)
    demonstrations = "".join(json.dumps(row) + "\n" for row in warmup_rows(arguments.seed))
    (arguments.out / "warmup.jsonl").write_text(demonstrations)
    for split, count in (("train", TRAIN_PICTURES), ("val", VAL_PICTURES)):
        pq.write_table(pa.Table.from_pylist(list(rows(split, count))), arguments.out / f"{split}.parquet")
    print(f"{arguments.out}: model, warmup.jsonl, train.parquet, val.parquet")


if __name__ == "__main__":
    main()
