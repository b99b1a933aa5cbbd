"""The results of recipes/pretrained: held-out countries before and after, and the mean reward of each step.

Scores the responses by the recipe's rule. Exits with status 1 if fewer held-out countries are right than expected.
"""

import argparse
import sys
from pathlib import Path
from statistics import fmean

from reward import compute_score

from hybridrl.tracking import read_metrics
from hybridrl.tracking.records import SampleRecord, read_records, records_of
from hybridrl.tracking.sink import REWARD, STEP_SECONDS

LEAST = 0.85  # of the held-out countries
EXAMPLES = 6


def judged(record: SampleRecord) -> dict[str, float]:
    return compute_score("", record.response, record.truth)


def share(records: list[SampleRecord], name: str) -> float:
    return fmean(judged(record)[name] for record in records)


def example_page(before: list[SampleRecord], after: list[SampleRecord]) -> str:
    """Return the first countries that were wrong before and are right after, each with both answers."""
    pairs = zip(before, after, strict=True)
    changed = [(old, new) for old, new in pairs if not judged(old)["acc"] and judged(new)["acc"]][:EXAMPLES]
    rows = [(new.truth.split("/")[0], *(" ".join(one.response.split()) for one in (old, new))) for old, new in changed]
    width = max((len(old) for _, old, _ in rows), default=0)
    return "\n".join(f"  {truth:<16}{old:<{width}}   {new}" for truth, old, new in [("", "before", "after"), *rows])


def main() -> int:
    parser = argparse.ArgumentParser(description="Show what a run of recipes/pretrained has learned.")
    parser.add_argument("run_dir", type=Path, nargs="?", default=Path("outputs/pretrained"))
    run_dir: Path = parser.parse_args().run_dir
    metrics, samples = read_metrics(run_dir), records_of(run_dir, "samples")
    trained = {step: values for step, values in metrics.items() if STEP_SECONDS in values}
    validated = {step: [*read_records(samples[step])] for step in sorted(samples)}
    if not trained or len(validated) < 2:
        sys.exit(f"{run_dir}: no step between two validations, so there is nothing to compare")
    print(example_page(*(validated[step] for step in (min(validated), max(validated)))))
    print(f"\n  held-out countries (greedy)  {''.join(f'   step {step:>2}' for step in validated)}")
    for name, column in (("right name first", "acc"), ("and nothing else", "alone")):
        print(f"    {name:<25}{''.join(f'{share(records, column):10.3f}' for records in validated.values())}")
    print(f"\n  mean reward{''.join(f'{values[REWARD[0]]:7.3f}' for values in trained.values())}")
    print(f"  seconds    {''.join(f'{values[STEP_SECONDS]:7.1f}' for values in trained.values())}")
    print(f"\nEverything about the run, with its curves and samples: {run_dir}/report.html")
    if (reached := share(validated[max(validated)], "acc")) < LEAST:
        expected = f"{LEAST:.0%} were expected: is it another model, or are there fewer steps?"
        print(f"{reached:.0%} of the held-out countries are right, {expected}")
    return int(reached < LEAST)


if __name__ == "__main__":
    sys.exit(main())
