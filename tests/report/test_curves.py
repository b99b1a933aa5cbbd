"""Panels, thinning and marks."""

from hybridrl.report.curves import POINTS, averaged, panels_of, thinned


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
