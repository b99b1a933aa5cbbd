"""Seconds and bytes of report.html: `python scripts/benchmark/report.py [RUN ...]`

By itself: of a made-up run of 10,000 steps and 10,000 samples, and of one with long samples; and the time to open the
page and an empty one in headless Chromium, where there is one. Of directories: the same of each.
"""

import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from side_by_side import Row, arguments, report
from warm_start import TOP

sys.path.insert(0, str(TOP))
from tests.report.synthetic import verl_sample, write_run

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
EMPTY = "<!doctype html><title>empty</title>"


def main() -> None:
    parser = arguments(__doc__, steps=200, rounds=1)
    parser.add_argument("runs", nargs="*", type=Path, metavar="RUN")
    parser.add_argument("--steps", type=int, default=10_000, help="of the made-up run")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    steps, few = options.steps, options.steps // 100
    with TemporaryDirectory() as place:
        runs = options.runs or [
            write_run(
                Path(place, f"{steps:,} steps, {steps:,} samples"),
                steps=steps,
                prompts=1,
                n=1,
                validate_every=steps // 10,
            ),
            write_run(
                Path(place, f"{few} steps, samples of 12,000 characters"), steps=few, prompts=2, record=long_sample
            ),
        ]
        report([row for run in runs for row in rows_of(run, Path(place), options.rounds)], options.json)


def long_sample(*arguments: object) -> dict:
    known = verl_sample(*arguments)
    return known | {"output": " ".join(str(hash((*arguments, word))) for word in range(600))}


def rows_of(run: Path, place: Path, rounds: int) -> list[Row]:
    page = place / "report.html"
    command = [sys.executable, "-m", "hybridrl.report", str(run), "--out", str(page)]
    seconds = least(lambda: subprocess.run(command, check=True, cwd=TOP, stdout=subprocess.DEVNULL), rounds)
    size = page.stat().st_size / 1e6
    rows = [
        Row(f"{run.name}: write", f"{seconds:.2f} s", "", seconds, "< 5 s (an ordinary run < 2 s)"),
        Row(f"{run.name}: size", f"{size:.2f} MB", "", size, "< 5 MB"),
    ]
    if CHROMIUM:
        empty = place / "empty.html"
        empty.write_text(EMPTY)
        opened, nothing = (least(lambda file=file: open_page(file, place), rounds) for file in (page, empty))
        text = f"{opened:.2f} s, {nothing:.2f} s"
        rows.append(Row(f"{run.name}: open, an empty page", text, "", opened - nothing, "< 1 s apart"))
    return rows


def open_page(file: Path, place: Path) -> None:
    """Open a page until its script is done, and end the browser."""
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={place}/profile"]
    done = subprocess.run([CHROMIUM or "", *flags, "--dump-dom", file.as_uri()], capture_output=True, text=True)
    assert "<title>" in done.stdout


def least(action: Callable[[], object], rounds: int) -> float:
    seconds = []
    for _ in range(rounds):
        began = time.monotonic()
        action()
        seconds.append(time.monotonic() - began)
    return min(seconds)


if __name__ == "__main__":
    main()
