"""Terminal output: the line of a step, the progress bar below it, and the remaining time."""

import io
import re
from itertools import chain, repeat

import pytest
from rich.console import Console

from hybridrl.tracking.console import LineSink, TerminalSink, seconds_left, stage, step_line
from hybridrl.tracking.sink import Activity, Stopwatch


def terminal(width: int = 160) -> Console:
    return Console(file=io.StringIO(), force_terminal=True, color_system=None, width=width, _environ={})


def written(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def shown(console: Console) -> list[str]:
    """Return the lines as written, without the codes that move the cursor."""
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written(console))
    return [line.strip("\r") for line in text.splitlines() if line]


def test_a_step_is_one_line_of_its_main_metrics_with_the_seconds_per_phase():
    metrics = {
        "critic/rewards/mean": 0.7,
        "critic/score/mean": 0.9,
        "val-core/openai/gsm8k/acc/mean@1": 0.5,
        "val-core/math/acc/mean@1": 0.7,
        "val-core/math/acc/best@4/mean": 1.0,
        "response_length/mean": 24.06,
        "actor/entropy": 0.41,
        "actor/ppo_kl": 0.0002,
        "actor/grad_norm": 0.83,
        "timing_s/gen": 0.9,
        "timing_s/old_log_prob": 0.25,
        "timing_s/ref": 0.25,
        "timing_s/update_actor": 0.5,
        "timing_s/switch": 0.1,
        "timing_s/update_weights": 0.1,
        "timing_s/step": 2.3,
    }
    assert step_line(12, metrics).plain == (
        "step 12   reward 0.700 val 0.600 length 24.1  2.3s  entropy 0.410 kl 2.0e-04 grad 0.83"
        " (rollout 0.9 log-probs 0.5 update 0.5 switch 0.2)"
    )


def test_a_supervised_step_shows_its_losses():
    metrics = {"train/loss": 1.25, "val/loss": 1.5, "train/lr": 1e-3, "train/grad_norm": 0.5}
    assert step_line(3, metrics).plain == "step 3    loss 1.2500 val loss 1.5000 lr 1.0e-03 grad 0.5"


def test_without_a_reward_the_score_is_shown():
    assert "reward 0.900" in step_line(1, {"critic/score/mean": 0.9}).plain


def test_engines_that_were_restarted_are_shown_and_none_is_not():
    assert step_line(7, {"critic/score/mean": 0.9, "rollout/engine_restarts": 2}).plain.endswith("engine restarts 2")
    assert "restarts" not in step_line(7, {"rollout/engine_restarts": 0}).plain


def test_the_remaining_time_is_the_mean_after_the_first_two_steps():
    # Steps 1 and 2 end at 100 and 150, steps 3 and 4 take 10 and 20 seconds.
    assert seconds_left([100.0], 4) is None
    assert seconds_left([100.0, 150.0], 3) == 150.0
    assert seconds_left([100.0, 150.0, 160.0, 180.0], 2) == 30.0


def test_the_bar_counts_finished_steps_and_shows_the_remaining_time():
    console = terminal()
    ends = chain([0.0, 100.0, 150.0, 160.0], repeat(180.0))
    sink = TerminalSink(console, total_steps=6, clock=lambda: next(ends))
    sink.log(0, {"val-core/toy/acc/mean@1": 0.2})
    for step in (1, 2, 3, 4):
        sink.log(step, {})
    sink.close()
    assert "4/6 steps" in shown(console)[-1]
    assert "0:00:30 left" in shown(console)[-1]


def test_other_output_appears_above_the_bar():
    console = terminal()
    sink = TerminalSink(console, total_steps=2)
    print("another line")
    sink.log(1, {"critic/rewards/mean": 0.5})
    sink.close()
    lines = shown(console)
    assert "another line" in lines
    assert lines.index("another line") < lines.index("    1    0.500         ")
    assert "1/2 steps" in lines[-1]


