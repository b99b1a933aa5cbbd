"""Panels, thinning and marks."""

from hybridrl.report.curves import POINTS, averaged, panels_of, thinned
from hybridrl.report.svg import as_bars, padded, short, ticks


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


def test_ticks_are_round_and_few():
    assert [round(tick, 9) for tick in ticks(0, 1)] == [0, 0.2, 0.4, 0.6, 0.8, 1]
    assert ticks(1, 3, whole=True) == [1, 2, 3]
    assert [short(value) for value in (12_000, 2.5e-7, 0.25, 3e6)] == ["12k", "2.5e-7", "0.25", "3M"]


def test_an_axis_has_room_but_none_below_zero():
    assert padded(0.0, 1.0) == (0.0, 1.06)
    assert padded(1.0, 1.0) == (0.9, 1.1)


def test_bars_meet_half_way():
    assert as_bars([1, 2, 4], [5, 6, 7]) == ([1, 1.5, 1.5, 3, 3, 4], [5, 5, 6, 6, 7, 7])
