"""An evaluation of rows with pictures, by the engine of a model that sees."""

import json
import subprocess
import sys
from base64 import b64encode
from io import BytesIO
from pathlib import Path

import pytest
from PIL import Image

from tests.vision_models import noise_picture, write_model_that_sees

ROOT = Path(__file__).parents[2]
REWARD = "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return 1.0\n"


def url(picture: Image.Image) -> str:
    file = BytesIO()
    picture.save(file, "PNG")
    return "data:image/png;base64," + b64encode(file.getvalue()).decode()


@pytest.mark.drill
def test_responses_depend_on_pictures_and_are_found_again(tmp_path):
    """Greedy responses to the same question with three pictures, two of which are equal, and to one without."""
    pictures = [noise_picture(80, 50), noise_picture(80, 50, 1), noise_picture(80, 50)]
    prompts = [("<image>What is it?", [url(picture)]) for picture in pictures] + [("What is it?", [])]
    rows = [
        {
            "data_source": "noise",
            "prompt": [{"role": "user", "content": text}],
            "images": images,
            "reward_model": {"ground_truth": "1"},
        }
        for text, images in prompts
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "reward.py").write_text(REWARD)
    values = {
        "eval.files": tmp_path / "rows.jsonl",
        "eval.models": write_model_that_sees(tmp_path / "model"),
        "eval.n": 1,
        "eval.temperature": 0.0,
        "eval.max_tokens": 12,
        "eval.output_dir": tmp_path / "out",
        "data.max_prompt_length": 64,
        "reward.custom_reward_function.path": tmp_path / "reward.py",
        "reward.num_workers": 1,
        "trainer.n_gpus_per_node": 1,
        "trainer.device": "cpu",
    }
    command = [sys.executable, "-m", "hybridrl.main_eval", *(f"{key}={value}" for key, value in values.items())]
    subprocess.run(command, cwd=ROOT, check=True)
    file = tmp_path / "out" / "model" / "samples.jsonl"
    samples = [json.loads(line) for line in file.read_bytes().splitlines()]
    first, second, third, text = (sample["response"] for sample in sorted(samples, key=lambda sample: sample["id"]))
    assert first == third and len({first, second, text}) == 3
    before = file.read_bytes()
    again = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    assert "4 responses are stored" in again.stdout + again.stderr and file.read_bytes() == before
