"""The supervisor of actors, with actors of this process that double what they are sent."""

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from hybridrl.core.cluster.dispatch import ActorJob, ActorLost, Arrivals, Dispatcher, Lane, in_lists


@dataclass(eq=False)
class Number(ActorJob):
    value: int


@dataclass
class Doubler:
    """Returns two results at a time; it is lost at its `dies`-th call for results, counted from 1."""

    dies: int = 0
    calls: list[list[int]] = field(default_factory=list)
    given: list[tuple[int, int]] = field(default_factory=list)
    taken: int = 0

    def send(self, numbers: list[tuple[int, int]]) -> None:
        self.calls.append([value for _, value in numbers])
        self.given += numbers

    async def take(self) -> list[tuple[int, int]]:
        await asyncio.sleep(0)
        self.taken += 1
        if self.taken == self.dies:
            raise ActorLost("killed")
        results, self.given = [(ticket, 2 * value) for ticket, value in self.given[:2]], self.given[2:]
        return results


class Doubling(Dispatcher[Number, Lane[Number]]):
    """Assigns numbers in turn, and retries them once on a new actor; `looks` counts the looks."""

    look_seconds = 0.01
    looks = 0

    def double(self, values: Sequence[int]) -> list[asyncio.Future[int]]:
        futures = [asyncio.get_running_loop().create_future() for _ in values]
        self.submit(Number(next(self.tickets), *both) for both in zip(futures, values, strict=True))
        return futures

    def assign(self) -> None:
        while self.waiting:
            self.give(self.lanes[self.waiting[0].ticket % len(self.lanes)], self.waiting.popleft())

    def send(self, lane: Lane) -> None:
        lane.actor.send([(job.ticket, job.value) for job in lane.queued])

    async def take(self, lane: Lane) -> list[tuple[int, int]]:
        return await lane.actor.take()

    def receive(self, lane: Lane, results: Sequence[tuple[int, int]]) -> None:
        for ticket, value in results:
            if job := lane.jobs.pop(ticket, None):
                job.future.set_result(value)

    async def lost(self, lane: Lane, failure: ActorLost) -> None:
        lane.actor, lane.queued = Doubler(), list(lane.jobs.values())
        for job in lane.queued:
            job.attempts += 1
            if job.attempts > 1:
                raise failure
        self.flush_soon()

    async def look(self) -> None:
        self.looks += 1
        if self.looks > 3:
            raise ConnectionError("the cluster is lost")


def doubling(*actors: Doubler) -> Doubling:
    return Doubling(Lane(index, actor) for index, actor in enumerate(actors))


async def doubled(dispatcher: Doubling, values: Sequence[int]) -> list[int]:
    return await asyncio.gather(*dispatcher.double(values))


def test_jobs_of_one_turn_of_the_loop_travel_in_one_call_per_actor():
    even, odd = Doubler(), Doubler()
    assert asyncio.run(doubled(doubling(even, odd), range(5))) == [0, 2, 4, 6, 8]
    assert (even.calls, odd.calls) == ([[0, 2, 4]], [[1, 3]])


def test_what_an_actor_had_not_finished_is_sent_to_its_replacement():
    dispatcher = doubling(Doubler(dies=2))
    assert asyncio.run(doubled(dispatcher, range(5))) == [0, 2, 4, 6, 8]
    assert dispatcher.lanes[0].actor.calls == [[2, 3, 4]]


def test_an_error_ends_the_jobs_of_all_actors():
    class Broken(Doubler):
        async def take(self) -> list[tuple[int, int]]:
            raise ValueError("no message")

    class Hung(Doubler):
        async def take(self) -> list[tuple[int, int]]:
            await asyncio.Event().wait()
            raise AssertionError

    async def run(*actors: Doubler) -> list[str]:
        ended = await asyncio.gather(*doubling(*actors).double(range(4)), return_exceptions=True)
        return [str(error) for error in ended]

    assert asyncio.run(run(Broken(), Hung())) == 4 * ["no message"]
    assert asyncio.run(run(Hung(), Hung())) == 4 * ["the cluster is lost"], "a look raised it"


async def test_whoever_waits_until_nothing_is_in_flight_gets_what_ended_it():
    dispatcher = doubling(Doubler())
    futures = dispatcher.double(range(3))
    await asyncio.sleep(0)
    before = dispatcher.load
    await dispatcher.drained()
    assert all(future.done() for future in futures)
    dispatcher.double(range(3))
    await asyncio.sleep(0)
    asyncio.get_running_loop().call_soon(dispatcher.fail, ConnectionError("lost"))
    with pytest.raises(ConnectionError, match="lost"):
        await dispatcher.drained()
    assert (before, dispatcher.load) == (3, 0)


def test_what_an_earlier_event_loop_left_is_abandoned():
    dispatcher = doubling(Doubler())

    async def leave() -> None:
        dispatcher.double([7])

    asyncio.run(leave())
    assert asyncio.run(doubled(dispatcher, [1, 2])) == [2, 4] and not dispatcher.load


async def test_futures_that_finish_together_come_in_one_list():
    first, second, third = (asyncio.get_running_loop().create_future() for _ in range(3))
    first.set_result("a")
    third.set_result("c")
    asyncio.get_running_loop().call_later(0.01, second.set_result, "b")
    lists = in_lists([first, second, third])
    found = [[(index, future.result()) for index, future in arrived] async for arrived in lists]
    assert found == [[(0, "a"), (2, "c")], [(1, "b")]]


async def test_values_of_other_threads_that_arrive_together_come_in_one_list_and_none_is_lost():
    arrivals, count = Arrivals[int](), 3000

    def put(first: int) -> None:
        for value in range(first, first + count):
            arrivals.put(value)

    threads = [threading.Thread(target=put, args=[first]) for first in (0, count)]
    for thread in threads:
        thread.start()
    lists = []
    while sum(map(len, lists)) < 2 * count:
        lists.append(await asyncio.wait_for(arrivals.take(), 10))
    for thread in threads:
        thread.join()
    assert sorted(value for values in lists for value in values) == [*range(2 * count)] and len(lists) < count
    for first in (0, count):
        own = [value for values in lists for value in values if first <= value < first + count]
        assert own == sorted(own), "those of a thread come in their order"


async def test_values_of_the_loop_itself_come_without_a_pause():
    arrivals = Arrivals[str]()
    arrivals.put("a")
    arrivals.put("b")
    assert await arrivals.take() == ["a", "b"]


def test_a_value_for_a_loop_that_has_ended_disturbs_nobody():
    async def abandoned() -> Arrivals[int]:
        return Arrivals[int]()

    arrivals = asyncio.run(abandoned())
    thread = threading.Thread(target=arrivals.put, args=[1])
    thread.start()
    thread.join()
    arrivals.put(2)
