"""The quickstart's data and warm start, for benchmarks that train from it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

TOP = Path(__file__).absolute().parents[2]
TINY = [
    "trainer.n_gpus_per_node=1",
    "data.train_batch_size=4",
    "data.max_response_length=16",
    "data.val_max_samples=4",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "actor_rollout_ref.rollout.n=2",
]


def python(arguments: list[str], output: object = None) -> bool:
    """Run Python in the repository's directory. Returns whether it succeeded."""
    return subprocess.run([sys.executable, *arguments], cwd=TOP, stdout=output, stderr=output).returncode == 0


def warm_start(seed: int, out: Path, tiny: bool = False) -> list[str]:
    """Return overrides with data and warm start of this seed: those of quickstart.sh if they exist, else new ones. A
    tiny run has few short responses and starts from the untrained model."""
    kept = TOP / "outputs" / "quickstart"
    key = kept / "warmup" / "key"
    same_seed = key.is_file() and key.read_text().rstrip().endswith(f" seed {seed}")
    place = kept if same_seed and not tiny else out / f"warm-start-{seed}"
    model = place / ("data/model" if tiny else "warmup/global_step_600/actor/huggingface")
    if not model.is_dir() and not (make_data(seed, place) and (tiny or make_warm_start(seed, place))):
        sys.exit("the warm start failed")
    start = [f"data.train_files={place}/data/train.jsonl", f"actor_rollout_ref.model.path={model}"]
    return start + TINY * tiny


def make_data(seed: int, place: Path) -> bool:
    """Make the quickstart's data and untrained model in another directory, or copy them from QUICKSTART_DATA, where a
    test has made them for all scripts. Returns whether it succeeded."""
    if made := os.environ.get("QUICKSTART_DATA"):
        return bool(shutil.copytree(made, place / "data"))
    return python(["recipes/quickstart/make_data.py", "--out", f"{place}/data", "--seed", str(seed)])


def make_warm_start(seed: int, place: Path) -> bool:
    """Train the model of that directory on its demonstrations. Returns whether it succeeded."""
    command = ["-m", "hybridrl.main_sft", "--config-path", "recipes/quickstart", "--config-name", "warmup"]
    files = [f"data.train_files={place}/data/warmup.jsonl", f"model.path={place}/data/model"]
    return python([*command, *files, f"trainer.seed={seed}", f"trainer.default_local_dir={place}/warmup"])
