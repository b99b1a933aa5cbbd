"""What asynchronous rollout would gain: `python scripts/simulate_async.py --lengths RUN_DIR`, or with assumed lengths
`--mean 4096 --sigma 0.8 --cap 32768 --groups 1024 --engines 16 --slots 16 --train-share 0.25`. docs/asynchronous.md

The law is simulation/simulate.py. With a run, its lengths are used, and where they are not given its sizes and
seconds: config.yaml and metrics.jsonl in its directory.
"""

import argparse
import json
import math
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from simulation.recorded import Sizes, Times, recorded_lengths, resample, run_sizes, run_times
from simulation.simulate import Cluster, Mode, Prediction, Work, best_split, log_normal_lengths, simulate

from hybridrl.config import ConfigError
from hybridrl.core.experience.asynchronous import QUEUED
from hybridrl.tracking import read_metrics

DEFAULTS = {"groups": 1024, "n": 1, "engines": 16, "slots": 16, "prompt_tokens": 0.0}
DEFAULTS |= {"train_share": 0.25, "sync_seconds": 0.0, "switch_seconds": 0.0, "pause_seconds": 0.0}
DEVICES = (64, 256, 1024, 4096)
HEADS = ("mode", "s/step", "samples/s", "gain", "slots busy", "training busy", "staleness", "max", "re-prefilled")


def main(argv: Sequence[str] | None = None) -> int:
    options = parser().parse_args(argv)
    try:
        check(options)
        work, cluster = assumed(options)
        predictions = predict(work, cluster, options)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    driver = driver_rows(work, cluster, predictions, options)
    if options.json:
        means = [asdict(prediction) for prediction in predictions]
        rate = None if math.isinf(cluster.prefill_rate) else cluster.prefill_rate
        inputs = asdict(cluster) | {"prefill_rate": rate} | inputs_of(work)
        print(json.dumps({"inputs": inputs, "modes": means, "driver": driver}, indent=2))
        return 0
    print(summary(work, cluster), table(HEADS, mode_rows(predictions)), sep="\n\n")
    if options.driver:
        print("\n" + driver_summary(options), table(tuple(driver[0]), [[*row.values()] for row in driver]), sep="\n\n")
    return 0


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description="Predict the gain of asynchronous rollout.", allow_abbrev=False)
    add = made.add_argument
    add("--lengths", type=Path, metavar="RUN_DIR", help="a run, or a directory of its <step>.jsonl; or log-normal:")
    add("--mean", type=float, default=4096, help="mean length in tokens, without the cap")
    add("--sigma", type=float, default=0.8, help="standard deviation of the logarithm of the length")
    add("--cap", type=int, default=32768, help="largest length")
    add("--groups", type=int, help="groups per step (data.train_batch_size)")
    add("--n", type=int, help="responses per group (actor_rollout_ref.rollout.n)")
    add("--engines", type=int, help="engines, on as many equal parts of the devices")
    add("--slots", type=int, help="responses that an engine decodes at once (rollout.max_num_seqs)")
    add("--speed", type=speed_table, help="running responses:seconds per token, e.g. 1:0.01,256:0.03; or one number")
    add("--prompt-tokens", type=float, help="mean length of a prompt")
    add("--prefill-rate", type=float, help="tokens per second and engine; prefill takes no time if not given")
    add("--train-share", type=float, help="seconds of training over those of synchronous generation")
    add("--train-seconds", type=float, help="seconds of training per step, instead")
    add("--sync-seconds", type=float, help="per weight sync on shared devices")
    add("--switch-seconds", type=float, help="per step, from rollout to training and back")
    add("--pause-seconds", type=float, help="per weight sync between separate pools")
    add("--bound", type=int, nargs="+", default=[1, 4, 8], help="bounds of the staleness")
    add("--over-sampling", type=float, default=0.25, help="limit of groups started early, as a share of a batch")
    add("--steps", type=int, default=60)
    add("--warmup", type=int, default=12, help="steps that are left out of the means")
    add("--seed", type=int, default=0)
    add("--driver", action="store_true", help="also the driver's messages and memory on 64 to 4,096 devices")
    add("--devices-per-engine", type=int, default=1, help="of the driver's table")
    add("--bytes-per-token", type=int, default=29, help="of a batch: ids, mask, six columns of four bytes")
    add("--json", action="store_true")
    return made


