"""The cost of a weight sync: `python scripts/benchmark/weight_sync.py [--shape 0.5b]`

On one CPU device, a random model, in float32: from the call of `to_rollout` until the engine is verified to have the
trainer's weights, and back. Compared in turn with vLLM's own `reload_weights` of the same model from tensors that are
already in the engine's process, and with a copy of as many bytes in memory. Then the seconds of each call, and the
engine's tokens per second after the first weight sync and after the last. With --same-allocator vLLM's side keeps freed
memory as a run's processes do (`device.py`), which plain vLLM does not.
"""

import os
import sys
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from multiprocessing import Process
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from child import Child
from memory_plan import make_model, overrides
from models import SHAPES
from side_by_side import ROUNDS, Row, arguments, formatted, in_turn, report

from hybridrl.config import PPOConfig, load_ppo_config
from hybridrl.core.cluster import Group
from hybridrl.core.hybrid_engine import HybridEngine
from hybridrl.core.rollout import Request, Sampling, request_seed
from hybridrl.runs.ppo import probe_ids, start_devices
from hybridrl.runs.settings import build_algorithm, ppo_worker_config
from hybridrl.runs.setup import start_session
from hybridrl.runtime.environment import worker_environment

HERE = Path(__file__).absolute().parent
RESPONSES, TOKENS = 8, 24
BLOCK = 256 << 20  # of the copy in memory, much larger than a processor's caches


def count_calls(seconds: Counter[str]) -> None:
    """Add up the seconds that the driver waits, by role and method."""
    for name in ("finish", "failures"):  # the latter puts engines to sleep
        plain = vars(Group)[name]

        def timed(self: Group, *args: Any, plain: Any = plain, **options: Any) -> Any:
            began, method = time.perf_counter(), next(value for value in args if callable(value))
            try:
                return plain(self, *args, **options)
            finally:
                seconds[f"{self.role.split()[0]}.{method.__name__}"] += time.perf_counter() - began

        setattr(Group, name, timed)


class WeightSyncs:
    """Weight syncs with a new version each, and the return to training."""

    def __init__(self, engine: HybridEngine) -> None:
        self.engine, self.version = engine, 0
        self.seconds: Counter[str] = Counter()
        count_calls(self.seconds)

    def to_rollout(self) -> None:
        self.version += 1
        self.engine.to_rollout(version=self.version)

    def to_training(self) -> None:
        self.engine.to_training()

    def decode(self) -> float:
        """Return tokens per second."""
        sampling, prompt = Sampling(TOKENS, (), ignore_eos=True), list(range(5, 40))
        requests = [Request(0, number, prompt, request_seed(0, 0, number), sampling) for number in range(RESPONSES)]
        began = time.perf_counter()
        count = sum(len(response.token_ids) for response in self.engine.client.generate_all(requests))
        return count / (time.perf_counter() - began)


def measure(config: PPOConfig, directory: Path, options: Namespace) -> list[Row]:
    section = config.actor_rollout_ref
    torch.save((section.model, section.rollout, 1), directory / "engine.pt")
    with ExitStack() as stack:
        session = start_session(config.trainer, config.ray_kwargs.ray_init)
        stack.callback(session.close)
        algorithm = build_algorithm(config)
        worker = ppo_worker_config(config, algorithm, directory, 1)
        _, engine = start_devices(config, session, worker, directory, probe_ids([5, 6, 7]))
        ours = WeightSyncs(engine)
        ours.to_rollout()
        before = [ours.decode() for _ in range(3)]
        environment = {"OMP_NUM_THREADS": str(os.cpu_count()), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        if options.same_allocator:
            environment |= worker_environment("cpu", slots=1)
        bare = [sys.executable, str(HERE / "bare.py"), "--threads", str(os.cpu_count())]
        other = stack.enter_context(Child(bare, directory / "bare.log", environment))
        other.call("start_engine", file=str(directory / "engine.pt"))
        size = other.call("keep_weights")
        source, target = (torch.ones(BLOCK, dtype=torch.uint8) for _ in range(2))
        sides: dict[str, Callable[[], object]] = {
            "to training": ours.to_training,
            "to rollout": ours.to_rollout,
            "reload": partial(other.call, "reload"),
            "copy": lambda: [target.copy_(source) for _ in range(size // BLOCK)],
        }
        seconds = in_turn(sides, options.rounds)
        ours.to_training()
        ours.seconds.clear()
        ours.to_rollout()
        parts = ", ".join(f"{call} {value:.2f}" for call, value in ours.seconds.most_common(8))
        after = [ours.decode() for _ in range(3)]
    ratio = seconds["to rollout"].median / seconds["reload"].median
    floor = seconds["copy"].median
    return [
        Row(
            f"weight sync, {options.shape}",
            formatted(seconds["to rollout"]),
            f"reload_weights: {formatted(seconds['reload'])}",
            ratio,
            "at most 1.5 (aim 1.2)",
        ),
        Row(
            f"weight sync over a copy of its {size / 1e9:.2f} GB",
            parts,
            formatted(seconds["copy"]),
            seconds["to rollout"].median / floor,
        ),
        Row("back to training", formatted(seconds["to training"]), ""),
        Row(
            "tokens/s after a weight sync",
            f"{median(after):.1f}",
            f"before: {median(before):.1f}",
            median(after) / median(before),
        ),
    ]


def main() -> None:
    parser = arguments(__doc__, shape="tiny", rounds=1)
    parser.add_argument("--shape", choices=SHAPES, default="0.5b")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument(
        "--same-allocator", action="store_true", help="use the allocator of a run's processes for vLLM's side too"
    )
    parser.add_argument("overrides", nargs="*", help="key=value of the run")
    options = parser.parse_args()
    with TemporaryDirectory() as place:
        directory = Path(place)
        # A separate process, so that its memory is freed.
        maker = Process(target=make_model, args=(SHAPES[options.shape], directory / "model"))
        maker.start()
        maker.join()
        more = ["trainer.save_freq=-1", *options.overrides]
        config = load_ppo_config(overrides(directory / "model", directory, False, more))
        report(measure(config, directory, options), options.json)


if __name__ == "__main__":
    main()
