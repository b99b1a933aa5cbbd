"""The curves of a run: panels, their series with at most POINTS points, and marks of events."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from statistics import fmean
from typing import Any

from hybridrl.report.contents import Contents
from hybridrl.tracking.sink import PHASES, REWARD, STEP_SECONDS, is_validation_score, line_seconds

POINTS = 600  # most points of a curve; of longer ones, the least and the greatest value of each bucket are kept
PHASE_ORDER = (*PHASES, "other")
PHASE = "phase/"  # series of seconds by phase
GROUPS = "groups/"  # series of the mean rewards of prompts, from the files of samples
INTERVAL = "interval/"  # series of the interval of a validation score

Points = tuple[list[int], list[float]]  # steps and values


@dataclass(frozen=True)
class Line:
    """One line of a panel. `axis`: left, or right with its own scale. `band`: the series of its lower and upper end.
    `color`: a class of page.css, empty for the default of its position. `least`: the axis reaches at least this value,
    so that noise of small values looks small."""

    series: str
    label: str
    axis: str = "left"
    band: tuple[str, str] | None = None
    color: str = ""
    least: float = 0.0


@dataclass(frozen=True)
class Panel:
    """A picture of lines, or of areas that are stacked."""

    title: str
    lines: tuple[Line, ...]
    kind: str = "lines"
    unit: str = ""
    note: str = ""


@dataclass(frozen=True)
class Mark:
    """A vertical line at a step."""

    step: int
    kind: str  # resume, skip, diagnosis
    text: str


@dataclass
class Curves:
    """The curves of one run, with thinned series."""

    steps: list[int]
    seconds: list[float]  # since the start, at each of `steps`
    series: dict[str, Points]
    marks: list[Mark]
    panels: list[Panel] = field(default_factory=list)
    absent: list[str] = field(default_factory=list)  # titles of panels without data


def curves_of(contents: Contents, further: dict[str, Points], points: int = POINTS) -> Curves:
    """Return the curves of a run with at most `points` points. `further`: series in addition to its metrics."""
    full = series_of(contents) | further
    steps = list(contents.steps)
    elapsed = list(accumulate(_finite(line_seconds(metrics)) for metrics in contents.steps.values()))
    shown = thinned(steps, elapsed, points) if steps else ([], [])
    series = {
        name: averaged(*each, points // 2) if name.startswith(PHASE) else thinned(*each, points)
        for name, each in full.items()
        if each[0]
    }
    curves = Curves(*shown, series, marks_of(contents))
    for panel in panels_of(series):
        if panel.lines:
            curves.panels.append(panel)
        else:
            curves.absent.append(panel.title)
    return curves


def series_of(contents: Contents) -> dict[str, Points]:
    """Return the series of all logged metrics, and of seconds by phase, without values that are not finite."""
    series: dict[str, Points] = {}
    isfinite = math.isfinite
    for step, metrics in contents.steps.items():
        for name, value in metrics.items():
            if isfinite(value):
                points = series.get(name)
                if points is None:
                    points = series[name] = ([], [])
                points[0].append(step)
                points[1].append(value)
    phases = [name for name in PHASE_ORDER if any(name in spent for spent in contents.phases.values())]
    for name in phases:
        steps = list(contents.phases)
        series[PHASE + name] = (steps, [spent.get(name, 0.0) for spent in contents.phases.values()])
    return series


def thinned(steps: Sequence[int], values: Sequence[float], points: int = POINTS) -> Points:
    """Return at most `points` points: the least and the greatest value of each bucket of neighbouring steps."""
    if len(steps) <= points:
        return list(steps), [rounded(value) for value in values]
    chosen, buckets = {0, len(steps) - 1}, points // 2 - 1  # the first and the last point are included
    for bucket in range(buckets):
        inside = range(bucket * len(steps) // buckets, (bucket + 1) * len(steps) // buckets)
        chosen.add(min(inside, key=values.__getitem__))
        chosen.add(max(inside, key=values.__getitem__))
    return [steps[index] for index in sorted(chosen)], [rounded(values[index]) for index in sorted(chosen)]


def averaged(steps: Sequence[int], values: Sequence[float], buckets: int = POINTS // 2) -> Points:
    """Return the means of at most `buckets` buckets. Series of the same steps can be stacked afterwards."""
    if len(steps) <= buckets:
        return list(steps), [rounded(value) for value in values]
    edges = [bucket * len(steps) // buckets for bucket in range(buckets + 1)]
    inside = list(pairwise(edges))
    return [steps[end - 1] for _, end in inside], [rounded(fmean(values[begin:end])) for begin, end in inside]


def rounded(value: float) -> float:
    """Round to five digits, more than a picture shows."""
    return float(f"{value:.5g}") if isinstance(value, float) else value


# Title -> panel. The panels "Reward", "Validation" and "Teacher" depend on the logged metrics.
PANELS = {
    "Loss": Panel("Loss", (Line("train/loss", "training"), Line("val/loss", "validation"))),
    "Reward": Panel("Reward", ()),
    "Validation": Panel("Validation", ()),
    "Response length": Panel(
        "Response length",
        (
            Line("response_length/mean", "mean"),
            Line("response_length/max", "max"),
            Line("episode/observed_tokens/mean", "mean, observed"),
            Line("response_length/clip_ratio", "share cut off", "right", least=0.1),
        ),
        unit="tokens",
    ),
    "Entropy": Panel("Entropy", (Line("actor/entropy", "mean"),), unit="nats"),
    "KL and mismatch": Panel(
        "KL and mismatch",
        (
            Line("actor/ppo_kl", "to the old policy", least=0.01),
            Line("actor/kl_loss", "to the reference"),
            Line("actor/reward_kl_penalty", "to the reference"),
            Line("training/rollout_probs_diff_mean", "engine - trainer, probability", "right", least=1e-4),
        ),
    ),
    "Teacher": Panel("Teacher", ()),
    "Gradient norm": Panel(
        "Gradient norm",
        (
            Line("actor/grad_norm", "norm"),
            Line("train/grad_norm", "norm"),
            Line("actor/pg_clipfrac", "share of tokens clipped", "right", least=0.1),
        ),
    ),
    "Groups without a signal": Panel(
        "Groups without a signal", (Line("critic/zero_signal_share", "share of the prompts", least=1.0),)
    ),
    "Seconds per step": Panel(
        "Seconds per step",
        tuple(
            Line(PHASE + name, name, color=f"p{number}")
            for number, name in enumerate(PHASE_ORDER)
            if name != "start-up"
        ),
        kind="stack",
        unit="s",
    ),
}
SUPERVISED = ("Loss", "Gradient norm", "Seconds per step")


def panels_of(series: Iterable[str]) -> list[Panel]:
    """Return the panels in order; panels without data have no lines."""
    names = set(series)
    panels = []
    depending = {"Reward": _reward(names), "Validation": _validation(names), "Teacher": _teacher(names)}
    for title, panel in (PANELS | depending).items():
        lines = tuple(line for line in panel.lines if line.series in names)
        if lines or (title in SUPERVISED[1:] if "train/loss" in names else title not in ("Loss", "Teacher")):
            panels.append(replace(panel, lines=lines))
    return panels


def _reward(names: set[str]) -> Panel:
    name, band = (
        next((name for name in REWARD if name in names), REWARD[0]),
        _band(names, GROUPS + "p10", GROUPS + "p90"),
    )
    note = "band: mean reward of the middle 80% of the prompts" if band else ""
    return Panel("Reward", (Line(name, "mean", band=band),), note=note)


def _validation(logged: set[str]) -> Panel:
    names = sorted(name for name in logged if is_validation_score(name))[:4]
    bands = {name: _band(logged, f"{INTERVAL}{name}/low", f"{INTERVAL}{name}/high") for name in names}
    lines = tuple(Line(name, _source(name), band=bands[name]) for name in names)
    return Panel("Validation", lines, note="band: 95% interval, questions like these" if any(bands.values()) else "")


def _teacher(names: set[str]) -> Panel:
    of_each = [name for name in sorted(names) if name.startswith("distillation/") and name.endswith("/kl")]
    several = [Line(name, f"from {name.split('/')[1]}") for name in of_each if name != "distillation/kl"]
    lines = (
        Line("distillation/kl", "divergence per token"),
        *several[:4],
        Line("distillation/unreached", "teacher's mass out of reach", "right", least=0.01),
        Line("distillation/without_context", "rows without a context", "right", least=1.0),
    )
    return Panel("Teacher", lines)


def marks_of(contents: Contents) -> list[Mark]:
    """Return the marks of resumptions, skipped updates, and first steps of diagnoses."""
    marks = [Mark(step, "resume", f"resumed at step {step}") for step in contents.resumes]
    before: set[str] = set()
    for step, metrics in contents.trained.items():
        now = {name for name, value in metrics.items() if value and name.startswith("health/")}
        marks += [Mark(step, "diagnosis", name.removeprefix("health/")) for name in sorted(now - before)]
        before = now
        if skipped := sum(
            metrics.get(f"{model}/skipped_updates", 0.0) or 0.0 for model in ("actor", "critic", "train")
        ):
            marks.append(Mark(step, "skip", f"{skipped:.0f} update{'s' * (skipped > 1)} skipped"))
    return marks[:200]


def as_json(curves: Curves) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the data of the run with the series of its panels, and its other series, for the page's script. A series
    without steps has those of the run."""
    series = {
        name: {"y": values} if steps == curves.steps else {"x": steps, "y": values}
        for name, (steps, values) in curves.series.items()
    }
    first = {name for panel in curves.panels for line in panel.lines for name in (line.series, *(line.band or ()))}
    first.add(STEP_SECONDS)  # several runs show it instead of phases
    marks = [[mark.step, mark.kind, mark.text] for mark in curves.marks]
    run = {"steps": curves.steps, "seconds": curves.seconds, "marks": marks}
    run["series"] = {name: points for name, points in series.items() if name in first}
    return run, {name: points for name, points in series.items() if name not in first}


def panel_json(panel: Panel) -> dict[str, Any]:
    lines = [vars(line) | {"color": line.color or f"s{number}"} for number, line in enumerate(panel.lines)]
    return {"title": panel.title, "kind": panel.kind, "unit": panel.unit, "note": panel.note, "lines": lines}


def _band(names: set[str], low: str, high: str) -> tuple[str, str] | None:
    return (low, high) if low in names and high in names else None


def _source(name: str) -> str:
    """The data source and variable of `val-core/<data source>/<variable>/mean@n`."""
    return name.removeprefix("val-core/").rpartition("/")[0]


def _finite(value: float) -> float:
    return value if math.isfinite(value) else 0.0
