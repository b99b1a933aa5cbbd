"""The progress of an evaluation in a log."""

import time

from hybridrl.evaluation import progress
from hybridrl.evaluation.samples import Sample


def test_a_log_gets_a_line_now_and_then_also_before_the_first_sample(monkeypatch, capsys):
    monkeypatch.setattr(progress, "SECONDS", 0.1)
    with progress.EvaluationProgress(4) as shown:
        time.sleep(0.25)
        for score in (1.0, 0.0, None):
            shown(Sample("maths", "a", 0, 0, "", "", "1", 50, "completed", score))
        time.sleep(0.25)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "0/4 samples"
    assert lines[-1].startswith("3/4 samples, ") and lines[-1].endswith("left, mean so far 0.500")
    time.sleep(0.15)
    assert capsys.readouterr().out == ""


def test_a_terminal_gets_a_bar(monkeypatch, capsys):
    monkeypatch.setattr(progress, "on_terminal", lambda: True)
    with progress.EvaluationProgress(2) as shown:
        shown(Sample("maths", "a", 0, 0, "", "", "1", 50, "completed", 1.0))
    assert shown.bar is not None and shown.bar.tasks[0].completed == 1
