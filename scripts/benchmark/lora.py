"""Trains the quickstart in full, and with a LoRA adapter, synced separately or merged; writes docs/lora.md's tables:

python scripts/benchmark/lora.py [--seed N] [--steps N] [--only NAME ...] [--out DIR] [--docs DIR]

The second table is of supervised steps on a larger random model, whose memory exceeds that of the libraries. A run that
is complete in --out with the same overrides is not repeated. Exits with status 1 if a run failed.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from peak_memory import process_bytes
from side_by_side import Arguments
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from warm_start import TOP, make_data, warm_start

from hybridrl.tracking.report import LAST_STEPS, change_of

MODEL, GOAL, MIB = "actor_rollout_ref.model", 0.8, 1 << 20
# On two ranks. Full training uses 1.0e-4; an adapter needs a higher rate, here the lowest that trains well.
LORA = f"{MODEL}.lora_rank=16 {MODEL}.lora_alpha=32 actor_rollout_ref.actor.optim.lr=2.0e-4"
RUNS = {"full": "", "adapter": LORA, "merged": f"{LORA} {MODEL}.lora.merge=true"}
MEMORY = {"full, wide": "", "LoRA, rank 16": "model.lora_rank=16"}
WIDE = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "layer_types": ["full_attention"] * 8,
}
BEGIN, END = "<!-- measured -->", "<!-- /measured -->"


@dataclass(frozen=True)
class Run:
    """A command with a separate directory, where its results and the memory of its processes are written."""

    arguments: list[str]
    directory: Path

    @property
    def complete(self) -> bool:
        marker = self.directory / "complete.json"
        return marker.is_file() and json.loads(marker.read_text())["arguments"] == self.arguments

    def make(self) -> bool:
        """Run it from scratch, unless it is complete. Returns whether it succeeded."""
        if self.complete:
            return True
        shutil.rmtree(self.directory, ignore_errors=True)
        self.directory.mkdir(parents=True)
        command = [sys.executable, "-m", *self.arguments, f"trainer.default_local_dir={self.directory}"]
        with (self.directory / "output.log").open("w") as log:
            process = subprocess.Popen(command, cwd=TOP, stdout=log, stderr=log)
            peak = 0
            while process.poll() is None:
                time.sleep(1.0)
                peak = max([peak, *train_worker_bytes(process.pid)])
        if process.returncode == 0:
            results = {"arguments": self.arguments, "train_worker_bytes": peak}
            (self.directory / "complete.json").write_text(json.dumps(results))
        return process.returncode == 0

    @property
    def peak(self) -> float:
        """Proportional set size of the largest training rank, in MiB."""
        return json.loads((self.directory / "complete.json").read_text())["train_worker_bytes"] / MIB

    @property
    def metrics(self) -> list[dict[str, float]]:
        lines = (self.directory / "metrics.jsonl").read_text().splitlines()
        return [values for values in map(json.loads, lines) if values["step"] > 0]

    @property
    def trained(self) -> str:
        log = " ".join((self.directory / "output.log").read_text().split())
        match = re.search(r"([\d,]+) parameters \(([\d.]+%) of", log)
        return f"{match[1]} ({match[2]})" if match else "all"


def train_worker_bytes(pid: int) -> list[int]:
    try:
        processes = psutil.Process(pid).children(recursive=True)
        return [process_bytes(process.pid) for process in processes if "TrainWorker" in " ".join(process.cmdline())]
    except psutil.Error:  # it has just ended
        return []


def learning_runs(arguments: argparse.Namespace) -> dict[str, Run]:
    start, out = warm_start(arguments.seed, arguments.out, arguments.tiny), arguments.out
    trainer = {"total_training_steps": arguments.steps, "seed": arguments.seed, "val_before_train": "false"}
    trainer |= {"test_freq": -1, "save_freq": -1, "logger": "[console]"}
    recipe = ["--config-path", "recipes/quickstart", "--config-name", "train"]
    fixed = ["hybridrl.main_ppo", *recipe, "data.val_files=null", *start]
    fixed += [f"trainer.{key}={value}" for key, value in trainer.items()]
    return {name: Run([*fixed, *own.split()], out / name) for name, own in RUNS.items()}


def memory_runs(arguments: argparse.Namespace) -> dict[str, Run]:
    data, out = arguments.out / f"warm-start-{arguments.seed}" / "data", arguments.out
    if not data.is_dir() and not make_data(arguments.seed, data.parent):
        sys.exit("the data could not be made")
    wide = out / "wide-model"
    if not (wide / "config.json").is_file():
        torch.manual_seed(0)
        config = AutoConfig.from_pretrained(data / "model", **({} if arguments.tiny else WIDE))
        AutoModelForCausalLM.from_config(config).save_pretrained(wide)
        AutoTokenizer.from_pretrained(data / "model").save_pretrained(wide)
    fixed = ["hybridrl.main_sft", f"data.train_files={data}/warmup.jsonl", f"model.path={wide}", "data.max_length=128"]
    fixed += ["data.train_batch_size=8", "trainer.total_training_steps=3", "trainer.save_freq=-1"]
    fixed += ["trainer.resume_mode=disable", "trainer.logger=[console]"]
    return {name: Run([*fixed, *own.split()], out / f"memory-{name[:4]}") for name, own in MEMORY.items()}


def learning_table(runs: dict[str, Run]) -> list[str]:
    rows = [
        f"| run | trained parameters | reward at step 1 | mean of the last {LAST_STEPS} | steps to {GOAL} | largest "
        "log-prob gap, probe | sampled token | a training rank's peak, MiB |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for name, run in runs.items():
        metrics = run.metrics
        rewards = [step["critic/rewards/mean"] for step in metrics]
        change = change_of("critic/rewards/mean", rewards)
        reached = next((str(number) for number, reward in enumerate(rewards, 1) if reward >= GOAL), "never")
        probe = max(step["training/probe_log_prob_diff"] for step in metrics)
        token = max(step["training/log_probs_diff_max"] for step in metrics)
        rows.append(
            f"| {name} | {run.trained} | {change.before:.3f} | {change.after:.3f} | {reached} | "
            f"{probe:.1e} | {token:.1e} | {run.peak:.0f} |"
        )
    return rows


def memory_table(runs: dict[str, Run]) -> list[str]:
    rows = ["| training | trained parameters | a training rank's peak, MiB |", "|---|--:|--:|"]
    return rows + [f"| {name} | {run.trained} | {run.peak:.0f} |" for name, run in runs.items()]


def write_page(page: Path, tables: list[list[str]], caption: str) -> None:
    """Replace the text between the markers."""
    before, begin, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        sys.exit(f"{page}: there is no {BEGIN} ... {END} to write the tables into")
    text = "\n\n".join("\n".join(rows) for rows in tables)
    page.write_text(f"{before}{BEGIN}\n{caption}\n\n{text}\n{END}{after}", encoding="utf-8")


def parse() -> argparse.Namespace:
    parser = Arguments(__doc__, steps=1, only=["adapter", "LoRA, rank 16"])
    names = [*RUNS, *MEMORY]
    parser.add_argument("--seed", type=int, default=0, help="of the warm start and of every run")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument(
        "--only", nargs="+", choices=names, default=names, metavar="NAME", help=f"of {', '.join(names)}"
    )
    parser.add_argument("--out", type=Path, default=TOP / "outputs" / "lora", help="directory of the runs")
    parser.add_argument("--docs", type=Path, default=TOP / "docs", help="directory of lora.md")
    return parser.parse_args()


def main() -> int:
    arguments = parse()
    arguments.out = arguments.out.absolute()
    learning, memory = learning_runs(arguments), memory_runs(arguments)
    wanted = [run for name, run in (learning | memory).items() if name in arguments.only]
    failed = [run for run in wanted if not run.make()]
    for run in failed:
        print(f"failed: {run.directory}/output.log", flush=True)
    tables = [
        learning_table({name: run for name, run in learning.items() if run.complete}),
        memory_table({name: run for name, run in memory.items() if run.complete}),
    ]
    caption = f"Seed {arguments.seed}, {arguments.steps} steps, {os.cpu_count()} cores, float32:"
    write_page(arguments.docs / "lora.md", tables, caption)
    print("\n".join(row for table in tables for row in table))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
