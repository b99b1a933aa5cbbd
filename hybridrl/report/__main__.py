"""`python -m hybridrl.report RUN [RUN2 ...]`: write the page of a run, or serve it while the run is under way."""

import argparse
import sys
from argparse import ArgumentTypeError
from collections.abc import Callable
from pathlib import Path

from hybridrl.report.contents import is_run
from hybridrl.report.page import MOST_RUNS, write_report
from hybridrl.report.serve import serve

PORT, SAMPLES = 8800, 200


def whole(least: int, most: int) -> Callable[[str], int]:
    """Return what reads an argument as a whole number between two others."""

    def read(argument: str) -> int:
        if not argument.isdecimal() or not least <= int(argument) <= most:
            raise ArgumentTypeError(f"{argument} is no whole number from {least} to {most}")
        return int(argument)

    return read


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m hybridrl.report",
        description="Write a page with curves, samples, health, times, configuration and checkpoints of a run; with "
        f"several (at most {MOST_RUNS}), a comparison of them. A directory of verl's rollout files is read too.",
        allow_abbrev=False,
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="the run's trainer.default_local_dir")
    parser.add_argument("--out", type=Path, metavar="FILE", help="default: report.html in the (first) directory")
    parser.add_argument(
        "--samples", type=whole(1, 1_000_000), default=SAMPLES, metavar="N", help=f"in the page (default {SAMPLES})"
    )
    help_text = f"serve the page on this machine only, with all samples within reach (default {PORT}; 0: a free one)"
    parser.add_argument("--serve", type=whole(0, 65535), nargs="?", const=PORT, metavar="PORT", help=help_text)
    parser.add_argument("--live", action="store_true", help="serve, and let the page follow what the run writes")
    options = parser.parse_args(argv)
    if missing := [str(run) for run in options.runs if not run.is_dir()]:
        parser.error(f"no such directory: {', '.join(missing)}")
    if empty := [str(run) for run in options.runs if not is_run(run)]:
        parser.error(f"no run, as there are no metrics, faults, configuration and samples: {', '.join(empty)}")
    if len(options.runs) > MOST_RUNS:
        parser.error(f"{len(options.runs)} runs; at most {MOST_RUNS} can be compared on one page")
    if options.serve is not None or options.live:
        return serve(options.runs, PORT if options.serve is None else options.serve, options.samples, live=options.live)
    out = options.out or options.runs[0] / "report.html"
    try:
        path = write_report(options.runs, out, options.samples)
    except OSError as error:
        print(f"{out} cannot be written: {error.strerror or error}; name another file with --out", file=sys.stderr)
        return 1
    print(f"{path} ({path.stat().st_size / 1e6:.2f} MB)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
