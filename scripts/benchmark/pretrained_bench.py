"""Commands of pretrained.py, each measured, and a toy in place of a pretrained model."""

import json
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from peak_memory import process_bytes, tree_bytes
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, PreTrainedTokenizerFast
from warm_start import TOP

from hybridrl.tracking import read_metrics

RECIPE, GIB = TOP / "recipes" / "pretrained", 2**30
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
# The smallest sizes of the recipe; a token of the toy is a byte.
TINY = {"data.max_prompt_length": 128, "data.train_batch_size": 4, f"{ACTOR}.ppo_mini_batch_size": 4}
TINY |= {f"{ROLLOUT}.n": 2, "data.val_max_samples": 2}
WARNING = re.compile(r"warning: |.*\bWARNING\b|.*[a-z]Warning: ")
SPECIAL = {"pad_token": "<pad>", "eos_token": "<eos>", "bos_token": "<bos>"}


class Failed(RuntimeError):
    """A case whose result is not what it must be."""


@dataclass
class Result:
    """Row of the table."""

    name: str
    what: str
    figures: str = ""
    minutes: float = 0.0
    gib: float = 0.0
    warnings: list[str] = field(default_factory=list)
    failed: str = ""


class Bench:
    """Runs the commands of cases, each with its own directory, and measures them; `runs` are overrides by name."""

    def __init__(self, model: Path, out: Path, runs: dict[str, list[str]], *, tiny: bool) -> None:
        self.model, self.out, self.runs, self.tiny = model, out, runs, tiny
        self.peak, self.warnings = 0, list[str]()

    def directory(self, name: str) -> Path:
        """Return the empty directory of a case."""
        shutil.rmtree(self.out / name, ignore_errors=True)
        (self.out / name).mkdir(parents=True)
        return self.out / name

    def data(self, name: str, rows: Callable[[str], list[dict]]) -> list[Path]:
        """Write rows of training and validation, made from those of the recipe; return the two files."""
        files = []
        for split in ("train", "val"):
            files.append(self.out / "data" / f"{name}-{split}.jsonl")
            files[-1].write_text("".join(json.dumps(row) + "\n" for row in rows(split)))
        return files

    def recipe_rows(self, split: str) -> list[dict]:
        file = self.out / "data" / f"{split}.jsonl"
        if not file.is_file():
            self.run(self.out / "data.log", str(RECIPE / "make_data.py"), "--out", file.parent)
        return [json.loads(line) for line in file.read_text().splitlines()]

    def recipe(self, name: str) -> list[str]:
        """Return the command line of the recipe with the overrides of a run."""
        self.recipe_rows("train")
        values = {
            "actor_rollout_ref.model.path": self.model,
            "data.train_files": self.out / "data" / "train.jsonl",
            "data.val_files": self.out / "data" / "val.jsonl",
            "reward.custom_reward_function.path": RECIPE / "reward.py",
            "trainer.default_local_dir": self.out / name / "run",
            "trainer.seed": 0,
        }
        words = [*(f"{key}={value}" for key, value in values.items()), *self.runs.get(name, [])]
        words += [f"{key}={value}" for key, value in TINY.items()] if self.tiny else []
        return ["--config-path", str(RECIPE), "--config-name", "train", *words]

    def hybridrl(self, log: Path, *words: object) -> str:
        return self.run(log, "-m", "hybridrl", *words)

    def run(self, log: Path, *words: object) -> str:
        """Run Python with these words; return what it printed. Raises Failed if it failed."""
        with log.open("w") as output:
            command = [sys.executable, *map(str, words)]
            status = subprocess.run(command, cwd=TOP, stdout=output, stderr=output).returncode
        text = log.read_text()
        self.warnings += [line for line in text.splitlines() if WARNING.match(line)]
        if status:
            raise Failed(f"{log} has exit status {status}: {text[-300:]}")
        return text

    def measured(self, case: Callable[["Bench"], str], result: Result) -> Result:
        """Run a case, and sample the memory of all processes that it starts."""
        self.peak, self.warnings, ended, began = 0, [], threading.Event(), time.monotonic()
        thread = threading.Thread(target=self._sample, args=[ended], daemon=True)
        thread.start()
        try:
            result.figures = case(self)
        except Failed as error:
            result.failed = str(error)
        ended.set()
        thread.join()
        result.minutes, result.gib = (time.monotonic() - began) / 60, self.peak / GIB
        result.warnings = self.warnings
        return result

    def _sample(self, ended: threading.Event) -> None:
        pid = threading.main_thread().native_id
        assert pid is not None
        while not ended.wait(1.0):
            self.peak = max(self.peak, tree_bytes(pid) - process_bytes(pid))

    def train(self, name: str, *more: str) -> dict[int, dict[str, float]]:
        """Run training with the overrides of a run; return the metrics of its steps."""
        directory = self.directory(name)
        self.hybridrl(directory / "log", "train", *self.recipe(name), *more)
        return read_metrics(directory / "run")


def make_toy(directory: Path) -> Path:
    """Write it to a directory, which is returned."""
    vocabulary = {
        text: number for number, text in enumerate([*SPECIAL.values(), *sorted(pre_tokenizers.ByteLevel.alphabet())])
    }
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **SPECIAL).save_pretrained(directory)
    settings = Gemma3TextConfig(
        vocab_size=len(vocabulary),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        query_pre_attn_scalar=32,
        sliding_window=64,
        max_position_embeddings=512,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=2,
    )
    torch.manual_seed(0)
    Gemma3ForCausalLM(settings).save_pretrained(directory)
    return directory
