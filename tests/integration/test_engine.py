"""The switch with real vLLM and FSDP2: fresh weights, proven; lost servers replaced with nothing lost."""

import os
import signal
from functools import partial

import psutil
import pytest

from hybridrl import device as devices
from hybridrl.cluster import Group
from hybridrl.hybrid_engine import Mode, StaleWeights
from hybridrl.rollout import Request, request_seed
from hybridrl.rollout.server import RolloutServer
from hybridrl.runs.ppo import start_devices
from hybridrl.runs.settings import build_algorithm, build_policy_plan, ppo_worker_config
from hybridrl.runs.setup import probe_ids
from hybridrl.training.worker_group import TrainWorkers
from tests.integration.answers import PROMPT, SAMPLING, generate, largest_gap, requests, rows, tokens, update


@pytest.fixture(scope="module")
def parts(config, session, tmp_path_factory):
    logs = tmp_path_factory.mktemp("logs")
    worker = ppo_worker_config(config, build_algorithm(config), logs, steps=10)
    workers, engine = start_devices(config, session, worker, logs, probe_ids(PROMPT))
    return engine, TrainWorkers(workers, build_policy_plan(config), None, "float32", 120)


def test_engine_and_trainer_agree_before_and_after_an_update(parts):
    engine, workers = parts
    wanted = requests()
    engine.to_rollout(0)
    before = generate(engine, wanted)
    engine.to_training()
    batch = rows(wanted, before)
    assert largest_gap(workers, batch) < 1e-4
    update(workers, batch)
    assert largest_gap(workers, batch) > 0.1, "the update must change the policy for this test to mean anything"
    engine.to_rollout(1)
    after = generate(engine, wanted)
    engine.to_training()
    assert tokens(after) != tokens(before)
    assert largest_gap(workers, rows(wanted, after)) < 1e-4
    assert engine.take_metrics()["training/probe_log_prob_diff"] < 1e-4


def test_a_prompt_longer_than_a_cache_block_is_not_answered_from_the_old_cache(parts):
    engine, workers = parts
    wanted = [Request(0, s, [*PROMPT * 4], request_seed(2, 0, s)) for s in range(2)]
    engine.to_rollout(1)
    first = generate(engine, wanted)
    engine.to_training()
    update(workers, rows(wanted, first))
    engine.to_rollout(2)
    second = generate(engine, wanted)
    engine.to_training()
    assert largest_gap(workers, rows(wanted, second)) < 1e-4


def test_asking_for_the_mode_one_is_in_does_nothing(parts):
    engine, _ = parts
    engine.to_rollout(3)
    engine.take_metrics()
    engine.to_rollout(3)
    assert "timing_s/update_weights" not in engine.take_metrics()
    assert engine.mode is Mode.ROLLOUT
    engine.to_training()
    engine.to_training()
    assert engine.mode is Mode.TRAINING


def test_weights_that_were_not_handed_over_stop_the_run(parts, monkeypatch):
    engine, workers = parts
    wanted = requests(2)
    engine.to_rollout(4)
    answers = generate(engine, wanted)
    engine.to_training()
    update(workers, rows(wanted, answers))
    with monkeypatch.context() as patch:
        patch.setattr(engine, "_publish", lambda servers: None)
        with pytest.raises(StaleWeights, match="computes with the weights of hand-over"):
            engine.to_rollout(5)
        told = partial(Group.broadcast, engine.servers, RolloutServer.finish_hand_over, timeout=60)
        patch.setattr(engine, "_publish", lambda servers: told(engine.number))
        with pytest.raises(StaleWeights, match="differs from the trainer by"):
            engine.to_rollout(5)
    engine.to_rollout(5)
    engine.to_training()


def engine_processes() -> list[psutil.Process]:
    mine = psutil.Process().children(recursive=True)
    return [process for process in mine if "EngineCore" in " ".join(process.cmdline())]


def server_process(engine_process: psutil.Process) -> psutil.Process:
    return engine_process.parent()


def test_an_engine_waits_for_its_threads_longer_than_a_trainer(parts):
    (waits,) = {int(engine.environ()["GOMP_SPINCOUNT"]) for engine in engine_processes()}
    assert waits > int(devices.environment("cpu", slots=2)["GOMP_SPINCOUNT"])


@pytest.mark.parametrize(
    ("victim", "how", "cause"),
    [
        ("engine", signal.SIGKILL, "the engine failed: EngineDeadError"),
        ("server", signal.SIGKILL, "killed by hand or by a scheduler"),
        ("engine", signal.SIGSTOP, "ray.kill"),
    ],
)
def test_a_server_lost_while_generating_costs_no_answer(parts, monkeypatch, caplog, victim, how, cause):
    engine, _ = parts
    wanted = requests(8, 4)
    engine.to_rollout(6)
    undisturbed = tokens(generate(engine, wanted))
    restarts = engine.pool.restarts
    if how is signal.SIGSTOP:  # it hangs: only its silence tells
        monkeypatch.setattr(engine.pool, "timeout", 5.0)
    process = engine_processes()[0]
    target = process if victim == "engine" else server_process(process)
    stream = engine.pool.generate(wanted, SAMPLING)
    os.kill(target.pid, how)
    found = list(next(stream))
    for batch in stream:
        found.extend(batch)
    again = tokens(generate(engine, wanted))
    assert tokens({(c.prompt, c.sample): c for c in found}) == undisturbed == again
    assert engine.pool.restarts == restarts + 1
    (warning,) = (line for line in caplog.messages if "was lost" in line)
    assert cause in warning
    assert len(engine_processes()) == 2
    engine.to_training()


def test_a_server_killed_asleep_is_replaced_when_it_is_wanted(parts):
    engine, _ = parts
    engine.to_training()
    restarts = engine.pool.restarts
    server_process(engine_processes()[0]).kill()
    engine.to_rollout(7)
    assert len(generate(engine, requests(2))) == 6
    assert engine.pool.restarts == restarts + 1
    engine.to_training()


def test_a_server_killed_in_the_middle_of_a_hand_over_is_replaced_and_fed_anew(parts, monkeypatch):
    engine, workers = parts
    engine.to_training()
    restarts, publish = engine.pool.restarts, engine._publish
    victims = [engine_processes()[0]]

    def publish_to_the_dead(servers):
        while victims:
            victims.pop().kill()
        publish(servers)

    monkeypatch.setattr(engine, "_publish", publish_to_the_dead)
    engine.to_rollout(8)
    wanted = requests(2)
    answers = generate(engine, wanted)
    assert engine.pool.restarts == restarts + 1
    engine.to_training()
    assert largest_gap(workers, rows(wanted, answers)) < 1e-4
