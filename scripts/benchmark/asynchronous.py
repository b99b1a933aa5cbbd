"""Asynchronous rollout against the synchronous loop: `python scripts/benchmark/asynchronous.py [--mode separate]`

continued: rollouts are continued over steps, on shared devices; separate: rollout has half of the devices to itself.

The case tail: the quickstart's warm start with imposed log-normal lengths (imposed.py) up to 2,048 tokens, 32 of the
256 requests of a step at a time; 25m: the step of step.py. Both loops run, --rounds times in turn, and simulate.py
predicts the gain from what the synchronous one measured: the speed of its engines, and the seconds of all else.
"""

import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory

import numpy as np
from cases import CASES, Case
from imposed import RESPONSES
from side_by_side import Row, arguments, report
from step import configuration, impose
from warm_start import TOP

from hybridrl.config import PPOConfig
from hybridrl.core.experience.asynchronous import QUEUED
from hybridrl.main_ppo import COMMAND
from hybridrl.tracking import read_metrics

sys.path.insert(0, str(TOP / "scripts"))
from simulation.recorded import WARM_UP, Times, run_times
from simulation.simulate import Mode, Work, simulate


def case_of(name: str, directory: Path, tiny: bool) -> tuple[Case, list[str]]:
    """Return a case with its further settings."""
    if name == "25m":
        return CASES[name](directory, tiny), []
    case = replace(CASES["quickstart"](directory, tiny), responses=RESPONSES["tiny" if tiny else "tail"])
    context = "actor_rollout_ref.model.override_config.max_position_embeddings=2304"
    return case, [f"+{context}", "actor_rollout_ref.rollout.max_num_seqs=16"]


def settings_of(mode: str, slots: int) -> list[str]:
    if mode == "continued":
        return ["trainer.v1.trainer_mode=colocate_async"]
    training = slots // 2
    devices = [f"trainer.n_gpus_per_node={training}", f"actor_rollout_ref.rollout.n_gpus_per_node={slots - training}"]
    return ["trainer.v1.trainer_mode=separate_async", *devices]


def run_modes(case: Case, directory: Path, options, more: list[str]) -> dict[str, list[Path]]:
    """Run each mode --rounds times in turn. Returns the directories of its runs."""
    modes = {"synchronous": [], options.mode: settings_of(options.mode, options.slots)}
    runs: dict[str, list[Path]] = {name: [] for name in modes}
    steps = ["trainer.logger=[file]", f"trainer.total_training_steps={options.steps + WARM_UP}", *options.overrides]
    for number in range(options.rounds):
        for name, mode in modes.items():
            runs[name].append(directory / f"{name}-{number}")
            config = configuration(case, directory, options.slots, [*more, *steps, *mode])
            config.trainer.default_local_dir = str(runs[name][-1])
            train(config)
    return runs


def counted_steps(run: Path) -> list[dict[str, float]]:
    return [metrics for step, metrics in sorted(read_metrics(run).items()) if step > WARM_UP]


def train(config: PPOConfig) -> None:
    run: Callable[[PPOConfig], None]
    with COMMAND.open(config) as run:
        run(config)


def predicted(case: Case, times: Times, config: PPOConfig, mode: str) -> float:
    """Return the gain that the simulation predicts from what a synchronous run recorded."""
    responses, rollout = case.responses, config.actor_rollout_ref.rollout
    lengths = np.array(responses.lengths).reshape(responses.prompts, responses.samples)
    work = Work(responses.prompts, lengths, times.prompt_tokens, steps=24, warmup=6)
    cluster = times.cluster(config.trainer.devices, rollout.max_num_seqs)
    training = config.trainer.devices // 2 if mode == "separate" else 0
    bound = config.trainer.v1.sampler.max_off_policy_threshold
    modes = Mode("sync"), Mode(mode, bound, training_engines=training, queued=QUEUED)
    synchronous, asynchronous = (simulate(work, cluster, one) for one in modes)
    return synchronous.seconds / asynchronous.seconds


def main() -> None:
    parser = arguments(__doc__, steps=3, slots=1)
    parser.add_argument("--case", choices=["tail", "25m"], default="tail")
    parser.add_argument("--mode", choices=["continued", "separate"], default="continued")
    parser.add_argument("--slots", type=int, default=2, help="devices")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("overrides", nargs="*", help="key=value of the runs")
    options = parser.parse_args()
    with TemporaryDirectory() as place:
        directory = Path(place)
        case, more = case_of(options.case, directory, options.tiny)
        config = configuration(case, directory, options.slots, [*more, *options.overrides])
        impose("tiny" if options.tiny else options.case)
        runs = run_modes(case, directory, options, more)
        law = mean(predicted(case, run_times(run), config, options.mode) for run in runs["synchronous"])
        metrics = {name: list(chain.from_iterable(map(counted_steps, some))) for name, some in runs.items()}
    step, rollout = (
        {name: mean(one[f"timing_s/{key}"] for one in some) for name, some in metrics.items()}
        for key in ("step", "gen")
    )
    tokens = {name: mean(one["perf/response_tokens"] for one in some) for name, some in metrics.items()}
    samples = case.responses.prompts * case.responses.samples
    gain = step["synchronous"] / step[options.mode]
    per_token = {name: rollout[name] / tokens[name] for name in metrics}
    texts = [
        f"{samples / step[name]:.1f} samples/s, rollout {rollout[name]:.2f} of {step[name]:.2f} s" for name in metrics
    ]
    rows = [
        Row(f"{options.case}, {options.mode}: a step", texts[1], texts[0], gain),
        Row("its gain over the predicted one", f"{gain:.2f}", f"{law:.2f}", gain / law, "at least 0.9"),
        Row(
            "seconds of rollout, or of waiting for it, per trained token",
            f"{per_token[options.mode] * 1e6:.1f} us",
            f"{per_token['synchronous'] * 1e6:.1f} us",
            per_token[options.mode] / per_token["synchronous"],
            "at most 0.8",
        ),
    ]
    report(rows, options.json)


if __name__ == "__main__":
    main()
