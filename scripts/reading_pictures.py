"""Draw docs/reading.png, what good and bad runs look like: `python scripts/reading_pictures.py [--runs DIR]`

Trains the quickstart's task four times, each about a minute on two cores: as it is, with a learning rate that is far
too high, with a reward that pays for length, and with one that is the same for every response.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from matplotlib import rc_context
from matplotlib.figure import Figure

from hybridrl.tracking.report import COLORS, STYLE, read_metrics

TOP = Path(__file__).parents[1]
STEPS, SEED = 25, 0
RATE, REWARD = "actor_rollout_ref.actor.optim.lr", "reward.custom_reward_function"
LENGTH = """
def compute_score(solution_str, ground_truth):
    return {"score": len(solution_str) / 100, "acc": float(solution_str.rpartition("#### ")[2] == ground_truth)}
"""
SAME = """
def compute_score(solution_str, ground_truth):
    return {"score": 1.0, "acc": float(solution_str.rpartition("#### ")[2] == ground_truth)}
"""
RUNS = {
    "learns": [],
    "learning rate x 100": [f"{RATE}=1e-2"],
    "paid for length": [f"{REWARD}.path={{}}/length.py", f"{REWARD}.name=compute_score"],
    "same reward for all": [f"{REWARD}.path={{}}/same.py", f"{REWARD}.name=compute_score"],
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


def train(name: str, overrides: list[str], directory: Path) -> Path:
    """Train one run from the warm start of the quickstart, unless it is there already. Returns its directory."""
    run = directory / name.replace(" ", "-")
    if not (run / "curves.png").is_file():
        words = [
            sys.executable,
            "-m",
            "hybridrl.main_ppo",
            "--config-path",
            "recipes/quickstart",
            "--config-name",
            "train",
        ]
        keys = {"default_local_dir": run, "total_training_steps": STEPS, "seed": SEED, "logger": "[console]"}
        places = [override.format(directory) for override in overrides]
        subprocess.run(
            [*words, *(f"trainer.{key}={value}" for key, value in keys.items()), *places], cwd=TOP, check=True
        )
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, help="where the runs are kept; default: nowhere")
    options = parser.parse_args()
    if not (TOP / "outputs" / "quickstart" / "warmup").is_dir():
        sys.exit("the warm start is missing: run bash scripts/quickstart.sh first")
    with tempfile.TemporaryDirectory() as place:
        directory = (options.runs or Path(place)).absolute()
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "length.py").write_text(LENGTH)
        (directory / "same.py").write_text(SAME)
        runs = {name: train(name, overrides, directory) for name, overrides in RUNS.items()}
        draw(runs, TOP / "docs" / "reading.png")


if __name__ == "__main__":
    main()
