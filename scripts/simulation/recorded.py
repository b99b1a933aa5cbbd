"""Inputs of a simulation from the files of a run: the lengths of its responses, the speed of its engines, and the
seconds of all else."""

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from simulation.simulate import Cluster

from hybridrl.core.rollout.engine import ITERATION
from hybridrl.tracking import read_metrics
from hybridrl.tracking.records import read_records, records_of
from hybridrl.tracking.sink import STEP_SECONDS

WARM_UP = 2  # steps: libraries compile in the first one, and the engines of an asynchronous run fill
LEAST_STEPS, LAST_STEPS = 3, 40  # to predict from: at least so many after the warm-up, and of all the last ones


@dataclass(frozen=True)
class Sizes:
    """Groups per step, responses per group, engines on as many equal parts of the devices, the requests that each runs
    at a time, and how many of these parts train alone (0: all train, and generate)."""

    groups: int
    n: int
    engines: int
    slots: int
    training_engines: int


@dataclass(frozen=True)
class Times:
    """Means over the last steps of a run, in seconds: of a step and its parts, and of an engine's iteration by what it
    has. All that is neither rollout, weight sync nor switch counts as training."""

    step: float
    train: float
    sync: float
    switch: float
    prompt_tokens: float  # that are computed, not found in the prefix cache
    fixed: float
    running_request: float
    prefilled_token: float

    @property
    def prefill_rate(self) -> float:
        return 1 / self.prefilled_token if self.prefilled_token else math.inf

    def speed(self, slots: int) -> tuple[tuple[int, float], ...]:
        """Return the seconds per token of each running request, as the simulation wants them."""
        return tuple((count, self.fixed + count * self.running_request) for count in (1, slots + 1))

    def cluster(self, engines: int, slots: int, training_engines: int = 0) -> Cluster:
        """Return the run's; training took its seconds on `training_engines`, and is wanted on all devices."""
        train = self.train * (training_engines or engines) / engines
        rest = {"train": train, "sync": self.sync, "switch": self.switch, "pause": self.sync}
        return Cluster(engines, slots, self.speed(slots), self.prefill_rate, **rest)


def recorded_lengths(run: Path) -> list[np.ndarray]:
    """Read the lengths of a run's responses by group, from its last step on."""
    groups: dict[Any, list[float]] = defaultdict(list)
    for _, path in sorted(records_of(run, "rollouts").items(), reverse=True):
        for record in read_records(path):
            if (tokens := record.episode.get("sampled_tokens", 0)) > 0:
                groups[record.group].append(tokens)
    return [np.array(lengths, dtype=float) for lengths in groups.values()]


def resample(groups: list[np.ndarray], count: int, n: int, seed: int) -> np.ndarray:
    """Draw groups, and n responses from each: those of a group have similar lengths."""
    random = np.random.default_rng(seed)
    chosen = random.integers(len(groups), size=count).tolist()
    return np.stack([random.choice(groups[index], n, replace=len(groups[index]) < n) for index in chosen])


def run_sizes(config: Mapping[str, Any]) -> Sizes:
    """Return the sizes that a run's configuration has; KeyError, TypeError or ValueError if it is not that of a run."""
    rollout, trainer = config["actor_rollout_ref"]["rollout"], config["trainer"]
    width, devices, training = rollout["tensor_model_parallel_size"], trainer["n_gpus_per_node"] * trainer["nnodes"], 0
    engines = devices // width
    if trainer.get("v1", {}).get("trainer_mode") == "separate_async":
        training = max(devices // width, 1)
        engines = training + rollout["n_gpus_per_node"] * rollout["nnodes"] // width
    sizes = Sizes(config["data"]["train_batch_size"], rollout["n"], engines, rollout["max_num_seqs"], training)
    if min(sizes.groups, sizes.n, sizes.engines, sizes.slots) < 1:
        raise ValueError(f"a run cannot have these sizes: {sizes}")
    return sizes


def run_times(run: Path) -> Times | None:
    """Read the means from metrics.jsonl; None if it has too few steps, or not the speed of the engines."""
    steps = [line for step, line in sorted(read_metrics(run).items()) if step > 0 and STEP_SECONDS in line]
    steps = steps[WARM_UP:][-LAST_STEPS:]
    if len(steps) < LEAST_STEPS:
        return None

    def mean(name: str) -> float:
        return fmean(line.get(name, 0.0) for line in steps)

    step, sync, switch = mean(STEP_SECONDS), mean("timing_s/update_weights"), mean("timing_s/switch")
    train = max(step - mean("timing_s/gen") - sync - switch, 0.0)
    prompt_tokens = mean("prompt_length/mean") * (1 - mean("rollout/prefix_cache_hit_share"))
    iteration = [mean(f"rollout/iteration_s/{part}") for part in ITERATION]
    if not any(iteration[:2]):
        return None
    return Times(step, train, sync, switch, prompt_tokens, *iteration)
