"""What a finished run leaves for its reader, made from `metrics.jsonl` alone."""

import math
from pathlib import Path

from hybridrl.tracking import names
from hybridrl.tracking.jsonl import logged

Metrics = dict[str, float]
Series = dict[int, float]  # step -> value

CONTENTS = {
    "config.yaml": "the configuration as it was run",
    "metrics.jsonl": "every metric, one line a step",
    "curves.png": "the curves as a picture",
    "samples": "validation samples",
    "rollouts": "training samples",
    "tensorboard": "`tensorboard --logdir` shows it",
    "wandb": "the Weights & Biases run",
    "logs": "one log a process",
    "global_step_*": "checkpoints",
}


def read_metrics(run_dir: Path) -> dict[int, Metrics]:
    """Metrics by step, in order; of a name logged twice for a step the later value stands. null is NaN."""
    steps: dict[int, Metrics] = {}
    for _, record in logged(run_dir / "metrics.jsonl"):
        values = {name: math.nan if value is None else value for name, value in record.items()}
        steps.setdefault(int(values.pop("step")), {}).update(values)
    return dict(sorted(steps.items()))


def draw_curves(run_dir: Path, title: str | None = None) -> Path | None:
    """Draw `curves.png`, titled with the directory's name unless told; None if there is nothing to draw."""
    panels = _panels(read_metrics(run_dir))
    if not panels:
        return None
    # matplotlib costs half a second, and only this needs it.
    from hybridrl.tracking.curves import draw

    return draw(panels, title or run_dir.name, run_dir / "curves.png")


def summary(run_dir: Path) -> str:
    """First, last and best value of what the run was for, its seconds by phase, and where everything is."""
    steps = read_metrics(run_dir)
    blocks = [_values_block(steps), _seconds_block(steps), _files_block(run_dir)]
    return "\n\n".join(block for block in blocks if block)


def _panels(steps: dict[int, Metrics]) -> dict[str, dict[str, Series]]:
    """Title of a panel -> name of a metric -> its finite values."""
    logged = sorted({name for metrics in steps.values() for name in metrics})
    chosen = {
        "Training reward": [name for name in names.REWARD if name in logged][:1],
        "Validation": [name for name in logged if names.is_validation_score(name)],
        "Response length": [name for name in logged if name == names.RESPONSE_LENGTH],
        "Loss": [name for name in names.LOSSES if name in logged],
    }
    panels = {
        panel: {name: series for name in metrics if (series := _series(steps, name))}
        for panel, metrics in chosen.items()
    }
    return {panel: lines for panel, lines in panels.items() if lines}


def _series(steps: dict[int, Metrics], name: str) -> Series:
    values = {step: metrics.get(name, math.nan) for step, metrics in steps.items()}
    return {step: value for step, value in values.items() if math.isfinite(value)}


def _values_block(steps: dict[int, Metrics]) -> str:
    rows = [("", "first", "last", "best")]
    for panel, lines in _panels(steps).items():
        for name, series in lines.items():
            values = list(series.values())
            rows.append((name, f"{values[0]:.4g}", f"{values[-1]:.4g}", _best(panel, series)))
    width = max(len(name) for name, *_ in rows)
    lines = [f"{name:<{width}}{first:>10}{last:>10}  {best}" for name, first, last, best in rows]
    return "\n".join(lines) if len(rows) > 1 else ""


def _best(panel: str, series: Series) -> str:
    if panel == "Response length":  # neither long nor short is better
        return ""
    best = (min if panel == "Loss" else max)(series, key=series.__getitem__)
    return f"{series[best]:.4g} (step {best})"


def _seconds_block(steps: dict[int, Metrics]) -> str:
    total = sum(names.line_seconds(metrics) for metrics in steps.values())
    if not total:
        return ""
    seconds = dict.fromkeys(names.PHASES, 0.0)
    for metrics in steps.values():
        for phase, spent in names.phase_seconds(metrics).items():
            seconds[phase] += spent
    seconds["other"] = total - sum(seconds.values())
    rows = [f"  {phase:<14}{spent:10.1f} s {spent / total:7.1%}" for phase, spent in seconds.items() if spent > 0]
    return "\n".join([f"{'seconds in all':<16}{total:10.1f} s", *rows])


def _files_block(run_dir: Path) -> str:
    rows = [f"  {pattern:<16}{meaning}" for pattern, meaning in CONTENTS.items() if any(run_dir.glob(pattern))]
    return "\n".join([f"everything is in {run_dir}", *rows])
