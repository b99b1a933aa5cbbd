"""Processor time and memory of the driver per response: `python scripts/benchmark/driver.py [--responses N ...]`

Stand-in servers return all responses of a step at once. The built-in grader scores them in its processes, they become a
batch, and are spooled and written as samples. Only the driver's process counts, with all its threads. The responses
exist before; the peak of memory is above what they hold, next to the size of the batch with the fields of a GRPO step.
With `--profile` the functions of the driver's main thread are listed instead, by their own time.
"""

import cProfile
import gc
import pstats
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from child import Child, serve
from side_by_side import Arguments

from hybridrl.core.algorithms import Algorithm
from hybridrl.core.algorithms.estimators import grpo
from hybridrl.core.batch import Batch
from hybridrl.core.cluster import RaySession
from hybridrl.core.experience.collector import SamplingPlan, SynchronousExperience
from hybridrl.core.experience.episodes import EpisodeRunner
from hybridrl.core.experience.responses import ResponseStore
from hybridrl.core.rollout import Completion, RolloutClient, Sampling
from hybridrl.data.order import PromptOrder
from hybridrl.data.prompts import Prompt
from hybridrl.doctor.reward import reward_config
from hybridrl.required import required
from hybridrl.rewards.actors import open_scorer_pool
from hybridrl.rewards.pool import ScorerPool
from hybridrl.rewards.score import FaultGuard
from hybridrl.runs.sample_log import SampleLog

SIZES, SAMPLES, TOKENS, PROMPT = [4_096, 16_384, 65_536], 8, 64, 64
PHASES = ("sampled and scored", "batch and metrics", "sample log")
HEAD = "| responses | sample log | s | driver, ms each | sampled and scored | batch and metrics | sample log | peak |"


class StandIn:
    """A server whose responses exist before they are requested: by prompt and sample."""

    def __init__(self, responses: Sequence[Completion]) -> None:
        self.responses, self.finished = responses, list[tuple[int, Completion]]()

    def submit(self, requests, goal=None) -> None:
        at = self.responses
        self.finished += [(ticket, at[request.prompt * SAMPLES + request.sample]) for ticket, request in requests]

    async def take(self) -> list[tuple[int, Completion]]:
        finished, self.finished = self.finished, []
        return finished

    async def check(self) -> int:
        return 0

    async def activity(self) -> str:
        return ""

    def interrupt(self) -> None: ...
    def kill(self) -> None: ...


class Devices:
    """The devices of stand-in servers, which nothing else uses."""

    weights = ""

    def to_rollout(self, version: int) -> None: ...
    def to_training(self) -> None: ...
    def rebuild_servers(self) -> None: ...
    def take_metrics(self) -> dict[str, float]:
        return {}


class TimedRunner(EpisodeRunner):
    """Counts the processor time of its last call."""

    cpu = 0.0

    def run(self, *arguments: Any, **options: Any) -> Any:
        start = time.process_time()
        episodes = super().run(*arguments, **options)
        self.cpu = time.process_time() - start
        return episodes


def decoder():
    """Return a decoder without a tokenizer: responses of four characters per token."""
    return lambda ids: f"{' '.join(f'{token % 1000:03}' for token in ids)}\n#### {ids[0] % 2}"


def responses_of(count: int) -> list[Completion]:
    random = np.random.default_rng(0)
    ids = random.integers(1000, size=(count, TOKENS))
    log_probs = -random.random((count, TOKENS), dtype=np.float32)
    return [Completion(row.copy(), probs.copy(), False, 0) for row, probs in zip(ids, log_probs, strict=True)]