def speed_table(text: str) -> tuple[tuple[int, float], ...]:
    """`1:0.01,256:0.03` or `0.02`."""
    pairs = [pair.split(":") for pair in (text if ":" in text else f"1:{text}").split(",")]
    speed = tuple((int(batch), float(seconds)) for batch, seconds in pairs)
    if any(batch < 1 or not 0 < seconds < math.inf for batch, seconds in speed):
        raise ValueError
    return speed


def check(options: argparse.Namespace) -> None:
    """Reject numbers that no run has."""
    positive = ("mean", "cap", "groups", "n", "engines", "slots", "prefill_rate", "steps")
    positive += ("devices_per_engine", "bytes_per_token")
    for name, value in vars(options).items():
        option = f"--{name.replace('_', '-')}"
        values = value if isinstance(value, list) else [value]
        numbers = [number for number in values if isinstance(number, int | float) and not isinstance(number, bool)]
        for number in numbers:
            if not math.isfinite(number) or number < 0 or (number == 0 and name in positive):
                least = "more than 0" if name in positive else "0 or more"
                raise ConfigError(f"{option}={number:g} is no {name.replace('_', ' ')}", fix=f"{option} {least}")
    if options.warmup >= options.steps:
        fix = f"--warmup {options.steps // 5}"
        raise ConfigError(f"--warmup={options.warmup} leaves none of --steps={options.steps}", fix=fix)


def assumed(options: argparse.Namespace) -> tuple[Work, Cluster]:
    """What is simulated: given values, else the run's, else the defaults."""
    known, times = recorded(options.lengths, options.speed) if options.lengths else ({}, None)
    given = {name: value for name, value in vars(options).items() if value is not None}
    values = DEFAULTS | known | given
    count = values["groups"] * (options.steps + max(options.bound) + 1)
    if options.lengths:
        lengths = resample(lengths_of(options.lengths), count, values["n"], options.seed)
    else:
        lengths = log_normal_lengths(count * values["n"], options.mean, options.sigma, options.cap, options.seed)
    lengths = lengths.reshape(count, values["n"])
    work = Work(values["groups"], lengths, values["prompt_tokens"], options.steps, options.warmup)
    speed = options.speed or (times.speed(values["slots"]) if times else Cluster.speed)
    cluster = Cluster(values["engines"], values["slots"], speed, values.get("prefill_rate", math.inf))
    if "train_seconds" in given or ("train_seconds" in known and "train_share" not in given):
        train = values["train_seconds"]
    else:
        train = values["train_share"] * simulate(work, cluster, Mode("sync")).seconds
    seconds = {name: values[f"{name}_seconds"] for name in ("sync", "switch", "pause")}
    return work, replace(cluster, train=train, **seconds)


def lengths_of(run: Path) -> list[np.ndarray]:
    """Return the lengths of the run's responses by group; ConfigError if there are none."""
    if not (groups := recorded_lengths(run)):
        fix = "a directory with rollouts/<step>.jsonl of hybridrl, or --mean, --sigma and --cap instead"
        raise ConfigError(f"--lengths={run}: no samples with sampled_tokens", fix=fix)
    return groups


