from collections.abc import Callable

import pytest

from hybridrl.runs import setup


@pytest.fixture
def session_start(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable], None]:
    """Have runs start Ray by a stand-in."""
    return lambda start: monkeypatch.setattr(setup, "start_session", start)
