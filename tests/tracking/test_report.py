"""The report of a run, from a handwritten `metrics.jsonl`."""

import json
import math
from pathlib import Path

import pytest

from hybridrl.tracking import draw_curves, read_metrics, summary
from hybridrl.tracking.report import CurvesSink

RUN = [
    {"step": 0, "val-core/toy/acc/mean@1": 0.25, "timing_s/start_up": 8.0, "timing_s/testing": 2.0},
    {"step": 1, "critic/rewards/mean": 0.25, "response_length/mean": 17.0, "timing_s/gen": 3.0, "timing_s/step": 5.0},
    {"step": 2, "critic/rewards/mean": 0.75, "response_length/mean": 30.0, "timing_s/gen": 4.0, "timing_s/step": 5.0},
    {"step": 3, "critic/rewards/mean": 0.5, "response_length/mean": 36.0, "val-core/toy/acc/mean@1": 1.0},
]


def write(run_dir: Path, lines: list[dict]) -> Path:
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run_dir


def rows(text: str) -> dict[str, list[str]]:
    """Return the first word of a line -> the others."""
    return {words[0]: words[1:] for words in map(str.split, text.splitlines()) if words}


def test_lines_of_one_step_are_joined_and_the_later_value_is_kept(tmp_path):
    write(tmp_path, [{"step": 2, "a": 1}, {"step": 1, "a": 5}, {"step": 2, "a": 3, "b": None}])
    metrics = read_metrics(tmp_path)
    assert list(metrics) == [1, 2]
    assert metrics[2]["a"] == 3 and math.isnan(metrics[2]["b"])


def test_an_incomplete_last_line_is_not_read(tmp_path):
    write(tmp_path, [{"step": 1, "a": 1}])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "a')
    assert read_metrics(tmp_path) == {1: {"a": 1}}


def test_the_summary_has_values_before_and_after_training_and_the_best(tmp_path):
    lines = rows(summary(write(tmp_path, RUN)))
    assert lines["critic/rewards/mean"] == ["0.25", "0.5", "0.75", "(step", "2)"]
    assert lines["val-core/toy/acc/mean@1"] == ["0.25", "1", "1", "(step", "3)"]
    assert lines["response_length/mean"] == ["17", "36"]


def test_the_best_loss_is_the_lowest(tmp_path):
    write(tmp_path, [{"step": step, "train/loss": loss} for step, loss in ((1, 2.0), (2, 0.5), (3, 1.0))])
    assert rows(summary(tmp_path))["train/loss"] == ["2", "1", "0.5", "(step", "2)"]


def test_the_phases_add_up_to_the_total_seconds(tmp_path):
    # 10 s before the first step, two steps of 5 s, of which 7 s are rollout and 3 s are not timed.
    lines = rows(summary(write(tmp_path, RUN)))
    assert lines["total"] == ["seconds", "20.0", "s"]
    assert lines["start-up"] == ["8.0", "s", "40.0%"]
    assert lines["rollout"] == ["7.0", "s", "35.0%"]
    assert lines["validation"] == ["2.0", "s", "10.0%"]
    assert lines["other"] == ["3.0", "s", "15.0%"]
    assert "switch" not in lines


def test_the_summary_has_every_diagnosis_with_its_steps(tmp_path):
    held = {2: 1.0, 3: 1.0, 4: 0.0, 5: 1.0}
    lines = rows(
        summary(write(tmp_path, [{"step": 1}, *({"step": s, "health/truncation": v} for s, v in held.items())]))
    )
    assert lines["truncation"] == ["steps", "2", "to", "3,", "5"]


def test_the_summary_lists_the_existing_files(tmp_path):
    (tmp_path / "logs").mkdir()
    lines = rows(summary(write(tmp_path, RUN)))
    assert {"metrics.jsonl", "logs"} <= set(lines)
    assert not {"config.yaml", "curves.png", "wandb"} & set(lines)
    assert lines["output"][-1] == str(tmp_path)


def test_the_curves_have_a_panel_for_each_logged_group(tmp_path):
    image = pytest.importorskip("matplotlib.image")
    one = draw_curves(write(tmp_path, [{"step": 1, "train/loss": 2.0}, {"step": 2, "train/loss": 1.0}]))
    assert one == tmp_path / "curves.png"
    height, width, _ = image.imread(one).shape
    three = image.imread(draw_curves(write(tmp_path, RUN)))
    assert three.shape[0] == height and three.shape[1] > 2.5 * width
    assert three[..., :3].std() > 0.05  # not blank


def test_a_run_without_curves_draws_nothing(tmp_path):
    assert draw_curves(tmp_path) is None
    assert draw_curves(write(tmp_path, [{"step": 1, "critic/rewards/mean": None}])) is None
    assert not (tmp_path / "curves.png").exists()
    assert summary(tmp_path).splitlines()[0] == f"output directory: {tmp_path}"


def test_the_curves_are_drawn_while_the_run_goes_and_seldom(tmp_path):
    times = iter([0.0, 59.0, 61.0, *[61.0, 63.0, 63.0], 100.0, 262.0, 264.0, *[264.0, 264.0, 264.0]])
    write(tmp_path, [{"step": 1, "critic/score/mean": 0.5}])
    sink = CurvesSink(tmp_path, clock=lambda: next(times))
    drawn = []
    for step in range(1, 6):
        sink.log(step, {})
        if sink.thread is not None:
            sink.thread.join()
        drawn.append((tmp_path / "curves.png").is_file())
        (tmp_path / "curves.png").unlink(missing_ok=True)
    # After a minute; drawing took 2 s, so the next one comes 200 s later.
    assert drawn == [False, True, False, False, True]
    sink.close()
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]
