"""The work of a step, for step.py: the model, the rows, the lengths of responses and the number of updates."""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from imposed import RESPONSES, Responses
from memory_plan import make_model
from models import SHAPES
from warm_start import TOP, python, warm_start

sys.path.insert(0, str(TOP))
from tests import vision_models

SIDE = 256  # pixels of a picture's side
# 25 M parameters, and 6 M of the tower.
SEEING = {
    "vocab_size": 8192,
    "hidden_size": 384,
    "intermediate_size": 1280,
    "num_hidden_layers": 10,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "initializer_range": 0.02,
}
TOWER = {
    "depth": 4,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_heads": 4,
    "out_hidden_size": 384,
    "initializer_range": 0.02,
}


@dataclass(frozen=True)
class Case:
    """The work of a step: its responses, and the number of updates."""

    model: str
    rows: str
    responses: Responses
    updates: int
    lr: float = 1e-4
    keys: Sequence[str] = ()

    def setting(self) -> dict[str, Any]:
        """Return what trl_peer.py reads."""
        return vars(self) | {"responses": asdict(self.responses) | {"lengths": self.responses.lengths}}


def case_25m(directory: Path, tiny: bool, model: str = "") -> Case:
    name = "tiny" if tiny else "25m"
    make_model(SHAPES[name], directory / "model")
    rows = directory / "rows.jsonl"
    with open(rows, "w", encoding="utf-8") as file:
        for number in range(20 * RESPONSES[name].prompts):
            question = [{"role": "user", "content": f"What is {100 + 7 * number % 900}+{100 + 13 * number % 900}?"}]
            row = {"data_source": "none", "prompt": question, "reward_model": {"ground_truth": str(number)}}
            print(json.dumps(row), file=file)
    return Case(str(directory / "model"), str(rows), RESPONSES[name], updates=1)


def case_quickstart(directory: Path, tiny: bool, model: str = "") -> Case:
    rows, model, *_ = (override.partition("=")[2] for override in warm_start(0, directory, tiny))
    return Case(model, rows, RESPONSES["tiny" if tiny else "quickstart"], updates=4)


def case_pretrained(directory: Path, tiny: bool, model: str = "") -> Case:
    if not model and not tiny:
        sys.exit("the case pretrained needs --model DIR, a small pretrained model")
    if not python(["recipes/pretrained/make_data.py", "--out", str(directory)], sys.stderr):
        sys.exit("the questions could not be made")
    if not model:
        model = case_25m(directory, tiny, "").model
    keys = ["actor_rollout_ref.actor.ppo_max_token_len_per_gpu=512", "actor_rollout_ref.rollout.max_num_seqs=128"]
    responses = RESPONSES["tiny" if tiny else "pretrained"]
    return Case(model, str(directory / "train.jsonl"), responses, updates=1, lr=1.5e-6, keys=keys)


def case_pictures(directory: Path, tiny: bool, model: str = "") -> Case:
    if not tiny:
        vision_models.TEXT |= SEEING
        vision_models.TOWER |= TOWER
    responses, rows = RESPONSES["tiny" if tiny else "pictures"], directory / "rows.jsonl"
    vision_models.write_model_that_sees(directory / "model")
    with open(rows, "w", encoding="utf-8") as file:
        for number in range(8 * responses.prompts):
            picture = directory / f"{number}.png"
            vision_models.noise_picture(SIDE, SIDE, seed=number).save(picture, compress_level=0)
            row = {"data_source": "none", "prompt": [{"role": "user", "content": "<image>What is it?"}]}
            row |= {"images": [str(picture)], "reward_model": {"ground_truth": str(number)}}
            print(json.dumps(row), file=file)
    return Case(str(directory / "model"), str(rows), responses, updates=1, keys=["data.max_prompt_length=128"])


CASES = {"25m": case_25m, "quickstart": case_quickstart, "pretrained": case_pretrained, "pictures": case_pictures}
