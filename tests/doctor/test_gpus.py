import pytest

from hybridrl.config import PPOConfig, load_ppo_config
from hybridrl.config.findings import Finding, Findings
from hybridrl.doctor.gpus import Gpu, check_gpus

GIB = 1 << 30


@pytest.fixture
def config(command: list[str]) -> PPOConfig:
    """As on a machine with GPUs: two are used, and the engine takes half of each."""
    config = load_ppo_config(command)
    config.trainer.device, config.trainer.n_gpus_per_node = "cuda", 2
    config.actor_rollout_ref.rollout.gpu_memory_utilization = 0.5
    return config


def told(config: PPOConfig, *gpus: Gpu) -> list[Finding]:
    findings = Findings()
    check_gpus(config, findings, lambda: list(gpus))
    return findings.found


def test_idle_gpus_are_told_of_as_far_as_they_are_used(config: PPOConfig):
    idle = [Gpu(number, "H200", 140 * GIB, 139 * GIB) for number in range(3)]
    assert [(f.severity, f.text) for f in told(config, *idle)] == [
        ("information", f"GPU {number}, H200: 139.0 of 140.0 GiB free") for number in (0, 1)
    ]


def test_who_holds_a_gpu_is_named_with_what_would_fit_beside_it(config: PPOConfig):
    held = Gpu(0, "A100", 80 * GIB, 20 * GIB, ((4711, "python serve.py, of ann", 58 * GIB),))
    warning = told(config, held)[1]
    assert warning.code == "gpu.held"
    assert "75% of its memory is taken by process 4711 (python serve.py, of ann, 58.0 GiB)" in warning.cause
    assert "gpu_memory_utilization=0.5 of it is free" in warning.cause
    assert warning.fix == "end them (kill 4711), or set actor_rollout_ref.rollout.gpu_memory_utilization=0.22"


def test_a_gpu_that_is_partly_held_by_the_unseen_is_a_warning_too(config: PPOConfig):
    warning = told(config, Gpu(1, "A100", 80 * GIB, 60 * GIB))[1]
    assert "25% of its memory is taken by processes that this one cannot see" in warning.cause
    assert "CUDA_VISIBLE_DEVICES" in warning.fix


def test_nobody_is_asked_of_gpus_that_the_run_does_not_use(config: PPOConfig, monkeypatch: pytest.MonkeyPatch):
    config.trainer.device = "cpu"
    check_gpus(config, Findings(), lambda: pytest.fail("asked"))
    config.trainer.device = "cuda"
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    check_gpus(config, Findings(), lambda: pytest.fail("asked"))