def recorded(run: Path, speed: object) -> tuple[dict[str, Any], Times | None]:
    """Read the run's sizes from its config.yaml and its seconds from metrics.jsonl, each where it is there; ConfigError
    for seconds without the engines' speed, if none is given."""
    sizes: Sizes | None = None
    with suppress(OSError, ValueError, TypeError, KeyError, yaml.YAMLError):
        sizes = run_sizes(yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8")))
    values, times = asdict(sizes) if sizes else {}, run_times(run)
    if times is not None:
        one = times.cluster(sizes.engines, sizes.slots, sizes.training_engines) if sizes else times.cluster(1, 1)
        values |= {f"{name}_seconds": getattr(one, name) for name in ("train", "sync", "switch", "pause")}
        values |= {"prompt_tokens": times.prompt_tokens, "prefill_rate": one.prefill_rate}
    elif speed is None and read_metrics(run):
        cause = f"--lengths={run}: metrics.jsonl has too few steps, or no rollout/iteration_s: how fast engines were"
        raise ConfigError(cause, fix="give --speed, and --train-seconds or --train-share")
    return values, times


def predict(work: Work, cluster: Cluster, options: argparse.Namespace) -> list[Prediction]:
    widest = max(options.bound)
    modes = [Mode("sync")]
    modes += [Mode(f"carried over, bound {bound}", bound, None, 0, QUEUED) for bound in options.bound]
    further = f"at most {options.over_sampling:g} further"
    over = [bound for bound in options.bound if bound > options.over_sampling]
    modes += [
        Mode(f"carried over, bound {bound}, {further}", bound, options.over_sampling, 0, QUEUED) for bound in over
    ]
    modes.append(Mode(f"carried over, no bound, {further}", None, options.over_sampling, 0, QUEUED))
    if cluster.engines > 1:
        half = cluster.engines // 2
        name = f"separate, half for training, bound {widest}"
        modes.append(Mode(name, widest, training_engines=half, queued=QUEUED))
    predictions = [simulate(work, cluster, mode) for mode in modes]
    if cluster.engines > 1 and cluster.train > 0:
        best = best_split(work, cluster, widest, QUEUED)
        name = f"separate, {best.mode.training_engines} of {cluster.engines} for training, bound {widest}"
        predictions.append(replace(best, mode=replace(best.mode, name=name)))
    return predictions


def mode_rows(predictions: list[Prediction]) -> list[list[str]]:
    return [
        [
            row.mode.name,
            f"{row.seconds:,.1f}",
            f"{row.samples_per_second:.3g}",
            f"{predictions[0].seconds / row.seconds:.2f}x",
            f"{row.rollout_busy:.0%}",
            f"{row.training_busy:.0%}",
            f"{row.staleness:.2f}",
            f"{row.max_staleness}",
            f"{row.reprefill_tokens:,.0f}",
        ]
        for row in predictions
    ]


def driver_rows(
    work: Work, cluster: Cluster, predictions: list[Prediction], options: argparse.Namespace
) -> list[dict[str, Any]]:
    """The driver's work per step if groups per step and engines grow with the devices, in the mode of most messages."""
    busiest = max(predictions, key=lambda row: (row.submits + row.takes) / row.seconds)
    rows = []
    for devices in DEVICES:
        scale = devices / (cluster.engines * options.devices_per_engine)
        tokens = work.groups * work.lengths.size / len(work.lengths) * (work.lengths.mean() + work.prompt_tokens)
        row = {"devices": devices, "groups": round(work.groups * scale)}
        row |= {"submits/step": round(busiest.submits * scale), "takes/step": round(busiest.takes * scale)}
        row["messages/s"] = round((busiest.submits + busiest.takes) * scale / busiest.seconds, 2)
        rows.append(row | {"batch GB": round(tokens * scale * options.bytes_per_token / 1e9, 2)})
    return rows


def inputs_of(work: Work) -> dict[str, Any]:
    sizes = {"groups": work.groups, "n": work.lengths.shape[1], "prompt_tokens": work.prompt_tokens}
    lengths = {"mean_length": float(work.lengths.mean()), "longest": float(work.lengths.max())}
    return sizes | lengths | {"steps": work.steps, "warmup": work.warmup}


def summary(work: Work, cluster: Cluster) -> str:
    lengths = f"{work.lengths.mean():,.0f} tokens on average, at most {work.lengths.max():,.0f}"
    speed = ", ".join(f"{seconds * 1000:.3g} ms per token with {batch} running" for batch, seconds in cluster.speed)
    if len(cluster.speed) == 1:
        speed = f"{cluster.speed[0][1] * 1000:.3g} ms per token however many run"
    prefill = "prefill takes no time" if math.isinf(cluster.prefill_rate) else f"prefill {cluster.prefill_rate:,.0f}/s"
    return (
        f"Assumed: {work.groups} groups of {work.lengths.shape[1]} per step, {lengths}; {cluster.engines} engines of "
        f"{cluster.slots} slots, {speed}, {prefill}; per step {cluster.train:,.1f} s of training, {cluster.sync:.3g} s "
        f"of weight sync, {cluster.switch:.3g} s of switching; {cluster.pause:g} s of pause with separate pools."
    )


def driver_summary(options: argparse.Namespace) -> str:
    return (
        "The driver. Assumed: groups per step grow with the devices; one message per engine and moment of dispatch, "
        f"one per moment at which groups complete; devices per engine: {options.devices_per_engine}; "
        f"{options.bytes_per_token} bytes per token of a batch."
    )


def table(heads: Sequence[str], rows: list[list[Any]]) -> str:
    cells = [[*map(str, heads)], *([*map(str, row)] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["| " + " | ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) + " |" for row in cells]
    rule = "|" + "|".join("-" * (width + 1) + ("-" if not index else ":") for index, width in enumerate(widths)) + "|"
    return "\n".join([lines[0], rule, *lines[1:]])


if __name__ == "__main__":
    sys.exit(main())
