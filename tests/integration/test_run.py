"""Whole runs through the front doors, as a user starts them."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, AutoTokenizer

from hybridrl.doctor.selftest_resume import MACHINE_METRICS
from hybridrl.doctor.why import diagnose
from hybridrl.runtime.keeper import is_keeper
from hybridrl.tracking.sink import entry_of

FAULTY_REWARD = """
import zlib
def compute_score(solution_str, **_):
    if zlib.crc32(solution_str.encode()) % 8 == 0:
        raise ValueError("this one is not for me")
    return len(set(solution_str)) / max(len(solution_str), 1)
"""


def start(module: str, arguments: list[str], **environment: str) -> subprocess.Popen:
    command = [sys.executable, "-m", f"hybridrl.{module}", *arguments]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | environment,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background job would ignore it
        start_new_session=True,
    )


def finish(process: subprocess.Popen, status: int = 0) -> str:
    output, _ = process.communicate(timeout=300)
    assert process.returncode == status, output
    return output


def metrics(directory: Path) -> dict[int, dict[str, float]]:
    found: dict[int, dict[str, float]] = {}
    for line in (directory / "metrics.jsonl").read_text().splitlines():
        values = json.loads(line)
        found.setdefault(values["step"], {}).update(values)
    without_entry = {name for values in found.values() for name in values if name != "step" and entry_of(name) is None}
    assert not without_entry, "hybridrl/tracking/metrics.yaml"
    return found


def validation_keys(tiny: Path) -> dict[str, object]:
    return {
        "data.val_files": tiny / "val.jsonl",
        "data.val_max_samples": 6,
        "actor_rollout_ref.rollout.val_kwargs.n": 2,
        "actor_rollout_ref.rollout.val_kwargs.do_sample": True,
        "actor_rollout_ref.rollout.val_kwargs.temperature": 1.0,
    }


@pytest.fixture(scope="module")
def two_slots(overrides, tiny, tmp_path_factory) -> tuple[Path, str]:
    """A run on two slots with everything on: directory and what it printed."""
    directory = tmp_path_factory.mktemp("two")
    more = validation_keys(tiny) | {
        "actor_rollout_ref.actor.ppo_mini_batch_size": 4,
        "actor_rollout_ref.actor.use_kl_loss": True,
        "actor_rollout_ref.actor.fsdp_config.reshard_after_forward": False,
        "algorithm.use_kl_in_reward": True,
        "trainer.rollout_data_dir": directory / "samples",
        "trainer.log_val_generations": 2,
        "trainer.logger": "[console,tensorboard]",
    }
    return directory, finish(start("main_ppo", overrides(directory, more)))


def test_a_run_leaves_metrics_samples_curves_and_a_model(two_slots):
    directory, output = two_slots
    steps = metrics(directory)
    assert sorted(steps) == [0, 1, 2]
    assert steps[2]["training/log_probs_diff_max"] < 1e-4
    assert steps[2]["training/probe_log_prob_diff"] < 1e-4
    for name in ("actor/kl_loss", "actor/reward_kl_penalty", "timing_s/ref", "rollout_corr/kl", "perf/throughput"):
        assert name in steps[2], name
    assert "val-core/quickstart/addition/acc/mean@2" in steps[0]
    assert "val-core/quickstart/addition/acc/best@2/mean" in steps[2]
    for name in (
        "config.yaml",
        "curves.png",
        "logs/train-0.log",
        "logs/rollout-1.log",
        "samples/2.jsonl",
        "tensorboard",
    ):
        assert (directory / name).exists(), name
    assert (directory / "latest_checkpointed_iteration.txt").read_text() == "2"
    assert diagnose(directory).code == "finished"
    assert "8 prompts x 4 responses = 32 samples per step, 2 mini-batches of 4 prompts" in output


def test_every_process_logs_in_the_directory_of_the_run(two_slots):
    logs = {path.name for path in (two_slots[0] / "logs").iterdir()}
    assert logs >= {"train-0.log", "train-1.log", "rollout-0.log", "rollout-1.log", "scoring-0.log", "reward.log"}


def test_the_saved_model_loads_and_differs_from_the_initial_one(two_slots, tiny):
    saved = two_slots[0] / "global_step_2" / "actor" / "huggingface"
    before = AutoModelForCausalLM.from_pretrained(tiny / "model").state_dict()
    after = AutoModelForCausalLM.from_pretrained(saved).state_dict()
    assert after.keys() == before.keys()
    assert not torch.equal(after["model.norm.weight"], before["model.norm.weight"])
    assert AutoTokenizer.from_pretrained(saved).chat_template


@pytest.mark.slow
def test_the_saved_model_scores_as_the_last_validation_did(two_slots, overrides, tiny, tmp_path):
    more = {
        "actor_rollout_ref.model.path": two_slots[0] / "global_step_2" / "actor" / "huggingface",
        "trainer.n_gpus_per_node": 1,
        "trainer.val_only": True,
    }
    finish(start("main_ppo", overrides(tmp_path, validation_keys(tiny) | more)))
    last, again = metrics(two_slots[0])[2], metrics(tmp_path)[0]
    names = [name for name in again if name.startswith("val-")]
    assert len(names) > 5
    assert {name: again[name] for name in names} == {name: last[name] for name in names}


@pytest.mark.slow
def test_ppo_trains_policy_and_critic_and_saves_both(overrides, tiny, tmp_path):
    """With a critic, the exact KL in the reward against a reference that is refreshed, and dynamic sampling."""
    more = {
        "algorithm.adv_estimator": "gae",
        "algorithm.use_kl_in_reward": True,
        "algorithm.kl_penalty": "full",
        "algorithm.filter_groups.enable": True,
        "actor_rollout_ref.ref.refresh_freq": 2,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 4,
        "critic.optim.lr": 1e-2,
        "critic.checkpoint.save_contents": "[model,optimizer,extra,hf_model]",
        "critic.fsdp.offload_policy": True,
        "trainer.critic_warmup": 2,
        "trainer.total_training_steps": 3,
    }
    finish(start("main_ppo", overrides(tmp_path, more)))
    steps = metrics(tmp_path)
    assert "actor/grad_norm" not in steps[1], "the critic learns alone before step 2"
    assert steps[1]["critic/vf_loss"] > 0 and steps[1]["critic/values/max"] == 0, "a new critic says nothing"
    assert steps[2]["actor/grad_norm"] > 0 and steps[2]["critic/values/max"] != 0
    assert steps[1]["actor/reward_kl_penalty"] == pytest.approx(0, abs=1e-6), "nothing has been learnt yet"
    assert steps[3]["actor/reward_kl_penalty"] == pytest.approx(0, abs=1e-6), "the reference has been refreshed"
    assert steps[3]["train/num_gen_batches"] >= 1
    assert steps[3]["training/log_probs_diff_max"] < 1e-4
    saved = tmp_path / "global_step_3" / "critic" / "huggingface"
    critic = AutoModelForTokenClassification.from_pretrained(saved, num_labels=1)
    assert critic.score.weight.abs().max() > 0


@pytest.fixture
def running_ray(tmp_path, monkeypatch):
    """The port of a Ray that somebody else has started; another program may take a port before Ray does."""
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")  # a session of this process may have set it
    ray, said = Path(sys.executable).with_name("ray"), tmp_path / "ray.txt"
    command = [ray, "start", "--head", "--block", "--num-cpus=2", "--include-dashboard=false"]
    for _ in range(3):
        port = free_port()
        with said.open("a") as output:
            head = subprocess.Popen([*command, f"--port={port}"], stdout=output, stderr=output)
        deadline = time.monotonic() + 60
        while head.poll() is None and not answers(port) and time.monotonic() < deadline:
            time.sleep(0.2)
        if head.poll() is None:
            break
    assert head.poll() is None and answers(port), said.read_text()
    yield port
    for process in [*psutil.Process(head.pid).children(recursive=True), head]:
        process.kill()
    head.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.drill
def test_one_device_in_a_joined_ray_gives_the_same_samples_and_survives_a_faulty_grader(
    two_slots, overrides, running_ray, tmp_path
):
    (tmp_path / "faulty.py").write_text(FAULTY_REWARD)
    more = {
        "trainer.n_gpus_per_node": 1,
        "trainer.rollout_data_dir": tmp_path / "samples",
        "reward.custom_reward_function.path": tmp_path / "faulty.py",
    }
    finish(start("main_ppo", overrides(tmp_path, more), RAY_ADDRESS=f"127.0.0.1:{running_ray}"))
    assert answers(running_ray), "the Ray that was joined must go on"
    outputs = [
        [json.loads(line)["output"] for line in (directory / "samples" / "1.jsonl").read_text().splitlines()]
        for directory in (two_slots[0], tmp_path)
    ]
    assert len(outputs[0]) == 32
    assert outputs[0] == outputs[1]
    rows = [json.loads(line) for line in (tmp_path / "samples" / "1.jsonl").read_text().splitlines()]
    faults = [row for row in rows if row["episode"].get("fault") == "raised:ValueError"]
    assert 0 < len(faults) < 32
    assert metrics(tmp_path)[1]["reward/faults"] == len(faults)


def wait_for_step(process: subprocess.Popen, directory: Path, step: int) -> None:
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline:
        assert process.poll() is None, process.communicate()[0]
        if (directory / "metrics.jsonl").exists() and step in metrics(directory):
            return
        time.sleep(0.05)
    raise AssertionError(f"step {step} did not come")


def assert_gone(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=10)
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


def driver_of(process: subprocess.Popen) -> psutil.Process:
    """The first child of a run's guard."""
    return min(psutil.Process(process.pid).children(), key=psutil.Process.create_time)


