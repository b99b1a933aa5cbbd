"""The doctor's memory plan against a run's peak: `python scripts/benchmark/memory_plan.py [--shape 25m] [--critic]`

A random model of that shape is trained for two steps on CPU, and saved after each, so that the second step's update has
all of it in memory. Measured is the proportional set size of the run's processes together, less that of the same run
with a model of next to no parameters: what imports alone take. Printed are plan, measurement and error; the last line
is a JSON object. Ends with status 1 where the error is above 20%. On two cores 25m takes 2 minutes and 4 GiB, 150m
10 minutes and 13 GiB (with a critic), 0.5b 11 minutes and 17 GiB (with trainer.save_freq=-1).
"""

import argparse
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import torch
from models import SHAPES
from peak_memory import process_bytes
from transformers import AutoModelForCausalLM, Qwen2Config

from hybridrl import main_ppo
from hybridrl.config import load_ppo_config
from hybridrl.doctor.memory_plan import Plan, plans, read_models, table
from hybridrl.doctor.memory_setup import setup
from hybridrl.runtime.guard import guarded
from hybridrl.runtime.timer import Stopwatch

TOP = Path(__file__).absolute().parents[2]
SECONDS_BETWEEN_SAMPLES = 1.0
GIB = 2**30
NOTHING = {"vocab_size": 512, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1} | {
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
}
PARTS = {"ray::TrainWorker": "trainer", "ray::RolloutServer": "server", "VLLM::": "engine", "ray": "ray"}
PROMPT, ANSWER, BETWEEN = 64, 192, "between"
# What a stopwatch measures -> the phase of the plan that it is part of.
PHASES = {
    "start-up": "start-up",
    "step": "rollout",
    "old_log_prob": "log-probs",
    "ref": "log-probs",
    "values": "critic update",
    "update_critic": "critic update",
    "update_actor": "policy update",
    "update_weights": "hand-over",
    "switch": "hand-over",
    "save_checkpoint": "save",
    BETWEEN: "save",  # written in the background
}


def prepare(shape: dict[str, int], directory: Path, critic: bool, more: list[str]) -> list[str]:
    """A model, rows and a reward in a directory. Returns the run's command line."""
    make_model(shape, directory / "model")
    return overrides(directory / "model", directory, critic, more)


def make_model(shape: dict[str, int], directory: Path) -> int:
    """A random model and the quickstart's tokenizer. Returns its number of parameters."""
    sys.path.insert(0, str(TOP / "recipes" / "quickstart"))
    from make_data import build_tokenizer

    build_tokenizer().save_pretrained(directory)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(Qwen2Config(**{"tie_word_embeddings": True} | shape, bos_token_id=None))
    model.save_pretrained(directory)
    return model.num_parameters()


def overrides(model: Path, directory: Path, critic: bool, more: list[str]) -> list[str]:
    rows, reward = directory / "rows.jsonl", directory / "reward.py"
    question = [{"role": "user", "content": "x" * (PROMPT - 20)}]
    row = {"data_source": "none", "prompt": question, "reward_model": {"ground_truth": ""}}
    rows.write_text(f"{json.dumps(row)}\n" * 8)
    reward.write_text("def compute_score(solution_str, **_):\n    return len(solution_str) % 7\n")
    values = {
        "data.train_files": rows,
        "data.train_batch_size": 4,
        "data.max_prompt_length": PROMPT,
        "data.max_response_length": ANSWER,
        "actor_rollout_ref.model.path": model,
        "critic.model.path": model,
        "actor_rollout_ref.rollout.n": 4,
        "actor_rollout_ref.rollout.max_num_seqs": 16,
        "actor_rollout_ref.rollout.ignore_eos": "true",
        "actor_rollout_ref.actor.ppo_mini_batch_size": 2,
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": 1024,
        "critic.ppo_mini_batch_size": 2,
        "critic.ppo_max_token_len_per_gpu": 1024,
        "critic.forward_max_token_len_per_gpu": 1024,
        "algorithm.adv_estimator": "gae" if critic else "grpo",
        "reward.custom_reward_function.path": reward,
        "trainer.device": "cpu",
        "trainer.n_gpus_per_node": 1,
        "trainer.total_training_steps": 2,
        "trainer.save_freq": 1,
        "trainer.max_actor_ckpt_to_keep": 1,
        "trainer.default_local_dir": directory / "run",
    }
    return [f"{key}={value}" for key, value in values.items()] + more


# -- measuring ---------------------------------------------------------------------------------------------------------


