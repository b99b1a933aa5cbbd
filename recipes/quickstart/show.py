"""The quickstart's results: one problem before and after, accuracy and time figures, commands to try next.

Reads a run's metrics and samples, and scores responses by the quickstart's own rule, independent of the run's reward.
Exits with status 1 if the run did not reach the expected accuracy.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from reward import compute_score

from hybridrl import project_file
from hybridrl.tracking import read_metrics
from hybridrl.tracking.records import read_records, records_of
from hybridrl.tracking.report import change_of, last_steps
from hybridrl.tracking.sink import PHASES, RESPONSE_LENGTH, REWARD, STEP_SECONDS, phase_seconds

LEAST_SAMPLED, LEAST_GREEDY = 0.85, 0.95

WHAT_CHANGED = """\
Reinforcement learning changed mainly the choice of a strategy. Adding digit by digit, with carries, was in the
demonstrations; so were answering without work and forgetting the carries. From a reward of right or wrong only, the
model learned which strategy pays: {after:.0%} of the responses show work now, {before:.0%} did before. It did not
discover addition."""

NEXT = """\
To try next on this machine, after

    source .venv/bin/activate

  Read what it wrote: wrong responses, with the others to the same problems:
    hybridrl show {run} --max-reward 0 --group --limit 2

  The run's page, with all samples within reach:
    hybridrl report {run} --serve

  Ask the model something, or without --prompt as often as you like:
    hybridrl chat {run} device=cpu --temperature 0 --prompt 'What is 767+488?'

  Two learning rates from the same warm start, and a table of both:
    hybridrl sweep --config-path {recipes}/quickstart --config-name train \\
        actor_rollout_ref.actor.optim.lr=1e-4,5e-5 trainer.default_local_dir=outputs/sweep

  An agent: the same model learns a game of several turns, or that a tool pays:
    hybridrl quickstart --agent
    hybridrl quickstart --tool

With a GPU, a real task: {recipes}/gsm8k/README.md."""


@dataclass(frozen=True)
class Sample:
    question: str
    response: str
    truth: str
    score: float | None  # None: the reward failed
    right: bool
    worked: bool


@dataclass(frozen=True)
class Stage:
    """The samples at the beginning or at the end of the run."""

    sampled: list[Sample]
    greedy: list[Sample]
    reward: float  # mean over the sampled responses
    tokens: float  # mean length of a sampled response
    steps: int


def read_stages(run_dir: Path) -> tuple[Stage, Stage]:
    """Return step 1 with the first validation, and the last steps with the last validation."""
    trained, validated = read_steps(run_dir)
    steps = list(trained)
    changes = [change_of(name, [values[name] for values in trained.values()]) for name in (REWARD[0], RESPONSE_LENGTH)]
    rollouts, validations = records_of(run_dir, "rollouts"), records_of(run_dir, "samples")

    def stage(steps: list[int], validation: int, end: str) -> Stage:
        sampled = [sample for step in steps for sample in read_samples(rollouts[step])]
        reward, tokens = (getattr(change, end) for change in changes)
        return Stage(sampled, read_samples(validations[validation]), reward, tokens, len(steps))

    last = steps[-last_steps(len(steps)) :]
    return stage(steps[:1], validated[0], "before"), stage(last, validated[-1], "after")


def read_steps(run_dir: Path) -> tuple[dict[int, dict[str, float]], list[int]]:
    """Return the metrics of each training step, and the steps with a validation."""
    metrics = read_metrics(run_dir)
    trained = {step: values for step, values in metrics.items() if STEP_SECONDS in values}
    validated = [step for step, values in metrics.items() if "timing_s/testing" in values]
    if not trained or len(validated) < 2:
        sys.exit(f"{run_dir}/metrics.jsonl: no step between two validations, so there is nothing to compare")
    return trained, validated


def read_samples(file: Path) -> list[Sample]:
    samples = []
    for record in read_records(file):
        result = compute_score("", record.response, record.truth)
        question, response = one_line(record.prompt.removeprefix("user: ")), one_line(record.response)
        right, worked = result["score"] == 1, result["worked"] == 1
        samples.append(Sample(question, response, record.truth, record.score, right, worked))
    return samples


def one_line(text: str) -> str:
    """Return the text in one line, without control characters: a model can write some for the terminal."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in "  ".join(text.splitlines()))


def example_pair(before: Sequence[Sample], after: Sequence[Sample]) -> tuple[Sample, Sample]:
    """Return the responses to the first problem that was wrong before and is right after, else to the first problem."""
    pairs = list(zip(before, after, strict=True))
    return next((pair for pair in pairs if not pair[0].right and pair[1].right), pairs[0])


