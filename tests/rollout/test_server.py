"""A rollout server's own part: which devices its engine sees."""

import asyncio
import os
from types import SimpleNamespace

import pytest

from hybridrl.rollout import server
from hybridrl.rollout.server import RolloutServer


class SeeingEngine:
    """An engine that notes which GPUs are visible when it is built."""

    def __init__(self, *_: object) -> None:
        self.visible = os.environ.get("CUDA_VISIBLE_DEVICES")

    async def connect(self) -> None: ...


@pytest.mark.parametrize(("gpus", "visible"), [(["4"], "4"), (["4", "6"], "4,6"), ([], "4,5,6,7")])
def test_an_engine_sees_the_gpus_of_its_ranks_alone(monkeypatch: pytest.MonkeyPatch, gpus, visible):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    monkeypatch.setitem(server.ENGINES, "vllm", (__name__, "SeeingEngine"))
    started = RolloutServer.__new__(RolloutServer)
    rollout = SimpleNamespace(name="vllm", full_determinism=False)
    asyncio.run(started.start("cuda", gpus, None, rollout, 1))
    assert started.engine.visible == visible
