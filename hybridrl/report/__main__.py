"""`python -m hybridrl.report RUN [RUN2 ...]`: write the page of a run, or serve it while the run is under way."""

import argparse
import sys
from pathlib import Path

from hybridrl.report.page import MOST_RUNS, write_report
from hybridrl.report.serve import serve

PORT, SAMPLES = 8800, 200


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m hybridrl.report",
        description="Write a page with curves, samples, health, times, configuration and checkpoints of a run; with "
        f"several (at most {MOST_RUNS}), a comparison of them. A directory of verl's rollout files is read too.",
        allow_abbrev=False,
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="the run's trainer.default_local_dir")
    parser.add_argument("--out", type=Path, metavar="FILE", help="default: report.html in the (first) directory")
    parser.add_argument("--samples", type=int, default=SAMPLES, metavar="N", help=f"in the page (default {SAMPLES})")
    help_text = f"serve the page on this machine only, with all samples within reach (default port {PORT})"
    parser.add_argument("--serve", type=int, nargs="?", const=PORT, metavar="PORT", help=help_text)
    parser.add_argument("--live", action="store_true", help="serve, and let the page follow what the run writes")
    options = parser.parse_args(argv)
    if missing := [str(run) for run in options.runs if not run.is_dir()]:
        parser.error(f"no such directory: {', '.join(missing)}")
    if options.serve is not None or options.live:
        return serve(options.runs, options.serve or PORT, options.samples, live=options.live)
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
