"""The seconds of a run's steps by simulation (hybridrl/experience/simulate.py), from what the run has recorded: the
lengths of its responses, its sizes, the speed of its engines, and the seconds of all else.

So a run shows whether its steps take what they should, and what those of another mode of rollout would take.
"""

import math
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from hybridrl.experience.admission import QUEUED
from hybridrl.experience.simulate import Cluster, Mode, Work, simulate
from hybridrl.rollout.statistics import ITERATION
from hybridrl.tracking import read_metrics
from hybridrl.tracking.records import read_records, records_of
from hybridrl.tracking.sink import STEP_SECONDS

WARM_UP = 2  # steps: libraries compile in the first one, and the engines of an asynchronous run fill
LEAST_STEPS = 3  # to predict from
STEPS, RESPONSES = (16, 40), 100_000  # the fewest and most steps that are simulated, and responses for fewer than most
WORTH = 1.15  # a gain that is named
FAR = 1024  # running requests
SYNC = Mode("sync")


def recorded_lengths(run: Path, steps: int = 0) -> list[np.ndarray]:
    """Read the lengths of a run's responses by group, of its last steps only if `steps` is given."""
    groups: dict[Any, list[float]] = defaultdict(list)
    for _, path in sorted(records_of(run, "rollouts").items())[-steps:]:
        for record in read_records(path):
            if (tokens := record.episode.get("sampled_tokens", 0)) > 0:
                groups[record.group].append(tokens)
    return [np.array(lengths, dtype=float) for lengths in groups.values()]


def resample(groups: list[np.ndarray], count: int, n: int, seed: int) -> np.ndarray:
    """Draw groups, and n responses from each: those of a group have similar lengths."""
    random = np.random.default_rng(seed)
    chosen = random.integers(len(groups), size=count).tolist()
    return np.stack([random.choice(groups[index], n, replace=len(groups[index]) < n) for index in chosen])


def run_sizes(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a run's groups per step, responses per group, engines and their slots; ValueError for what is no run's."""
    rollout, trainer = config["actor_rollout_ref"]["rollout"], config["trainer"]
    devices = round(trainer["n_gpus_per_node"] * trainer["nnodes"] / training_share(config))
    sizes = {"groups": config["data"]["train_batch_size"], "n": rollout["n"], "slots": rollout["max_num_seqs"]}
    sizes |= {"engines": devices // rollout["tensor_model_parallel_size"]}
    if any(not isinstance(value, int) or value < 1 for value in sizes.values()):
        raise ValueError(f"sizes of no run: {sizes}")
    return sizes


def training_share(config: Mapping[str, Any]) -> float:
    """Return the share of all devices that train; 1 if none are for rollout alone."""
    rollout, trainer = config["actor_rollout_ref"]["rollout"], config["trainer"]
    if trainer.get("v1", {}).get("trainer_mode") != "separate_async":
        return 1.0
    own = rollout["n_gpus_per_node"] * rollout["nnodes"]
    return (count := trainer["n_gpus_per_node"] * trainer["nnodes"]) / (count + own)


def run_seconds(run: Path) -> dict[str, Any]:
    """Read from metrics.jsonl the mean seconds of a step and its parts, the engines' speed, and the tokens of a
    prompt. All but rollout, weight sync and switch counts as training."""
    steps = [line for step, line in sorted(read_metrics(run).items()) if step > 0 and STEP_SECONDS in line]
    steps = steps[WARM_UP:] if len(steps) >= WARM_UP + LEAST_STEPS else steps[1:] or steps
    if not steps:
        return {}

    def mean(name: str) -> float:
        return fmean(line.get(name, 0.0) for line in steps)

    seconds = {"step_seconds": mean(STEP_SECONDS), "sync_seconds": mean("timing_s/update_weights")}
    prompt_tokens = mean("prompt_length/mean") * (1 - mean("rollout/prefix_cache_hit_share"))  # that are computed
    seconds |= {"switch_seconds": mean("timing_s/switch"), "prompt_tokens": prompt_tokens}
    besides = mean("timing_s/gen") + seconds["sync_seconds"] + seconds["switch_seconds"]
    seconds["has_turns"] = any("num_turns/mean" in line for line in steps)
    seconds["train_seconds"] = max(seconds["step_seconds"] - besides, 0.0)
    fixed, running, prefilled = (mean(f"rollout/iteration_s/{part}") for part in ITERATION)
    if fixed or running:
        seconds["speed"] = ((0, fixed), (FAR, fixed + FAR * running))
        seconds["prefill_rate"] = 1 / prefilled if prefilled else math.inf
    return seconds


def predict_steps(config: Mapping[str, Any], run: Path) -> str | None:
    """Return a sentence that compares the seconds of the run's steps with simulated ones; of a synchronous run with
    those of rollouts that are continued, where they are worth it.

    Not the other way round: engines that are always full do not show how fast they are with the last few responses.
    None if the run is too short, or does what the simulation does not know: turns, dynamic sampling, engines that wait.
    """
    sizes, seconds, lengths = run_sizes(config), run_seconds(run), recorded_lengths(run, STEPS[1])
    if "speed" not in seconds or not lengths or not _is_known(config, seconds):
        return None
    per_step = sizes["groups"] * sizes["n"]
    steps = min(max(RESPONSES // per_step, STEPS[0]), STEPS[1])
    lengths = resample(lengths, sizes["groups"] * steps, sizes["n"], seed=0)
    work = Work(sizes["groups"], lengths, seconds["prompt_tokens"], steps, warmup=steps // 4)
    cluster, mode = _cluster(config, sizes, seconds), _mode(config, sizes)
    predicted = simulate(work, cluster, mode).seconds
    text = (
        f"a step took {seconds['step_seconds']:.2f} s; simulated with this run's lengths and speed: {predicted:.2f} s"
    )
    if mode.bound:
        return text
    bound = config["trainer"]["v1"]["sampler"]["max_off_policy_threshold"]
    continued = simulate(work, cluster, Mode("continued", bound, queued=QUEUED)).seconds
    gain = f"with trainer.v1.trainer_mode=colocate_async {continued:.2f} s"
    return f"{text}, {gain}" if predicted > WORTH * continued else None


def _is_known(config: Mapping[str, Any], seconds: Mapping[str, Any]) -> bool:
    waits = training_share(config) < 1 and config["trainer"]["deterministic"]
    return not (config["algorithm"]["filter_groups"]["enable"] or seconds["has_turns"] or waits)


def _mode(config: Mapping[str, Any], sizes: Mapping[str, Any]) -> Mode:
    v1, over_sampling = config["trainer"]["v1"], config["actor_rollout_ref"]["rollout"]["over_sample_rate"]
    if v1["trainer_mode"] == "sync" and not over_sampling:
        return SYNC
    separate = round(training_share(config) * sizes["engines"]) % sizes["engines"]
    return Mode("own", v1["sampler"]["max_off_policy_threshold"], over_sampling or None, separate, QUEUED)


def _cluster(config: Mapping[str, Any], sizes: Mapping[str, Any], seconds: Mapping[str, Any]) -> Cluster:
    """Return the run's; the simulation wants the seconds that training takes on all devices."""
    sync, switch = seconds["sync_seconds"], seconds["switch_seconds"]
    train = seconds["train_seconds"] * training_share(config)
    engines = sizes["engines"], sizes["slots"], seconds["speed"], seconds["prefill_rate"]
    return Cluster(*engines, train=train, sync=sync, switch=switch, pause=sync)
