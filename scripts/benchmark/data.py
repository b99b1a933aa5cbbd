"""How long rows take to load, and the memory they take: `python scripts/benchmark/data.py TOKENIZER [--rows 100000]`

Rows like GSM8K's, with the answer and the question repeated in extra_info, are written as .jsonl and as .parquet and
loaded as a run loads them, each in a separate process. Memory is the peak, and the size at the end, without libraries
and tokenizer.
"""

import gc
import json
import random
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow
import pyarrow.parquet
from side_by_side import Arguments

from hybridrl.config import PPOConfig
from hybridrl.config.compose import SHIPPED
from hybridrl.config.load import resolve_config
from hybridrl.data.prompts import load_prompts
from hybridrl.data.tokenizer import load_tokenizer

WORDS = ("she", "sold", "half", "as", "many", "clips", "each", "month", "then", "bought", "apples", "at", "a", "price")


def row(number: int, draw: random.Random) -> dict[str, Any]:
    sentences = [" ".join(draw.choices(WORDS, k=12)) + f" {draw.randrange(1000)}." for _ in range(4)]
    question, answer = " ".join(sentences), " ".join(sentences[::-1]) + f"\n#### {draw.randrange(1000)}"
    return {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": f"{question} Let's think step by step and end with #### and a number."}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": answer.split()[-1]},
        "extra_info": {"split": "train", "index": number, "question": question, "answer": answer},
    }


def memory(name: str) -> int:
    """Return MiB of this process: VmRSS is the present size, VmHWM the peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) // 1024


def load(file: str, tokenizer_path: str) -> None:
    needed = [f"data.train_files={file}", "actor_rollout_ref.model.path=a/model", "data.max_prompt_length=4096"]
    config = resolve_config(PPOConfig, needed, SHIPPED[PPOConfig], offline=True).config
    assert config is not None
    tokenizer = load_tokenizer(tokenizer_path)
    tokenizer.encode("a")
    before, began, used = memory("VmRSS"), time.monotonic(), time.process_time()
    prompts = load_prompts([file], config.data, tokenizer, max_samples=-1, shuffle=True, key="data.train_files")
    seconds, cpu = time.monotonic() - began, time.process_time() - used
    gc.collect()
    peak, left = memory("VmHWM"), memory("VmRSS")
    print(
        f"{Path(file).suffix}: {len(prompts)} prompts of {prompts.ids.lengths.mean():.0f} tokens in {seconds:.1f} s "
        f"({cpu:.1f} s of CPU time); memory: {peak - before} MiB at the peak, {left - before} MiB at the end; "
        f"the file has {Path(file).stat().st_size >> 20} MiB"
    )


def main() -> None:
    parser = Arguments(__doc__, rows=100)
    parser.add_argument("tokenizer")
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--load", metavar="FILE", help="load this file and print time and memory")
    arguments = parser.parse_args()
    if arguments.load:
        return load(arguments.load, arguments.tokenizer)
    draw = random.Random(0)
    rows = [row(number, draw) for number in range(arguments.rows)]
    with TemporaryDirectory() as place:
        lines, columns = Path(place, "rows.jsonl"), Path(place, "rows.parquet")
        lines.write_text("".join(json.dumps(values) + "\n" for values in rows))
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), columns)
        del rows
        for file in (lines, columns):
            subprocess.run([sys.executable, __file__, arguments.tokenizer, "--load", str(file)], check=True)


if __name__ == "__main__":
    main()
