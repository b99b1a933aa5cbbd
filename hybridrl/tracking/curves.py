"""The picture of a run: one panel for each group of curves; knows nothing of where the numbers come from."""

from pathlib import Path

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator

COLORS = ("#2563eb", "#ea580c", "#059669", "#7c3aed", "#db2777", "#64748b")
INK, MUTED, GRID = "#1e293b", "#64748b", "#e2e8f0"
STYLE = {
    "font.family": "sans-serif",
    "font.size": 10,
    "text.color": INK,
    "axes.edgecolor": GRID,
    "axes.labelcolor": MUTED,
    "axes.titlecolor": INK,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "legend.frameon": False,
}


def draw(panels: dict[str, dict[str, dict[int, float]]], title: str, path: Path) -> Path:
    """Draw panel title -> name of a metric -> {step: value}, the panels side by side."""
    with rc_context(STYLE):
        figure = Figure(figsize=(4.4 * len(panels) + 0.4, 3.6), layout=ConstrainedLayoutEngine(w_pad=0.12))
        figure.suptitle(title, x=0.015, ha="left", fontsize=14, fontweight="bold")
        grid = figure.subplots(1, len(panels), squeeze=False, sharex=True)
        for number, (axes, (panel, lines)) in enumerate(zip(grid[0], panels.items(), strict=True)):
            _panel(axes, panel, lines, first_color=number if len(lines) == 1 else 0)
        figure.savefig(path, dpi=150, facecolor="white")
    return path


def _panel(axes: Axes, title: str, lines: dict[str, dict[int, float]], first_color: int) -> None:
    axes.set_title(title, pad=10)
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    axes.margins(x=0.03, y=0.08)
    for number, (name, series) in enumerate(lines.items()):
        color = COLORS[(first_color + number) % len(COLORS)]
        steps, values = list(series), list(series.values())
        width, marker = (2, "o") if len(values) <= 50 else (1.2, "")
        last = f"{values[-1]:.3g}"
        axes.plot(steps, values, color=color, linewidth=width, marker=marker, markersize=4, label=f"{name}: {last}")
        if len(lines) == 1:
            axes.set_ylabel(name)
            axes.annotate(
                last,
                (steps[-1], values[-1]),
                xytext=(5, 0),
                textcoords="offset points",
                color=color,
                va="center",
                fontweight="bold",
                annotation_clip=False,
            )
    if len(lines) > 1:
        axes.legend(fontsize=8)
