"""From the command to the first sample, part by part: `python scripts/benchmark/start_up.py [key=value ...]`

First what it costs to import the front door, beside `import torch, ray`, each in a process of its own; then a run of
the quickstart with one step, on as many slots as it takes by itself, whose own clock tells the parts.
"""

import os
import re
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from side_by_side import Row, arguments, in_turn, report, told
from warm_start import TOP, warm_start

# Run by itself, as what this script imports would be counted as the driver's.
PARTS = """
import functools, sys, time
began = float(sys.argv.pop(1))
from hybridrl import main_ppo, hybrid_engine
from hybridrl.runs import ppo
from hybridrl.cluster import session
from hybridrl.trainer import Trainer
def tell(name):
    print(f"PART {name} {time.time() - began:.2f}", flush=True)
def after(owner, name, what):
    plain = getattr(owner, name)
    @functools.wraps(plain)
    def told(*args, **more):
        result = plain(*args, **more)
        tell(what)
        return result
    setattr(owner, name, told)
tell("imports of the driver")
after(ppo, "prepare", "data and reward")
after(ppo, "start_session", "Ray")
after(ppo, "start_train_workers", "actors asked for")
after(ppo, "start_devices", "engines and trainers")
after(hybrid_engine.HybridEngine, "to_rollout", "first hand-over")
after(Trainer, "train_step", "first step")
sys.exit(main_ppo.main(sys.argv[1:]))
"""


def imported(statement: str) -> None:
    subprocess.run([sys.executable, "-c", statement], check=True)


def run_parts(overrides: list[str]) -> list[tuple[str, float]]:
    """What was done when, in seconds from the command."""
    with TemporaryDirectory() as place:
        start = ["--config-path", f"{TOP}/recipes/quickstart", "--config-name", "train"]
        more = [
            *warm_start(0, Path(place)),
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
    found = re.findall(r"PART (.+) ([\d.]+)", output.stdout)
    if output.returncode or not found:
        sys.exit(output.stdout[-2000:] + output.stderr[-2000:])
    return [(name, float(seconds)) for name, seconds in found]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("overrides", nargs="*", help="key=value of the run")
    given = parser.parse_args()
    statements = {"front door": "import hybridrl.main_ppo", "torch, ray": "import torch, ray"}
    seconds = in_turn({name: partial(imported, statement) for name, statement in statements.items()})
    here, beside = seconds["front door"], seconds["torch, ray"]
    rows = [
        Row(
            "import of hybridrl.main_ppo",
            told(here),
            f"import torch, ray: {told(beside)}",
            here.median / beside.median,
            "at most 1.3 (aim 1.1)",
        )
    ]
    before = 0.0
    for name, at in run_parts(given.overrides):
        rows.append(Row(f"start-up: {name}", f"{at - before:.1f} s", f"{at:.1f} s since the command"))
        before = at
    report(rows, given.json)


if __name__ == "__main__":
    main()
