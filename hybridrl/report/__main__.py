"""`python -m hybridrl.report RUN [RUN2 ...]`: write the page of a run, or serve it while the run is under way."""

import argparse
import sys
from argparse import ArgumentTypeError
from collections.abc import Callable, Sequence
from pathlib import Path

from hybridrl.config import ConfigError
from hybridrl.report.contents import is_run
from hybridrl.report.page import MOST_RUNS, write_report
from hybridrl.report.serve import serve
from hybridrl.tracking.console import print_text

PORT, SAMPLES = 8800, 200
EXIT_FAILED, EXIT_REJECTED = 1, 2


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
        epilog="exit status: 0 the page is written or was served, 1 it could not be written, 2 the command is rejected",
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
    out = options.out or options.runs[0] / "report.html"
    serves = options.serve is not None or options.live
    try:
        check(options.runs, None if serves else out)
        if serves:
            port = PORT if options.serve is None else options.serve
            return serve(options.runs, port, options.samples, live=options.live)
    except ConfigError as error:
        print_text(f"error: {error}", error=True)
        return EXIT_REJECTED
    try:
        path = write_report(options.runs, out, options.samples)
    except OSError as error:
        cause = f"{out} cannot be written: {error.strerror or error}"
        print_text(f"error: {cause}; make room, or name another file with --out", error=True)
        return EXIT_FAILED
    print(f"{path} ({path.stat().st_size / 1e6:.2f} MB)")
    return 0


def check(runs: Sequence[Path], out: Path | None) -> None:
    """Raise ConfigError if a page of these runs cannot be made, or not be written to `out`."""
    if missing := [str(run) for run in runs if not run.is_dir()]:
        raise ConfigError(f"{', '.join(missing)}: there is no such directory", fix="name a run's directory")
    if empty := [str(run) for run in runs if not is_run(run)]:
        cause = f"{', '.join(empty)}: there are no metrics, faults, configuration and samples"
        raise ConfigError(cause, fix="name a run's directory")
    if len(runs) > MOST_RUNS:
        fix = f"name at most {MOST_RUNS}"
        raise ConfigError(f"{len(runs)} runs are more than a page can compare", fix=fix)
    if out is None:
        return
    if out.exists() and not out.is_file():
        kind = "a directory" if out.is_dir() else "no regular file"
        raise ConfigError(f"--out={out} is {kind}", fix="name a file")
    if not out.absolute().parent.is_dir():
        raise ConfigError(f"--out={out}: there is no directory {out.parent}", fix="make it, or name another file")


if __name__ == "__main__":
    sys.exit(main())
