"""Every command that reads a run's directory, over each of its files damaged: a sentence, never a traceback."""

import json
import shutil
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hybridrl.checkpoint.files import write_manifest
from hybridrl.checkpoint.store import Store
from hybridrl.config import ConfigError, PPOConfig
from hybridrl.config.compose import as_yaml, save_config
from hybridrl.doctor import __main__ as doctor
from hybridrl.evaluation.targets import find_targets
from hybridrl.model_merger import __main__ as merger
from hybridrl.report import __main__ as report
from hybridrl.report import show
from hybridrl.runs.resume import check_complete, plan_resume
from hybridrl.runs.settings import build_algorithm
from hybridrl.tracking import Tracker
from hybridrl.tracking.faults import begin_step, recording
from hybridrl.tracking.records import write_records

from .conftest import config_in

STEP = "global_step_2"
FILES = [
    *("config.yaml", "faults.jsonl", "metrics.jsonl", "rollouts/2.jsonl", "samples/2.jsonl", "logs/train-0.log"),
    *(f"{STEP}/state.json", f"{STEP}/manifest.json", f"{STEP}/config.yaml", f"{STEP}/actor/huggingface/config.json"),
]
WHOLE = ["rollouts", "samples", "logs", "replay", STEP, f"{STEP}/actor", ".lock"]
TEXTS: dict[str, bytes] = {
    "empty": b"",
    "zeros": bytes(64),
    "binary": bytes(range(256)) * 4,
    "no UTF-8": b'{"step": "\xff\xfe", "score": 1}\n',
    "a number": b"7\n",
    "null": b"null\n",
    "a list": b"[1, {}]\n",
    "NaN": b"NaN\n",
    "a huge number": b'{"step": 1' + b"0" * 400 + b"}\n",
    "deep": b"[" * 1_500,
    "an object": b"{}\n",
    "texts": b'{"trainer": "x", "data": 1, "files": "x", "healthy": "yes", "metrics": "x", "published": "x", '
    b'"recovery": 0, "step": "1", "code": 3, "time": 3, "text": 4, "tail": 5, "memory": 6, "input": 7, "output": 8}\n',
    "lists": b'{"trainer": [], "data": {}, "files": {"x": 3}, "healthy": [], "metrics": {"val-core/x/acc": "x"}, '
    b'"published": [], "recovery": {}, "step": [], "code": "unexpected", "time": "x", "text": "x", "tail": {}, '
    b'"memory": {"oom_kills": "x"}, "episode": {"row": {}, "position": []}, "input": {}, "output": {}}\n',
}


