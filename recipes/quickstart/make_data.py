"""Make the inputs of the quickstart: a tiny model and its tokenizer, demonstrations, problems to solve.

The demonstrations come from three solvers. Most are lazy: they give an answer without work and forget the carries. The
others add digit by digit, the last digit first, mostly with carries. Reinforcement learning finds out which is right.

    What is 767+488?
    lazy      #### 1145
    careful   7+8+0=15; 6+8+1=15; 7+4+1=12   #### 1255     (digit + digit + carry = two digits)
    careless  7+8+0=15; 6+8+0=14; 7+4+0=11   #### 1145
"""

import argparse
import hashlib
import json
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer
from transformers.utils import logging

Problem = tuple[int, int]
Files = dict[str, Iterable[dict[str, Any]]]  # the rows of each file

NUMBERS = range(100, 1000)
TRAIN_PROBLEMS, VAL_PROBLEMS, WARMUP_PROBLEMS = 2000, 200, 4000
WARMUP_ROWS = 600 * 32  # one epoch is 600 steps of 32; after 450 some seeds copy digits wrongly
SHARE_LAZY, SHARE_CAREFUL, SHARE_CARELESS = 0.6, 0.34, 0.06

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def question(problem: Problem) -> str:
    return f"What is {problem[0]}+{problem[1]}?"


def careful(problem: Problem) -> str:
    return _worked(problem, carries=True)


def careless(problem: Problem) -> str:
    return _worked(problem, carries=False)


def lazy(problem: Problem) -> str:
    return careless(problem).splitlines()[-1]


def _worked(problem: Problem, *, carries: bool) -> str:
    """Write the addition digit by digit; without `carries` each carry is written as 0."""
    lines, digits, carry, total = [], "", 0, 0
    for x, y in zip(reversed(str(problem[0])), reversed(str(problem[1])), strict=True):
        total = int(x) + int(y) + carry
        lines.append(f"{x}+{y}+{carry}={total:02d}")
        digits = f"{total % 10}{digits}"
        carry = total // 10 if carries else 0
    return f"{'; '.join(lines)}\n#### {int(f'{total // 10}{digits}')}"


def draw_problems(split: str, count: int, seed: int, numbers: range = NUMBERS) -> list[Problem]:
    """Return different pairs of these numbers; the hash of a pair assigns it to "train" or "val"."""
    draw, problems = random.Random(f"{split} {seed}"), dict[Problem, None]()
    while len(problems) < count:
        problem = draw.choice(numbers), draw.choice(numbers)
        if (_hash(problem) % 10 == 0) == (split == "val"):
            problems[problem] = None
    return list(problems)


def _hash(problem: Problem) -> int:
    return int.from_bytes(hashlib.sha256(repr(problem).encode()).digest()[:4], "big")


def warmup_rows(seed: int) -> Iterator[dict[str, Any]]:
    problems, draw = draw_problems("train", WARMUP_PROBLEMS, 1000 + seed), random.Random(f"warmup {seed}")
    solvers: list[Callable[[Problem], str]] = [lazy, careful, careless]
    for solver in draw.choices(solvers, (SHARE_LAZY, SHARE_CAREFUL, SHARE_CARELESS), k=WARMUP_ROWS):
        problem = draw.choice(problems)
        yield {
            "messages": [
                {"role": "user", "content": question(problem)},
                {"role": "assistant", "content": solver(problem)},
            ]
        }


def prompt_rows(split: str, count: int) -> Iterator[dict[str, Any]]:
    """Yield rows for reinforcement learning; they are the same for every seed, so that runs can be compared."""
    for index, problem in enumerate(draw_problems(split, count, 0)):
        yield prompt_row("addition", question(problem), sum(problem), split, index)


def prompt_row(task: str, question: str, truth: int, split: str, index: int) -> dict[str, Any]:
    return {
        "data_source": f"quickstart/{task}",
        "prompt": [{"role": "user", "content": question}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(truth)},
        "extra_info": {"split": split, "index": index},
    }


def build_tokenizer(*texts: str, template: str = CHAT_TEMPLATE, special: Sequence[str] = ()) -> Qwen2Tokenizer:
    """Return a tokenizer of bytes with merges for the few words of a task, and these special tokens."""
    bytes_only = Qwen2Tokenizer(
        eos_token="<|im_end|>", pad_token="<|endoftext|>", extra_special_tokens=["<|im_start|>", *special]
    )
    words = ["user\n", "assistant\n", "system\n", *texts]
    tokenizer = bytes_only.train_new_from_iterator(2 * words, vocab_size=384, show_progress=False)
    tokenizer.chat_template = template
    return tokenizer


def build_model(tokenizer: Qwen2Tokenizer, seed: int) -> Qwen2ForCausalLM:
    """Return a model of 0.57 M random parameters."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=-(-len(tokenizer) // 64) * 64,
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    return Qwen2ForCausalLM(config)


def make(
    description: str, texts: Sequence[str], rows_of: Callable[[int], Files], *, template: str = CHAT_TEMPLATE
) -> None:
    """Write what a quickstart starts from: a model, its tokenizer with merges for `texts`, and rows of a seed."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--out", type=Path, required=True, help="directory to write to")
    parser.add_argument("--seed", type=int, default=0, help="seed of the model's weights and of the demonstrations")
    arguments = parser.parse_args()
    logging.disable_progress_bar()
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = build_tokenizer(*texts, template=template)
    tokenizer.save_pretrained(out / "model")
    build_model(tokenizer, arguments.seed).save_pretrained(out / "model")
    files = rows_of(arguments.seed)
    for name, rows in files.items():
        (out / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(f"{out}: model, {', '.join(files)}")


def files(seed: int) -> Files:
    return {
        "warmup.jsonl": warmup_rows(seed),
        "train.jsonl": prompt_rows("train", TRAIN_PROBLEMS),
        "val.jsonl": prompt_rows("val", VAL_PROBLEMS),
    }


if __name__ == "__main__":
    # 19 tokens per prompt, 35 per response.
    words = question((767, 488)), careful((767, 488))
    make("Make the quickstart's model, tokenizer and data.", words, files)
