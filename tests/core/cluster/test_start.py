"""A signal while Ray starts, whose own handler would end the process without a word."""

import os
import signal
import sys

import pytest
import ray
import ray._private.utils

from hybridrl.core.cluster.session import start_ray
from hybridrl.runtime.guard import StopRequest
from hybridrl.runtime.keeper import PrivateDirectory


@pytest.mark.parametrize("caught", [False, True], ids=["raised", "caught by Ray"])
def test_a_signal_while_ray_starts_is_a_request_to_stop(monkeypatch, no_requests, caught):
    def init(**options: object) -> None:
        ray._private.utils.set_sigterm_handler(lambda *_: sys.exit(15))
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        except KeyboardInterrupt:
            if not caught:
                raise

    monkeypatch.setattr(ray, "init", init)
    directory = PrivateDirectory()
    try:
        with StopRequest(wait_for_step=False), pytest.raises(KeyboardInterrupt, match="SIGTERM"):
            start_ray({}, directory)
    finally:
        directory.close()
