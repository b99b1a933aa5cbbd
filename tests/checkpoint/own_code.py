"""A model directory with custom code, in three files."""

import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from tests.compat.verl.files import qwen2

CODE = {
    "configuration_mine.py": """
from transformers import Qwen2Config

class MineConfig(Qwen2Config):
    model_type = "mine"
""",
    "scale_mine.py": "SCALE = 3.0\n",
    "modeling_mine.py": """
from transformers import Qwen2ForCausalLM
from .configuration_mine import MineConfig
from .scale_mine import SCALE

class MineForCausalLM(Qwen2ForCausalLM):
    config_class = MineConfig

    def forward(self, *arguments, **options):
        outputs = super().forward(*arguments, **options)
        outputs.logits = outputs.logits * SCALE
        return outputs
""",
}
CLASSES = {"AutoConfig": "configuration_mine.MineConfig", "AutoModelForCausalLM": "modeling_mine.MineForCausalLM"}


def save_with_code(directory: Path) -> None:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(qwen2()).save_pretrained(directory)
    file = directory / "config.json"
    changes = {"model_type": "mine", "architectures": ["MineForCausalLM"], "auto_map": CLASSES}
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    for name, text in CODE.items():
        (directory / name).write_text(text)
