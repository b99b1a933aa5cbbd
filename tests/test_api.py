"""`train` and `Run` from Python: what they write and start, what they raise, and what they read of a run."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas
import psutil
import pytest
from PIL import Image

from hybridrl.api import CommandFailed, Run, run_command, train
from hybridrl.config import ConfigError
from hybridrl.config.compose import read_argument
from hybridrl.data.pictures import content, decoded, located

PYTHON = sys.executable
ROWS = [{"question": "1+1?", "answer": "2"}, {"question": "1+2?", "answer": "3"}]
# Stands for the interpreter: keeps the arguments, makes the directory of a run, and does what ACT says.
CHILD = """#!{python}
import json, os, signal, sys, time
from pathlib import Path
Path({arguments!r}).write_text(json.dumps(sys.argv[1:]))
for word in sys.argv:
    if word.startswith("trainer.default_local_dir="):
        run = Path(word.partition("=")[2].strip("'"))
        run.mkdir(parents=True, exist_ok=True)
        (run / "config.yaml").touch()
exec(os.environ.get("ACT", ""))
"""


class Command:
    """The stand-in for the command `hybridrl`."""

    def __init__(self, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.file, self._monkeypatch, program = place / "arguments.json", monkeypatch, place / "python"
        program.write_text(CHILD.format(python=PYTHON, arguments=str(self.file)))
        program.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(program))

    def acts(self, code: str) -> None:
        self._monkeypatch.setenv("ACT", code)

    @property
    def words(self) -> list[str]:
        return json.loads(self.file.read_text())

    @property
    def values(self) -> dict[str, Any]:
        """The keys of the last command, as it reads them."""
        arguments = [read_argument(word) for word in self.words if "=" in word]
        return {argument.key: argument.value for argument in arguments}


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    monkeypatch.chdir(tmp_path)
    return Command(tmp_path, monkeypatch)


def score(solution_str: str, ground_truth: str) -> float:
    return float(solution_str == ground_truth)


def read_rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


# -- arguments ---------------------------------------------------------------------------------------------------------


def test_arguments_become_keys_of_the_command(command: Command, tmp_path: Path) -> None:
    run = train("some/model", ROWS, "my_reward.py:grade", validation="val.jsonl", steps=3, directory="run", samples=4)
    assert command.words[:3] == ["-m", "hybridrl", "train"]
    assert command.values == {
        "actor_rollout_ref.model.path": "some/model",
        "data.train_files": str(tmp_path / "run/inputs/train.jsonl"),
        "data.prompt_key": "question",
        "data.ground_truth_key": "answer",
        "data.val_files": "val.jsonl",
        "reward.custom_reward_function.path": "my_reward.py",
        "reward.custom_reward_function.name": "grade",
        "algorithm.adv_estimator": "grpo",
        "actor_rollout_ref.rollout.n": 4,
        "trainer.total_training_steps": 3,
        "trainer.default_local_dir": str(tmp_path / "run"),
    }
    assert run.directory == tmp_path / "run" and repr(run) == f"Run('{tmp_path}/run')"


@pytest.mark.parametrize(
    ("algorithm", "values"),
    [
        ("rloo", {"algorithm.adv_estimator": "rloo", "actor_rollout_ref.rollout.n": 8}),
        ("no_such", {"algorithm.adv_estimator": "no_such", "actor_rollout_ref.rollout.n": 8}),
        ("mine.py:advantages", {"algorithm.adv_estimator": "mine.py:advantages", "actor_rollout_ref.rollout.n": 8}),
        ("dapo", {"preset": "dapo"}),
        ("cispo", {"algorithm.adv_estimator": "grpo", "actor_rollout_ref.rollout.n": 8,
                   "actor_rollout_ref.actor.policy_loss.loss_mode": "cispo"}),
    ],
)  # fmt: skip
def test_an_algorithm_is_an_estimator_a_preset_or_a_loss(command: Command, algorithm: str, values: dict) -> None:
    train("m", "rows.jsonl", algorithm=algorithm)
    others = {"actor_rollout_ref.model.path", "data.train_files", "trainer.default_local_dir"}
    assert {key: value for key, value in command.values.items() if key not in others} == values


def test_keys_are_nested_or_dotted_and_are_read_back_exactly(command: Command, tmp_path: Path) -> None:
    texts = ["true", "null", "1e3", "a b", "it's", "a\\", "[x]", "{a}", "", "~", "a:b", "é\n", "nan"]
    train(
        Path("m"),
        ["a.jsonl", Path("b.jsonl")],
        trainer={"seed": np.int64(3), "logger": [], "experiment_name": "mine", "on_diagnosis": {"policy-jump": "stop"}},
        actor_rollout_ref={"actor": {"optim": {"lr": 1e-6}}, "rollout": {"stop": texts, "temperature": 0.1}},
        **{"data.tokenizer": Path("t"), "data.seed": None, "data.shuffle": False, "algorithm.adv_estimator": "opo"},
    )
    values = command.values
    assert values["actor_rollout_ref.rollout.stop"] == texts
    assert values["trainer.on_diagnosis"] == {"policy-jump": "stop"} and values["trainer.logger"] == []
    assert (values["trainer.seed"], values["actor_rollout_ref.actor.optim.lr"]) == (3, 1e-6)
    assert (values["data.tokenizer"], values["data.seed"], values["data.shuffle"]) == ("t", None, False)
    assert values["data.train_files"] == ["a.jsonl", "b.jsonl"] and values["algorithm.adv_estimator"] == "opo"
    assert values["trainer.default_local_dir"] == str(tmp_path / "outputs/hybridrl/mine")
    with pytest.raises(ConfigError, match=r"data.seed is of type set; give a number, a text, a list or a dict"):
        train("m", "rows.jsonl", **{"data.seed": {1}})


def test_a_built_in_reward_and_modules_are_named(command: Command) -> None:
    train("m", "rows.jsonl", "gsm8k")
    assert command.values["reward.name"] == "gsm8k"
    for reward, path, name in (
        ("my.py", "my.py", "compute_score"),
        ("pkg://my.grader:grade", "pkg://my.grader", "grade"),
        ("file:///my.py", "file:///my.py", "compute_score"),
    ):
        train("m", "rows.jsonl", reward)
        key = "reward.custom_reward_function"
        assert (command.values[f"{key}.path"], command.values[f"{key}.name"]) == (path, name)


# -- rows --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [list, iter, datasets.Dataset.from_list, pandas.DataFrame, lambda rows: ({**row} for row in rows)],
    ids=["list", "iterator", "Dataset", "DataFrame", "generator"],
)
def test_rows_of_every_kind_are_written(command: Command, make: Callable[[list], Any]) -> None:
    train("m", make(ROWS), directory="run")
    assert read_rows(Path("run/inputs/train.jsonl")) == ROWS


def test_rows_of_a_table_keep_values_and_lose_missing_ones(command: Command) -> None:
    messages = [[{"role": "user", "content": "2?"}], [{"role": "user", "content": "3?"}]]
    table = pandas.DataFrame({"prompt": messages, "answer": [2, 3], "size": [0.1, None], "ids": [np.arange(2), None]})
    train("m", "rows.jsonl", validation=table, directory="run")
    assert read_rows(Path("run/inputs/validation.jsonl")) == [
        {"prompt": messages[0], "answer": 2, "size": 0.1, "ids": [0, 1]},
        {"prompt": messages[1], "answer": 3, "size": None, "ids": None},
    ]
    assert command.values["data.ground_truth_key"] == "answer" and "data.prompt_key" not in command.values


@pytest.mark.parametrize("make", [list, pandas.DataFrame, datasets.Dataset.from_list])
def test_pictures_in_rows_are_written_as_files_next_to_them(command: Command, make: Callable[[list], Any]) -> None:
    """Equal pictures are one file, whose name a run reads from the directory of the rows."""
    red, blue = (Image.new("RGB", (4, 3), colour) for colour in ("red", "blue"))
    rows = [{"prompt": "<image><image>?", "images": [red, blue]}, {"prompt": "<image>?", "images": [red.copy()]}]
    train("m", make(rows), directory="run", **{"data.ground_truth_key": "none"})
    (first, second), (again,) = (row["images"] for row in read_rows(Path("run/inputs/train.jsonl")))
    assert again == first != second and len(list(Path("run/inputs/pictures").iterdir())) == 2
    for name, picture in ((first, red), (second, blue)):
        file = located(name, Path("run/inputs"))
        assert decoded(content(file)).tobytes() == picture.tobytes()


def test_columns_that_the_reader_finds_or_the_user_names_are_left_alone(command: Command) -> None:
    verl = {"prompt": "1?", "reward_model": {"ground_truth": "1"}, "answer": "worked out"}
    train("m", [verl])
    assert not {"data.prompt_key", "data.ground_truth_key"} & command.values.keys()
    train("m", [{"text": "1?", "problem": "2?", "label": 1}], **{"data.prompt_key": "text"})
    assert (command.values["data.prompt_key"], command.values["data.ground_truth_key"]) == ("text", "label")


def test_unchanged_inputs_are_not_written_again(command: Command) -> None:
    files = [Path("run/inputs", name) for name in ("train.jsonl",)]
    train("m", ROWS, directory="run")
    before = [file.stat().st_ino for file in files]
    train("m", ROWS, directory="run")
    assert [file.stat().st_ino for file in files] == before
    train("m", ROWS[:1], directory="run")
    assert read_rows(files[0]) == ROWS[:1]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "data has no rows"),
        (3, "data has no rows"),
        ({"train": ROWS, "test": ROWS}, "data is a dict of train, test; give one table, or a list of rows"),
        ([*ROWS, 3], "data: row 2 cannot be written as JSON"),
        ([{"prompt": "a", "answer": float("nan")}], "data: row 0 cannot be written as JSON"),
        ([{"prompt": "a", "answer": {1}}], r"data: row 0 .*\{1\} is of type set.*; rows are dicts"),
        ([{"prompt": "\ud800"}], "train.jsonl: 'utf-8' codec"),
    ],
)
def test_what_are_no_rows_is_rejected_by_its_argument(command: Command, data: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        train("m", data)
    assert not command.file.exists()


# -- the command -------------------------------------------------------------------------------------------------------


def test_output_is_shown_line_by_line_and_the_command_runs_twice(
    command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    command.acts("print('step 1', flush=True); print('warning', file=sys.stderr)")
    for _ in range(2):
        train("m", "rows.jsonl")
        assert capsys.readouterr().out == "step 1\nwarning\n"


def test_rejected_input_raises_the_text_of_the_command(command: Command) -> None:
    command.acts("print('set by you'); print('error: a=1: wrong; set 2', file=sys.stderr); sys.exit(2)")
    with pytest.raises(ConfigError) as error:
        train("m", "rows.jsonl")
    assert str(error.value) == "a=1: wrong; set 2"
    command.acts("print('error:\\na=1: wrong\\nb=2: wrong'); sys.exit(2)")
    with pytest.raises(ConfigError) as error:
        train("m", "rows.jsonl")
    assert str(error.value) == "a=1: wrong\nb=2: wrong"


def test_an_error_in_a_key_is_the_commands_own(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"unknown key trainer.sed; nearest: trainer.seed") as error:
        train(tmp_path, ROWS, score, directory=tmp_path / "run", trainer={"sed": 1}, steps=0)
    assert "trainer.total_training_steps=0" in str(error.value)  # all at once


@pytest.mark.parametrize(
    ("act", "code", "status", "text"),
    [
        ("print('failed [disk-full]: no space (docs/errors.md#disk-full)'); sys.exit(1)", "disk-full", 1, "no space"),
        ("print('failed: the driver was killed (signal 9)'); sys.exit(137)", "killed", 137, "the driver was killed"),
        ("os.kill(os.getpid(), 9)", "killed", -9, "the command was killed by SIGKILL"),
        ("print('exit status 3: too many faults'); sys.exit(3)", "reward-faults", 3, "too many faults"),
        ("print('no such module'); sys.exit(1)", "unexpected", 1, "no such module"),
    ],
)
def test_other_failures_have_a_code_and_the_place_of_the_log(
    command: Command, tmp_path: Path, act: str, code: str, status: int, text: str
) -> None:
    command.acts(act)
    with pytest.raises(CommandFailed) as error:
        train("m", "rows.jsonl", directory="run")
    assert (error.value.code, error.value.status) == (code, status)
    assert str(error.value).startswith(f"failed [{code}]: ") and text in str(error.value)
    assert f"logs: {tmp_path}/run/logs; hybridrl why {tmp_path}/run" in str(error.value)


STOPPING = """
signal.signal(signal.SIGINT, lambda *_: print("stopping", flush=True) or stopped.append(1))
stopped = []
print("ready", flush=True)
while not stopped: time.sleep(0.01)
time.sleep(0.3)
print(f"stopped {len(stopped)}", flush=True)
sys.exit(130)
"""


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Ctrl-C raises, also where the tests were started in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_one_interrupt_ends_the_command_in_order_and_is_raised_after_its_end(
    command: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command.acts(STOPPING)

    def interrupt() -> None:
        while "ready" not in capsys.readouterr().out:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        run_command(["train"], tmp_path)
    assert capsys.readouterr().out.endswith("stopping\nstopped 1\n")


def test_the_command_ends_with_a_parent_that_is_killed(command: Command, tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    command.acts(f"Path({str(pid)!r}).write_text(str(os.getpid())); time.sleep(60)")
    code = f"import sys; sys.executable = {sys.executable!r}\nfrom hybridrl import train; train('m', 'rows.jsonl')"
    parent = subprocess.Popen([PYTHON, "-c", code])
    while not pid.exists() or not pid.read_text():
        time.sleep(0.05)
    child = psutil.Process(int(pid.read_text()))
    parent.kill()
    parent.wait()
    assert psutil.wait_procs([child], timeout=10)[1] == []


def test_a_directory_in_use_is_rejected_before_its_inputs_are_touched(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hybridrl.api.holder", lambda directory: "process 7")
    with pytest.raises(ConfigError, match=r"run is in use by process 7; wait for it, or name another directory"):
        train("m", ROWS, directory="run")
    assert not Path("run").exists()


# -- runs --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Two steps of a run, the second with three samples."""
    lines = [{"step": 1, "critic/rewards/mean": 0.1}, {"step": 1, "x": 3}, {"step": 2, "critic/rewards/mean": 1 / 3}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    sample = {"input": "1+1?", "output": "2", "gts": "2", "score": 1.0, "step": 2, "acc": True}
    others = [
        {"episode": {"row": 4, "advantage": 0.5}},
        {"score": None, "episode": {"fault": "raised"}},
        {"row": "mine"},
    ]
    (tmp_path / "rollouts").mkdir()
    text = "".join(json.dumps(sample | other) + "\n" for other in others)
    (tmp_path / "rollouts" / "2.jsonl").write_text(text)
    return Run(tmp_path)


def test_metrics_are_a_table_by_step(run: Run) -> None:
    assert run.metrics.index.name == "step" and [*run.metrics.index] == [1, 2]
    assert run.metrics["critic/rewards/mean"].to_dict() == {1: 0.1, 2: 1 / 3}
    assert run.metrics.loc[1, "x"] == 3 and np.isnan(run.metrics.loc[2, "x"])


def test_samples_are_a_table_with_the_values_of_the_reward(run: Run) -> None:
    table = run.samples()
    assert [*table.columns[:4]] == ["prompt", "response", "ground_truth", "score"]
    assert table["score"].tolist()[::2] == [1.0, 1.0] and np.isnan(table["score"][1])
    assert table["acc"].all() and table["row"].tolist()[::2] == [4, "mine"] and table["fault"][1] == "raised"
    with pytest.raises(ConfigError, match="step=7: there are no samples; choose steps 2"):
        run.samples(7)


def test_a_run_shows_its_curves_and_writes_its_page(run: Run) -> None:
    assert "data:image/png;base64,iVBOR" in vars(Run)["_repr_html_"](run)
    page = run.report()
    assert page == run.directory / "report.html" and "1+1?" in page.read_text()


def test_what_is_no_run_and_a_run_without_checkpoints_are_rejected(run: Run, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none is not the directory of a run; name its trainer.default_local_dir"):
        Run(tmp_path / "none")
    with pytest.raises(ConfigError, match="has no checkpoint"):
        run.model_path  # noqa: B018


def test_the_package_imports_nothing_until_it_is_used() -> None:
    code = "import sys, hybridrl; print([n for n in sys.modules if n[:9] == 'hybridrl.'], hasattr(hybridrl, 'no'))"
    code += "; from hybridrl import Run, train; print({'torch', 'ray', 'pandas', 'transformers'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[] False\nset()\n"
