"""A merged model in vLLM."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoConfig

from tests.checkpoint.shards import save_in_shards
from tests.core.training.on_ranks import on_ranks

pytestmark = pytest.mark.slow

# Check the merged directory unchanged, with other weights of one norm, and with a truncated file.
CHECKS = """
import os, sys
from pathlib import Path
import torch
from safetensors.torch import load_file, save_file
from hybridrl.model_merger.source import CheckFailed, open_source
from hybridrl.model_merger.source import check_in_vllm

actor, merged = map(Path, sys.argv[1:])
file = merged / "model.safetensors"

def check():
    try:
        print("EQUAL", check_in_vllm(open_source(actor), merged))
    except CheckFailed as error:
        print("FAILED", error)

check()
weights = load_file(file)
save_file(weights | {"model.norm.weight": weights["model.norm.weight"] + 1}, file, metadata={"format": "pt"})
check()
os.truncate(file, 1000)
check()
"""
QUIET = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR", "TORCH_COMPILE_DISABLE": "1"}


@pytest.fixture(scope="module")
def actor(tiny, tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("step") / "actor"
    on_ranks(2, save_in_shards, directory, AutoConfig.from_pretrained(tiny / "model"))
    return directory


def run(*command: object) -> str:
    environment = os.environ | QUIET
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_vllm_responds_as_the_checkpoint_does_and_other_models_are_rejected(actor, tmp_path):
    merge = ("-m", "hybridrl.model_merger", "merge", "--local_dir", actor, "--target_dir", tmp_path / "merged")
    assert "vllm: greedy log-probs of 24 tokens within " in run(*merge, "--verify", "vllm")
    equal, changed, truncated = [
        line
        for line in run("-c", CHECKS, actor, tmp_path / "merged").splitlines()
        if line.startswith(("EQUAL", "FAIL"))
    ]
    assert equal.startswith("EQUAL greedy log-probs of 24 tokens within ")
    assert changed.startswith("FAILED in vLLM log-probs differ from those of the checkpoint by ")
    assert truncated.startswith("FAILED vLLM cannot load what was written (")
