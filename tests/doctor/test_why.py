"""`hybridrl why`: the directories that runs leave, each as its fault leaves it, and the one cause that is reported."""

import json
import os
import shlex
import subprocess
import sys
import time
from contextlib import closing
from datetime import datetime, timedelta
from pathlib import Path

import psutil
import pytest

from hybridrl.checkpoint.store import Store
from hybridrl.config import ConfigError, PPOConfig
from hybridrl.config.compose import as_yaml, save_config
from hybridrl.config.load import load_ppo_config, load_sft_config
from hybridrl.core.cluster import OutOfMemory
from hybridrl.doctor import __main__ as doctor
from hybridrl.doctor import why
from hybridrl.doctor.why import diagnose
from hybridrl.health import HealthMonitor
from hybridrl.required import required
from hybridrl.runs.directory import RunDirectory
from hybridrl.runtime.guard import REQUESTS
from hybridrl.tracking import Tracker
from hybridrl.tracking.faults import begin_step, read_faults, recording
from tests.doctor.conftest import config_in
from tests.doctor.ends import CAUSES, Work, broken, stopped
from tests.runtime.test_guard import count_kills

TOP = Path(__file__).parents[2]
GOOD = {"healthy": True, "recovery": False, "metrics": {}}


@pytest.fixture
def config(tmp_path: Path) -> PPOConfig:
    return config_in(tmp_path)


def run(config: PPOConfig, work: Work | None = None, *, steps: int = 3, saved: int = 2) -> Path:
    """A run's steps, with the writers of a run; `work` is done in the last one."""
    directory = Path(config.trainer.default_local_dir)
    directory.mkdir(exist_ok=True)
    REQUESTS.last = ""
    try:
        with recording(directory), closing(Store(directory)) as store:
            save_config(as_yaml(config), directory / "config.yaml")
            with Tracker([], directory, "p", "e", {}, steps) as tracker:
                for step in range(1, steps + 1):
                    begin_step(step)
                    if step == steps and work:
                        work(store, config)
                    tracker.log(step, {"timing_s/step": 2.0})
                    if step == saved:
                        store.begin(step)
                        store.publish(step, GOOD)
    except (Exception, KeyboardInterrupt):
        pass
    return directory


@pytest.mark.parametrize(("work", "code", "cause", "command"), CAUSES, ids=[case[1] for case in CAUSES])
def test_the_cause_of_each_end_is_named_with_the_command_to_continue(config, work, code, cause, command):
    verdict = diagnose(run(config, work))
    assert (verdict.code, cause in verdict.cause, command in verdict.command) == (code, True, True), verdict
    assert "\n" not in verdict.cause + verdict.command


def test_every_code_of_an_end_has_a_case_a_meaning_and_a_command(config):
    assert {case[1] for case in CAUSES} == {"finished", "stopped", *why.ENDS}
    directory = run(config, stopped)
    assert all(command_of(RunDirectory(directory)) for _, command_of in why.ENDS.values())
    (directory / "config.yaml").unlink()
    assert all(command_of(RunDirectory(directory)) for _, command_of in why.ENDS.values())


def test_a_run_of_an_earlier_version_has_no_recorded_end(config):
    directory = run(config)
    (directory / "faults.jsonl").unlink()
    assert diagnose(directory).code == "killed"


def test_the_command_to_continue_loads_the_run_s_configuration_with_the_override(config):
    directory = run(config, broken)
    program, name, *arguments = shlex.split(diagnose(directory).command)
    assert (program, name) == ("hybridrl", "train") and arguments[:4] == ["-cp", str(directory), "-cn", "config"]
    loaded = load_ppo_config(arguments[4:], config_name="config", config_dir=directory)
    assert loaded.actor_rollout_ref.actor.optim.lr == 1e-7
    assert loaded.trainer.default_local_dir == config.trainer.default_local_dir


def test_a_supervised_run_without_memory_continues_with_its_optimizer_on_the_host(config):
    text = "train worker.update_policy: train-0 ran out of memory: CUDA out of memory"
    directory = run(config, lambda *_: (_ for _ in ()).throw(OutOfMemory(text, "train worker.update_policy")))
    files = Path(config.data.train_files[0]).parent
    own = [f"data.train_files={config.data.train_files[0]}", f"model.path={files}", "trainer.device=cpu"]
    save_config(as_yaml(load_sft_config(own)), directory / "config.yaml")
    program, name, *arguments = shlex.split(diagnose(directory).command)
    assert (program, name) == ("hybridrl", "sft")
    loaded = load_sft_config(arguments[4:], config_name="config", config_dir=directory)
    assert loaded.engine.fsdp_config.offload_policy


def test_a_run_that_began_elsewhere_continues_from_its_own_checkpoint(config):
    config.trainer.resume_mode = "resume_path"
    directory = run(config, stopped)
    assert diagnose(directory).command.endswith("trainer.resume_mode=auto")
    config.trainer.default_local_dir += " without checkpoint"
    assert diagnose(run(config, stopped, saved=0)).command.endswith("-cn config")


