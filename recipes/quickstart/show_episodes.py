"""The results of a quickstart of several turns: an episode before and after, figures, commands to try next.

Exits with status 1 if the run did not reach 90% of the best possible reward.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

from show import print_results, read_arguments, read_steps, table

from hybridrl.tracking.records import SampleRecord, read_records, records_of
from hybridrl.tracking.report import change_of

REWARD, LEAST = "critic/score/mean", 0.9


def show_episodes(
    name: str,
    best: float,
    figures: Mapping[str, tuple[str, float]],
    title: Callable[[SampleRecord], str],
    line: Callable[[SampleRecord], str],
    what_changed: str,
    commands: str,
) -> int:
    """Print the results and return the exit status. `best` is the best possible mean reward, `figures` has names with
    a metric and its best value; `title` and `line` write the task of an episode and what was said in it."""
    arguments = read_arguments(f"Show what a run of the {name} quickstart has learned.")
    trained, validated = read_steps(arguments.run_dir)
    reward = change_of(REWARD, [values[REWARD] for values in trained.values()])
    rows = [(f"sampled episodes (step 1; last {reward.count} steps)", "before", "after", "best")]
    for label, (key, highest) in {"mean reward": (REWARD, best), **figures}.items():
        if values := [values[key] for values in trained.values() if key in values]:  # a custom environment has others
            change = change_of(key, values)
            rows.append((f"  {label}", *(f"{value:.3f}" for value in (change.before, change.after, highest))))
    files = records_of(arguments.run_dir, "samples")
    pair = example_pair(files[validated[0]], files[validated[-1]])
    example = [f"    {end:<8}{line(record)}" for end, record in zip(("before", "after"), pair, strict=True)]
    pages = ["\n".join([f"  {title(pair[0])}", *example]), table(rows), what_changed]
    expected = "" if reward.after >= LEAST * best else f"{LEAST:.0%} of the best possible mean reward."
    return print_results(arguments, pages, commands, expected)


def example_pair(first: Path, last: Path) -> tuple[SampleRecord, SampleRecord]:
    """Return the validation episodes of a row that was lost at first and is won at last, else of any row."""
    pairs = list(zip(read_records(first), read_records(last), strict=True))
    return next((pair for pair in pairs if (pair[0].score or 0) <= 0 < (pair[1].score or 0)), pairs[0])
