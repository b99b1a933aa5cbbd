"""GSM8K as rows for reinforcement learning: train.parquet and test.parquet.

Reads the public dataset or local files. `--random_model` also writes a tiny untrained model with a tokenizer, to try
the full run for a few steps on a laptop.
"""

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, disable_progress_bars, load_dataset
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer
from transformers.utils import logging

SOURCE = "openai/gsm8k"
INSTRUCTION = 'Think step by step, and end with the final answer after "####".'

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def read_split(split: str, local_dir: Path | None) -> list[dict[str, str]]:
    """Return rows of question and answer, from `local_dir`/gsm8k_<split>.jsonl or from the Hugging Face hub."""
    if local_dir is None:
        try:
            return load_dataset(SOURCE, "main", split=split).to_list()
        except ConnectionError as error:
            files = "gsm8k_train.jsonl and gsm8k_test.jsonl, with question and answer in each line"
            sys.exit(f"{SOURCE} cannot be read from the hub: {error}\nwith {files}: --local_dir DIR")
    with (local_dir / f"gsm8k_{split}.jsonl").open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def prompt_row(problem: dict[str, str], index: int, split: str) -> dict[str, Any]:
    final = problem["answer"].rsplit("####", 1)[1].strip().replace(",", "")
    return {
        "data_source": SOURCE,
        "prompt": [{"role": "user", "content": f"{problem['question']} {INSTRUCTION}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": final},
        "extra_info": {"split": split, "index": index, **problem},
    }


def write_random_model(directory: Path, texts: Iterable[str]) -> None:
    """Write a Qwen2 model of 0.85 M random parameters, and a tokenizer trained on `texts`."""
    bytes_only = Qwen2Tokenizer(
        eos_token="<|im_end|>", pad_token="<|endoftext|>", extra_special_tokens=["<|im_start|>"]
    )
    tokenizer = bytes_only.train_new_from_iterator(texts, vocab_size=4096, show_progress=False)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(directory)
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=4096,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    Qwen2ForCausalLM(config).save_pretrained(directory)


def main() -> None:
    parser = argparse.ArgumentParser(description="Make train.parquet and test.parquet of GSM8K.")
    parser.add_argument("--out", type=Path, required=True, help="directory to write to")
    parser.add_argument(
        "--local_dir",
        type=Path,
        help="directory with gsm8k_train.jsonl and gsm8k_test.jsonl; default: download",
    )
    parser.add_argument("--random_model", type=Path, help="also write a tiny random model to this directory")
    arguments = parser.parse_args()
    disable_progress_bars()
    logging.disable_progress_bar()
    arguments.out.mkdir(parents=True, exist_ok=True)
    for split in ("train", "test"):
        problems = read_split(split, arguments.local_dir)
        rows = [prompt_row(problem, index, split) for index, problem in enumerate(problems)]
        Dataset.from_list(rows).to_parquet(arguments.out / f"{split}.parquet")
        print(f"{arguments.out / split}.parquet: {len(rows)} rows")
        if split == "train" and arguments.random_model:
            write_random_model(arguments.random_model, [problem["question"] for problem in problems])
            print(f"{arguments.random_model}: a random model")


if __name__ == "__main__":
    main()