def test_the_steps_are_rows_of_a_table_with_its_titles_again_at_times():
    console = terminal()
    sink = TerminalSink(console, total_steps=30, clock=chain(range(100)).__next__)
    sink.log(0, {"val-core/toy/acc/mean@1": 0.25})
    for step in range(1, 31):
        sink.log(step, {"critic/rewards/mean": step / 100, "response_length/mean": 7.0, "timing_s/step": 1.5})
    sink.close()
    lines = [line for line in shown(console) if "steps" not in line]
    assert [line for line in lines if "reward" in line] == [" step   reward      val   length  seconds"] * 2
    assert "step 0    val 0.250" in lines and "   29    0.290               7.0      1.5" in lines


def test_a_reward_above_the_steps_before_it_is_green():
    console = Console(file=io.StringIO(), force_terminal=True, color_system="standard", width=80, _environ={})
    sink = TerminalSink(console, total_steps=3, clock=chain(range(9)).__next__)
    for step, reward in enumerate([0.5, 0.625, 0.25], 1):
        sink.log(step, {"critic/rewards/mean": reward})
    sink.close()
    green = re.findall(r"\x1b\[1;32m +([\d.]+)", written(console))
    assert green == ["0.625"]


def test_on_a_narrow_terminal_a_step_is_cropped_to_one_line():
    console = terminal(width=20)
    sink = TerminalSink(console, total_steps=2)
    sink.log(1, {"critic/rewards/mean": 0.5, "response_length/mean": 24.0})
    sink.close()
    assert "    1    0.500     …" in shown(console)


def test_in_a_log_quick_steps_have_a_line_every_two_seconds_and_the_last_always():
    console = Console(file=io.StringIO(), width=20)
    times = iter([0.0, 1.0, 2.5, 3.0, 3.5])
    sink = LineSink(console, total_steps=5, clock=lambda: next(times))
    for step in range(1, 6):
        sink.log(step, {"train/loss": step / 10, "train/grad_norm": 1.25})
    assert written(console).splitlines() == [f"step {step}    loss {step / 10:.4f} grad 1.25" for step in (1, 3, 5)]


def test_quick_steps_are_thinned_out_but_a_validation_is_always_shown():
    console = terminal()
    sink = TerminalSink(console, total_steps=9, clock=lambda: 100.0)
    for step in range(1, 4):
        sink.log(step, {"critic/rewards/mean": 0.5 + step / 100})
    sink.log(4, {"critic/rewards/mean": 0.55, "val-core/toy/acc/mean@1": 0.75})
    sink.close()
    text = "\n".join(shown(console))
    assert "0.510" in text and "0.520" not in text
    assert "    4    0.550    0.750" in text


def test_a_stage_of_the_start_up_is_named_before_it_and_timed_after_it(capsys):
    with stage("starting Ray"):
        assert capsys.readouterr().out == "starting Ray ...\n"
    assert re.fullmatch(r"starting Ray: \d+\.\d s\n", capsys.readouterr().out)
    with pytest.raises(KeyError), stage("starting ranks"):
        raise KeyError
    assert capsys.readouterr().out == "starting ranks ...\n"


def test_the_bar_shows_what_the_step_is_doing():
    console = terminal()
    sink = TerminalSink(console, total_steps=2)
    Activity.is_now("responses 3/8")
    sink.progress.refresh()
    assert any("0/2 steps" in line and "responses 3/8" in line for line in shown(console))
    with Stopwatch()("update_actor"):
        sink.progress.refresh()
    assert "update" in shown(console)[-1]
    sink.close()
    Activity.is_now("responses 4/8")
    assert not any("4/8" in line for line in shown(console))


def test_in_a_log_a_long_step_has_a_line_a_minute():
    console = Console(file=io.StringIO(), width=80)
    times = iter([0.0, 30.0, 61.0, 62.0, 70.0, 100.0, 131.0])
    sink = LineSink(console, total_steps=5, start_step=3, clock=lambda: next(times))
    for done in range(4):
        sink.doing(f"responses {done}/8")
    sink.log(4, {"train/loss": 0.5})
    sink.doing("update")
    sink.doing("update")
    assert written(console).splitlines() == ["step 4 ... responses 2/8", "step 4    loss 0.5000", "step 5 ... update"]
