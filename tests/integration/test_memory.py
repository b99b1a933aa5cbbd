"""Lack of memory on one rank of two: the run goes on, and ends with the parameters of one that has enough.

In each of the five calls of a step it is the same code; a supervised run has one of them, and starts in seconds.
"""

import json

import pytest

from tests.integration.test_resume import weights_and_moments
from tests.integration.test_run import finish, start

pytestmark = pytest.mark.drill

# Loaded by every worker: rank 1 has no memory for a micro-batch of more than 300 tokens.
LITTLE_MEMORY = """
import sys
import torch
learner = sys.modules.get("hybridrl.core.training.learner")
if learner is not None:
    inputs = learner.Learner.inputs

    def limited(self, rows):
        if int(rows.lengths.sum()) > 300 and torch.distributed.get_rank() == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return inputs(self, rows)

    learner.Learner.inputs = limited
"""


def test_a_run_whose_rank_lacks_memory_ends_as_one_that_has_enough(tiny, tmp_path):
    (tmp_path / "little_memory.py").write_text(LITTLE_MEMORY)

    def run(name: str, *more: str) -> str:
        values = {
            "data.train_files": tiny / "warmup.jsonl",
            "data.max_length": 128,
            "data.train_batch_size": 24,
            "model.path": tiny / "model",
            # With Adam's usual epsilon, an element whose gradient is rounding alone would move as far as any other.
            "optim.override_optimizer_config": "{eps: 1e-3}",
            "trainer.total_training_steps": 2,
            "trainer.save_freq": 1,
            "trainer.n_gpus_per_node": 2,
            "trainer.logger": "[console]",
            "trainer.default_local_dir": tmp_path / name,
        }
        return finish(start("main_sft", [*(f"{key}={value}" for key, value in values.items()), *more]))

    run("enough")
    output = run("little", f"model.external_lib={tmp_path}/little_memory.py")
    assert output.count("starting again from the last checkpoint with data.max_token_len_per_gpu=") == 1
    enough, lacking = (weights_and_moments(tmp_path / name, 2) for name in ("enough", "little"))
    gaps = {name: float((enough[name] - lacking[name]).abs().max()) for name in enough if "exp_avg" not in name}
    assert max(gaps.values()) < 1e-6
    state = json.loads((tmp_path / "little" / "global_step_2" / "state.json").read_text())
    assert list(state["adjusted"]) == ["data.max_token_len_per_gpu"]
