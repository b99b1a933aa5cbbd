"""Runs that Python starts, from a script and from cells of a notebook, against those of the same command."""

import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import nbformat
import psutil
import pytest
from nbclient import NotebookClient

from hybridrl import Run
from hybridrl.doctor.selftest_resume import MACHINE_METRICS

pytestmark = pytest.mark.drill  # minutes
STEPS, REWARD = 6, "critic/rewards/mean"
SCRIPT = """
from hybridrl import train

LENGTH = 24

def distinct(solution_str, ground_truth):
    return len(set(solution_str)) / LENGTH + (ground_truth in solution_str)

rows = [{"question": f"What is 1{a}+1{a}?", "answer": str(200 + 2 * a)} for a in range(10, 42)]
keys = {"data.train_batch_size": 4, "data.max_prompt_length": 32, "data.max_response_length": LENGTH}
"""
CALL = (
    'run = train("model", rows, distinct, steps=6, samples=4, directory="run", trainer={"n_gpus_per_node": 1}, **keys)'
)
COMMAND = f"""
data.train_files=rows.jsonl data.prompt_key=question data.ground_truth_key=answer data.train_batch_size=4
data.max_prompt_length=32 data.max_response_length=24 actor_rollout_ref.model.path=model
actor_rollout_ref.rollout.n=4 algorithm.adv_estimator=grpo reward.custom_reward_function.path=reward.py
reward.custom_reward_function.name=distinct trainer.total_training_steps={STEPS} trainer.n_gpus_per_node=1
trainer.default_local_dir=by_command
"""


@pytest.fixture
def here(tiny: Path, tmp_path: Path) -> Path:
    (tmp_path / "model").symlink_to(tiny / "model")
    return tmp_path


@pytest.fixture(scope="module")
def by_command(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, float]]:
    """The metrics of the run as its command starts it, with the files that its user wrote."""
    place = tmp_path_factory.mktemp("command")
    (place / "model").symlink_to(tiny / "model")
    (place / "reward.py").write_text(
        "def distinct(solution_str, ground_truth):\n"
        "    return len(set(solution_str)) / 24 + (ground_truth in solution_str)\n"
    )
    rows = [f'{{"question": "What is 1{a}+1{a}?", "answer": "{200 + 2 * a}"}}\n' for a in range(10, 42)]
    (place / "rows.jsonl").write_text("".join(rows))
    subprocess.run([sys.executable, "-m", "hybridrl", "train", *COMMAND.split()], cwd=place, check=True)
    return deterministic(place / "by_command")


def deterministic(directory: Path) -> dict[int, dict[str, float]]:
    """The metrics of the steps that do not depend on the machine, to the last digit."""
    steps = Run(directory).metrics.drop(index=0).astype(object).fillna("-").to_dict(orient="index")
    return {
        step: {str(name): value for name, value in values.items() if not MACHINE_METRICS.search(str(name))}
        for step, values in steps.items()
    }


def test_a_script_trains_twice_in_one_process_as_its_command_does(here: Path, by_command: dict, tiny: Path) -> None:
    again = CALL.replace('"run"', '"again"').replace("steps=6", "steps=1")
    (here / "script.py").write_text(f"{SCRIPT}{CALL}\n{again}\nprint(run.evaluate(rows[:4])['num_questions'].item())\n")
    done = subprocess.run([sys.executable, "script.py"], cwd=here, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("\n4\n") and "step 6 " in done.stdout
    assert deterministic(here / "run") == by_command
    assert deterministic(here / "again")[1][REWARD] == by_command[1][REWARD]  # the schedule has other steps
    model = Run(here / "run").model_path
    assert (Path(model) / "model.safetensors").is_file() and Run(here / "run").model_path == model


def test_cells_of_a_notebook_train_with_a_function_of_a_cell_and_show_the_run(here: Path, by_command: dict) -> None:
    cells = [*SCRIPT.strip().split("\n\n"), CALL, "run"]
    notebook: Any = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(here)}}).execute()
    assert deterministic(here / "run") == by_command
    assert "step 6 " in "".join(output.get("text", "") for output in notebook.cells[-2].outputs)
    assert "data:image/png" in notebook.cells[-1].outputs[0]["data"]["text/html"]


def test_a_run_whose_processes_are_killed_is_resumed_by_its_command(here: Path, by_command: dict) -> None:
    (here / "script.py").write_text(SCRIPT + CALL)
    script = subprocess.Popen([sys.executable, "script.py"], cwd=here, stderr=subprocess.PIPE, text=True)
    metrics = here / "run" / "metrics.jsonl"
    while not metrics.exists() or '"step": 2' not in metrics.read_text():
        assert script.poll() is None
        time.sleep(0.05)
    for process in psutil.Process(script.pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # it ends with the one before it
            process.kill()
    assert "CommandFailed: failed [killed]: the command was killed by SIGKILL" in script.communicate()[1]
    run = Run(here / "run")
    assert 2 <= run.metrics.index.max() < STEPS
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    subprocess.run(run.command, shell=True, cwd=here, check=True, env=os.environ | {"PATH": path})
    assert deterministic(here / "run") == by_command
