"""The command that predicts what asynchronous rollout gains (scripts/simulate_async.py)."""

import json
import runpy
import shlex
from pathlib import Path

import pytest
import yaml
from simulation.recorded import LEAST_STEPS, WARM_UP, run_sizes

from hybridrl.tracking.records import write_records

TOP = Path(__file__).parents[2]
MAIN = runpy.run_path(str(TOP / "scripts" / "simulate_async.py"))["main"]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two steps of two groups of two: lengths 1 and 3 in the one, 5 and 5 in the other."""
    for step in (1, 2):
        lengths = [(0, 1), (0, 3), (1, 5), (1, 5)]
        records = [
            {"input": "?", "output": "!", "step": step, "episode": {"position": position, "sampled_tokens": tokens}}
            for position, tokens in lengths
        ]
        write_records(tmp_path / "rollouts" / f"{step}.jsonl", records)
    return tmp_path


def predicted(capsys, *arguments: object) -> dict:
    assert MAIN([*map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_page_shows_what_its_command_prints(capsys):
    page = (TOP / "docs" / "asynchronous.md").read_text(encoding="utf-8")
    command = page.partition("    python scripts/simulate_async.py --mean")[2].partition("\n")[0]
    assert MAIN(shlex.split(f"--mean{command}")) == 0
    assert [line for line in capsys.readouterr().out.splitlines() if line not in page] == []


def test_lengths_are_those_of_a_runs_samples(run, capsys):
    # the group of a prompt stays together: 3 s where it is the first one, 5 s where it is the other
    of_run = predicted(capsys, "--lengths", run, "--groups", 1, "--n", 2, "--speed", 1, "--steps", 200, "--engines", 1)
    assert (of_run["inputs"]["longest"], of_run["inputs"]["n"]) == (5, 2)
    assert of_run["modes"][0]["seconds"] == pytest.approx(4 * 1.25, rel=0.05)


def test_sizes_and_seconds_are_the_runs_unless_they_are_given(run, capsys):
    rollout = {"n": 2, "max_num_seqs": 8, "tensor_model_parallel_size": 2}
    config = {"data": {"train_batch_size": 2}, "actor_rollout_ref": {"rollout": rollout}}
    config["trainer"] = {"n_gpus_per_node": 4, "nnodes": 1}
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    first, second = {"timing_s/step": 99.0}, {"timing_s/step": 10.0, "timing_s/gen": 6.0}
    second |= {"timing_s/update_weights": 1.0, "prompt_length/mean": 7.0, "rollout/iteration_s/fixed": 1.0}
    lines = [{"step": step} | (first if step <= WARM_UP else second) for step in range(1, WARM_UP + LEAST_STEPS + 1)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    of_run = predicted(capsys, "--lengths", run)
    inputs = of_run["inputs"]
    assert [inputs[name] for name in ("groups", "n", "engines", "slots", "prompt_tokens")] == [2, 2, 2, 8, 7]
    longest = 0.75 * 5 + 0.25 * 3  # of two groups, of which one in two has 5
    assert of_run["modes"][0]["seconds"] == pytest.approx(longest + 3 + 1, rel=0.05)
    without = predicted(capsys, "--lengths", run, "--train-share", 0)["modes"][0]["seconds"]
    assert of_run["modes"][0]["seconds"] - without == pytest.approx(3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--lengths", "nothing-here"], "--lengths=nothing-here: no samples"),
        (["--slots", "0"], "--slots=0"),
        (["--sigma", "nan"], "--sigma=nan"),
        (["--bound", "1", "-1"], "--bound=-1"),
        (["--steps", "5"], "--warmup=12 leaves none of --steps=5"),
    ],
)
def test_what_no_run_has_is_rejected_in_a_line(arguments, message, capsys):
    assert MAIN(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {message}") and error.count("\n") == 1


@pytest.mark.parametrize(
    ("training", "rollout", "width", "engines", "alone"),
    [(4, 4, 1, 8, 4), (3, 2, 2, 2, 1), (2, 4, 4, 2, 1), (8, 4, 2, 6, 4)],
)
def test_engines_are_those_of_rollout_and_as_many_parts_of_the_devices_train(training, rollout, width, engines, alone):
    separate = {"nnodes": 1, "n_gpus_per_node": rollout, "tensor_model_parallel_size": width}
    config = {"data": {"train_batch_size": 4}, "actor_rollout_ref": {"rollout": {"n": 1, "max_num_seqs": 2} | separate}}
    config["trainer"] = {"nnodes": 1, "n_gpus_per_node": training, "v1": {"trainer_mode": "separate_async"}}
    sizes = run_sizes(config)
    assert (sizes.engines, sizes.training_engines) == (engines, alone)
