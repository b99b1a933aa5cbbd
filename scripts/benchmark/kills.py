"""Kills runs of the quickstart at random moments, restarts them, and compares each with an unbroken run:

python scripts/benchmark/kills.py [--runs N] [--steps N] [--kills N] [--on-disk] [--seed N] [--out DIR] [key=value ...]

With --on-disk every process is killed, 2 s or more after the last shard of a checkpoint is on disk. Prints a line per
kill and run, and writes all to DIR/kills.json. Exits with status 1 if a run differs, loses more than a step, or leaves
processes behind.
"""

import argparse
import json
import random
import shutil
import sys
import time
from pathlib import Path

from warm_start import TOP, warm_start

from hybridrl.doctor.selftest_resume import ON_DISK, Kill, Selftest, draw_kills


def main() -> int:
    arguments, overrides = parse()
    out: Path = arguments.out.absolute()
    start = ["--config-path", f"{TOP}/recipes/quickstart", "--config-name", "train", *warm_start(0, out)]
    own = [f"reward.custom_reward_function.path={TOP}/recipes/quickstart/reward.py", "data.val_files=null", *overrides]
    shutil.rmtree(out / "whole", ignore_errors=True)
    test = Selftest([*start, *own], critic=False, steps=arguments.steps, directory=out)
    test.run_unbroken()
    results = []
    for number in range(arguments.runs):
        began, directory = time.monotonic(), out / f"killed-{number}"
        shutil.rmtree(directory, ignore_errors=True)
        rng = random.Random(arguments.seed + number)
        if arguments.on_disk:
            moments = sorted(rng.sample(range(1, arguments.steps), arguments.kills))
            kills = [Kill(step, ON_DISK, 2 + rng.uniform(0, test.step_seconds), "everything") for step in moments]
        else:
            kills = draw_kills(rng, arguments.kills, arguments.steps, test.step_seconds)
        differences = test.run_killed(directory, kills)
        results.append({"run": number, "kills": test.kills, "lost": test.lost, "differences": differences})
        result = "; ".join(differences[:3]) or "bit-identical"
        lost = f"complete steps lost by kill: {test.lost}"
        print(f"run {number}: {result}; {lost} ({time.monotonic() - began:.0f} s)", flush=True)
        (out / "kills.json").write_text(json.dumps(results, indent=1))
        if not differences:
            shutil.rmtree(directory)
    same = sum(not result["differences"] for result in results)
    print(f"{same} of {arguments.runs} runs of {arguments.steps} steps ended bit-identical to the unbroken run")
    return 0 if same == arguments.runs else 1


def parse() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description="Kill runs at random moments and compare them with an unbroken one.")
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--kills", type=int, default=1, help="how often each run is killed")
    parser.add_argument("--on-disk", action="store_true", help="kill everything after a checkpoint is on disk")
    parser.add_argument("--seed", type=int, default=0, help="for the moments and processes of the kills")
    parser.add_argument("--out", type=Path, default=TOP / "outputs" / "kills", help="directory of the runs")
    return parser.parse_known_args()


if __name__ == "__main__":
    sys.exit(main())