KILLED = """
import os, signal, sys
from pathlib import Path
from hybridrl.checkpoint.store import Store
from hybridrl.tracking import Tracker
from hybridrl.tracking.faults import begin_step, recording
from hybridrl.runtime.guard import oom_kills
from hybridrl.runtime.guard import StopRequest
directory = Path(sys.argv[1])
with recording(directory, lambda: {"oom_kills": oom_kills()}), StopRequest(wait_for_step=True):
    store = Store(directory)
    tracker = Tracker([], directory, "p", "e", {}, 9)
    tracker.log(1, {"timing_s/step": 0.1})
    begin_step(2)
    if "stop" in sys.argv:
        os.kill(os.getpid(), signal.SIGTERM)
    print("ready", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def living(tmp_path):
    """Starts a process that runs step 2 until it is killed."""
    processes = []

    def start(*more: str) -> subprocess.Popen:
        command = [sys.executable, "-c", KILLED, str(tmp_path), *more]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        processes.append(subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(TOP)}, **pipes))
        assert any(line == "ready\n" for line in iter(required(processes[-1].stdout).readline, ""))
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.wait()


def age(directory: Path, seconds: float) -> None:
    """Make what a run recorded so much older."""
    faults, metrics = directory / "faults.jsonl", directory / "metrics.jsonl"
    records = [json.loads(line) for line in faults.read_text().splitlines()]
    for record in records:
        record["time"] = (datetime.fromisoformat(record["time"]) - timedelta(seconds=seconds)).isoformat()
    faults.write_text("".join(json.dumps(record) + "\n" for record in records))
    os.utime(metrics, times=(metrics.stat().st_mtime - seconds,) * 2)


def test_a_living_run_shows_its_step_and_a_killed_one_that_nothing_recorded_its_end(tmp_path, living):
    process = living()
    verdict = diagnose(tmp_path)
    assert verdict.code == "running"
    assert f"process {process.pid} on " in verdict.cause and "did step 1 0 s ago, and steps take 0.1 s" in verdict.cause
    age(tmp_path, 120)
    assert diagnose(tmp_path).code == "silent" and "did step 1 12" in diagnose(tmp_path).cause
    age(tmp_path, -120)
    process.kill()
    process.wait()
    verdict = diagnose(tmp_path)
    assert verdict.code == "killed"
    assert verdict.cause.startswith(
        "the driver was killed after step 1 (nothing was saved), by hand, by a scheduler or"
    )


def test_what_is_known_of_the_machine_explains_a_run_without_an_end(tmp_path, living, monkeypatch, free_space):
    process = living()
    process.kill()
    process.wait()
    before = read_faults(tmp_path)[0].memory["oom_kills"]
    assert diagnose(tmp_path).code == "killed"
    if before is not None:
        with monkeypatch.context() as patch:
            count_kills(patch, tmp_path / "vmstat", before)(f"oom_kill {before + 2}\n")
            verdict = diagnose(tmp_path)
        assert verdict.code == "host-memory"
        assert "for lack of memory the kernel has killed 2 processes since the run began" in verdict.cause
    free_space(0)
    assert diagnose(tmp_path).code == "disk-full"
    age(tmp_path, 1 + time.time() - psutil.boot_time())
    assert diagnose(tmp_path).code == "machine-restarted"


def test_a_run_that_was_killed_while_it_stopped_names_the_request(tmp_path, living):
    process = living("stop")
    process.kill()
    process.wait()
    assert "after step 1 (nothing was saved), after SIGTERM and before its step was saved" in diagnose(tmp_path).cause


def test_a_run_that_starts_and_one_that_was_rejected(config, tmp_path):
    assert diagnose(tmp_path / "nowhere").code == "not-started"
    directory = Path(config.trainer.default_local_dir)
    (directory / "logs").mkdir(parents=True)
    assert diagnose(directory).code == "not-started"
    with recording(directory), closing(Store(directory)):
        assert "has been starting it for 0 s" in diagnose(directory).cause
    with pytest.raises(ConfigError), recording(directory):
        raise ConfigError("data.train_files=x: row 3 has no prompt", fix="fix the row")
    verdict = diagnose(directory)
    assert verdict.code == "rejected"
    assert verdict.cause.endswith("before the start: data.train_files=x: row 3 has no prompt; fix the row")


def test_a_run_that_finished_although_it_learned_nothing_shows_the_diagnosis(config):
    def constant(store: Store, _: PPOConfig) -> None:
        rows = {number: {"critic/score/max": 0.0, "critic/score/min": 0.0} for number in range(1, 3)}
        metrics = HealthMonitor(rows).judge(3, rows[1])
        with Tracker([], store.directory, "p", "e", {}, 3) as tracker:
            tracker.log(3, metrics)

    directory = run(config, constant)
    assert diagnose(directory).cause == "it finished after step 3; no-signal held at the last step (docs/health.md)"
    assert [fault.code for fault in read_faults(directory)] == ["begun", "no-signal", "finished"]


def test_a_directory_that_is_not_there_is_rejected(capsys):
    for name in ("why", "checkpoints", "replay", "bundle"):
        with pytest.raises(SystemExit) as ended:
            doctor.command(name, ["nope"])
        assert ended.value.code == 2
        assert "nope: there is no such directory (a run whose configuration is" in capsys.readouterr().err


def test_the_command_prints_cause_and_command_or_json_and_its_status_says_whether_all_is_well(config, capsys):
    directory = run(config, stopped)
    assert doctor.command("why", [str(directory)]) == 1
    first, second, third = capsys.readouterr().out.splitlines()[-3:]
    assert first.startswith("why:  Ctrl-C stopped it in step 3") and first.endswith("[stopped]")
    assert second.startswith("next: hybridrl train -cp ") and third.strip() == "(docs/errors.md#stopped)"
    config.trainer.default_local_dir += " to the end"
    assert doctor.command("why", [str(run(config)), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["code"] == "finished"
