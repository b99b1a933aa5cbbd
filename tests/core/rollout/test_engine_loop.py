"""The thread of an engine: what enters between its iterations, and what an end of the engine leaves behind."""

import asyncio
from dataclasses import dataclass, field

import pytest

from hybridrl.core.rollout.vllm.collector import EngineLoop


@dataclass
class Finished:
    name: str
    steps: int


@dataclass
class CountingEngine:
    """A request takes as many iterations as it says; `seen` are the requests that each iteration had."""

    left: dict[str, int] = field(default_factory=dict)
    seen: list[list[str]] = field(default_factory=list)
    model_executor: object = None

    def add_request(self, name: str, steps: int) -> None:
        if steps < 1:
            raise ValueError("a request takes at least one step")
        self.left[name] = steps

    def has_unfinished_requests(self) -> bool:
        return bool(self.left)

    def step(self) -> list[Finished]:
        self.seen.append(list(self.left))
        if any(steps > 1000 for steps in self.left.values()):
            raise MemoryError("no memory for so many steps")
        self.left = {name: steps - 1 for name, steps in self.left.items()}
        done = [name for name, steps in self.left.items() if not steps]
        return [Finished(name, self.left.pop(name)) for name in done]


async def started(engine: CountingEngine) -> EngineLoop:
    loop = EngineLoop(lambda: engine)
    await loop.start()
    return loop


async def test_each_request_gets_its_own_response():
    loop = await started(CountingEngine())
    responses = await asyncio.gather(*(loop.generate(f"r{steps}", steps) for steps in (3, 1, 2)))
    found = [response.name for response in responses]
    assert found == ["r3", "r1", "r2"]


async def test_a_call_is_made_between_two_iterations_and_gives_its_result_or_its_error():
    loop = await started(engine := CountingEngine())
    request = asyncio.create_task(loop.generate("long", 1000))
    seen = await loop.call(lambda engine: len(engine.seen))
    with pytest.raises(ZeroDivisionError):
        await loop.call(lambda engine: 1 / 0)
    await request
    whole = len(engine.seen) == 1000
    assert seen < 1000 and whole, "neither waited for the other"


async def test_held_requests_are_in_the_first_iteration_together_in_their_order():
    loop = await started(engine := CountingEngine())
    loop.hold()
    requests = [asyncio.create_task(loop.generate(name, 1)) for name in "cab"]
    await asyncio.sleep(0.05)
    assert not engine.seen
    loop.release()
    await asyncio.gather(*requests)
    assert engine.seen == [["c", "a", "b"]]


async def test_a_request_that_the_engine_rejects_fails_alone():
    loop = await started(CountingEngine())
    bad, good = await asyncio.gather(loop.generate("bad", 0), loop.generate("good", 2), return_exceptions=True)
    assert isinstance(bad, ValueError) and good == Finished("good", 0)


async def test_an_engine_that_fails_ends_all_that_waits_and_all_that_comes_later():
    loop = await started(CountingEngine())
    loop.check()
    waiting = await asyncio.gather(*(loop.generate(f"r{n}", 1001) for n in range(3)), return_exceptions=True)
    later = await asyncio.gather(loop.generate("late", 1), loop.call(len), return_exceptions=True)
    with pytest.raises(RuntimeError, match="the engine is dead: no memory for so many steps"):
        loop.check()
    found = [*waiting, *later]
    assert [type(error) for error in found] == [MemoryError] * 5


class Panic(BaseException):
    """What a library in Rust raises."""


@pytest.mark.parametrize("place", ["step", "add_request"])
async def test_an_engine_whose_thread_ends_otherwise_is_dead_for_all_that_waits_and_comes_later(place):
    def panic(*_: object) -> None:
        raise Panic("a library panicked")

    loop = await started(engine := CountingEngine())
    setattr(engine, place, panic)
    some = [loop.generate(f"r{n}", 1) for n in range(3)]
    waiting = await asyncio.wait_for(asyncio.gather(*some, return_exceptions=True), 10)
    later = await asyncio.wait_for(asyncio.gather(loop.call(len), return_exceptions=True), 10)
    with pytest.raises(RuntimeError, match="the engine is dead: Panic: a library panicked"):
        loop.check()
    found = [*waiting, *later]
    assert [repr(error) for error in found] == ["RuntimeError('Panic: a library panicked')"] * 4


def test_an_engine_that_cannot_be_built_says_why():
    def build():
        raise OSError("there is no such model")

    with pytest.raises(OSError, match="there is no such model"):
        asyncio.run(EngineLoop(build).start())


async def test_a_caller_that_no_longer_waits_does_not_disturb_the_others():
    loop = await started(CountingEngine())
    leaving = asyncio.create_task(loop.generate("leaving", 50))
    staying = asyncio.create_task(loop.generate("staying", 100))
    await asyncio.sleep(0)
    leaving.cancel()
    assert (await staying).name == "staying"
