"""Trains the quickstart once per algorithm, draws docs/algorithms.png and writes the table in docs/algorithms.md:

python scripts/benchmark/algorithms.py [--seed N] [--steps N] [--only NAME ...] [--out DIR] [--docs DIR]

A run that is complete in --out with the same overrides, seed and steps is not repeated. Picture and table show every
such run. Exits with status 1 if a run failed.
"""

import argparse
import json
import os
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from side_by_side import Arguments
from warm_start import TOP, python, warm_start

from hybridrl.tracking.report import COLORS, LAST_STEPS, MUTED, STYLE, change_of

ACTOR, LOSS = "actor_rollout_ref.actor", "actor_rollout_ref.actor.policy_loss"
CORRECTION, OVERLONG = "algorithm.rollout_correction", "reward.reward_kwargs.overlong_buffer_cfg"
GOAL, COLUMNS = 0.8, 5
BEGIN, END = "<!-- curves -->", "<!-- /curves -->"

# Differences from recipes/quickstart/train.yaml, which has the estimator grpo and the loss vanilla.
ENTRIES = {
    "gae": "algorithm.adv_estimator=gae critic.optim.lr=1.0e-3",
    "grpo": "algorithm.adv_estimator=grpo",
    "grpo_no_std": f"algorithm.norm_adv_by_std_in_grpo=false {ACTOR}.loss_agg_mode=seq-mean-token-sum-norm",
    # As many responses as elsewhere, but in pairs: of eight, the best is rarely better than the second best.
    "grpo_passk": "algorithm.adv_estimator=grpo_passk actor_rollout_ref.rollout.n=2 data.train_batch_size=128 "
    f"{ACTOR}.ppo_mini_batch_size=32",
    "rloo": "algorithm.adv_estimator=rloo",
    "reinforce_plus_plus": "algorithm.adv_estimator=reinforce_plus_plus",
    "reinforce_plus_plus_baseline": "algorithm.adv_estimator=reinforce_plus_plus_baseline",
    "remax": "algorithm.adv_estimator=remax",
    "opo": "algorithm.adv_estimator=opo",
    "gpg": f"algorithm.adv_estimator=gpg {LOSS}.loss_mode=gpg",
    "optimal_token_baseline": "algorithm.adv_estimator=optimal_token_baseline",
    "gdpo": "algorithm.adv_estimator=gdpo algorithm.gdpo_reward_keys=[acc,worked]",
    # A hundred times the paper's clipping range, for responses a hundred times shorter.
    "gspo": f"{LOSS}.loss_mode=gspo {ACTOR}.clip_ratio_low=0.03 {ACTOR}.clip_ratio_high=0.04",
    "cispo": f"{LOSS}.loss_mode=cispo {ACTOR}.clip_ratio_low=1.0 {ACTOR}.clip_ratio_high=0.2",
    "sapo": f"{LOSS}.loss_mode=sapo",
    "geo_mean": f"{LOSS}.loss_mode=geo_mean {ACTOR}.clip_ratio=0.4",
    # A share of 0.002 is three tokens of a mini-batch here.
    "clip_cov": f"{LOSS}.loss_mode=clip_cov {LOSS}.clip_cov_ratio=0.002 {ACTOR}.clip_ratio=1.0",
    "kl_cov": f"{LOSS}.loss_mode=kl_cov {LOSS}.kl_cov_ratio=0.002 {LOSS}.ppo_kl_coef=1.0",
    "dppo_tv": f"{LOSS}.loss_mode=dppo_tv {ACTOR}.clip_ratio=0.15 {ACTOR}.clip_ratio_c=20",
    "dppo_kl": f"{LOSS}.loss_mode=dppo_kl {ACTOR}.clip_ratio=0.05 {ACTOR}.clip_ratio_c=20",
    "dro": f"{LOSS}.loss_mode=dro {LOSS}.dro_beta=0.1",
    "kl_loss": f"{ACTOR}.use_kl_loss=true {ACTOR}.kl_loss_type=low_var_kl {ACTOR}.kl_loss_coef=0.01",
    "kl_full": f"{ACTOR}.use_kl_loss=true {ACTOR}.kl_loss_type=full {ACTOR}.kl_loss_coef=0.01",
    "kl_in_reward": "algorithm.use_kl_in_reward=true algorithm.kl_ctrl.type=adaptive algorithm.kl_ctrl.kl_coef=0.01 "
    "algorithm.kl_ctrl.target_kl=0.05 algorithm.kl_ctrl.horizon=2000",
    "dapo": f"algorithm.filter_groups.enable=true algorithm.filter_groups.metric=acc {ACTOR}.clip_ratio_high=0.28 "
    f"{ACTOR}.loss_agg_mode=token-mean reward.reward_manager.name=dapo {OVERLONG}.enable=true {OVERLONG}.len=16",
    "correction": f"{CORRECTION}.rollout_is=token",
    "bypass_reinforce": f"{CORRECTION}.bypass_mode=true {CORRECTION}.loss_type=reinforce {CORRECTION}.rollout_is=token",
}


