"""What a group says of actors that do not answer, with a Ray of its own."""

import time

import pytest

from hybridrl.cluster.group import Group, WorkerDied, kill, spawn
from hybridrl.cluster.session import RaySession


class Sleeper:
    def sleep(self) -> None:
        time.sleep(60)


def test_silence_names_the_runtime_environment_that_the_user_set():
    session = RaySession("cpu", 1, 1, {"runtime_env": {"env_vars": {"COLOUR": "blue"}}}, 60.0)
    try:
        group = Group([spawn(Sleeper, session, 0, {})], "trainer", [])
        with pytest.raises(WorkerDied, match=r"no answer from rank 0 within 0.1 s .*runtime_env=.*'COLOUR': 'blue'"):
            group.broadcast(Sleeper.sleep, timeout=0.1)
        kill(group.actors[0])
    finally:
        session.close()
