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

# Runs in a separate process, as the imports of this script would be counted as the driver's.
PARTS = """
import contextlib, functools, sys, time
began = float(sys.argv.pop(1))
from hybridrl import main_ppo
def report(part):
    print(f"PART {part} {time.time() - began:.2f}", flush=True)
def report_after(owner, name, part):
    plain = getattr(owner, name)
    @functools.wraps(plain)
    def wrapped(*args, **kwargs):
        result = plain(*args, **kwargs)
        report(part)
        return result
    setattr(owner, name, wrapped)
fork_server = main_ppo.fork_server
@contextlib.contextmanager
def reported(*args, **kwargs):
    report("configuration")
    with fork_server(*args, **kwargs) as forks:
        from hybridrl.core import hybrid_engine
        from hybridrl.doctor import start
        from hybridrl.runs import ppo, setup
        from hybridrl.core.trainer import RLTask
        report("imports of the driver")
        # Each function is replaced in the module that calls it.
        report_after(start, "check_run_start", "checks")
        report_after(ppo, "prepare", "data and reward")
        report_after(setup, "start_session", "Ray")
        report_after(ppo, "start_train_workers", "actors requested")
        report_after(ppo, "start_devices", "engines and trainers")
        report_after(hybrid_engine.HybridEngine, "to_rollout", "first weight sync")
        report_after(RLTask, "train_step", "first step")
        yield forks
main_ppo.fork_server = reported
sys.exit(main_ppo.main(sys.argv[1:]))
"""


def imported(statement: str) -> None:
    subprocess.run([sys.executable, "-c", statement], check=True)


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
        command = [sys.executable, "-c", PARTS, str(time.time()), *start, *more]
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
    statements = {"command": "import hybridrl.main_ppo", "torch, ray": "import torch, ray"}
    seconds = in_turn({name: partial(imported, statement) for name, statement in statements.items()}, options.rounds)
    ours, libraries = seconds["command"], seconds["torch, ray"]
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
