"""Seconds from the command to the first step, by part: `python scripts/benchmark/start_up.py [key=value ...]`

First the import of the command's module, compared with `import torch, ray`, each in a separate process; then a run of
the quickstart with one step, on its default number of devices, which reports the end of each part.
"""

import os
import re
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from side_by_side import ROUNDS, Row, arguments, formatted, in_turn, report
from warm_start import TOP, warm_start


def imported(modules: str) -> None:
    subprocess.run([sys.executable, "-c", f"import {modules}"], check=True)


def run_parts(overrides: list[str], tiny: bool) -> list[tuple[str, float]]:
    """Return the parts and when each was done, in seconds since the command."""
    with TemporaryDirectory() as place:
        start = ["--config-path", f"{TOP}/recipes/quickstart", "--config-name", "train"]
        more = [
            *warm_start(0, Path(place), tiny),
            f"reward.custom_reward_function.path={TOP}/recipes/quickstart/reward.py",
            "data.val_files=null",
            "trainer.total_training_steps=1",
            "trainer.save_freq=-1",
            f"trainer.default_local_dir={place}/run",
            *overrides,
        ]
        command = [sys.executable, f"{TOP}/scripts/benchmark/timed_start.py", str(time.time()), *start, *more]
        output = subprocess.run(
            command, capture_output=True, text=True, cwd=place, env=os.environ | {"PYTHONPATH": str(TOP)}
        )
    parts = re.findall(r"PART (.+) ([\d.]+)", output.stdout)
    if output.returncode or not parts:
        sys.exit(output.stdout[-2000:] + output.stderr[-2000:])
    return [(name, float(seconds)) for name, seconds in parts]


def main() -> None:
    parser = arguments(__doc__, rounds=1)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="of the imports")
    parser.add_argument("overrides", nargs="*", help="key=value of the run")
    options = parser.parse_args()
    imports = {modules: partial(imported, modules) for modules in ("hybridrl.main_ppo", "torch, ray")}
    ours, libraries = in_turn(imports, options.rounds).values()
    rows = [
        Row(
            "import of hybridrl.main_ppo",
            formatted(ours),
            f"import torch, ray: {formatted(libraries)}",
            ours.median / libraries.median,
            "at most 1.3 (aim 1.1)",
        )
    ]
    before = 0.0
    for name, at in run_parts(options.overrides, options.tiny):
        rows.append(Row(name, f"{at - before:.1f} s", f"at {at:.1f} s"))
        before = at
    report(rows, options.json)


if __name__ == "__main__":
    main()
