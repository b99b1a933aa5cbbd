"""Model families, tested by the command that writes the table of docs/models.md; here two with the most
special cases: latent attention and experts with a router bias, and capped scores and logits. vLLM's Qwen3.5 module is
only imported, without an engine."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
NAMES = ["DeepSeek-V3", "Gemma 2"]
WITHOUT_TORCHVISION = """
import pathlib, sys
from transformers.utils import is_torchvision_available
from vllm import ModelRegistry
from hybridrl.core.rollout.vllm.repairs import prepare_for
prepare_for(pathlib.Path(sys.argv[1]))
assert ("torchvision" in sys.modules) == is_torchvision_available()
ModelRegistry.models["Qwen3_5ForCausalLM"].load_model_cls()
"""


def test_log_probs_agree_before_and_after_an_update_and_the_merged_model_is_the_same():
    command = [sys.executable, ROOT / "scripts" / "benchmark" / "families.py", *NAMES]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout.splitlines()[-1])
    assert [row["family"] for row in rows] == NAMES
    for row in rows:
        assert not row["failed"] and not row["rejected"]
        assert max(row["gap_before"], row["gap_after"]) < 1e-4 < 0.1 < row["moved"]
        assert row["in_transformers"] == "log-probs for 64 tokens equal"
        assert "of transformers'" in row["in_vllm"]


def test_qwen3_5_can_be_served_where_torchvision_is_missing(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Qwen3_5ForCausalLM"]}))
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCHVISION, tmp_path], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