def example_page(before: Sample, after: Sample) -> str:
    width = max(len(before.response), len(after.response))
    rows = [
        f"    {name:<9}{sample.response:<{width}}   {'right' if sample.right else 'wrong'}"
        for name, sample in (("before", before), ("after", after))
    ]
    return "\n".join([f"  {before.question}  (It is {before.truth}.)", *rows])


def figures_page(*stages: Stage) -> str:
    worked = [[sample for sample in stage.sampled if sample.worked] for stage in stages]
    rows = [
        (f"sampled responses (step 1; last {stages[-1].steps} steps)", "before", "after"),
        ("  mean reward", *(f"{stage.reward:.3f}" for stage in stages)),
        ("  share with work shown", *(_figure([sample.worked for sample in stage.sampled]) for stage in stages)),
        ("  share of those that are right", *(_figure([sample.right for sample in samples]) for samples in worked)),
        ("  tokens", *(f"{stage.tokens:.1f}" for stage in stages)),
        ("greedy responses to problems not trained on", "", ""),
        ("  accuracy", *(_figure([sample.right for sample in stage.greedy]) for stage in stages)),
    ]
    return table(rows)


def table(rows: Sequence[Sequence[str]]) -> str:
    """Return rows of a name and figures as lines."""
    return "\n".join(f"  {name:<43}{''.join(f'{figure:>9}' for figure in figures)}".rstrip() for name, *figures in rows)


def _figure(values: Sequence[float]) -> str:
    return f"{fmean(values):.3f}" if values else "-"


def seconds_page(run_dir: Path, total: float, warm_start: float) -> str:
    """Return the time of the quickstart by phase; `other` is imports, shutdown and this script."""
    seconds = {"warm start": warm_start} | dict.fromkeys(PHASES, 0.0)
    for metrics in read_metrics(run_dir).values():
        for phase, spent in phase_seconds(metrics).items():
            seconds[phase] += spent
    seconds["other"] = total - sum(seconds.values())
    rows = [f"    {phase:<12}{spent:8.1f} s{spent / total:8.1%}" for phase, spent in seconds.items()]
    return "\n".join([f"  {'total seconds':<14}{total:8.1f} s", *rows])


def next_page(commands: str, run_dir: Path) -> str:
    """Return commands to try next, for this run and its newest model."""
    saved = sorted(run_dir.glob("global_step_*"), key=lambda path: int(path.name.rpartition("_")[2]))
    newest = saved[-1] if saved else run_dir / "global_step_N"
    places = {name: project_file(name) for name in ("recipes", "docs")}
    return commands.format(run=run_dir, model=newest / "actor", **places)


def has_learned(after: Stage) -> bool:
    sampled, greedy = (fmean(sample.right for sample in samples) for samples in (after.sampled, after.greedy))
    return sampled > LEAST_SAMPLED and greedy > LEAST_GREEDY


def read_arguments(description: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--seconds", type=float, help="total time; without it no shares are shown")
    parser.add_argument("--warm-start-seconds", type=float, default=0.0, help="time of data and warm start")
    return parser.parse_args()


def print_results(arguments: argparse.Namespace, pages: Sequence[str], commands: str, expected: str) -> int:
    """Print the pages, the time, and commands to try next; return the exit status. `expected` is what the run did not
    reach, empty if it did."""
    pages = [*pages]
    if arguments.seconds:
        pages.append(seconds_page(arguments.run_dir, arguments.seconds, arguments.warm_start_seconds))
    pages.append(f"Everything about the run, with its curves and samples: {arguments.run_dir}/report.html")
    pages.append(next_page(commands, arguments.run_dir))
    if expected:
        pages.append(f"This run did not reach the expected result: {expected}")
    print("\n\n".join(pages))
    return 1 if expected else 0


def main() -> int:
    arguments = read_arguments("Show what a run of the quickstart has learned.")
    before, after = read_stages(arguments.run_dir)
    shares = {
        name: fmean(one.worked for one in stage.sampled) for name, stage in (("before", before), ("after", after))
    }
    pages = [example_page(*example_pair(before.greedy, after.greedy)), figures_page(before, after)]
    pages.append(WHAT_CHANGED.format(**shares))
    expected = (
        f"more than {LEAST_SAMPLED:.0%} of the sampled responses right over the last\n{after.steps} steps, and more "
        f"than {LEAST_GREEDY:.0%} of the greedy ones. This can happen with fewer steps or other values."
    )
    return print_results(arguments, pages, NEXT, "" if has_learned(after) else expected)


if __name__ == "__main__":
    sys.exit(main())