def temporary_directories(processes: list[psutil.Process]) -> set[Path]:
    """Where Ray, engines and their sockets are."""
    owners = {str(process.pid) for process in processes}
    commands = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
    directories = {Path(command[-3]) for command in commands if is_keeper(command) and command[-2] in owners}
    assert all(map(Path.exists, directories))
    return directories


@pytest.mark.slow
def test_a_killed_driver_leaves_nothing_running(overrides, tmp_path):
    process = start("main_ppo", overrides(tmp_path, {"trainer.total_training_steps": 50}))
    wait_for_step(process, tmp_path, 1)
    processes = psutil.Process(process.pid).children(recursive=True)
    assert any("RolloutServer" in " ".join(p.cmdline()) for p in processes)
    directories = temporary_directories(processes)
    assert len(directories) == 4, "of Ray, of two engines, and where workers are forked"
    driver_of(process).kill()
    output, _ = process.communicate(timeout=20)
    assert process.returncode == 137
    assert "the driver was killed (signal 9" in output
    assert diagnose(tmp_path).code == "killed"
    assert_gone(processes)
    assert not any(map(Path.exists, directories))


def sft_arguments(tiny: Path, directory: Path, **more: object) -> list[str]:
    values = {
        "data.train_files": tiny / "warmup.jsonl",
        "data.train_max_samples": 640,
        "data.val_files": tiny / "warmup.jsonl",
        "data.val_max_samples": 32,
        "data.train_batch_size": 32,
        "data.max_length": 96,
        "model.path": tiny / "model",
        "optim.optimizer": "Muon",
        "optim.lr": 2e-3,
        "trainer.default_local_dir": directory,
        "trainer.logger": "[console]",
    }
    return [f"{key}={value}" for key, value in (values | more).items()]


