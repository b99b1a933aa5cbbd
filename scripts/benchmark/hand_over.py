"""What it costs to hand weights to the engines: `python scripts/benchmark/hand_over.py [--shape 0.5b]`

On one slot, a random model, in float32: from the call to `to_rollout` until the engine is proven to hold the trainer's
weights, and back. Beside it, in turn, vLLM's own `reload_weights` of the same model from tensors that lie in the
engine's process already, and a copy of as many bytes in memory. Then the same seconds by call, and how fast the engine
writes before the first hand-over and after the last. With --same-allocator vLLM's side keeps freed memory as a run's
processes do (`device.py`), which vLLM by itself does not.
"""

import os
import sys
import time
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
from side_by_side import Row, arguments, in_turn, report, told

from hybridrl import device as devices
from hybridrl.cluster import Group
from hybridrl.config import PPOConfig, load_ppo_config
from hybridrl.hybrid_engine import HybridEngine
from hybridrl.rollout import Request, Sampling, request_seed
from hybridrl.runs.ppo import start_devices
from hybridrl.runs.settings import build_algorithm, ppo_worker_config
from hybridrl.runs.setup import probe_ids, start_session

HERE = Path(__file__).absolute().parent
ANSWERS, TOKENS = 8, 24
BLOCK = 256 << 20  # of the copy in memory, far beyond a processor's caches


def count_calls(seconds: Counter[str]) -> None:
    """Add up what the driver waits for, by method."""
    for name in ("finish", "failures"):  # the last is how engines are put to sleep
        plain = vars(Group)[name]

        def timed(self: Group, *args: Any, plain: Any = plain, **more: Any) -> Any:
            began, method = time.perf_counter(), next(value for value in args if callable(value))
            try:
                return plain(self, *args, **more)
            finally:
                seconds[f"{self.role.split()[0]}.{method.__name__}"] += time.perf_counter() - began

        setattr(Group, name, timed)


class HandOvers:
    """One hand-over at a time."""

    def __init__(self, engine: HybridEngine) -> None:
        self.engine, self.number = engine, 0
        self.seconds: Counter[str] = Counter()
        count_calls(self.seconds)

    def there(self) -> None:
        self.number += 1
        self.engine.to_rollout(version=self.number)

    def back(self) -> None:
        self.engine.to_training()

    def decode(self) -> float:
        """Tokens a second."""
        requests = [Request(0, number, list(range(5, 40)), request_seed(0, 0, number)) for number in range(ANSWERS)]
        sampling, began = Sampling(TOKENS, (), ignore_eos=True), time.perf_counter()
        count = sum(
            len(answer.token_ids) for found in self.engine.pool.generate(requests, sampling) for answer in found
        )
        return count / (time.perf_counter() - began)


def measure(config: PPOConfig, directory: Path, name: str, same_allocator: bool) -> list[Row]:
    section = config.actor_rollout_ref
    torch.save((section.model, section.rollout, 1), directory / "engine.pt")
    with ExitStack() as stack:
        session = start_session(config.trainer, config.ray_kwargs.ray_init)
        stack.callback(session.close)
        algorithm = build_algorithm(config)
        worker = ppo_worker_config(config, algorithm, directory, 1)
        _, engine = start_devices(config, session, worker, directory, probe_ids([5, 6, 7]))
        ours = HandOvers(engine)
        ours.there()
        before = [ours.decode() for _ in range(3)]
        environment = {"OMP_NUM_THREADS": str(os.cpu_count()), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        if same_allocator:
            environment |= devices.environment("cpu", slots=1)
        bare = [sys.executable, str(HERE / "bare.py"), "--threads", str(os.cpu_count())]
        other = stack.enter_context(Child(bare, directory / "bare.log", environment))
        other.ask("start_engine", file=str(directory / "engine.pt"))
        size = other.ask("keep_weights")
        source, target = (torch.ones(BLOCK, dtype=torch.uint8) for _ in range(2))
        sides: dict[str, Callable[[], object]] = {
            "back": ours.back,
            "there": ours.there,
            "reload": partial(other.ask, "reload"),
            "copy": lambda: [target.copy_(source) for _ in range(size // BLOCK)],
        }
        seconds = in_turn(sides)
        ours.back()
        ours.seconds.clear()
        ours.there()
        parts = ", ".join(f"{call} {value:.2f}" for call, value in ours.seconds.most_common(8))
        after = [ours.decode() for _ in range(3)]
    ratio = seconds["there"].median / seconds["reload"].median
    floor = seconds["copy"].median
    return [
        Row(
            f"hand-over, {name}",
            told(seconds["there"]),
            f"reload_weights: {told(seconds['reload'])}",
            ratio,
            "at most 1.5 (aim 1.2)",
        ),
        Row(
            f"hand-over over a copy of its {size / 1e9:.2f} GB",
            parts,
            told(seconds["copy"]),
            seconds["there"].median / floor,
        ),
        Row("back to training", told(seconds["back"]), ""),
        Row(
            "tokens/s after a hand-over",
            f"{median(after):.1f}",
            f"before: {median(before):.1f}",
            median(after) / median(before),
        ),
    ]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="0.5b")
    parser.add_argument("--same-allocator", action="store_true", help="as a run's processes, for vLLM's side too")
    parser.add_argument("overrides", nargs="*", help="key=value of the run")
    given = parser.parse_args()
    with TemporaryDirectory() as place:
        directory = Path(place)
        maker = Process(target=make_model, args=(SHAPES[given.shape], directory / "model"))  # keeps its memory
        maker.start()
        maker.join()
        more = ["trainer.save_freq=-1", *given.overrides]
        config = load_ppo_config(overrides(directory / "model", directory, False, more))
        report(measure(config, directory, given.shape, given.same_allocator), given.json)


if __name__ == "__main__":
    main()
