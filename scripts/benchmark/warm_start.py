"""The quickstart's data and warm start, for benchmarks that train from it."""

import subprocess
import sys
from pathlib import Path

TOP = Path(__file__).absolute().parents[2]


def python(arguments: list[str], output: object = None) -> bool:
    """Run Python in the checkout. Returns whether it ended with status 0."""
    return subprocess.run([sys.executable, *arguments], cwd=TOP, stdout=output, stderr=output).returncode == 0


def warm_start(seed: int, out: Path) -> list[str]:
    """Overrides that name data and warm start of this seed: those of quickstart.sh where it has kept them, else own."""
    kept = TOP / "outputs" / "quickstart"
    key = kept / "warmup" / "key"
    theirs = key.is_file() and key.read_text().rstrip().endswith(f" seed {seed}")
    place = kept if theirs else out / f"warm-start-{seed}"
    model = place / "warmup" / "global_step_450" / "actor" / "huggingface"
    if not model.is_dir() and not make_warm_start(seed, place):
        sys.exit("the warm start failed")
    return [f"data.train_files={place}/data/train.jsonl", f"actor_rollout_ref.model.path={model}"]


def make_warm_start(seed: int, place: Path) -> bool:
    """The quickstart's data and warm start, in another place."""
    made = python(["recipes/quickstart/make_data.py", "--out", f"{place}/data", "--seed", str(seed)])
    command = ["-m", "hybridrl.main_sft", "--config-path", "recipes/quickstart", "--config-name", "warmup"]
    files = [f"data.train_files={place}/data/warmup.jsonl", f"model.path={place}/data/model"]
    return made and python([*command, *files, f"trainer.seed={seed}", f"trainer.default_local_dir={place}/warmup"])
