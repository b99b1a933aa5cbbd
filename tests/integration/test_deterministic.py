"""trainer.deterministic: batches always have the same composition, as rounding may depend on it."""

import numpy as np
import pytest
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from hybridrl.config import load_ppo_config
from hybridrl.runs.ppo import probe_ids, start_devices
from hybridrl.runs.settings import build_algorithm, ppo_worker_config
from tests.integration.answers import PROMPT, generate, generate_disturbed, requests
from tests.integration.test_engine import server_processes

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def config(overrides, tiny, tmp_path_factory):
    """A model so wide that the rounding of a row depends on the other rows of a batch."""
    directory = tmp_path_factory.mktemp("wide")
    wide = AutoConfig.from_pretrained(tiny / "model", hidden_size=512, intermediate_size=1408, num_attention_heads=8)
    AutoModelForCausalLM.from_config(wide).save_pretrained(directory / "model")
    AutoTokenizer.from_pretrained(tiny / "model").save_pretrained(directory / "model")
    more = {
        "actor_rollout_ref.model.path": directory / "model",
        "trainer.deterministic": True,
        "actor_rollout_ref.rollout.max_num_seqs": 8,
    }
    return load_ppo_config(overrides(directory, more))


@pytest.fixture(scope="module")
def engine(config, session, tmp_path_factory):
    logs = tmp_path_factory.mktemp("logs")
    worker = ppo_worker_config(config, build_algorithm(config), logs, steps=1)
    _, engine = start_devices(config, session, worker, logs, probe_ids(PROMPT))
    engine.to_rollout(0)
    return engine


def test_the_same_requests_get_bitwise_equal_responses_even_if_a_server_dies(engine):
    wanted = requests(12, 4)
    expected = generate(engine, wanted)
    responses = generate_disturbed(engine, wanted, lambda: server_processes()[0].kill())
    assert engine.client.restarts == 1
    assert responses.keys() == expected.keys()
    for key, response in responses.items():
        assert np.array_equal(response.token_ids, expected[key].token_ids)
        assert np.array_equal(response.log_probs, expected[key].log_probs)
