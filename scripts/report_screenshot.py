"""The picture of a run's page for README and docs: `python scripts/report_screenshot.py RUN --out docs/report.png`

Needs Chromium (`apt-get install chromium`); `--dark` and `--width 500` show the page in the dark and on a phone.
"""

import argparse
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from hybridrl.report import write_report

BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, nargs="+", metavar="RUN")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    parser.add_argument("--width", type=int, default=1320)
    parser.add_argument("--height", type=int, default=1560)
    parser.add_argument("--dark", action="store_true")
    options = parser.parse_args()
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        print("there is no Chromium on PATH; apt-get install chromium", file=sys.stderr)
        return 1
    with TemporaryDirectory() as place:
        page = write_report(options.run, Path(place, "report.html"))
        command = [
            *(browser, "--headless=new", "--no-sandbox", "--hide-scrollbars", "--virtual-time-budget=4000"),
            *(f"--window-size={options.width},{options.height}", f"--user-data-dir={place}/profile"),
            *(["--blink-settings=preferredColorScheme=0"] if options.dark else []),
            *(f"--screenshot={options.out.absolute()}", page.as_uri()),
        ]
        subprocess.run(command, check=True, capture_output=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