class Sampler:
    """Watches a run: most memory in all processes together by the phase that a file names, and by kind of process."""

    def __init__(self, pid: int, phase: Path) -> None:
        self.pid, self.phase, self.ended = pid, phase, threading.Event()
        self.by_phase: dict[str, dict[str, int]] = {}
        self.thread = threading.Thread(target=self._watch, daemon=True)
        self.thread.start()

    def _watch(self) -> None:
        while not self.ended.wait(SECONDS_BETWEEN_SAMPLES):
            name, found = self.phase.read_text(), self._sample()
            if not name:  # it is being written
                continue
            if found["all"] > self.by_phase.get(name, {"all": 0})["all"]:
                self.by_phase[name] = found

    def _sample(self) -> dict[str, int]:
        found = dict.fromkeys(("all", *PARTS.values(), "driver"), 0)
        try:
            processes = [psutil.Process(self.pid), *psutil.Process(self.pid).children(recursive=True)]
        except psutil.NoSuchProcess:
            return found
        for process in processes:
            held = process_bytes(process.pid)
            found[_part(process)] += held
            found["all"] += held
        return found

    def stop(self) -> dict[str, dict[str, int]]:
        self.ended.set()
        self.thread.join()
        return self.by_phase


def _part(process: psutil.Process) -> str:
    try:
        command = " ".join(process.cmdline())
    except psutil.Error:
        return "driver"
    return next((part for mark, part in PARTS.items() if mark in command), "driver")


def measure(arguments: list[str], directory: Path) -> dict[str, dict[str, int]]:
    """Bytes at the peak of each phase, in all processes and by kind."""
    phase = directory / "phase"
    phase.write_text("start-up")
    command = [sys.executable, __file__, "--run", str(phase), *arguments]
    with open(directory / "log", "w", encoding="utf-8") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        sampler = Sampler(process.pid, phase)
        status = process.wait()
    found = sampler.stop()
    if status:
        raise RuntimeError((directory / "log").read_text()[-2000:])
    return found


def run(phase: Path, arguments: list[str]) -> int:
    """A run that writes into a file what its stopwatches measure at the moment."""
    plain = Stopwatch.__call__

    @contextmanager
    def noting(watch: Stopwatch, name: str) -> Iterator[None]:
        before = phase.read_text()
        phase.write_text(name)
        with plain(watch, name):
            yield
        phase.write_text(BETWEEN if before == "start-up" else before)

    Stopwatch.__call__ = noting
    return guarded(lambda: main_ppo.main(arguments))


# -- beside the plan ---------------------------------------------------------------------------------------------------


@dataclass
class Row:
    """Bytes at the peak, without what imports take; the error is the plan's, of what was measured."""

    shape: str
    parameters: int
    critic: bool
    planned: float
    measured: float
    processes: int  # what imports alone take
    by_kind: dict[str, int]

    @property
    def error(self) -> float:
        return self.planned / self.measured - 1


def peak(found: dict[str, dict[str, int]]) -> dict[str, int]:
    return max(found.values(), key=lambda kinds: kinds["all"])


def compare(plan: Plan, found: dict[str, dict[str, int]], processes: int) -> str:
    """The plan, and below it what was measured in its phases."""
    most = dict.fromkeys(plan.needs, 0)
    for name, kinds in found.items():
        most[PHASES[name]] = max(most[PHASES[name]], kinds["all"])
    lines = [
        f"{phase}: planned {plan.needs[phase].total() / GIB:.2f}, measured {f'{size / GIB:.2f}' if size else 'never'}"
        for phase, size in most.items()
    ]
    return "\n".join([table(plan), *lines, f"(of which imports {processes / GIB:.2f})"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="25m")
    parser.add_argument("--critic", action="store_true", help="with a critic (GAE) rather than without (GRPO)")
    parser.add_argument("--processes", type=int, help="bytes that imports alone take, where they were measured before")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of the configuration")
    arguments = parser.parse_args()
    with TemporaryDirectory() as name:
        processes = arguments.processes
        if processes is None:
            command = prepare(NOTHING, Path(name, "nothing"), arguments.critic, arguments.set)
            processes = peak(measure(command, Path(name, "nothing")))["all"]
        directory = Path(name, arguments.shape)
        command = prepare(SHAPES[arguments.shape], directory, arguments.critic, arguments.set)
        config = load_ppo_config(command)
        models = read_models(config)
        (plan,) = plans(setup(config, models, 0))
        found = measure(command, directory)
    needs = plan.needs[plan.fullest]
    planned, measured = needs.total() - needs["processes"], peak(found)["all"] - processes
    row = Row(arguments.shape, models.policy.parameters, arguments.critic, planned, measured, processes, peak(found))
    print(compare(plan, found, processes))
    print(
        f"peak without imports: planned {planned / GIB:.2f} GiB, measured {measured / GIB:.2f}, error {row.error:+.1%}"
    )
    print(json.dumps(asdict(row) | {"error": row.error}))
    return int(abs(row.error) > 0.2)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--run"]:
        sys.exit(run(Path(sys.argv[2]), sys.argv[3:]))
    sys.exit(main())
