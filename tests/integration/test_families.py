"""Families of models, proven end to end by the command that makes the table of docs/models.md; here the two that take
most ways of their own: a mixture of experts, and capped scores and logits."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
NAMES = ["Qwen3-MoE", "Gemma 2"]


def test_engine_and_trainer_agree_before_and_after_an_update_and_the_merged_model_is_the_same():
    command = [sys.executable, ROOT / "scripts" / "benchmark" / "families.py", *NAMES]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout.splitlines()[-1])
    assert [row["family"] for row in rows] == NAMES
    for row in rows:
        assert not row["failed"] and not row["refused"]
        assert max(row["gap_before"], row["gap_after"]) < 1e-4 < 0.1 < row["moved"]
        assert row["in_transformers"] == "log-probs for 64 tokens equal"
        assert "of transformers'" in row["in_vllm"]
