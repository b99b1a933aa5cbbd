"""The cost of pictures in a run next to its work: `python scripts/benchmark/pictures.py`

A small random model that sees trains on 64 prompts x 8 responses per step, each prompt with another picture of
512 x 512. The bytes in Ray's object store are sampled while it trains, and compared with the pixels of a step and of
the next one, which is read meanwhile. Then the sizes of what names pictures, and the driver's memory over all steps.
"""

import argparse
import json
import pickle
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory
from typing import Any

import ray
from engine_memory import private_memory
from ray._private.internal_api import node_stats
from side_by_side import Row, arguments, report

from hybridrl.config import PPOConfig, load_ppo_config
from hybridrl.core.batch import Batch
from hybridrl.core.carried import PICTURE_DIGEST
from hybridrl.core.experience.collector import SynchronousExperience
from hybridrl.core.hybrid_engine import HybridEngine
from hybridrl.core.rollout import Completion, Request
from hybridrl.core.trainer import RLTask, Trainer
from hybridrl.required import required
from hybridrl.runs import ppo, setup

HERE = Path(__file__).absolute().parent
sys.path.insert(0, str(HERE.parents[1]))
from tests.vision_models import noise_picture, write_model_that_sees  # noqa: E402

SAMPLES, SECONDS = 8, 0.05
UNUSED = 2  # steps after which the pixels of a step must be gone


def configuration(directory: Path, options: argparse.Namespace) -> PPOConfig:
    """Write the model, pictures and rows of a run, and return its configuration."""
    write_model_that_sees(directory / "model")
    with open(directory / "rows.jsonl", "w", encoding="utf-8") as file:
        for number in range(options.prompts * (options.steps + 1)):
            noise_picture(options.side, options.side, seed=number).save(directory / f"{number}.png", compress_level=0)
            prompt = [{"role": "user", "content": "<image>What?"}]
            row = {"data_source": "none", "prompt": prompt, "images": [str(directory / f"{number}.png")]}
            print(json.dumps(row | {"reward_model": {"ground_truth": ""}}), file=file)
    values = {
        "data.train_files": directory / "rows.jsonl",
        "data.train_batch_size": options.prompts,
        "data.max_prompt_length": 512,
        "data.max_response_length": 4,
        "+data.mm_processor_kwargs.max_pixels": options.side**2,
        "actor_rollout_ref.model.path": directory / "model",
        "actor_rollout_ref.rollout.n": SAMPLES,
        "actor_rollout_ref.actor.ppo_mini_batch_size": options.prompts,
        "algorithm.adv_estimator": "grpo",
        "reward.custom_reward_function.path": HERE / "constructed_rewards.py",
        "trainer.device": "cpu",
        "trainer.n_gpus_per_node": options.slots,
        "trainer.total_training_steps": options.steps,
        "trainer.save_freq": -1,
        "trainer.logger": "[]",
        "trainer.default_local_dir": directory / "run",
    }
    return load_ppo_config([f"{key}={value}" for key, value in values.items()])


def stored() -> int:
    """Return the bytes in the object store of this machine."""
    (node,) = ray.nodes()
    stats = node_stats(node["NodeManagerAddress"], node["NodeManagerPort"], include_memory_info=False)
    return stats.store_stats.object_store_bytes_used


@contextmanager
def sampled() -> Iterator[list[int]]:
    """Sample the bytes in the object store until the end of the block."""
    sizes, ended = [0], threading.Event()

    def sample() -> None:
        while not ended.wait(SECONDS):
            sizes.append(stored())

    thread = threading.Thread(target=sample)
    thread.start()
    yield sizes
    ended.set()
    thread.join()


