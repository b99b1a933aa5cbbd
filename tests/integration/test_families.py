"""Model families, tested by the command that writes the table of docs/models.md; here two with the most
special cases: latent attention and experts with a router bias, and capped scores and logits. vLLM's Qwen3.5 module is
only imported, in a process of vLLM's own and without an engine."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
INSPECTION = """
from vllm import ModelRegistry
assert ModelRegistry.models["Qwen3_5ForCausalLM"].inspect_model_cls().is_text_generation_model
"""


@pytest.mark.parametrize("name", [pytest.param("DeepSeek-V3", marks=pytest.mark.drill), "Gemma 2"])
def test_log_probs_agree_before_and_after_an_update_and_the_merged_model_is_the_same(name):
    command = [sys.executable, ROOT / "scripts" / "benchmark" / "families.py", name]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout.splitlines()[-1])
    assert row["family"] == name
    assert not row["failed"] and not row["rejected"]
    assert max(row["gap_before"], row["gap_after"]) < 1e-4 < 0.1 < row["moved"]
    assert row["in_transformers"] == "log-probs for 64 tokens equal"
    assert "of transformers'" in row["in_vllm"]


def test_a_process_of_vllm_imports_qwen3_5_with_torchvision(tmp_path):
    environment = os.environ | {"VLLM_CACHE_ROOT": str(tmp_path)}  # vLLM keeps what it has found of a model
    done = subprocess.run([sys.executable, "-c", INSPECTION], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
