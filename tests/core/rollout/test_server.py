"""The rollout server around a fake engine: its devices, forwarded calls, responses and failures."""

import asyncio
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from hybridrl.core.carried import PICTURE_DIGEST, PICTURE_START
from hybridrl.core.rollout import Request, Sampling
from hybridrl.core.rollout.engine import EngineEntry, RejectedRequest
from hybridrl.core.rollout.ladder import EngineOutOfMemory
from hybridrl.core.rollout.server import RolloutServer


class FakeEngine:
    """Records the GPUs that are visible when it is built, and the order of what happens to it."""

    def __init__(self, *_: object) -> None:
        self.visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        self.events: list[object] = []
        self.unfinished = 0
        self.broken = False

    async def connect(self) -> None:
        self.events.append("connect")

    async def hold(self) -> None:
        if self.broken:
            raise RuntimeError("dead")
        self.events.append("hold")

    async def release(self, goal=None) -> None:
        self.events.append("release")

    async def wake(self, part: str) -> str:
        return f"awake: {part}"

    async def interrupt(self) -> None:
        self.events.append("interrupt")

    async def generate(self, request: Request, pixels: object = None) -> int:
        self.events += [request.seed, *([pixels] if pixels else [])]
        self.unfinished += 1
        await asyncio.sleep(0.01)
        if self.broken:
            raise ValueError("out of order")
        if not request.prompt_ids:
            raise RejectedRequest("no prompt")
        if request.prompt_ids == [-1]:
            raise KeyError(-1)
        return 10 * request.seed

    async def check(self) -> int:
        if self.broken:
            raise RuntimeError("dead")
        return 0


@pytest.fixture(autouse=True)
def log(tmp_path) -> Path:
    """The log of the server, with a line of an earlier one."""
    file = tmp_path / "rollout-0.log"
    file.write_text("torch.OutOfMemoryError: CUDA out of memory: of an earlier engine\n")
    return file


@pytest.fixture(autouse=True)
def in_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


ENTRY = EngineEntry(__name__, "FakeEngine", lambda rollout: {})


async def started(monkeypatch: pytest.MonkeyPatch, gpus: list[str] | None = None, fixed: bool = False) -> RolloutServer:
    server = RolloutServer.__new__(RolloutServer)  # without an actor's log file
    server.finished, server.running = asyncio.Queue(), set()
    server.begin(Path("rollout-0.log"))
    assert await server.start(ENTRY, "cuda", gpus or [], None, SimpleNamespace(name="vllm", full_determinism=fixed), 1)
    return server


def fake(server: RolloutServer) -> FakeEngine:
    assert isinstance(server.engine, FakeEngine)
    return server.engine


def pictures(*digests: int) -> dict[str, np.ndarray]:
    return {PICTURE_DIGEST: np.array(digests, np.int64), PICTURE_START: np.arange(len(digests), dtype=np.int32)}


def requests(count: int) -> list[tuple[int, Request]]:
    return [(100 + n, Request(n, 0, [1], n, Sampling(4, ()))) for n in range(count)]


@pytest.mark.parametrize(("gpus", "visible"), [(["4"], "4"), (["4", "6"], "4,6"), ([], "4,5,6,7")])
def test_an_engine_sees_only_the_gpus_of_its_ranks(monkeypatch, gpus, visible):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    server = asyncio.run(started(monkeypatch, gpus))
    assert fake(server).visible == visible and fake(server).events == ["connect"]


async def test_calls_reach_the_engine(monkeypatch):
    assert (await (await started(monkeypatch)).call("wake", "weights")) == "awake: weights"


async def test_responses_that_finish_together_are_taken_together(monkeypatch):
    server = await started(monkeypatch)
    await server.submit(requests(3))
    assert (await server.take()) == [(100, 0), (101, 10), (102, 20)]


async def test_with_full_determinism_the_engine_starts_once_it_has_all_requests(monkeypatch):
    server = await started(monkeypatch, fixed=True)
    await server.submit(requests(3))
    assert fake(server).events == ["connect", "hold", 0, 1, 2, "release"]


