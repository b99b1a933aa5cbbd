import socket

import pytest

from hybridrl.cluster.session import Cluster
from hybridrl.config import PPOConfig, load_ppo_config
from hybridrl.config.findings import Finding, Findings
from hybridrl.doctor.devices import check_devices


@pytest.fixture
def config(command: list[str], monkeypatch: pytest.MonkeyPatch) -> PPOConfig:
    """Two machines with four GPUs each of a Ray that is there, engines over two."""
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    config = load_ppo_config(command)
    config.trainer.device, config.trainer.nnodes, config.trainer.n_gpus_per_node = "cuda", 2, 4
    config.actor_rollout_ref.rollout.tensor_model_parallel_size = 2
    return config


def told(config: PPOConfig, *machines: tuple[float, float], free: float) -> list[Finding]:
    findings = Findings()
    cluster = Cluster([{"GPU": gpus, "CPU": cpus} for gpus, cpus in machines], {"GPU": free, "CPU": free})
    check_devices(config, findings, lambda _: cluster)
    return findings.found


def test_ranks_and_engines_are_counted(config: PPOConfig):
    plan, ray = told(config, (4, 32), (8, 64), free=12)
    assert plan.text == "8 GPUs on 2 machines: 8 training ranks, 4 rollout engines over 2 of them"
    assert ray.severity == "information"


def test_devices_spread_over_too_many_machines_are_refused(config: PPOConfig):
    _, ray = told(config, (4, 32), (2, 32), (2, 32), free=8)
    assert ray.severity == "refused"
    assert "2 machine(s) with 4 GPUs and 4 CPUs each" in ray.cause


def test_a_gpu_wants_a_cpu_too(config: PPOConfig):
    assert told(config, (4, 2), (4, 2), free=4)[1].severity == "refused"


def test_devices_that_others_use_now_are_a_warning(config: PPOConfig):
    _, ray = told(config, (4, 32), (4, 32), free=7)
    assert ray.severity == "warning" and "others use them now" in ray.cause


def test_a_ray_that_does_not_answer_is_refused_without_a_wait(config: PPOConfig, monkeypatch: pytest.MonkeyPatch):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # nobody listens
        address = f"127.0.0.1:{closed.getsockname()[1]}"
        monkeypatch.setenv("RAY_ADDRESS", address)
        findings = Findings()
        check_devices(config, findings)
    assert findings.refused[0].cause.startswith(f"no Ray answers at {address}")
