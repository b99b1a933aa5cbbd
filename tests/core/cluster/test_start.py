"""A signal while Ray starts, whose own handler would end the process without a word."""

import os
import signal
import sys

import pytest
import ray
import ray._private.utils

from hybridrl.core.cluster.start import start_ray
from hybridrl.runtime import guard
from hybridrl.runtime.keeper import PrivateDirectory


@pytest.mark.parametrize("caught", [False, True], ids=["raised", "caught by Ray"])
def test_a_signal_while_ray_starts_is_a_request_to_stop(monkeypatch, caught):
    def init(**options: object) -> None:
        ray._private.utils.set_sigterm_handler(lambda *_: sys.exit(15))
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        except KeyboardInterrupt:
            if not caught:
                raise

    monkeypatch.setattr(guard.REQUESTS, "last", "")
    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray._private.utils, "set_sigterm_handler", ray._private.utils.set_sigterm_handler)
    directory = PrivateDirectory()
    try:
        with guard.StopRequest(wait_for_step=False), pytest.raises(KeyboardInterrupt, match="SIGTERM"):
            start_ray({}, directory)
    finally:
        directory.close()
