"""The results of the agent and of the tool quickstart, from the files of a made-up run."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from hybridrl.report import show as samples
from tests.scripts import run_script

RECIPE = Path(__file__).parents[2] / "recipes" / "quickstart"

CALL = {"function": {"name": "calculator", "arguments": {"expression": "76*48"}}}
GUESSED = [{"role": "assistant", "content": "#### 2848"}]
CALLED = [
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "3648"},
    {"role": "assistant", "content": "#### 3648"},
]
LOST = [("assistant", "01"), ("user", "low"), ("assistant", "02")]
FOUND = [("assistant", "16"), ("user", "high"), ("assistant", "08")]


def record(task: str, truth: str, score: float, messages: list[Any]) -> str:
    said = [one if isinstance(one, dict) else {"role": one[0], "content": one[1]} for one in messages]
    episode = {"messages": [{"role": "user", "content": task}, *said], "turns": []}
    return json.dumps(
        {"input": f"user: {task}", "output": said[-1]["content"], "gts": truth, "score": score, "episode": episode}
    )


def made_up_run(run: Path, first: list[str], last: list[str], **metrics: list[float]) -> Path:
    """Write a run of two steps and two validations with these episodes."""
    steps = [dict(zip(metrics, values, strict=True)) for values in zip(*metrics.values(), strict=True)]
    lines = [{"step": 0, "timing_s/testing": 1.0}]
    lines += [
        {"step": step, "timing_s/step": 4.0, **{name.replace("__", "/"): value for name, value in values.items()}}
        for step, values in enumerate(steps, 1)
    ]
    lines[-1]["timing_s/testing"] = 1.0
    for name in ("samples", "rollouts"):
        (run / name).mkdir(parents=True)
        for step, records in ((0, first), (2, last)):
            (run / name / f"{step}.jsonl").write_text("".join(f"{line}\n" for line in records))
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run


def tool_run(run: Path, reward: float) -> Path:
    """Write a run in which the second of two problems was wrong before and is right after."""
    wrong, right = record("What is 11*11?", "121", 0, GUESSED), record("What is 76*48?", "3648", 1, CALLED)
    before = record("What is 76*48?", "3648", 0, GUESSED)
    metrics = {"critic__score__mean": [0.3, reward], "tool_call_counts__mean": [0.35, 1.0]}
    return made_up_run(run, [wrong, before], [wrong, right], **metrics)


def show(script: str, run: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int | str | None, str]:
    """Return exit status and output."""
    return run_script(RECIPE / script, run), capsys.readouterr().out


def test_a_response_is_shown_with_its_call_before_and_after(tmp_path, capsys):
    status, text = show("show_products.py", tool_run(tmp_path / "run", 0.9), capsys)
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert lines[:3] == [
        "What is 76*48? (It is 3648.)",
        "before #### 2848 wrong",
        "after calculator(76*48) -> 3648 -> #### 3648 right",
    ]
    assert "mean reward 0.300 0.900 1.000" in lines and "calls per response 0.350 1.000 1.000" in lines
    assert status == 0


def test_a_run_below_nine_tenths_of_the_best_reward_exits_with_status_1(tmp_path, capsys):
    status, text = show("show_products.py", tool_run(tmp_path / "run", 0.89), capsys)
    assert status == 1 and "did not reach the expected result: 90% of the best" in text


def test_the_commands_to_try_next_name_the_run_and_its_model(tmp_path, capsys):
    run = tool_run(tmp_path / "run", 0.9)
    (run / "global_step_2" / "actor").mkdir(parents=True)
    _, text = show("show_products.py", run, capsys)
    lines = [line for line in text.partition("To try next")[2].splitlines() if line.startswith("    ")]
    words = shlex.split("\n".join(lines).replace("\\\n", " "))
    assert f"model.path={run}/global_step_2/actor" in words
    (data,) = (word for word in words if word.startswith("{"))
    assert json.loads(data)["tools"] == [{"type": "function", "function": {"name": "calculator"}}]
    at = words.index("show")
    shown = words[at + 1 : words.index("hybridrl", at)]
    assert samples.main(shown) == 0 and "#### 2848" in capsys.readouterr().out


def test_a_game_is_shown_guess_by_guess_and_a_custom_one_needs_no_metric_of_its_wins(tmp_path, capsys):
    first, last = record("?", "8", -0.1, LOST), record("?", "8", 0.98, FOUND)
    run = made_up_run(tmp_path / "run", [first], [last], critic__score__mean=[0.3, 0.9])
    status, text = show("show_games.py", run, capsys)
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert lines[:3] == ["The number is 8, of 1 to 31", "before 01 low, 02 lost", "after 16 high, 08 right"]
    assert "mean reward 0.300 0.900 0.937" in lines and "share of numbers found" not in text
    assert status == 0
