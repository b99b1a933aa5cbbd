"""The quickstart's data and warm start, for benchmarks that train from it."""

import subprocess
import sys
from pathlib import Path

TOP = Path(__file__).absolute().parents[2]


def python(arguments: list[str], output: object = None) -> bool:
    """Run Python in the repository's directory. Returns whether it succeeded."""
    return subprocess.run([sys.executable, *arguments], cwd=TOP, stdout=output, stderr=output).returncode == 0


def warm_start(seed: int, out: Path) -> list[str]:
    """Return overrides with data and warm start of this seed: those of quickstart.sh if they exist, else new ones."""
    kept = TOP / "outputs" / "quickstart"
    key = kept / "warmup" / "key"
    same_seed = key.is_file() and key.read_text().rstrip().endswith(f" seed {seed}")
    place = kept if same_seed else out / f"warm-start-{seed}"
    model = place / "warmup" / "global_step_450" / "actor" / "huggingface"
    if not model.is_dir() and not make_warm_start(seed, place):
        sys.exit("the warm start failed")
    return [f"data.train_files={place}/data/train.jsonl", f"actor_rollout_ref.model.path={model}"]


def make_warm_start(seed: int, place: Path) -> bool:
    """Make the quickstart's data and warm start in another directory. Returns whether it succeeded."""
    done = python(["recipes/quickstart/make_data.py", "--out", f"{place}/data", "--seed", str(seed)])
    command = ["-m", "hybridrl.main_sft", "--config-path", "recipes/quickstart", "--config-name", "warmup"]
    files = [f"data.train_files={place}/data/warmup.jsonl", f"model.path={place}/data/model"]
    return done and python([*command, *files, f"trainer.seed={seed}", f"trainer.default_local_dir={place}/warmup"])
