"""Panels of curves as inline SVG, so that the page reads without JavaScript; page.js draws them again in the
width of the browser. No plotting library is small enough to be a part of every page.
"""

import math
from collections.abc import Sequence
from html import escape
from itertools import pairwise

from hybridrl.report.curves import Line, Mark, Panel, Points, colored

WIDTH, HEIGHT = 480, 190
LEFT, RIGHT, TOP, BOTTOM = 46, 14, 10, 24
RIGHT_AXIS = 46
DOTS = 40  # points of a curve that are shown as such


class Frame:
    """Where steps and values lie in a picture."""

    def __init__(
        self, steps: tuple[float, float], left: tuple[float, float], right: tuple[float, float] | None
    ) -> None:
        self.steps, self.left, self.right = steps, padded(*left), padded(*right) if right else None
        self.end = WIDTH - (RIGHT_AXIS if right else RIGHT)

    def x(self, step: float) -> float:
        low, high = self.steps
        return LEFT + (self.end - LEFT) * (step - low) / ((high - low) or 1)

    def y(self, value: float, axis: str = "left") -> float:
        low, high = self.right if axis == "right" and self.right else self.left
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (value - low) / ((high - low) or 1)


def draw(panel: Panel, series: dict[str, Points], marks: Sequence[Mark]) -> str:
    """Return a panel as SVG."""
    colors = dict(colored(panel))
    drawn = [line for line in panel.lines if series.get(line.series, ((), ()))[0]]
    every = [step for line in drawn for step in series[line.series][0]]
    stacked = panel.kind == "stack"
    layers = _stacked([series[line.series] for line in drawn]) if stacked else []
    left = [value for layer in layers for value in layer[1]] if stacked else _values(drawn, series, "left")
    right = _values(drawn, series, "right")
    frame = Frame((min(every), max(every)), _range(left or right), _range(right) if right and left else None)
    parts = [*_axes(frame, stacked), *_marks(frame, marks)]
    if stacked:
        below = [0.0] * len(layers[0][0])
        for line, (steps, above) in zip(drawn, layers, strict=True):
            (edges, high), (_, low) = as_bars(steps, above), as_bars(steps, below)
            parts.append(_area(frame, edges, low, high, f"area {colors[line]}"))
            below = above
    for line in () if stacked else drawn:
        parts += _line(frame, line, colors[line], series)
    label = escape(f"{panel.title} by step")
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}" preserveAspectRatio="xMinYMin">'
        f"{''.join(parts)}</svg>"
    )


def _line(frame: Frame, line: Line, color: str, series: dict[str, Points]) -> list[str]:
    parts = []
    if line.band and all(series.get(name, ((), ()))[0] for name in line.band):
        low, high = (series[name] for name in line.band)
        parts.append(_area(frame, low[0], low[1], high[1], f"band {color}"))
    steps, values = series[line.series]
    axis = line.axis if frame.right else "left"
    places = [f"{frame.x(step):.1f},{frame.y(value, axis):.1f}" for step, value in zip(steps, values, strict=True)]
    parts.append(f'<polyline class="line {color}" points="{" ".join(places)}"/>')
    if len(places) <= DOTS:
        dots = (place.split(",") for place in places)
        parts += [f'<circle class="dot {color}" cx="{x}" cy="{y}" r="2.2"/>' for x, y in dots]
    return parts


def _area(frame: Frame, steps: Sequence[int], low: Sequence[float], high: Sequence[float], name: str) -> str:
    top = [f"{frame.x(step):.1f},{frame.y(value):.1f}" for step, value in zip(steps, high, strict=True)]
    base = [f"{frame.x(step):.1f},{frame.y(value):.1f}" for step, value in zip(steps, low, strict=True)]
    return f'<polygon class="{name}" points="{" ".join([*top, *reversed(base)])}"/>'


def _axes(frame: Frame, from_zero: bool) -> list[str]:
    parts = []
    for value in ticks(*frame.left):
        y = frame.y(value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{frame.end}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick end" x="{LEFT - 7}" y="{y + 3.5:.1f}">{short(value)}</text>')
    for value in ticks(*frame.right) if frame.right else ():
        parts.append(
            f'<text class="tick" x="{frame.end + 7}" y="{frame.y(value, "right") + 3.5:.1f}">{short(value)}</text>'
        )
    for step in ticks(*frame.steps, whole=True):
        parts.append(f'<text class="tick mid" x="{frame.x(step):.1f}" y="{HEIGHT - 7}">{short(step)}</text>')
    return parts


def _marks(frame: Frame, marks: Sequence[Mark]) -> list[str]:
    low, high = frame.steps
    return [
        f'<line class="mark {mark.kind}" x1="{frame.x(mark.step):.1f}" x2="{frame.x(mark.step):.1f}" y1="{TOP}" '
        f'y2="{HEIGHT - BOTTOM}"><title>{escape(mark.text)}</title></line>'
        for mark in marks
        if low <= mark.step <= high
    ]


def _stacked(layers: Sequence[Points]) -> list[Points]:
    """Return the upper edges of areas on top of each other, at the steps of the first."""
    steps = sorted({step for layer, _ in layers for step in layer})
    edges, total = [], [0.0] * len(steps)
    for layer in layers:
        values, last = dict(zip(*layer, strict=True)), 0.0
        for place, step in enumerate(steps):
            last = values.get(step, last)
            total[place] += last
        edges.append((steps, list(total)))
    return edges


def as_bars(steps: Sequence[int], values: Sequence[float]) -> tuple[list[float], list[float]]:
    """Return the outline of bars that meet half-way between two steps."""
    middles = [(one + other) / 2 for one, other in pairwise(steps)]
    edges = list(zip([steps[0], *middles], [*middles, steps[-1]], strict=True))
    return [edge for pair in edges for edge in pair], [value for value in values for _ in range(2)]


def _values(lines: Sequence[Line], series: dict[str, Points], axis: str) -> list[float]:
    least = [line.least for line in lines if line.axis == axis and line.least]
    names = [name for line in lines if line.axis == axis for name in (line.series, *(line.band or ()))]
    return least + [value for name in names if name in series for value in series[name][1]]


def _range(values: Sequence[float]) -> tuple[float, float]:
    """From 0 where nothing is below it and the values are not all close together."""
    low, high = min(values), max(values)
    return (0.0, high) if 0 <= low < 0.6 * high else (low, high)


def padded(low: float, high: float) -> tuple[float, float]:
    """A range with some room at its ends, but not below 0. What differs by rounding only is equal."""
    size = max(abs(low), abs(high))
    room = 0.06 * (high - low) if high - low > 1e-6 * size else size * 0.1 or 1.0
    return (low if low == 0 else low - room, high + room)


def ticks(low: float, high: float, whole: bool = False) -> list[float]:
    """Round numbers in a range, about four of them."""
    span = (high - low) or 1.0
    size = 10 ** math.floor(math.log10(span / 4))
    step = next(size * factor for factor in (1, 2, 5, 10) if span / (size * factor) <= 5)
    step = max(step, 1) if whole else step
    first = math.ceil(low / step - 1e-9)
    return [place * step for place in range(first, math.floor(high / step + 1e-9) + 1)]


def short(value: float) -> str:
    """A number of an axis: 12k, 0.25, 3e-6."""
    size = abs(value)
    if size >= 1e6:
        return f"{value / 1e6:.3g}M"
    if size >= 1e4:
        return f"{value / 1e3:.3g}k"
    if size and size < 1e-3:
        return f"{float(f'{value:.3g}'):g}".replace("e-0", "e-")
    return f"{value:.4g}"
