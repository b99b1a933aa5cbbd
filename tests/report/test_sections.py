"""Health, times, configuration, checkpoints, log and curves of a run, as the page's data and tables have them."""

import fcntl
import json
import os
import time
from contextlib import suppress
from dataclasses import replace

import pytest

from hybridrl.report.contents import Contents, differing_keys, log_excerpts, settings
from hybridrl.report.curves import POINTS, averaged, panels_of, thinned
from hybridrl.report.samples import ChosenSamples, choose_samples
from hybridrl.report.sections import checkpoints, configuration, failure, health_rows, times
from hybridrl.tracking.faults import RESTART, record, recording
from hybridrl.tracking.report import ranges
from tests.report.synthetic import write_metrics, write_run


def test_a_rule_that_held_comes_first_with_its_steps_and_what_it_measured_then(tmp_path):
    cut = {"response_length/clip_ratio": 0.5, "response_length/max": 64.0}
    steps = [
        {"response_length/clip_ratio": 0.0},
        *[cut | {"health/truncation": float(step > 2)} for step in range(2, 6)],
    ]
    write_metrics(tmp_path, steps)
    row = health_rows(Contents(tmp_path), ChosenSamples())[0]
    assert (row.code, row.fired, row.holds_now) == ("truncation", "steps 3 to 5", True)
    assert row.cause.startswith("50% of the responses are cut off at 64 tokens")
    assert "data.max_response_length=128" in row.fix and row.limit == "30% in 2 steps in a row"


def test_a_custom_rule_that_held_has_a_row_with_its_steps(tmp_path):
    write_metrics(tmp_path, [{"critic/score/mean": 0.5, "health/slow-grader": float(step > 2)} for step in range(1, 6)])
    row = health_rows(Contents(tmp_path), ChosenSamples())[0]
    assert (row.code, row.fired, row.holds_now, row.sign) == ("slow-grader", "steps 3 to 5", True, "bad")


def test_steps_in_a_row_are_one_range():
    assert ranges([1, 2, 3, 7]) == "steps 1 to 3, 7"
    assert ranges([]) == ""
    assert ranges([1, 3, 5], most=2) == "steps 1, 3 and 1 more"


def test_the_placement_of_a_run_on_several_machines_is_shown(tmp_path):
    assert "Placement" not in configuration(Contents(write_run(tmp_path, steps=1)))
    machine = {"node": "node-a (10.0.0.1)", "devices": [["train-0", "rollout-0"]], "others": ["scoring-0"]}
    (tmp_path / "placement.json").write_text(json.dumps([machine]))
    page = configuration(Contents(tmp_path))
    assert (
        "Placement" in page
        and "<td>machine 0 on node-a (10.0.0.1)</td><td>device 0</td><td>train-0 rollout-0</td>" in page
    )
    assert "<td></td><td>scoring-0</td>" in page


def test_a_key_is_set_derived_or_follows_another_and_is_then_left_out(tmp_path):
    text = """
actor_rollout_ref:
  model: {path: some/model}
  rollout: {n: 4, dtype: float32}
critic: {enable: true, model: {path: some/model}}
trainer: {seed: 42}
"""
    (tmp_path / "config.yaml").write_text(text)
    rows = {row.key: row for row in settings(Contents(tmp_path))}
    assert rows["actor_rollout_ref.rollout.n"].source == ""
    assert (rows["actor_rollout_ref.rollout.n"].value, rows["actor_rollout_ref.rollout.n"].default) == ("4", "1")
    assert rows["actor_rollout_ref.rollout.n"].meaning == "Responses per prompt."
    assert rows["actor_rollout_ref.rollout.dtype"].source == "set, or derived for model and machine"
    assert not {"critic.model.path", "trainer.seed"} & set(rows)


def test_runs_differ_in_keys_but_not_in_directories(tmp_path):
    for name, rate in (("one", "0.1"), ("two", "0.2")):
        (tmp_path / name).mkdir()
        text = f"optim: {{lr: {rate}, betas: [1]}}\ntrainer: {{default_local_dir: {name}}}\n"
        (tmp_path / name / "config.yaml").write_text(text)
    contents = [Contents(tmp_path / name) for name in ("one", "two")]
    assert differing_keys(contents) == [("optim.lr", ["0.1", "0.2"])]


