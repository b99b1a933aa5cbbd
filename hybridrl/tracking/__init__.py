"""Metrics of a run: sinks during training, curves and summary at the end."""

from hybridrl.tracking.report import draw_curves, read_metrics, summary
from hybridrl.tracking.sink import SampleRow, Sink, Stopwatch
from hybridrl.tracking.tracker import Resume, Tracker

__all__ = ["Resume", "SampleRow", "Sink", "Stopwatch", "Tracker", "draw_curves", "read_metrics", "summary"]
