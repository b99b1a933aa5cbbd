"""What only a GPU can tell: `python scripts/benchmark/gpu.py [--shape 0.5b 1.5b]`

For each shape a run with random weights on one GPU, in bfloat16: hand-over by CUDA IPC, sleep and wake, the memory that
an engine keeps asleep, rollout beside vLLM's own `generate`, the update's share of the GPU's peak with and without
recomputation, the peak memory of log-probs, and the log-probs' difference between engine and trainer. `--device cpu`
tries the script itself.
"""

import json
import sys
from collections import Counter
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from child import Child
from hand_over import count_calls
from memory_plan import make_model, overrides
from models import SHAPES
from side_by_side import Row, Seconds, arguments, in_turn, report, told

from hybridrl import ppo
from hybridrl.batch import Batch
from hybridrl.config import load_ppo_config
from hybridrl.rollout import Request, Sampling, request_seed
from hybridrl.trainer import Trainer

HERE = Path(__file__).absolute().parent
PEAK = {"H100": 989e12, "H200": 989e12, "A100": 312e12}  # bfloat16 without sparsity, operations a second
ROWS, WIDTH = 32, 512  # 16k tokens in a pass
ANSWERS, TOKENS = 256, 256
GIB = 2**30


@dataclass
class Run:
    """One shape's run, and what it is measured by."""

    hall: Trainer
    shape: dict[str, int]
    parameters: int
    directory: Path
    config: Any
    number: int = 0

    def rows(self) -> Batch:
        generator = torch.Generator().manual_seed(0)
        lengths = torch.full((ROWS,), WIDTH - 1)
        ids = torch.randint(5, 250, (int(lengths.sum()),), generator=generator, dtype=torch.int32)
        numbers = torch.arange(ROWS)
        rows = Batch(
            prompt_lengths=torch.ones(ROWS, dtype=torch.int64),
            response_lengths=lengths,
            prompt_ids=torch.full((ROWS,), 5, dtype=torch.int32),
            response_ids=ids,
            group=numbers // 4,
            position=numbers // 4,
            sample=numbers % 4,
            rewards=(numbers % 3).float(),
            truncated=torch.zeros(ROWS, dtype=torch.bool),
            response_mask=torch.ones(len(ids), dtype=torch.bool),
        )
        return self.hall.algorithm.advantages(rows)[0]

    def there(self) -> None:
        self.number += 1
        self.hall.engine.to_rollout(version=self.number)

    def back(self) -> None:
        self.hall.engine.to_training()

    # -- one row each ----------------------------------------------------------------------------------------------

    def switch(self, name: str) -> list[Row]:
        calls: Counter[str] = Counter()
        count_calls(calls)
        seconds = in_turn({"there": self.there, "back": self.back})
        rounds = len(seconds["there"].wall) + 1
        billions = self.parameters / 1e9
        copies = calls["train.fill_bucket"] + calls["rollout.load_bucket"] + calls["rollout.finish_weights"]
        asleep = calls["rollout.sleep"] + calls["rollout.wake"]
        parts = ", ".join(f"{call} {1e3 * value / rounds:.1f}" for call, value in calls.most_common(8))
        held = self.hall.engine.memory
        left = held.get("perf/device_used_gb", 0.0) - held.get("perf/max_memory_reserved_gb", 0.0)
        return [
            Row(f"hand-over, {name}", f"{told(seconds['there'], 'ms')}; {parts} ms", "", None, ""),
            Row(f"hand-over, ms a billion parameters, {name}", "", "", 1e3 * copies / rounds / billions, "at most 5"),
            Row(f"sleep and wake, seconds, {name}", "", "", asleep / rounds, "at most 0.2"),
            Row(f"GiB on the device beyond the trainer's, {name}", str(held), "", left, "at most 1.5"),
        ]

    def rollout(self) -> Seconds:
        engine, number = self.hall.engine, self.number + 1
        asked = [Request(n // 8, n % 8, list(range(5, 69)), request_seed(0, number, n)) for n in range(ANSWERS)]
        self.there()
        work = {"here": lambda: list(engine.pool.generate(asked, Sampling(TOKENS, (), ignore_eos=True)))}
        here = in_turn(work)["here"]
        self.back()
        return here

    def update(self, name: str, bar: float) -> Row:
        batch, workers = self.rows(), self.hall.workers
        seconds = in_turn({"update": lambda: workers.update_policy(batch, 1)})["update"]
        tokens = int(batch.lengths.sum())
        width, layers = self.shape["hidden_size"], self.shape["num_hidden_layers"]
        work = tokens * (6 * self.parameters + 6 * layers * width * WIDTH)
        peak = next((value for gpu, value in PEAK.items() if gpu in _gpu()), None)
        share = work / seconds.median / peak if peak else None
        return Row(
            f"update of {tokens:,} tokens, share of the peak, {name}", told(seconds), "", share, f"at least {bar}"
        )

    def log_probs(self, name: str) -> Row:
        batch, workers = self.rows(), self.hall.workers
        before = self.memory()
        seconds = in_turn({"pass": partial(workers.log_probs, batch)})["pass"]
        plain = 2 * 4 * int(batch.response_lengths.sum()) * self.shape["vocab_size"] / GIB
        peak = self.memory() - before
        return Row(
            f"log-probs, peak GiB, {name}",
            f"{peak:.2f}; {told(seconds)}",
            f"plain {plain:.1f}",
            peak / plain,
            "at most 0.1",
        )

    def memory(self) -> float:
        self.hall.engine._move_trainers(to_host=False)
        return self.hall.engine.memory.get("perf/max_memory_allocated_gb", 0.0)

    def agreement(self, name: str) -> Row:
        metrics = self.hall.train_step(self.number + 1)
        return Row(
            f"difference of probabilities, mean, {name}",
            "",
            "",
            metrics["training/rollout_probs_diff_mean"],
            "at most 0.01",
        )


def _gpu() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else ""


def beside_bare(here: Seconds, directory: Path, config: Any, name: str) -> Row:
    """The rollout beside vLLM alone on the device, after the run has ended: both would not always fit."""
    section = config.actor_rollout_ref
    torch.save((section.model, section.rollout, 1), directory / "engine.pt")
    asked = [{"prompt": list(range(5, 69)), "seed": n, "max_tokens": TOKENS} for n in range(ANSWERS)]
    (directory / "requests.json").write_text(json.dumps(asked))
    command = [sys.executable, str(HERE / "bare.py"), "--device", config.trainer.device]
    # The engine in that process: fast, and gone with it.
    with Child(command, directory / "bare.log", {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}) as side:
        side.ask("start_engine", file=str(directory / "engine.pt"))
        there = median([side.ask("generate", file=str(directory / "requests.json"))["seconds"] for _ in range(6)][1:])
    ours, bare = (f"{ANSWERS * TOKENS / seconds:,.0f} tokens/s" for seconds in (here.median, there))
    what, ratio = f"rollout against vLLM's generate, {name}", there / here.median
    return Row(what, f"{ours}; {told(here)}", f"{bare}; {there:.2f} s", ratio, "at least 0.98")


def measured(name: str, device: str, recompute: bool, more: list[str]) -> list[Row]:
    rows: list[Row] = []
    rollouts: list[Seconds] = []
    with TemporaryDirectory() as place:
        directory = Path(place)
        parameters = make_model(SHAPES[name], directory / "model")
        options = [
            f"trainer.device={device}",
            "trainer.save_freq=-1",
            "trainer.logger=[]",
            "actor_rollout_ref.rollout.max_num_seqs=256",
            "actor_rollout_ref.rollout.gpu_memory_utilization=0.4",
            "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16384",
            f"actor_rollout_ref.model.enable_gradient_checkpointing={str(recompute).lower()}",
            "data.max_response_length=512",
        ]
        config = load_ppo_config(overrides(directory / "model", directory, False, [*options, *more]))
        told_as = f"{name}, {'with' if recompute else 'without'} recomputation"

        class Measured(Trainer):
            def fit(self, done: int, start_up: dict[str, float]) -> None:
                run = Run(self, SHAPES[name], parameters, directory, config)
                rows.append(run.update(told_as, 0.45 if recompute else 0.55))
                if recompute:
                    rows.extend([*run.switch(name), run.log_probs(name), run.agreement(name)])
                    rollouts.append(run.rollout())

        ppo.Trainer = Measured
        ppo.draw_curves = ppo.summary = lambda directory: ""
        ppo.train(config)
        return rows + [beside_bare(here, directory, config, name) for here in rollouts]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=["0.5b", "1.5b"])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("overrides", nargs="*", help="key=value of the run, after --")
    given = parser.parse_args()
    rows = []
    for name in given.shape:
        for recompute in (True, False):
            rows += measured(name, given.device, recompute, given.overrides)
    report(rows, given.json)


if __name__ == "__main__":
    main()