def test_secrets_of_configuration_faults_and_logs_are_masked_wherever_they_stand(tmp_path):
    (tmp_path / "config.yaml").write_text(
        "hf_token: SECRET\ndb_pwd: [SECRET, SECRET]\ncredentials: {user: SECRET, pin: 5}\n"
        "private_key: |\n  BEGIN\n  SECRET\nurl: https://me:SECRET@host/x\nenv: {PGPASS: SECRET}\n"
        "eos_token: <end>\nmax_tokens: 12\napi_key: null\n"
    )
    fault = {"time": "t", "step": 1, "code": "warning", "text": "PGPASS=SECRET https://me:SECRET@host", "tail": []}
    (tmp_path / "faults.jsonl").write_text(json.dumps(fault | {"tail": ["WANDB_API_KEY=SECRET"]}) + "\n")
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "train-0.log").write_text("password: 'SECRET'\neos_token=<end>\n")
    contents = Contents(tmp_path)
    everything = f"{contents} {log_excerpts(contents)}"
    assert "SECRET" not in everything and "BEGIN" not in everything
    assert contents.config["eos_token"] == "<end>" and contents.config["max_tokens"] == 12
    assert contents.config["api_key"] is None and "eos_token=<end>" in everything


def test_lines_that_are_torn_are_named(tmp_path):
    run = write_run(tmp_path / "run")
    with (run / "metrics.jsonl").open("a") as file:
        file.write('torn\n{"step": 13')
    with (run / "rollouts" / "3.jsonl").open("a") as file:
        file.write('{"input": "user: 1 + ')
    (run / "config.yaml").write_text("a: [")
    contents = Contents(run)
    notes = " ".join([*contents.notes, *choose_samples(contents, 50).notes])
    assert "line 14 cannot be read as metrics" in notes and "the last line of metrics.jsonl is not complete" in notes
    assert "1 line of rollouts/3.jsonl cannot be read as a sample" in notes
    assert "config.yaml cannot be read" in configuration(contents) and "no config.yaml" not in notes


def test_a_checkpoint_whose_files_have_another_size_is_named(tmp_path):
    run = write_run(tmp_path / "run")
    assert "files are as saved, by size" in checkpoints(Contents(run))
    (run / "global_step_12" / "actor" / "weights").write_bytes(b"short")
    assert "actor/weights: 5 of 1000 bytes" in checkpoints(Contents(run))


def test_a_slow_step_is_explained_by_the_phase_that_took_longer_than_usual(tmp_path):
    usual = {"timing_s/step": 2.0, "timing_s/gen": 1.0, "timing_s/update_actor": 1.0, "response_length/max": 64.0}
    write_metrics(tmp_path, [usual, usual, usual | {"timing_s/step": 9.0, "timing_s/gen": 8.0}, usual])
    html = times(Contents(tmp_path), ["raise n"])
    assert "rollout 8.00 s, usually 1.00 s; its longest response has 64 tokens" in html
    assert "raise n" in html and html.index('data-step="3"') < html.index('data-step="1"')


def test_the_traceback_of_a_crash_is_of_the_process_that_its_end_names(tmp_path):
    run, now = write_run(tmp_path / "run", end="worker-failed"), time.time()
    (run / "logs" / "rollout-0.log").write_text("Traceback (most recent call last):\nValueError: of an earlier run\n")
    os.utime(run / "logs" / "rollout-0.log", (0, 0))
    for number, name in enumerate(("scoring-0.log", "train-1.log", "train-0.log")):
        (run / "logs" / name).write_text(f"ready\nTraceback (most recent call last):\n  File\nValueError: {name}\n")
        os.utime(run / "logs" / name, (now + number, now + number))
    contents = Contents(run)
    assert [one.name for one in log_excerpts(contents) if one.is_traceback][:2] == ["scoring-0.log", "train-1.log"]
    assert "ValueError: train-0.log" in failure(contents)  # "train-0 died"
    contents.faults[-1] = replace(contents.faults[-1], text="a worker died")
    assert "ValueError: train-1.log" in failure(contents)  # the oldest
    contents.faults[-1] = replace(contents.faults[-1], code="reward-failed")
    assert "ValueError: scoring-0.log" in failure(contents)
    contents.faults[-1] = replace(contents.faults[-1], tail=["ValueError: the tail"])
    assert "ValueError: the tail" in failure(contents) and "scoring-0.log" not in failure(contents)


