import os
import signal
import time
from contextlib import suppress

import pytest

from hybridrl.runtime import guard

pytestmark = pytest.mark.usefixtures("no_requests")


def test_the_second_request_stops_at_once(capsys):
    with guard.StopRequest(wait_for_step=True) as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.reason == "SIGTERM"
        time.sleep(guard.SAME_REQUEST_SECONDS)
        with pytest.raises(KeyboardInterrupt, match="Ctrl-C"):
            os.kill(os.getpid(), signal.SIGINT)
    assert "SIGTERM: stopping after this step is saved" in capsys.readouterr().out


def test_two_signals_in_quick_succession_are_one_request():
    with guard.StopRequest(wait_for_step=True) as stop:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)
        assert stop.reason == "SIGTERM"


def test_without_a_step_to_wait_for_a_request_stops_at_once():
    with guard.StopRequest(wait_for_step=False), pytest.raises(KeyboardInterrupt, match="SIGHUP"):
        os.kill(os.getpid(), signal.SIGHUP)


def test_a_request_that_a_library_has_caught_is_raised_where_training_begins(monkeypatch):
    with guard.StopRequest(wait_for_step=False), suppress(KeyboardInterrupt):  # as ray.init does at some places
        os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt, match="SIGTERM"), guard.StopRequest(wait_for_step=True):
        pass
