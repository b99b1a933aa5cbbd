"""A run's metrics among Ray's own, which Prometheus reads where `ray start` was given a `--metrics-export-port`."""

import math

from ray.util.metrics import Gauge

from hybridrl.tracking.sink import Sink

NAME = "hybridrl_metric"
TAGS = ("metric", "project", "experiment")


class RayMetricsSink(Sink):
    """Sets the gauge `ray_hybridrl_metric{metric="actor/entropy", ...}` to the last value of every metric."""

    def __init__(self, project: str, experiment: str) -> None:
        self._gauge = Gauge(NAME, "the last value of each metric of a run", TAGS)
        self._gauge.set_default_tags({"project": project, "experiment": experiment})

    def log(self, step: int, metrics: dict[str, float]) -> None:
        for name, value in {"training/global_step": step, **metrics}.items():
            if math.isfinite(value):
                self._gauge.set(float(value), tags={"metric": name})
