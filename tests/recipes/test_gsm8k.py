import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from hybridrl.config import load_ppo_config
from hybridrl.data.prompts import load_prompts
from hybridrl.data.tokenizer import load_tokenizer

SCRIPT = Path(__file__).parents[2] / "recipes" / "gsm8k" / "make_data.py"


def test_local_problems_become_prompts_for_the_random_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = {"question": "Ann has 600 pens and buys 634. How many?", "answer": "600+634=1234\n#### 1,234"}
    for split in ("train", "test"):
        (tmp_path / f"gsm8k_{split}.jsonl").write_text(json.dumps(problem) + "\n")
    model = tmp_path / "model"
    arguments = ["--out", tmp_path / "out", "--local_dir", tmp_path, "--random_model", model]
    monkeypatch.setattr(sys, "argv", ["make_data.py", *map(str, arguments)])
    runpy.run_path(str(SCRIPT), run_name="__main__")

    files = [
        f"data.{name}_files={tmp_path}/out/{split}.parquet" for name, split in (("train", "train"), ("val", "test"))
    ]
    config = load_ppo_config([*files, f"actor_rollout_ref.model.path={model}"]).data
    tokenizer = load_tokenizer(str(model))
    (prompt,) = load_prompts(
        config.train_files, config, tokenizer, max_samples=-1, shuffle=True, key="data.train_files"
    )
    assert prompt.ground_truth == "1234"
    assert prompt.data_source == "openai/gsm8k"
    assert prompt.extra_info == {"split": "train", "index": 0, **problem}
    text = tokenizer.decode(prompt.ids)
    assert text.startswith(f"<|im_start|>user\n{problem['question']}")
    assert '"####"' in text


@pytest.mark.parametrize("script", sorted(path.name for path in SCRIPT.parent.glob("*.sh")))
def test_a_run_script_is_a_valid_configuration(script: str, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("{}\n")
    # Two devices: without GPUs an engine cannot use fewer than all of them.
    local = [f"data.train_files={rows}", f"data.val_files={rows}", "trainer.n_gpus_per_node=2", "trainer.device=cpu"]
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    command = ["bash", str(SCRIPT.with_name(script)), "--cfg", *local]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"path: Qwen/Qwen2.5-{script.split('_')[-2].upper()}-Instruct" in done.stdout
