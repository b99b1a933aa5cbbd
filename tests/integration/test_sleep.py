"""Engines that lose weights and cache in sleep, as on a GPU: nothing is used that has not come back."""

from dataclasses import replace
from pathlib import Path

import pytest

from hybridrl.config import load_ppo_config
from hybridrl.core.weights.sync import StaleWeights, WeightSync
from tests.integration.answers import PROMPT, generate, requests, tokens

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def config(overrides, tmp_path_factory):
    library = Path(__file__).with_name("poisoned.py")
    more = {
        "actor_rollout_ref.model.external_lib": f"[{library}]",
        "actor_rollout_ref.rollout.max_model_len": 448,
        "trainer.n_gpus_per_node": 1,
    }
    return load_ppo_config(overrides(tmp_path_factory.mktemp("run"), more))


def test_after_every_sleep_engines_have_new_weights_and_an_empty_cache(parts):
    engine, _ = parts
    # Longer than a block, so that the cache has the prompts.
    wanted = [replace(one, prompt_ids=[*PROMPT * 20, *one.prompt_ids]) for one in requests()]
    engine.to_rollout(0)
    first = generate(engine, wanted)
    engine.to_training()
    engine.to_rollout(0)
    second = generate(engine, wanted)
    engine.to_training()
    assert tokens(second) == tokens(first)
    for key, response in first.items():
        assert second[key].log_probs.tolist() == response.log_probs.tolist()


def test_a_switch_that_sends_no_weights_is_noticed(parts, monkeypatch):
    engine, _ = parts
    engine.to_rollout(1)
    engine.to_training()
    monkeypatch.setattr(WeightSync, "publish", lambda sync, version: None)
    with pytest.raises(StaleWeights, match="rollout server 0 differs from the trainer in the log-probs"):
        engine.to_rollout(2)
