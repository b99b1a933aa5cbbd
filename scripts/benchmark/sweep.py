"""Seconds of four runs as one sweep and as four commands: `python scripts/benchmark/sweep.py [--steps N]`

On the quickstart's task and its default number of devices, two learning rates times two seeds; two rounds in turn.
"""

import subprocess
import sys
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

from side_by_side import Row, arguments, formatted, in_turn, report
from warm_start import TOP, warm_start

RATE, SEED = "actor_rollout_ref.actor.optim.lr", "trainer.seed"


def main() -> None:
    parser = arguments(__doc__, steps=1, rates=["1e-4"], rounds=1)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rates", nargs="+", default=["1e-4", "5e-5"])
    parser.add_argument("--seeds", nargs="+", default=["0", "1"])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("overrides", nargs="*", help="key=value of the runs")
    options = parser.parse_args()
    with TemporaryDirectory() as place:
        command = [
            *(sys.executable, "-m", "hybridrl.main_ppo"),
            *("--config-path", f"{TOP}/recipes/quickstart", "--config-name", "train"),
            *warm_start(0, Path(place), options.tiny),
            f"reward.custom_reward_function.path={TOP}/recipes/quickstart/reward.py",
            "data.val_files=null",
            f"trainer.total_training_steps={options.steps}",
            *options.overrides,
        ]

        def run(*more: str) -> None:
            subprocess.run([*command, *more], check=True, cwd=TOP, stdout=subprocess.DEVNULL)

        def commands() -> None:
            for rate, seed in product(options.rates, options.seeds):
                run(f"{RATE}={rate}", f"{SEED}={seed}", f"trainer.default_local_dir={place}/alone-{rate}-{seed}")

        def sweep() -> None:
            swept = f"{RATE}={','.join(options.rates)}", f"{SEED}={','.join(options.seeds)}"
            run("-m", *swept, f"trainer.default_local_dir={place}/all")

        seconds = in_turn({"sweep": sweep, "commands": commands}, options.rounds, warm_up=0)
        ratio = seconds["sweep"].least / seconds["commands"].least
        count = len(options.rates) * len(options.seeds)
        what = f"{count} runs of {options.steps} steps: one sweep, {count} commands"
        ours, other = formatted(seconds["sweep"]), formatted(seconds["commands"])
        report([Row(what, ours, other, ratio, "at most 0.8 (aim 0.5)")], options.json)


if __name__ == "__main__":
    main()
