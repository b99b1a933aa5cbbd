"""Rollouts that are continued over steps against the synchronous loop: `python scripts/benchmark/asynchronous.py`

The case tail: the quickstart's warm start with imposed log-normal lengths (imposed.py) up to 2,048 tokens, 32 of the
256 requests of a step at a time; 25m: the step of step.py. First the engines' seconds per token are measured by the
number of responses that run, from which simulate.py predicts the gain; then both loops run, --rounds times in turn.
"""

import json
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory

import numpy as np
from imposed import RESPONSES
from side_by_side import Row, arguments, report
from step import CASES, Case, configuration

from hybridrl.config import PPOConfig
from hybridrl.experience.simulate import Cluster, Mode, Work, simulate
from hybridrl.main_ppo import opened
from hybridrl.rollout import Request, Sampling
from hybridrl.runs.eval_engines import serving
from hybridrl.runs.setup import start_session

WARM = 2  # steps that are not counted: the first of an asynchronous run fills the engines
TOKENS = 64  # of each response by which the speed is measured
MODES = {"synchronous": [], "continued": ["trainer.v1.trainer_mode=colocate_async"]}


def case_of(name: str, directory: Path) -> tuple[Case, list[str]]:
    """Return a case with its further settings."""
    if name == "25m":
        return CASES[name](directory), []
    case = replace(CASES["quickstart"](directory), responses=RESPONSES["tail"])
    context = "actor_rollout_ref.model.override_config.max_position_embeddings=2304"
    return case, [f"+{context}", "actor_rollout_ref.rollout.max_num_seqs=16"]


def measured_speed(case: Case, config: PPOConfig, directory: Path) -> list[tuple[int, float]]:
    """Return pairs of running responses and seconds per token, all engines at work, with the context that a token of
    the case has on average."""
    lengths, speeds = np.array(case.responses.lengths), []
    context = [*range(20, 20 + int((lengths**2).sum() / (2 * lengths.sum())) - TOKENS // 2)]
    prompt_ids = [20 + token % 250 for token in context]
    os.environ["IMPOSED"] = "none"
    with ExitStack() as stack:
        session = start_session(config.trainer, config.ray_kwargs.ray_init)
        stack.callback(session.close)
        model = replace(config.actor_rollout_ref.model, external_lib=[])
        config = replace(config, actor_rollout_ref=replace(config.actor_rollout_ref, model=model))
        client = stack.enter_context(serving(config, session, directory))

        def seconds(running: int, tokens: int) -> float:
            prompts, sampling = range(running * len(client.lanes)), Sampling(tokens, (), ignore_eos=True)
            began = time.monotonic()
            client.generate_all([Request(p, 0, [20 + p, *prompt_ids], p, sampling) for p in prompts])
            return time.monotonic() - began

        for running in sorted({1, 2, 4, 8, min(config.actor_rollout_ref.rollout.max_num_seqs, 16)}):
            whole, prefill = (min(seconds(running, tokens) for _ in range(3)) for tokens in (TOKENS, 1))
            speeds.append((running, (whole - prefill) / (TOKENS - 1)))
    return speeds


def run_modes(case: Case, directory: Path, options, more: list[str]) -> dict[str, list[dict[str, float]]]:
    """Return the metrics of the counted steps of each mode, over all rounds."""
    metrics: dict[str, list[dict[str, float]]] = {name: [] for name in MODES}
    steps = ["trainer.logger=[file]", f"trainer.total_training_steps={options.steps + WARM}", *options.overrides]
    for number in range(options.rounds):
        for name, mode in MODES.items():
            config = configuration(case, directory, options.slots, [*more, *steps, *mode])
            config.trainer.default_local_dir = str(directory / f"{name}-{number}")
            train(config)
            lines = (directory / f"{name}-{number}" / "metrics.jsonl").read_text().splitlines()
            metrics[name] += [json.loads(line) for line in lines][1 + WARM :]
    return metrics


def train(config: PPOConfig) -> None:
    run: Callable[[PPOConfig], None]
    with opened(config) as run:
        run(config)


def predicted(case: Case, speed: list[tuple[int, float]], config: PPOConfig, other: float) -> float:
    """Return the gain that the simulation predicts, with the synchronous loop's seconds of all but generation."""
    responses = case.responses
    lengths = np.array(responses.lengths).reshape(responses.prompts, responses.samples)
    work = Work(responses.prompts, lengths, steps=24, warmup=6)
    slots = config.actor_rollout_ref.rollout.max_num_seqs
    cluster = Cluster(config.trainer.devices, slots, tuple(speed), train=other)
    modes = Mode("sync"), Mode("continued", config.trainer.v1.sampler.max_off_policy_threshold)
    sync, continued = (simulate(work, cluster, mode) for mode in modes)
    return sync.seconds / continued.seconds


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--case", choices=["tail", "25m"], default="tail")
    parser.add_argument("--slots", type=int, default=2, help="devices")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("overrides", nargs="*", help="key=value of the runs")
    options = parser.parse_args()
    with TemporaryDirectory() as place:
        directory = Path(place)
        case, more = case_of(options.case, directory)
        config = configuration(case, directory, options.slots, [*more, *options.overrides])
        speed = measured_speed(case, config, directory)
        os.environ["IMPOSED"] = options.case
        metrics = run_modes(case, directory, options, more)
    step, rollout = (
        {name: mean(one[f"timing_s/{key}"] for one in some) for name, some in metrics.items()}
        for key in ("step", "gen")
    )
    tokens = {name: mean(one["perf/response_tokens"] for one in some) for name, some in metrics.items()}
    samples = case.responses.prompts * case.responses.samples
    law = predicted(case, speed, config, step["synchronous"] - rollout["synchronous"])
    gain = step["synchronous"] / step["continued"]
    per_token = {name: rollout[name] / tokens[name] for name in MODES}
    texts = [
        f"{samples / step[name]:.1f} samples/s, rollout {rollout[name]:.2f} of {step[name]:.2f} s" for name in MODES
    ]
    rows = [
        Row(f"{options.case}: a step", texts[1], texts[0], gain, "at least 1.4" if options.case == "tail" else ""),
        Row("its gain over the predicted one", f"{gain:.2f}", f"{law:.2f}", gain / law, "at least 0.9"),
        Row(
            "seconds of rollout per trained token",
            f"{per_token['continued'] * 1e6:.1f} us",
            f"{per_token['synchronous'] * 1e6:.1f} us",
            per_token["continued"] / per_token["synchronous"],
            "at most 0.8",
        ),
    ]
    print("engine: " + ", ".join(f"{running}:{seconds * 1000:.2f} ms" for running, seconds in speed))
    report(rows, options.json)


if __name__ == "__main__":
    main()