@pytest.mark.parametrize(("fixed", "reason"), [(False, "ValueError: out of order"), (True, "RuntimeError: dead")])
def test_whatever_ends_a_request_is_raised_by_take(monkeypatch, fixed, reason):
    async def take() -> None:
        server = await started(monkeypatch, fixed=fixed)
        fake(server).broken = True
        await server.submit(requests(1))
        await server.take()

    with pytest.raises(RuntimeError, match=f"the engine failed: {reason}"):
        asyncio.run(take())


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("ids", [[], [-1]])
def test_a_request_that_the_engine_rejects_or_fails_on_has_its_fault_and_the_others_their_responses(
    monkeypatch, fixed, ids
):
    async def take() -> list:
        server = await started(monkeypatch, fixed=fixed)
        (first, sound), (second, request), (third, _) = requests(3)
        await server.submit([(first, sound), (second, replace(request, prompt_ids=ids)), (third, request)])
        return await server.take()

    (_, first), (_, fault), (_, third) = asyncio.run(asyncio.wait_for(take(), 10))
    assert (first, third) == (0, 10) and isinstance(fault, RejectedRequest)
    assert str(fault) == ("the engine failed on a request, KeyError: -1" if ids else "no prompt")


async def test_requests_have_the_pixels_that_they_name_and_start_in_the_order_of_the_calls(monkeypatch):
    server, arrived = await started(monkeypatch), asyncio.get_running_loop().create_future()

    def seeing(number: int, *digests: int) -> tuple[int, Request]:
        return number, replace(requests(1)[0][1], seed=number, carried=pictures(*digests))

    other = asyncio.get_running_loop().create_future()
    other.set_result({"pixel_values": 8})
    calls = [
        server.submit([seeing(1, 5), seeing(2, 5, 6), seeing(3)], None, {5: arrived, 6: other}),
        server.submit([seeing(4)]),
        server.interrupt(),
        server.submit([seeing(7)]),
    ]
    called = asyncio.gather(*calls)
    await asyncio.sleep(0.02)
    assert fake(server).events == ["connect"], "nothing overtakes the requests whose pixels have not arrived"
    arrived.set_result({"pixel_values": 9})
    await called
    await asyncio.sleep(0)
    first, second = {"pixel_values": 9}, {"pixel_values": 8}
    assert [event for event in fake(server).events if event not in ("connect", "interrupt")] == [
        *(1, {5: first}),
        *(2, {5: first, 6: second}),
        *(3, 4, 7),
    ]


async def test_pixels_that_are_lost_are_an_error_of_the_server(monkeypatch):
    server, lost = await started(monkeypatch), asyncio.get_running_loop().create_future()
    lost.set_exception(RuntimeError("the object store lost them"))
    await server.submit([(1, replace(requests(1)[0][1], carried=pictures(5)))], None, {5: lost})
    with pytest.raises(RuntimeError, match="the engine failed: RuntimeError: the object store lost them"):
        await server.take()


async def test_an_engine_whose_log_says_that_memory_was_lacking_fails_with_that_line_and_from_then_on(monkeypatch, log):
    server = await started(monkeypatch)
    with log.open("a") as file:
        file.write(" WARNING reduce it to avoid out of memory\n torch.OutOfMemoryError: CUDA out of memory. Tried\n")
    fake(server).broken = True
    for _ in range(2):
        with pytest.raises(EngineOutOfMemory, match=r"^the engine ran out of memory: torch.OutOf.*memory. Tried$"):
            await server.call("hold")
        fake(server).broken = False  # it lives, but has not all of its memory


def test_an_engine_that_was_killed_by_the_kernel_lacked_memory(monkeypatch):
    async def take() -> None:
        one = await started(monkeypatch)
        fake(one).broken = True
        await one.submit(requests(1))
        one.oom_kills = -1  # when it began: the kernel has killed since
        await one.take()

    with pytest.raises(EngineOutOfMemory, match="the kernel killed a process of its machine for lack of memory"):
        asyncio.run(take())