def experience_of(count: int, scorers: ScorerPool, spool: Path) -> SynchronousExperience:
    server, ids = StandIn(responses_of(count)), [*range(PROMPT)]
    client = RolloutClient([server], lambda index: server, capacity=10**6, timeout=600.0, retries=2)
    chat = [{"role": "user", "content": "What is 767+488? " * 12}]
    prompts: Any = [Prompt(row, ids, chat, "gsm8k", "1", {}) for row in range(count // SAMPLES)]
    return SynchronousExperience(
        Devices(),
        prompts,
        PromptOrder(count // SAMPLES, 0, False),
        TimedRunner(client, scorers, 0),
        FaultGuard("exclude", 1.0, 99),
        SamplingPlan(count // SAMPLES, SAMPLES, Sampling(TOKENS, (0,))),
        ResponseStore(spool),
    )


@dataclass
class Measured:
    """Processor seconds of the driver by phase, wall-clock seconds, and bytes."""

    cpu: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    seconds: float = 0.0
    peak: int = 0
    batch: int = 0


def step(experience: SynchronousExperience, log: SampleLog | None, number: int) -> Measured:
    """Run what the driver does in a step, without the trainers."""
    measured, (sampled, batched, logged) = Measured(), PHASES
    gc.collect()
    begin_peak()
    before, began = resident("VmRSS"), time.perf_counter()
    clock = time.process_time
    start = clock()
    collected = experience.collect(number)
    measured.cpu[sampled] = vars(experience.runner)["cpu"]
    measured.cpu[batched] = clock() - start - measured.cpu[sampled]
    assert not collected.metrics["reward/faults"] and 0 < collected.metrics["reward/acc/mean"] < 1, collected.metrics
    measured.seconds, measured.peak = time.perf_counter() - began, resident("VmHWM") - before
    batch, _ = Algorithm(lambda batch: grpo(batch, norm_adv_by_std_in_grpo=True)).advantages(collected.batch)
    batch.old_log_probs = required(batch.rollout_log_probs).clone()
    begin_peak()
    start, began = clock(), time.perf_counter()
    if log is not None:
        log.training_samples(number, collected.samples, batch)
        log.flush()
        log.forget()
    measured.cpu[logged] = clock() - start
    measured.seconds += time.perf_counter() - began
    measured.peak, measured.batch = max(measured.peak, resident("VmHWM") - before), size_of(batch)
    return measured


def begin_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins with the memory at present


def resident(name: str) -> int:
    """Return the bytes of this process in memory, at present (VmRSS) or at most (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1]) * 1024


def size_of(batch: Batch) -> int:
    return sum(value.nbytes for value in {value.data_ptr(): value for _, _, value in batch.filled()}.values())


def measure(count: int, logs: bool, rounds: int, profiled: bool = False) -> list[dict[str, Any]]:
    """Return what each round has taken, after one of few responses."""
    session = RaySession("cpu", 1, 1, {}, 60)
    config = reward_config(None, ["reward.num_workers=2"])
    with (
        tempfile.TemporaryDirectory() as place,
        open_scorer_pool(session, config, Path(place), {"gsm8k"}, decoder) as pool,
    ):
        pool.wait_until_loaded()
        tracker: Any = None
        places: dict[str, Any] = {"training_dir": place, "validation_dir": None, "replay_dir": Path(place)}
        log = SampleLog(tracker, **places, shown=0, with_tokens=4) if logs else None
        step(experience_of(64, pool, Path(place, "spool")), log, 1)
        experience, profile = experience_of(count, pool, Path(place, "spool")), cProfile.Profile()
        gc.collect()
        gc.freeze()  # as before the first step of a run
        if profiled:
            profile.enable()
        steps = [step(experience, log, number) for number in range(2, 2 + rounds)]
        profile.disable()
        if profiled:
            pstats.Stats(profile).sort_stats("tottime").print_stats(45)
    session.close()
    return [vars(measured) for measured in steps]


def row(count: int, logs: bool, rounds: Sequence[dict[str, Any]]) -> str:
    best = min(rounds, key=lambda measured: sum(measured["cpu"].values()))
    each = [best["cpu"][phase] / count * 1e3 for phase in PHASES]
    peak = f"{max(measured['peak'] for measured in rounds) / best['batch']:.2f} x {best['batch'] / 2**20:.1f} MiB"
    cells = [
        f"{count:,}",
        "on" if logs else "off",
        f"{best['seconds']:.2f}",
        *(f"{ms:.3f}" for ms in [sum(each), *each]),
    ]
    return f"| {' | '.join(cells)} | {peak} |"


def main() -> None:
    parser = Arguments(__doc__, responses=[64], rounds=1)
    parser.add_argument("--responses", type=int, nargs="+", default=SIZES, help="multiples of 8")
    parser.add_argument("--rounds", type=int, default=3, help="steps of each, of which the one with the least counts")
    parser.add_argument("--log", choices=("on", "off"), help="only with, or without the sample log")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--pipes", help="of a child process")
    options = parser.parse_args()
    if options.pipes:
        return serve(options.pipes, {"measure": measure})
    if options.profile:
        measure(options.responses[0], options.log != "off", options.rounds, profiled=True)
        return None
    print(f"{HEAD}\n|{'--:|' * HEAD.count(' | ')}--:|")
    for count in options.responses:
        for logs in [log for log in (True, False) if options.log in (None, "on" if log else "off")]:
            with tempfile.TemporaryDirectory() as place:
                command = [sys.executable, __file__]
                with Child(command, Path(place) / "log") as child:
                    rounds = child.call("measure", count=count, logs=logs, rounds=options.rounds)
            print(row(count, logs, rounds), flush=True)
    return None


if __name__ == "__main__":
    main()
