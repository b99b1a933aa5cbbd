"""Seconds by name, collected during a step and logged once per step."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Stopwatch:
    """`with watch("gen"): ...` adds to `timing_s/gen`."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = time.monotonic()
        yield
        self._seconds[name] = self._seconds.get(name, 0.0) + time.monotonic() - start

    def take(self) -> dict[str, float]:
        """Return all seconds since the last call, as metrics."""
        taken, self._seconds = self._seconds, {}
        return {f"timing_s/{name}": seconds for name, seconds in taken.items()}