EXTENSIONS = """
from hybridrl.health import Diagnosis
from hybridrl.tracking import Sink

class Lines(Sink):
    def __init__(self, run_dir, name):
        self.file = (run_dir / f"{name}.txt").open("w")

    def log(self, step, metrics):
        print(step, metrics.get("train/lr"), file=self.file, flush=True)

def halves(update, total_updates):
    return 1.0 if 2 * update < total_updates else 0.5

def low_loss(history):
    loss = history.now("train/loss", 1)
    return Diagnosis(f"the loss is {loss:.2f}", "stop") if loss and loss < 5 else None
"""


def test_supervised_training_lowers_the_loss_and_saves(tiny, tmp_path):
    """With a custom sink, schedule and health rule: each is at work in the run."""
    (file := tmp_path / "mine.py").write_text(EXTENSIONS)
    custom = {"trainer.logger": f"[console,{file}:Lines]", "trainer.health_rules": f"[{file}:low_loss]"}
    arguments = sft_arguments(tiny, tmp_path, **custom, **{"optim.lr_scheduler_type": f"{file}:halves"})
    finish(start("main_sft", arguments))
    rates = [line.split()[1] for line in (tmp_path / "default.txt").read_text().splitlines()[1:]]
    assert rates == ["0.002"] * 10 + ["0.001"] * 10
    assert metrics(tmp_path)[20]["health/low-loss"] == 1
    steps = metrics(tmp_path)
    assert max(steps) == 20
    assert steps[1]["train/loss"] == pytest.approx(5.7, abs=0.2)
    assert steps[20]["train/loss"] < 4
    assert steps[20]["val/loss"] < 4
    merged = tmp_path / "merged"
    merge = ["merge", "--local_dir", str(tmp_path / "global_step_20" / "actor"), "--target_dir", str(merged)]
    finish(start("model_merger", merge))
    assert not torch.equal(
        AutoModelForCausalLM.from_pretrained(merged).state_dict()["model.norm.weight"],
        AutoModelForCausalLM.from_pretrained(tiny / "model").state_dict()["model.norm.weight"],
    )
    assert "the run is complete: 20 of 20 steps" in finish(start("main_sft", arguments))


