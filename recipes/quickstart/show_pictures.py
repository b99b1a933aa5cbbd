"""The picture quickstart's results: eight pictures with their answers before and after, accuracy and time figures."""

import sys
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from statistics import fmean

import numpy as np
import pyarrow.parquet as pq
from PIL import Image
from show import one_line, print_results, read_arguments, read_steps, table

from hybridrl.tracking.records import SampleRecord, read_records, records_of
from hybridrl.tracking.report import change_of
from hybridrl.tracking.sink import REWARD

LEAST = 0.9
SHOWN = 8
WHAT_CHANGED = """\
The demonstrations had no pictures: they taught the model to answer with one of four colours, whichever it is. From a
reward of right or wrong only, it learned to look. Its tower, which turns pixels into features, was trained with it."""
NEXT = """\
To try next on this machine, after

    source .venv/bin/activate

  Read its wrong answers, with the others to the same pictures:
    hybridrl show {run} --max-reward 0 --group --limit 2

  The run's page, with all samples within reach:
    hybridrl report {run} --serve

With a GPU, real pictures: {docs}/images.md."""


def block(encoded: bytes) -> str:
    """Return the mean colour of a picture: as a block in a terminal, else as numbers."""
    red, green, blue = np.asarray(Image.open(BytesIO(encoded)).convert("RGB")).reshape(-1, 3).mean(0).astype(int)
    if sys.stdout.isatty():
        return f"\033[48;2;{red};{green};{blue}m      \033[0m"
    return f"({red:3}, {green:3}, {blue:3})"


def pictures_page(pictures: Sequence[bytes], first: Sequence[SampleRecord], last: Sequence[SampleRecord]) -> str:
    lines = [f"  {'picture':<16}{'before':<12}after"]
    for encoded, before, after in zip(pictures, first, last, strict=True):
        mark = "" if after.score == 1 else f"   (It is {after.truth}.)"
        picture = block(encoded) + " " * (8 if sys.stdout.isatty() else 1)
        lines.append(f"  {picture}{one_line(before.response):<12}{one_line(after.response)}{mark}")
    return "\n".join(lines)


def main() -> int:
    arguments = read_arguments("Show what a run of the picture quickstart has learned.")
    run: Path = arguments.run_dir
    trained, validated = read_steps(run)
    reward = change_of(REWARD[0], [values[REWARD[0]] for values in trained.values()])
    files = records_of(run, "samples")
    first, last = (list(read_records(files[step])) for step in (validated[0], validated[-1]))
    rows = pq.read_table(run / "data" / "val.parquet", columns=["images"]).slice(0, SHOWN).to_pylist()
    pictures = [row["images"][0]["bytes"] for row in rows]
    right = [fmean(record.score == 1 for record in records) for records in (first, last)]
    figures = [
        (f"sampled answers (step 1; last {reward.count} steps)", "before", "after"),
        ("  mean reward", f"{reward.before:.3f}", f"{reward.after:.3f}"),
        ("greedy answers to pictures not trained on", "", ""),
        ("  accuracy", *(f"{share:.3f}" for share in right)),
    ]
    pages = [pictures_page(pictures, first[:SHOWN], last[:SHOWN]), table(figures), WHAT_CHANGED]
    expected = "" if right[1] >= LEAST else f"{LEAST:.0%} of the validation pictures right at the end."
    return print_results(arguments, pages, NEXT, expected)


if __name__ == "__main__":
    sys.exit(main())