@dataclass(frozen=True)
class Curve:
    """A run: the share of correct responses at each step."""

    rewards: list[float]

    @property
    def last(self) -> float:
        return change_of("critic/score/mean", self.rewards).after

    @property
    def steps_to_goal(self) -> int | None:
        return next((step for step, reward in enumerate(self.rewards, 1) if reward >= GOAL), None)


@dataclass(frozen=True)
class Run:
    """The run of one entry in `directory`; `wanted` is written there once it is complete."""

    name: str
    seed: int
    steps: int
    directory: Path

    @property
    def wanted(self) -> dict[str, object]:
        return {"overrides": ENTRIES[self.name].split(), "seed": self.seed, "steps": self.steps}

    @property
    def complete(self) -> bool:
        marker = self.directory / "complete.json"
        return marker.is_file() and json.loads(marker.read_text()) == self.wanted

    def train(self, start: list[str]) -> bool:
        """Run it from scratch with the overrides that name data and warm start. Returns whether it succeeded."""
        shutil.rmtree(self.directory, ignore_errors=True)
        self.directory.mkdir(parents=True)
        settings = {
            "total_training_steps": self.steps,
            "seed": self.seed,
            "default_local_dir": self.directory,
            "rollout_data_dir": self.directory / "rollouts",
            "val_before_train": "false",
            "test_freq": -1,
            "save_freq": -1,
            "logger": "[console]",
        }
        overrides = [f"trainer.{key}={value}" for key, value in settings.items()]
        # The recipe's rate decays to its end: constant, runs of any number of steps compare.
        overrides.append("actor_rollout_ref.actor.optim.lr_scheduler_type=constant")
        command = ["-m", "hybridrl.main_ppo", "--config-path", "recipes/quickstart", "--config-name", "train"]
        with (self.directory / "output.log").open("w") as log:
            done = python([*command, "data.val_files=null", *start, *overrides, *ENTRIES[self.name].split()], log)
        if done:
            (self.directory / "complete.json").write_text(json.dumps(self.wanted))
        return done

    def curve(self) -> Curve:
        """Return the curve of all sampled responses, with those that dynamic sampling drops, and without penalties."""
        files = [self.directory / "rollouts" / f"{step}.jsonl" for step in range(1, self.steps + 1)]
        rewards = [fmean(json.loads(line)["acc"] for line in file.read_text().splitlines()) for file in files]
        return Curve(rewards)


