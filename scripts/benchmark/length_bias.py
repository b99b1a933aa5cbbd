"""The length that a policy learns that is rewarded for it: `python scripts/benchmark/length_bias.py [--steps N]`

The quickstart's warm start and prompts, 32 of the 256 responses of a step at a time, three seeds of synchronous steps
and of rollouts that are continued over steps. Afterwards the policy samples responses to the validation prompts: their
length is compared. If long responses were lost, continued rollouts would teach shorter ones.
"""

import re
import subprocess
import sys
from pathlib import Path
from statistics import fmean, stdev
from tempfile import TemporaryDirectory

import yaml
from side_by_side import Row, arguments, report
from warm_start import TOP, warm_start

from hybridrl.tracking import read_metrics

VALIDATION = re.compile(r"val-core/.*/mean@\d+")
MODES = ("sync", "colocate_async")
REWARDS = Path(__file__).with_name("constructed_rewards.py")
SETTINGS = [
    "actor_rollout_ref.rollout.max_num_seqs=16",
    "actor_rollout_ref.rollout.val_kwargs.do_sample=true",
    "actor_rollout_ref.rollout.val_kwargs.temperature=1",
    "actor_rollout_ref.rollout.val_kwargs.n=4",
    "actor_rollout_ref.actor.optim.lr=3e-5",  # a higher one reaches the longest response before the end
    "trainer.n_gpus_per_node=2",
    "trainer.test_freq=-1",
    "trainer.save_freq=-1",
    "trainer.logger=[file]",
]


def main() -> None:
    parser = arguments(__doc__, steps=1, seeds=[0, 1])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("overrides", nargs="*", help="key=value of the runs")
    options = parser.parse_args()
    with TemporaryDirectory() as place:
        directory = Path(place)
        start = warm_start(0, directory, options.tiny)
        rows = start[0].partition("=")[2]
        command = [
            *(sys.executable, "-m", "hybridrl.main_ppo", "-m"),
            *("--config-path", f"{TOP}/recipes/quickstart", "--config-name", "train"),
            *start,
            f"data.val_files={Path(rows).with_name('val.jsonl')}",
            f"reward.custom_reward_function.path={REWARDS}",
            "reward.custom_reward_function.name=length",
            *SETTINGS,
            f"trainer.total_training_steps={options.steps}",
            f"trainer.default_local_dir={directory}/runs",
            *options.overrides,
            f"trainer.seed={','.join(map(str, options.seeds))}",
            f"trainer.v1.trainer_mode={','.join(MODES)}",
        ]
        subprocess.run(command, check=True, cwd=TOP)
        lengths: dict[str, list[float]] = {mode: [] for mode in MODES}
        first, continued_shares = [], []
        for file in sorted(directory.glob("runs/*/config.yaml")):
            mode = yaml.safe_load(file.read_text())["trainer"]["v1"]["trainer_mode"]
            lines = [line for _, line in sorted(read_metrics(file.parent).items())]
            scores = [value for line in lines for name, value in line.items() if VALIDATION.fullmatch(name)]
            first.append(100 * scores[0])
            lengths[mode].append(100 * scores[-1])
            continued_shares += [line["partial/continued_share"] for line in lines if "partial/continued_share" in line]
    sync, continued = lengths["sync"], lengths["colocate_async"]
    error = ((stdev(sync) ** 2 + stdev(continued) ** 2) / len(options.seeds)) ** 0.5
    what = f"characters of a response after {options.steps} steps, {fmean(first):.1f} before"
    what += f", {fmean(continued_shares):.0%} continued"
    of_continued, of_sync = (", ".join(f"{length:.1f}" for length in some) for some in (continued, sync))
    difference = abs(fmean(continued) - fmean(sync)) / error
    what += ": difference over its standard error"
    report([Row(what, of_continued, of_sync, difference, "at most 2")], options.json)


if __name__ == "__main__":
    main()