class Watched:
    """A run's task, and what its steps sent and kept."""

    def __init__(self, task: RLTask) -> None:
        assert isinstance(task.devices, HybridEngine) and isinstance(task.experience, SynchronousExperience)
        self.task, self.store = task, required(task.experience.prompts.reader).store
        self.requests: list[Request] = []  # of the first prompt
        self.batch: Batch | None = None
        self.of_steps: list[set[int]] = []  # digests
        self.pixels: list[float] = []  # bytes of the distinct pictures of a step
        self.memory: list[float] = []  # MiB of the driver after a step
        self.peaks: list[int] = []  # bytes in the object store
        self.kept = 0  # pictures whose pixels are stored, though no step since the last UNUSED ones has them
        client, workers = task.devices.client, task.workers
        generate, update_policy = client.generate, workers.update_policy

        def watched_generate(request: Request, begun: Completion | None = None) -> Any:
            if request.prompt == 0 and len(self.requests) < SAMPLES:  # in every step a prompt has this number
                self.requests.append(request)
            return generate(request, begun)

        def watched_update(batch: Batch, step: int) -> Any:
            self.batch = batch
            self.of_steps.append({*batch.carried[PICTURE_DIGEST].tolist()})
            return update_policy(batch, step)

        client.generate, workers.update_policy = watched_generate, watched_update

    def step(self, number: int) -> None:
        with sampled() as sizes:
            metrics = self.task.train_step(number)
        self.task.take_metrics()
        self.pixels.append(metrics["pictures/gb"] * 2**30)
        self.peaks.append(max(sizes))
        self.memory.append(private_memory())
        self.kept = max(self.kept, sum(map(self.stores, set().union(*self.of_steps[:-UNUSED]))))
        print(f"step {number}: {self.peaks[-1] / 1e6:.1f} MB stored, driver {self.memory[-1]:.0f} MiB", flush=True)

    def stores(self, digest: int) -> bool:
        with suppress(KeyError):
            return bool(self.store.handles([digest]))
        return False


def pickled(values: Sequence[Any]) -> tuple[int, int]:
    """Return the bytes of values that name pictures, and of the same without these names."""
    plain = [replace(value, carried={}) for value in values]
    return len(pickle.dumps(values, protocol=5)), len(pickle.dumps(plain, protocol=5))


def rows_of(watched: Watched, options: argparse.Namespace) -> list[Row]:
    what = f"{options.prompts} x {SAMPLES} responses, pictures of {options.side} x {options.side}"
    pixels, peak, half = 2 * max(watched.pixels), max(watched.peaks), len(watched.memory) // 2
    batch = required(watched.batch)
    one, several, rows = (pickled(each) for each in (watched.requests[:1], watched.requests, [batch]))
    arrays = sum(field.nbytes for field in batch.carried.values()) / len(batch)
    growth = mean(watched.memory[half:]) - mean(watched.memory[1:half])
    return [
        Row(
            f"most bytes in the object store, {what}",
            f"{peak / 1e6:.1f} MB",
            f"pixels of two steps: {pixels / 1e6:.1f} MB",
            peak / pixels,
            "at most 1.05",
        ),
        Row(f"pictures stored {UNUSED} steps later", f"{watched.kept}", "", watched.kept),
        Row(
            f"bytes for its picture in each of {SAMPLES} requests for a prompt, pickled together",
            f"{several[0]} bytes",
            f"{several[1]} bytes",
            (several[0] - several[1]) / SAMPLES,
            "at most 150",
        ),
        Row("the same in a request alone", f"{one[0]} bytes", f"{one[1]} bytes", one[0] - one[1]),
        Row(
            "bytes for its picture in a row of a batch",
            f"{rows[0] / len(batch):.0f} bytes, pickled",
            f"{rows[1] / len(batch):.0f} bytes",
            arrays,
            "at most 20",
        ),
        Row(
            f"driver, MiB in steps {half + 1} to {len(watched.memory)}",
            f"{mean(watched.memory[half:]):.1f}",
            f"steps 2 to {half}: {mean(watched.memory[1:half]):.1f}",
            growth,
            "at most 10",
        ),
    ]


def main() -> None:
    parser = arguments(__doc__, steps=4, prompts=4, side=64)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--side", type=int, default=512, help="pixels of a picture's side")
    parser.add_argument("--slots", type=int, default=1)
    options = parser.parse_args()
    rows: list[Row] = []

    class Measured(Trainer):
        def fit(self, done: int, start_up: dict[str, float]) -> None:
            assert isinstance(self.task, RLTask)
            watched = Watched(self.task)
            for number in range(1, options.steps + 1):
                watched.step(number)
            rows.extend(rows_of(watched, options))

    setup.Trainer = Measured
    setup.draw_curves = setup.summary = lambda directory: ""
    with TemporaryDirectory() as place:
        setup.train(configuration(Path(place), options), ppo.PPOJob, setup.Sessions())
    report(rows, options.json)


if __name__ == "__main__":
    main()