@pytest.mark.slow
@pytest.mark.parametrize("how", ["signal", "worker"])
def test_a_signal_to_the_group_and_a_dead_worker_end_a_run_in_seconds_with_one_message(tiny, tmp_path, how):
    process = start("main_sft", sft_arguments(tiny, tmp_path, **{"trainer.total_training_steps": 5000}))
    wait_for_step(process, tmp_path, 3)
    processes = psutil.Process(process.pid).children(recursive=True)
    directories = temporary_directories(processes)
    if how == "signal":
        os.killpg(process.pid, signal.SIGTERM)
    else:
        next(p for p in processes if "TrainWorker" in " ".join(p.cmdline())).kill()
    output, _ = process.communicate(timeout=30)
    if how == "signal":
        assert process.returncode == 130
        assert "stopped (SIGTERM)" in output
        assert list(tmp_path.glob("global_step_*")), "the step it was in is saved"
        assert "the same command resumes the run" in output and (tmp_path / "curves.png").is_file()
    else:
        assert process.returncode == 1
        assert "train worker.update_policy: the process of train-" in output
        assert "Traceback" not in output
    assert_gone(processes)
    assert len(directories) == 2 and not any(map(Path.exists, directories))
    assert diagnose(tmp_path).code == {"signal": "stopped", "worker": "worker-died"}[how]


@pytest.mark.drill
def test_the_runs_of_a_sweep_are_those_of_their_own_commands_also_next_to_a_busy_program(overrides, tmp_path):
    # On one device, whose threads wait for each other in another way next to a busy program.
    steps = {"trainer.total_training_steps": 2, "trainer.n_gpus_per_node": 1}
    rate, base = "actor_rollout_ref.actor.optim.lr", tmp_path / "sweep"
    output = finish(start("main_ppo", ["-m", *overrides(base, steps | {rate: "1e-2,-1"})]), status=2)
    assert "lr--1: " in output and "at least 0" in output and not base.exists()
    samples = {"actor_rollout_ref.rollout.n": "4,2"}
    output = finish(start("main_ppo", ["-m", *overrides(base, steps | samples | {rate: "1e-2,5e-3"})]))
    assert (base / "sweep.png").is_file()
    names = ["n-4_lr-0.01", "n-4_lr-0.005", "n-2_lr-0.01", "n-2_lr-0.005"]
    assert [line.split()[0] for line in output.splitlines() if line.startswith("n-")] == names
    engines = [set(re.findall(r"pid=(\d+)", (base / name / "logs" / "rollout-0.log").read_text())) for name in names]
    assert len(set().union(*engines)) == 4, "each run has an engine of its own"
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        finish(start("main_ppo", overrides(tmp_path / "alone", steps | {rate: "5e-3"})))
    finally:
        busy.kill()
        busy.wait()
    of_sweep, alone = metrics(base / "n-4_lr-0.005"), metrics(tmp_path / "alone")
    assert [*of_sweep] == [*alone]
    for step, values in alone.items():
        same = {name: value for name, value in values.items() if not MACHINE_METRICS.search(name)}
        assert {name: of_sweep[step][name] for name in same} == same
    assert of_sweep[2]["actor/grad_norm"] != metrics(base / "n-4_lr-0.01")[2]["actor/grad_norm"]