@pytest.mark.parametrize("again", [False, True], ids=["in one run", "when it was started again"])
def test_the_page_of_a_run_that_failed_twice_shows_the_first_cause_first(tmp_path, again):
    run, first, second = write_run(tmp_path / "run", end="finished"), "the kernel killed train-0", "metadata is None"
    if again:
        with suppress(RuntimeError), recording(run):
            raise RuntimeError(first)
    with suppress(RuntimeError), recording(run):
        if not again:
            record(RESTART, first)
        raise RuntimeError(second)
    shown = failure(Contents(run))
    assert "failed first" in shown and shown.index(first) < shown.index(second)
    for error in (None, "another"):
        with suppress(RuntimeError), recording(run):
            if error:
                raise RuntimeError(error)
    assert "another" in failure(Contents(run)) and "kernel" not in failure(Contents(run))


def test_a_rule_without_its_metric_is_neither_good_nor_bad_and_tokens_are_shares(tmp_path):
    steps = [{"critic/rewards/mean": 0.5, "perf/response_tokens": 200.0} for _ in range(10)]
    steps[-1]["sampling/unknown_tokens"] = 5.0
    write_metrics(tmp_path, steps)
    rows = {row.code: row for row in health_rows(Contents(tmp_path), ChosenSamples(length_correlation=0.9))}
    assert (rows["entropy-collapse"].sign, rows["length-reward"].sign, rows["unknown-tokens"].sign) == ("", "", "good")
    assert (rows["unknown-tokens"].start, rows["unknown-tokens"].now) == (0.0, 0.005)  # (0 x 4 + 5 / 200) / 5
    assert rows["length-reward"].limit == ""


def test_a_supervised_run_has_no_table_of_rules(tmp_path):
    write_metrics(tmp_path, [{"train/loss": 1.0, "train/skipped_updates": 0.0}] * 5)
    assert health_rows(Contents(tmp_path), ChosenSamples()) == []


def test_a_run_whose_directory_is_locked_is_running_until_its_end_is_recorded(tmp_path):
    run = write_run(tmp_path / "run", end=None)
    with (run / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert Contents(run).ending == "running" and not Contents(run).crashed
    assert Contents(run).ending == "killed after step 12"
    with (run / "faults.jsonl").open("a") as file:
        file.write(
            json.dumps({"time": "2026-11-26T09:00:00+00:00", "step": 12, "code": "finished", "text": "", "end": True})
            + "\n"
        )
    with (run / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert Contents(run).ending == "ended normally"


def test_thinning_keeps_both_ends_and_every_extreme():
    steps = list(range(10_000))
    values = [0.0] * 10_000
    values[1234], values[7777] = 5.0, -5.0
    kept_steps, kept = thinned(steps, values)
    assert len(kept) <= POINTS and kept_steps[0] == 0 and kept_steps[-1] == 9999
    assert kept[kept_steps.index(1234)] == 5.0 and kept[kept_steps.index(7777)] == -5.0


def test_short_series_are_kept_as_they_are():
    assert thinned([1, 2], [0.1234567, 2]) == ([1, 2], [0.12346, 2])


def test_series_that_are_stacked_are_averaged_at_the_same_steps():
    steps = list(range(1, 1201))
    kept, values = averaged(steps, [float(step % 2) for step in steps])
    assert len(kept) == 300 and kept[-1] == 1200 and set(values) == {0.5}


def test_a_panel_without_data_has_no_lines_and_one_of_supervised_training_is_left_out():
    panels = {panel.title: panel.lines for panel in panels_of(["critic/score/mean", "actor/entropy"])}
    assert len(panels) == 8 and "Loss" not in panels
    assert panels["Entropy"] and not panels["Validation"]
    assert [panel.title for panel in panels_of(["train/loss"])] == ["Loss", "Gradient norm", "Seconds per step"]


def test_a_run_with_teachers_has_a_panel_with_the_divergence_from_each():
    assert "Teacher" not in [panel.title for panel in panels_of(["critic/score/mean"])]
    names = ["distillation/kl", "distillation/maths/kl", "distillation/maths/share", "distillation/unreached"]
    panels = {panel.title: panel.lines for panel in panels_of(names)}
    assert [line.label for line in panels["Teacher"]] == [
        "divergence per token",
        "from maths",
        "teacher's mass out of reach",
    ]
