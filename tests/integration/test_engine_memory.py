"""Real engines that lack memory, at the start and while they generate: the run continues with less."""

from pathlib import Path

import pytest

from hybridrl.config import load_ppo_config
from hybridrl.runs.ppo import probe_ids, start_devices
from hybridrl.runs.settings import build_algorithm, ppo_worker_config
from tests.integration.answers import PROMPT, generate, generate_disturbed, requests, tokens
from tests.integration.test_engine import server_processes

LACKING = Path(__file__).with_name("no_memory.py")


@pytest.fixture(scope="module")
def config(overrides, tmp_path_factory):
    lacking = {"actor_rollout_ref.model.external_lib": f"[{LACKING}]", "trainer.n_gpus_per_node": 1}
    return load_ppo_config(overrides(tmp_path_factory.mktemp("run"), lacking))


@pytest.mark.drill
def test_engines_without_memory_start_with_fewer_requests_and_one_that_dies_of_it_comes_back_lower(
    config, session, tmp_path, caplog
):
    worker = ppo_worker_config(config, build_algorithm(config), tmp_path, steps=10)
    _, engine = start_devices(config, session, worker, tmp_path, probe_ids(PROMPT))
    (warning,) = (line for line in caplog.messages if "to keep it" in line)
    assert "can't allocate memory" in warning and "set actor_rollout_ref.rollout.max_num_seqs=16" in warning
    wanted = requests(8, 4)
    engine.to_rollout(0)
    undisturbed = tokens(generate(engine, wanted))
    (dying,) = server_processes()

    def run_out_of_memory() -> None:
        for log in tmp_path.glob("rollout-*.log"):
            with log.open("a") as file:
                file.write("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB\n")
        dying.kill()

    assert tokens(generate_disturbed(engine, wanted, run_out_of_memory)) == undisturbed
    assert engine.take_metrics()["rollout/engine_restarts"] == 1
    share = config.actor_rollout_ref.rollout.gpu_memory_utilization / 2
    kept = engine.fleet.state_dict()["engine_memory"]["lowered"]
    assert kept == {"max_num_seqs": 16, "gpu_memory_utilization": share} and engine.client.capacity == 16
    engine.to_training()
