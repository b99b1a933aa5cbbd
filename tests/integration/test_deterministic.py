"""trainer.deterministic: where rounding depends on the rows beside a row, batches are composed the same each time."""

import numpy as np
import pytest
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from hybridrl.config import load_ppo_config
from hybridrl.runs.ppo import start_devices
from hybridrl.runs.settings import build_algorithm, ppo_worker_config
from hybridrl.runs.setup import probe_ids
from tests.integration.answers import PROMPT, SAMPLING, generate, requests
from tests.integration.test_engine import engine_processes


@pytest.fixture(scope="module")
def config(overrides, tiny, tmp_path_factory):
    """A model so wide that the rounding of a row depends on the rows beside it."""
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


def test_the_same_requests_have_the_same_answers_bit_for_bit_although_a_server_is_lost_on_the_way(engine):
    wanted = requests(12, 4)
    expected = generate(engine, wanted)
    stream = engine.pool.generate(wanted, SAMPLING)
    found = list(next(stream))
    engine_processes()[0].kill()
    found += [completion for batch in stream for completion in batch]
    assert engine.pool.restarts == 1
    assert len(found) == len(wanted)
    for completion in found:
        same = expected[completion.prompt, completion.sample]
        assert np.array_equal(completion.token_ids, same.token_ids)
        assert np.array_equal(completion.log_probs, same.log_probs)
