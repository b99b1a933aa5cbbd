"""The memory of vLLM's matrix products on CPU, which oneDNN compiles for each number of tokens."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from hybridrl.core.rollout.vllm.settings import vllm_environment

# Prints the growth in MiB while products of further numbers of tokens are computed.
PRODUCTS = """
import torch
from vllm import _custom_ops as ops


def memory():
    with open("/proc/self/smaps_rollup") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("Anonymous:")) / 1024


def multiply(sizes):
    for size in sizes:
        ops.onednn_mm(handler, torch.ones(size, 256), None)


if ops._supports_onednn:
    handler = ops.create_onednn_mm(torch.ones(256, 256).t(), 32)
    multiply(range(1, 300))
    before = memory()
    multiply(range(300, 600))
    print(memory() - before)
else:
    print("skip")
"""


@pytest.mark.slow
def test_ever_new_numbers_of_tokens_do_not_fill_the_memory():
    environment = os.environ | vllm_environment(SimpleNamespace(dtype="float32"))
    command = [sys.executable, "-c", PRODUCTS]
    printed = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.split()[-1]
    if printed == "skip":
        pytest.skip("this vLLM does not compute with oneDNN")
    assert float(printed) < 70, "one number of tokens takes 0.7 MiB"