def make_run(directory: Path, config: PPOConfig) -> None:
    """Write what a run of three steps leaves that was saved in the second and failed in the third."""
    sample = {"input": "a", "output": "b", "gts": "c", "score": 1.0, "step": 2}
    state = {"healthy": True, "recovery": False, "metrics": {"val-core/x/acc/mean@1": 0.5}, "data": "x", "prompts": 8}
    with (
        pytest.raises(RuntimeError),
        recording(directory, lambda: {"oom_kills": 0}),
        closing(Store(directory)) as store,
    ):
        save_config(as_yaml(config), directory / "config.yaml")
        with Tracker([], directory, "p", "e", {}, 3) as tracker:
            for step in (1, 2):
                begin_step(step)
                tracker.log(step, {"timing_s/step": 2.0, "critic/score/mean": 0.5})
        writing = store.begin(2)
        (writing / "actor" / "huggingface").mkdir(parents=True)
        (writing / "actor" / "huggingface" / "config.json").write_text("{}")
        (writing / "actor" / ".metadata").write_bytes(b"optimizer.state")
        save_config(as_yaml(config), writing / "config.yaml")
        store.publish(2, state)
        raise RuntimeError("no luck")
    for name in ("rollouts", "samples"):
        write_records(directory / name / "2.jsonl", [sample | {"episode": {"row": 0}}])
    (directory / "logs").mkdir(exist_ok=True)
    (directory / "logs" / "train-0.log").write_text("Traceback (most recent call last):\n")


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> PPOConfig:
    return config_in(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def made_run(config: PPOConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("made") / "run"
    directory.mkdir()
    make_run(directory, config)
    return directory


QUICK = ("no UTF-8", "lists", "a loop")  # the kinds that are not marked slow


def damages() -> list[Any]:
    kinds = (*TEXTS, "truncated", "a directory", "no permission", "a loop")
    cases = [(name, kind) for name in FILES for kind in kinds]
    cases += [(name, kind) for name in WHOLE for kind in ("a file", "a loop")]
    cases += [(f"{STEP}/state.json", f"{kind}, intact") for kind in TEXTS]
    return [pytest.param(*case, marks=[] if case[1] in QUICK else [pytest.mark.slow]) for case in cases]


def damage(directory: Path, name: str, kind: str) -> None:
    path = directory / name
    whole = path.read_bytes() if path.is_file() else b""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    kind, _, intact = kind.partition(", ")
    if kind == "a directory":
        path.mkdir()
    elif kind == "a loop":
        path.symlink_to(path.name)
    elif kind == "no permission":
        path.write_bytes(whole)
        path.chmod(0)
    else:
        path.write_bytes({"truncated": whole[: len(whole) // 2], "a file": b"x", **TEXTS}[kind])
    if intact:
        write_manifest(directory / STEP)


def commands(directory: Path, config: PPOConfig, damaged: str) -> dict[str, Callable[[], object]]:
    run, reward = str(directory), str(Path(config.data.train_files[0]).with_name("reward.py"))
    merged = str(directory.parent / "merged")
    read_by_rescore = damaged.startswith(("config", "rollouts"))

    def resume(**trainer: str) -> None:
        wanted = replace(config, trainer=replace(config.trainer, default_local_dir=run, **trainer))
        plan = plan_resume(wanted, build_algorithm(wanted), 4, 4, directory, lambda text: None)
        check_complete(wanted, replace(plan, steps=plan.done or 1), directory)

    rescore = {"rescore": lambda: doctor.command("rescore", [run, "--reward", reward, "reward.num_workers=0"])}
    return (rescore if read_by_rescore else {}) | {
        "why --json": lambda: doctor.command("why", [run, "--json"]),
        "checkpoints --json": lambda: doctor.command("checkpoints", [run, "--json"]),
        "archive": lambda: doctor.command("bundle", [run, "--samples", "--out", f"{run}.tar.gz"]),
        "replay": lambda: doctor.main(["replay", run]),
        "check": lambda: doctor.main(["-cp", run, "-cn", "config", "--config-only"]),
        "show": lambda: show.main([run, "--step", "all", "--group"]),
        "show --validation": lambda: show.main([run, "--validation", "--sort", "advantage"]),
        "page": lambda: report.main([run, "--out", f"{run}.html"]),
        "merge": lambda: merger.main(["merge", "--local_dir", f"{run}/{STEP}/actor", "--target_dir", merged]),
        "eval": lambda: find_targets([run]),
        "eval :best": lambda: find_targets([f"{run}:best"]),
        "eval :all": lambda: find_targets([f"{run}:all"], "val-core/x/acc/mean@1"),
        "resume": lambda: resume(),
        "resume from it": lambda: resume(resume_mode="resume_path", resume_from_path=f"{run}/{STEP}"),
    }


@pytest.mark.parametrize(("name", "kind"), damages(), ids=str)
def test_every_command_survives_every_damaged_file(made_run, config, tmp_path, capsys, name, kind):
    directory = tmp_path / "run"
    shutil.copytree(made_run, directory)
    damage(directory, name, kind)
    raised = {}
    for command, call in commands(directory, config, name).items():
        capsys.readouterr()
        try:
            call()
            if command.endswith("--json"):
                json.loads(capsys.readouterr().out)
        except (ConfigError, SystemExit):
            pass
        except Exception as error:
            raised[command] = f"{type(error).__name__}: {error}"[:200]
    assert raised == {}
