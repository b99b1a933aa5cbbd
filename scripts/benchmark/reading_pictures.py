"""Draw docs/reading.png, what good and bad runs look like: `python scripts/benchmark/reading_pictures.py [--runs DIR]`

Trains the quickstart's task four times, each about a minute on two cores: as it is, with a learning rate that is far
too high, with a reward that pays for length, and with one that is the same for every response.
"""

import sys
import tempfile
from pathlib import Path

from matplotlib import rc_context
from matplotlib.figure import Figure
from side_by_side import Arguments
from warm_start import TOP, python, warm_start

from hybridrl.tracking.report import COLORS, STYLE, read_metrics

SEED = 0
RATE, REWARD = "actor_rollout_ref.actor.optim.lr", "reward.custom_reward_function"
REWARDS = Path(__file__).with_name("constructed_rewards.py")
RUNS = {
    "learns": [],
    "learning rate x 100": [f"{RATE}=1e-2"],
    "paid for length": [f"{REWARD}.path={REWARDS}", f"{REWARD}.name=paid_for_length"],
    "same reward for all": [f"{REWARD}.path={REWARDS}", f"{REWARD}.name=same_for_all"],
}
PANELS = {
    "critic/score/mean": "training score",
    "val-core/quickstart/addition/acc/mean@1": "validation accuracy",
    "response_length/mean": "response length, tokens",
    "response_length/clip_ratio": "share cut off",
    "actor/entropy": "entropy, nats",
    "actor/grad_norm": "gradient norm",
    "actor/ppo_kl": "KL to the old policy",
    "critic/zero_signal_share": "prompts without a signal",
}


def train(name: str, start: list[str], steps: int, directory: Path) -> Path:
    """Train one run from the warm start of the quickstart, unless it is there already. Returns its directory."""
    run = directory / name.replace(" ", "-")
    if not (run / "curves.png").is_file():
        words = ["-m", "hybridrl.main_ppo", "--config-path", "recipes/quickstart", "--config-name", "train", *start]
        keys = {"default_local_dir": run, "total_training_steps": steps, "seed": SEED, "logger": "[console]"}
        words += [f"trainer.{key}={value}" for key, value in keys.items()]
        if not python([*words, *RUNS[name]]):
            sys.exit(f"the run {name} failed")
    return run


def draw(runs: dict[str, Path], path: Path) -> None:
    """Draw one panel per metric, with a curve per run."""
    metrics = {name: read_metrics(run) for name, run in runs.items()}
    with rc_context(STYLE | {"font.size": 8, "axes.titlesize": 9}):
        figure = Figure(figsize=(11, 5), layout="constrained")
        grid = figure.subplots(2, len(PANELS) // 2, sharex=True).flatten()
        for axes, (metric, title) in zip(grid, PANELS.items(), strict=True):
            axes.set_title(title)
            for color, (name, steps) in zip(COLORS, metrics.items(), strict=False):
                series = {step: values[metric] for step, values in steps.items() if metric in values}
                axes.plot(list(series), list(series.values()), color=color, label=name, linewidth=1.5)
        figure.legend(*grid[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(runs), frameon=False)
        figure.savefig(path, dpi=130, facecolor="white")


def main() -> None:
    parser = Arguments(__doc__, steps=1, only=["paid for length"])
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--only", nargs="+", choices=RUNS, default=list(RUNS), metavar="NAME", help="runs")
    parser.add_argument("--runs", type=Path, help="where the runs are kept; default: nowhere")
    parser.add_argument("--out", type=Path, default=TOP / "docs" / "reading.png")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        directory = (options.runs or Path(place)).absolute()
        directory.mkdir(parents=True, exist_ok=True)
        start = warm_start(SEED, directory, options.tiny)
        start.append(f"data.val_files={Path(start[0].partition('=')[2]).with_name('val.jsonl')}")
        draw({name: train(name, start, options.steps, directory) for name in options.only}, options.out)


if __name__ == "__main__":
    main()
