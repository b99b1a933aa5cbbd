"""The driver's side of a failed weight sync, with ranks that only note what they are called for."""

from types import SimpleNamespace
from typing import Any

import pytest

from hybridrl import hybrid_engine
from hybridrl.hybrid_engine import HybridEngine


class NotedRanks:
    """Four training ranks."""

    def __init__(self) -> None:
        self.called: list[tuple[str, list[tuple]]] = []

    def __len__(self) -> int:
        return 4

    def scatter(self, method: Any, parts: list[tuple], *, timeout: float) -> None:
        self.called.append((method.__name__, parts))


def test_a_dead_server_is_ended_before_its_ranks_free_what_it_was_to_read(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, ended = HybridEngine.__new__(HybridEngine), []
    engine.trainers, engine.width, engine.timeout = NotedRanks(), 2, 1.0
    engine.servers = SimpleNamespace(actors=["first", "second"])
    monkeypatch.setattr(hybrid_engine, "kill", lambda actor: ended.append((actor, len(engine.trainers.called))))
    engine._release_buckets({1: "no answer"})
    assert ended == [("second", 0)]
    assert engine.trainers.called == [("release_buckets", [(False,), (False,), (True,), (True,)])]