def draw(curves: dict[str, Curve], path: Path) -> None:
    """Draw one panel per entry, with GRPO's curve in grey behind it."""
    rows = -(-len(curves) // COLUMNS)
    with rc_context(STYLE | {"axes.titlesize": 9, "axes.titleweight": "normal", "font.size": 8}):
        figure = Figure(figsize=(2 * COLUMNS, 1.45 * rows + 0.3), layout="constrained")
        grid = figure.subplots(rows, COLUMNS, squeeze=False, sharex=True, sharey=True).flatten()
        for number, (axes, (name, curve)) in enumerate(zip(grid, curves.items(), strict=False)):
            draw_panel(axes, name, curve, curves.get("grpo"))
            axes.tick_params(labelbottom=number + COLUMNS >= len(curves))
        for axes in grid[len(curves) :]:
            axes.set_visible(False)
        figure.supxlabel("step", color=MUTED, fontsize=9)
        figure.supylabel("share of correct responses", color=MUTED, fontsize=9)
        figure.savefig(path, dpi=160, facecolor="white")


def draw_panel(axes: Axes, name: str, curve: Curve, grpo: Curve | None) -> None:
    axes.set_title(name)
    axes.set(ylim=(0, 1.02), yticks=(0, 0.5, 1))
    axes.axhline(GOAL, color=MUTED, linewidth=0.7, linestyle=":")
    if grpo is not None:
        axes.plot(range(1, len(grpo.rewards) + 1), grpo.rewards, color="#cbd5e1", linewidth=2)
    axes.plot(range(1, len(curve.rewards) + 1), curve.rewards, color=COLORS[0], linewidth=1.5)
    axes.text(0.97, 0.08, f"{curve.last:.2f}", transform=axes.transAxes, ha="right", color=COLORS[0], fontweight="bold")


def table(curves: dict[str, Curve]) -> str:
    rows = [
        f"| name | overrides | mean of the last {LAST_STEPS} | steps to {GOAL} |",
        "|---|---|--:|--:|",
    ]
    for name, curve in curves.items():
        overrides = "<br>".join(f"`{override}`" for override in ENTRIES[name].split())
        rows.append(f"| {name} | {overrides} | {curve.last:.3f} | {curve.steps_to_goal or 'never'} |")
    return "\n".join(rows)


def write_page(page: Path, curves: dict[str, Curve], seed: int, steps: int) -> None:
    """Replace the text between the markers."""
    before, begin, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        sys.exit(f"{page}: there is no {BEGIN} ... {END} to write the table into")
    caption = f"Seed {seed}, {steps} steps, {os.cpu_count()} cores:"
    page.write_text(f"{before}{BEGIN}\n{caption}\n\n{table(curves)}\n{END}{after}", encoding="utf-8")


def parse() -> argparse.Namespace:
    parser = Arguments(__doc__, steps=1, only=["gae"])
    parser.add_argument("--seed", type=int, default=0, help="of the warm start and of every run")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--only", nargs="+", choices=ENTRIES, default=list(ENTRIES), metavar="NAME", help="entries")
    parser.add_argument("--out", type=Path, default=TOP / "outputs" / "algorithms", help="directory of the runs")
    parser.add_argument("--docs", type=Path, default=TOP / "docs", help="directory of algorithms.md and algorithms.png")
    return parser.parse_args()


def main() -> int:
    arguments = parse()
    out: Path = arguments.out.absolute()
    runs = {name: Run(name, arguments.seed, arguments.steps, out / name) for name in ENTRIES}
    start = warm_start(arguments.seed, out, arguments.tiny)
    failed = []
    for run in (runs[name] for name in arguments.only):
        began, kept = time.monotonic(), run.complete
        if kept or run.train(start):
            curve, seconds = run.curve(), "kept" if kept else f"{time.monotonic() - began:.0f} s"
            print(f"{run.name:<30} first {curve.rewards[0]:.3f}  last five {curve.last:.3f}  {seconds}", flush=True)
        else:
            failed.append(run.name)
            print(f"{run.name:<30} failed: {run.directory}/output.log", flush=True)
    curves = {name: run.curve() for name, run in runs.items() if run.complete}
    if curves:
        draw(curves, arguments.docs / "algorithms.png")
        write_page(arguments.docs / "algorithms.md", curves, arguments.seed, arguments.steps)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
