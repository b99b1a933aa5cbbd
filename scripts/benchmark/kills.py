"""Kills runs of the quickstarts at random moments, restarts them, and compares each with an unbroken run:

python scripts/benchmark/kills.py [--mode MODE ...] [--runs N] [--steps N] [--kills N] [--on-disk] [--seed N]
    [--out DIR] [key=value ...]

Where samples depend on time (separate_async, agents), runs cannot be compared bit for bit: every episode must have been
trained on exactly once. With --on-disk every process is killed, 2 s or more after the last shard of a checkpoint is on
disk. Prints a line per kill and run, and writes all to DIR/kills.json. Exits with status 1 if a run differs, loses more
than a step, or leaves processes behind.
"""

import argparse
import json
import random
import shutil
import sys
import time
from collections import Counter
from pathlib import Path

from side_by_side import Arguments
from warm_start import TOP, python, warm_start

from hybridrl.doctor.selftest_resume import ON_DISK, Kill, Selftest, draw_kills
from hybridrl.tracking.records import read_records, record_files

MODES = {
    "synchronous": [],
    "critic": ["algorithm.adv_estimator=gae"],
    "lora": ["actor_rollout_ref.model.lora_rank=8"],
    "colocate_async": [
        "trainer.v1.trainer_mode=colocate_async",
        "trainer.deterministic=true",
        "actor_rollout_ref.rollout.max_num_seqs=64",
    ],
    "separate_async": [
        "trainer.v1.trainer_mode=separate_async",
        "trainer.n_gpus_per_node=1",
        "actor_rollout_ref.rollout.n_gpus_per_node=1",
    ],
    "agents": [],
}
DEPENDS_ON_TIME = ("separate_async", "agents")
NO_VALIDATION = "data.val_files=null"


class EachOnce(Selftest):
    """Runs whose episodes must have been trained on exactly once, as many as those of the unbroken run."""

    def differences(self, directory: Path) -> list[str]:
        counts, expected = (self.trained(each) for each in (directory, self.unbroken.directory))
        lines = [f"{episode} was trained on {count} times" for episode, count in counts.items() if count > 1]
        if len(counts) != len(expected):
            lines.append(f"{len(counts)} episodes were trained on, not {len(expected)}")
        return lines

    def trained(self, directory: Path) -> Counter[tuple[int, int]]:
        records = [record for file in record_files(directory / "samples").values() for record in read_records(file)]
        episodes = [record.episode for record in records if record.episode["trained"]]
        return Counter((episode["position"], episode["sample"]) for episode in episodes)


def main() -> int:
    arguments, overrides = parse()
    out: Path = arguments.out.absolute()
    results = [result for mode in arguments.mode for result in kill_runs(mode, arguments, overrides, out / mode)]
    (out / "kills.json").write_text(json.dumps(results, indent=1))
    same = sum(not result["differences"] for result in results)
    print(f"{same} of {len(results)} runs of {arguments.steps} steps ended as the unbroken one of their mode")
    return 0 if same == len(results) else 1


def kill_runs(mode: str, arguments: argparse.Namespace, overrides: list[str], out: Path) -> list[dict[str, object]]:
    """Kill the runs of a mode. Returns the kills, lost steps and differences of each."""
    make = EachOnce if mode in DEPENDS_ON_TIME else Selftest
    shutil.rmtree(out / "whole", ignore_errors=True)
    command = [*start_of(mode, out, arguments.tiny), *MODES[mode], *overrides]
    test = make(command, mode == "critic", arguments.steps, out)
    test.run_unbroken()
    results = []
    for number in range(arguments.runs):
        began, directory = time.monotonic(), out / f"killed-{number}"
        shutil.rmtree(directory, ignore_errors=True)
        kills = kills_of(random.Random(f"{mode} {arguments.seed + number}"), arguments, test.step_seconds)
        differences = test.run_killed(directory, kills)
        results.append({"mode": mode, "kills": test.kills, "lost": test.lost, "differences": differences})
        result = "; ".join(differences[:3]) or "as the unbroken one"
        lost = f"complete steps lost by kill: {test.lost}"
        print(f"{mode}, run {number}: {result}; {lost} ({time.monotonic() - began:.0f} s)", flush=True)
        if not differences:
            shutil.rmtree(directory)
    return results


def start_of(mode: str, out: Path, tiny: bool) -> list[str]:
    """Return the command line of a quickstart, made where it is missing."""
    if mode == "agents":
        data = out.parent / "games"
        if not data.is_dir() and not python(["recipes/quickstart/make_games.py", "--out", str(data)]):
            sys.exit("the games could not be made")
        start = ["--config-path", f"{TOP}/recipes/quickstart", "--config-name", "agent"]
        files = [f"data.train_files={data}/train.jsonl", f"actor_rollout_ref.model.path={data}/model"]
        return [*start, *files, NO_VALIDATION]
    start = ["--config-path", f"{TOP}/recipes/quickstart", "--config-name", "train", *warm_start(0, out.parent, tiny)]
    return [*start, f"reward.custom_reward_function.path={TOP}/recipes/quickstart/reward.py", NO_VALIDATION]


def kills_of(rng: random.Random, arguments: argparse.Namespace, step_seconds: float) -> list[Kill]:
    if not arguments.on_disk:
        return draw_kills(rng, arguments.kills, arguments.steps, step_seconds)
    moments = sorted(rng.sample(range(1, arguments.steps), arguments.kills))
    return [Kill(step, ON_DISK, 2 + rng.uniform(0, step_seconds), "everything") for step in moments]


def parse() -> tuple[argparse.Namespace, list[str]]:
    parser = Arguments(__doc__, runs=1, steps=2)
    parser.add_argument("--mode", nargs="+", choices=MODES, default=["synchronous"])
    parser.add_argument("--runs", type=int, default=20, help="per mode")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--kills", type=int, default=1, help="how often each run is killed")
    parser.add_argument("--on-disk", action="store_true", help="kill everything after a checkpoint is on disk")
    parser.add_argument("--seed", type=int, default=0, help="for the moments and processes of the kills")
    parser.add_argument("--out", type=Path, default=TOP / "outputs" / "kills", help="directory of the runs")
    return parser.parse_known_args()


if __name__ == "__main__":
    sys.exit(main())
