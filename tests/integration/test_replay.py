"""A step computed again from its batch and the weights before it, by real training ranks."""

import re
import shutil
from contextlib import closing

import pytest
import torch
from transformers import AutoModelForCausalLM

from hybridrl.checkpoint.store import Store
from hybridrl.config import ConfigError, load_ppo_config
from hybridrl.config.compose import as_yaml, save_config
from hybridrl.doctor.replay import replay, weights_before
from hybridrl.required import required
from hybridrl.runs.sample_log import SampleLog
from tests.integration.test_gradient import ragged_batch


@pytest.fixture
def directory(overrides, tmp_path):
    """The directory of a run whose step 1 was diagnosed."""
    batch, settings = ragged_batch(4), load_ppo_config(overrides(tmp_path, {"trainer.n_gpus_per_node": 1}))
    batch.rewards = torch.tensor([0.0, 1.0, 0.0, 1.0])
    batch.advantages = batch.advantages * 0.01
    batch.advantages[: batch.response_lengths[0]] = 5.0
    save_config(as_yaml(settings), tmp_path / "config.yaml")
    SampleLog(None, training_dir=None, validation_dir=None, replay_dir=tmp_path / "replay", shown=0).keep(1, batch)
    return tmp_path


def test_the_row_that_moved_the_gradient_is_named_first(directory, capsys):
    rows = replay(directory, None)
    # One row has nearly all of the gradient, so that the estimate of the signal is next to 0, on either side of it.
    said = " ".join(capsys.readouterr().out.split())
    assert re.search(r"(, is nothing but noise|: most of it is noise); set actor_rollout_ref\.rollout\.n or ", said)
    assert (rows[0]["position"], rows[0]["sample"], rows[0]["advantage"]) == (0, 0, pytest.approx(5.0))
    assert rows[0]["share"] > 0.9 and sum(row["share"] for row in rows) == pytest.approx(1.0)
    assert [row["gradient"] for row in rows] == sorted((row["gradient"] for row in rows), reverse=True)
    model = AutoModelForCausalLM.from_pretrained(
        load_ppo_config([], config_name="config", config_dir=directory).actor_rollout_ref.model.path
    )
    batch = ragged_batch(4)
    ids = torch.cat([batch.prompt_ids[: batch.prompt_lengths[0]], batch.response_ids[: batch.response_lengths[0]]])
    log_probs = model(ids[None].long()).logits[0, :-1].float().log_softmax(-1)
    written = log_probs.gather(1, ids[1:, None].long())[-int(batch.response_lengths[0]) :, 0]
    assert rows[0]["least_log_prob"] == pytest.approx(float(written.detach().min()), abs=1e-4)


def test_a_step_that_was_not_kept_or_has_no_checkpoint_before_it_is_refused(directory):
    with pytest.raises(ConfigError, match=r"step 2 is not among those of which the batch was kept \(1\)"):
        replay(directory, 2)
    shutil.copy(directory / "replay" / "1.npz", directory / "replay" / "3.npz")
    with pytest.raises(ConfigError, match="no intact checkpoint of a step before 3"):
        replay(directory, 3)


def test_the_weights_are_those_of_the_last_checkpoint_before_the_step_healthy_or_not(tmp_path):
    with closing(Store(tmp_path)) as store:
        for step in (1, 2, 3):
            store.begin(step)
            store.publish(step, {"healthy": step < 2, "recovery": False, "metrics": {}, "reason": "it collapsed"})
    assert required(weights_before(tmp_path, 3)).step == 2 and weights_before(tmp_path, 1) is None
