"""Experience with episodes that outlive a step: episodes in flight when a step has enough continue in the next one.

The episodes run in an event loop in a separate thread, one task for each group. Environments continue while the devices
train; only requests to the engines wait: the client pauses them between `interrupt` and `resume`. If rollout has its
own devices, they wait only during a weight sync and after a restart, unless batches are fixed.

    weights    0           1           2
    group 0    |===========|=======T   |
    group 1    |=======T   |           |
    group 2    |   ========|===========|===T

`=`: the group is sampled; `T`: the step that trains on it. With bound=1 the step with weights 1 is the last that may
train on group 0, so it waits for this group. Group 2 is started when group 1 ends.
"""

import asyncio
import threading
import time
from collections.abc import Collection, Coroutine, Iterable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from hybridrl.core.algorithms.batch_metrics import off_policy_metrics
from hybridrl.core.experience.batching import GroupFilter, NoSignal, group_by_prompt
from hybridrl.core.experience.collector import IN_FLIGHT, Collected, Experience
from hybridrl.core.experience.trajectory import Episode
from hybridrl.core.rollout import Goal
from hybridrl.tracking.sink import Activity

T = TypeVar("T")


QUEUED = 0.25  # requests queued in the engines to replace finished ones at once, as a share of the running requests


# Nothing is dropped for its age: this would remove long responses more often than short ones, and a policy that is
# rewarded for length would not learn it. Instead the number of started groups is bounded (as in AReaL, Fu et al. 2025),
# and a step waits for groups that could not be trained in time otherwise.
@dataclass
class Admission:
    """Groups by their positions in the run's order; each step with the weights `version` trains `batch` of them.

    A group that is started with version u is trained at version u + `bound` at the latest. At most `most` groups are
    in flight. A `bound` of 0 is the synchronous loop: all groups of a step are started with its weights.

    >>> groups = Admission(bound=1, batch=2, most=4)
    >>> groups.start(range(groups.capacity()), version=0)
    >>> groups.choose(0, complete={1, 3})
    [1, 3]
    >>> groups.end([1, 3])
    >>> groups.start([4, 5], version=1)
    >>> groups.choose(1, complete={4, 5})  # None: groups 0 and 2 are due.
    >>> groups.choose(1, complete={0, 2, 5})
    [0, 2]
    """

    bound: int
    batch: int
    most: int
    started: dict[int, int] = field(default_factory=dict)  # the version by position, of groups that are not trained yet

    def capacity(self, *, training: bool = False) -> int:
        """Return how many groups may be started now; `training`: while a step trains on the groups that it has.

        With the bound n a step finds at most (n + 1) * batch groups in flight. The newest of them is due after n + 1
        steps, which can train them all. After a step has chosen its groups, n steps are left.
        """
        steps = self.bound if training else self.bound + 1
        return min(steps * self.batch, self.most - training * self.batch) - len(self.started)

    def start(self, positions: Iterable[int], version: int) -> None:
        self.started |= dict.fromkeys(positions, version)

    def end(self, positions: Iterable[int]) -> None:
        """Remove groups that are trained, or dropped."""
        for position in positions:
            del self.started[position]

    def choose(self, version: int, complete: Collection[int]) -> list[int] | None:
        """Return the groups to train now, in their order; None if the step must wait for further complete groups.

        Groups that are due first are chosen first. The step waits until it has enough groups, and until the others can
        be trained in time: of the groups due by version u it trains as many as the later steps up to u cannot take.
        """
        if not Goal(self._needs(version)).reached(complete):
            return None
        size = min(self.batch, len(self.started))
        by_due = sorted(complete, key=lambda position: (self.started[position], position))
        return sorted(by_due[:size])

    def goal(self, version: int, complete: Collection[int]) -> Goal:
        """Return the goal of sampling until groups can be chosen, given the `complete` groups."""
        return Goal(
            [
                (groups - set(complete), count - sum(position in groups for position in complete))
                for groups, count in self._needs(version)
            ]
        )

    def _needs(self, version: int) -> list[tuple[set[int], int]]:
        needs = [(set(self.started), min(self.batch, len(self.started)))]
        for due in range(version, version + self.bound):
            groups = {position for position, start in self.started.items() if start + self.bound <= due}
            needs.append((groups, len(groups) - (due - version) * self.batch))
        return needs


class LoopThread:
    """An event loop in a thread: its coroutines outlive the calls that started them."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.thread = threading.Thread(target=self.loop.run_forever, name="episodes", daemon=True)
        self.thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Return the result of a coroutine that runs in the loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result()

    def close(self) -> None:
        """Cancel everything and end the thread. Does not wait for work in further threads, such as the rebuild of a
        server."""
        if self.thread.is_alive():
            self.run(self._cancel())
            self.loop.call_soon_threadsafe(self.loop.stop)
            self.thread.join()
            self.loop.close()

    async def _cancel(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)


@dataclass(eq=False, kw_only=True)
class AsynchronousExperience(Experience):
    """Keeps groups of episodes running over the steps, and trains on no token older than `bound` steps. A step takes
    complete groups, and does not wait for the slowest responses.

    At most `most` groups are in flight, enough to keep the engines as full as a synchronous step would: they work on
    `slots` responses at a time. With `fixed`, groups are assigned to this many servers by number and each server stops
    by itself, which is deterministic. Otherwise, with `overlaps`, the engines continue while a step trains. The `store`
    carries the responses from step to step.
    """

    bound: int
    most: int
    slots: int
    fixed: int = 0
    overlaps: bool = False

    def __post_init__(self) -> None:
        batch, count = self.plan.prompts_per_step, max(self.fixed, 1)
        self.full = min(self.slots, batch * self.plan.samples_per_prompt) * (1 + QUEUED)
        self.shares = [Admission(self.bound, batch // count, self.most // count) for _ in range(count)]
        self.complete: dict[int, list[Episode]] = {}  # groups that wait to be trained on, by position
        self.dropped: list[Episode] = []  # episodes of groups without signal, since the last step
        self.tasks: dict[int, asyncio.Task[list[Episode]]] = {}
        self.thread: LoopThread | None = None
        self.continuing: asyncio.Task[None] | None = None  # starts groups while a step trains
        self.paused_at = 0.0

    @property
    def finished(self) -> bool:
        return super().finished and not self.in_flight

    @property
    def epochs(self) -> float:
        return (self.position - len(self.in_flight)) / self.order.size

    @property
    def in_flight(self) -> dict[int, int]:
        """The groups that are started and not yet trained, each with the weight version at its start."""
        started = [dict(share.started) for share in self.shares]  # copied at once: the thread may start more
        return {position: version for groups in started for position, version in groups.items()}

    def collect(self, step: int) -> Collected:
        version = step - 1
        with ExitStack() as failing:
            failing.callback(self.close)
            self.engine.to_rollout(version)
            self.store.open(step, self.engine.weights)
            self.thread, began = self.thread or LoopThread(asyncio.new_event_loop()), time.monotonic()
            episodes, dropped, metrics = self.thread.run(self._sample(version))
            failing.pop_all()
        metrics["timing_s/gen"] = time.monotonic() - began
        self.store.finish(len(episodes))
        self.engine.to_training()
        if self.rate is not None:
            episodes = self._rated(episodes)
        groups, episodes = group_by_prompt(episodes), episodes + dropped
        batch, reported = self._batch(groups, episodes, [episode.score for episode in episodes], version=version)
        return Collected(batch, episodes, metrics | reported | off_policy_metrics(batch))

    def pause(self) -> None:
        """Interrupt all requests until the next `collect`."""
        if self.continuing is not None and self.thread is not None:
            self.thread.run(self._pause())

    def close(self) -> None:
        """Abandon all groups in flight."""
        if self.thread is not None and self.thread.thread.is_alive():
            self.thread.run(self.runner.close())
            self.thread.close()

    def state_dict(self) -> dict[str, Any]:
        self.pause()  # a weight sync follows: nothing is lost but the time until then
        started, paused = self.in_flight, self.runner.client.paused()
        interrupted = [(request, begun) for request, begun in paused if begun is not None]
        state = {"prompts": self.position - len(started), "fault_steps": self.guard.steps_above}
        return state | {IN_FLIGHT: [list(item) for item in started.items()]} | self.store.state_dict(interrupted)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.store.load_state_dict(state)
        for position, version in state.get(IN_FLIGHT, ()):
            self._share_of(position).start([position], version)

    # In the thread's event loop.

    async def _sample(self, version: int) -> tuple[list[Episode], list[Episode], dict[str, float]]:
        """Sample until the step has its groups. Returns their episodes, those of groups without signal, and metrics."""
        client, metrics = self.runner.client, {}
        self.changed = asyncio.Event()
        reprefilled = client.reprefilled
        if self.paused_at:
            metrics["timing_s/rollout_paused"] = time.monotonic() - self.paused_at
        metrics["partial/open_at_switch"] = len(client.paused())
        for position in self.in_flight:
            if position not in self.tasks and position not in self.complete:  # started by an earlier process
                self._run(position)
        positions = await (self._sample_fixed if self.fixed else self._sample_freely)(version)
        if not self.overlaps:
            metrics["partial/open_at_switch"] = len(client.paused())
        metrics["partial/reprefill_tokens"] = client.reprefilled - reprefilled
        metrics["off_policy/capacity"] = sum(share.capacity() for share in self.shares)
        episodes = [episode for position in positions for episode in self.complete.pop(position)]
        dropped, self.dropped = self.dropped, []
        self.store.drop(positions)
        for share in self.shares:
            share.end(share.started.keys() & set(positions))
        metrics["training/epoch"] = (self.position - len(self.in_flight) - 1) // self.order.size
        if self.overlaps:
            self.continuing = asyncio.create_task(self._continue(version))
        return episodes, dropped, metrics

    async def _sample_freely(self, version: int) -> list[int]:
        client, (share,) = self.runner.client, self.shares
        client.resume(self.changed.set)
        await asyncio.sleep(0)  # groups of an earlier process request their responses, which count as load
        while True:
            self.changed.clear()
            self._gather()
            self._admit(version)
            positions = share.choose(version, self.complete)
            if positions is not None:
                if not self.overlaps:
                    await client.interrupt()
                return positions
            Activity.is_now(f"groups {min(len(self.complete), share.batch)}/{share.batch}")
            await self.changed.wait()

    async def _continue(self, version: int) -> None:
        """Start groups while a step trains, as others end."""
        while True:
            self.changed.clear()
            self._gather()
            self._admit(version, training=True)
            await self.changed.wait()

    async def _pause(self) -> None:
        """Interrupt all requests, and raise any error of the time in which the step trained."""
        continuing, self.continuing, self.paused_at = self.continuing, None, time.monotonic()
        assert continuing is not None
        continuing.cancel()
        with suppress(asyncio.CancelledError):
            await continuing
        await self.runner.client.interrupt()

    async def _sample_fixed(self, version: int) -> list[int]:
        """Like `_sample_freely`, but each server gets all its requests at once, and stops by itself."""
        client = self.runner.client
        await client.interrupt()
        self._admit(version)
        await self._settle()
        while None in (chosen := [share.choose(version, self._complete_of(share)) for share in self.shares]):
            await client.reach([share.goal(version, self._complete_of(share)) for share in self.shares])
            await self._settle()
        return sorted(position for positions in chosen for position in positions or ())

    def _complete_of(self, share: Admission) -> list[int]:
        return [position for position in share.started if position in self.complete]

    async def _settle(self) -> None:
        """Wait until all groups are complete, except those with paused requests."""
        await asyncio.sleep(0)  # new groups request their responses
        unfinished = {request.prompt for request, _ in self.runner.client.paused()}
        await asyncio.gather(*(task for position, task in self.tasks.items() if position not in unfinished))
        self._gather()

    def _admit(self, version: int, *, training: bool = False) -> None:
        """Start as many groups as may be in flight and the engines can work on."""
        load = self.runner.client.load
        self._read_next()
        while self.position < self.plan.prompts_in_all:
            share = self._share_of(self.position)
            needed = len(share.started) < share.batch and not training
            if share.capacity(training=training) <= 0 or not (needed or self.fixed or load < self.full):
                return
            share.start([self.position], version)
            self._run(self.position)
            load += self.plan.samples_per_prompt
            self.position += 1

    def _share_of(self, position: int) -> Admission:
        return self.shares[position % len(self.shares)]

    def _run(self, position: int) -> None:
        """Start the episodes of a group."""
        (row,) = self.order.rows(position, 1)
        prompt, plan = self.prompts[row], self.plan
        episodes = self.runner.group(prompt, position, plan.samples_per_prompt, plan.sampling, self.store)
        self.tasks[position] = task = asyncio.create_task(episodes)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[list[Episode]]) -> None:
        if not task.cancelled():
            task.exception()  # counts as retrieved: `_gather` raises it, unless another error has ended the step
        self.changed.set()

    def _gather(self) -> None:
        """Take the groups that have ended since the last call; those without signal are dropped."""
        ended = [position for position, task in self.tasks.items() if task.done()]
        for position in ended:
            episodes = self.tasks.pop(position).result()
            if self.rate is None:  # otherwise scores are complete once the trainers have the devices
                self.guard.apply([episode.score for episode in episodes])
            signal = self.plan.group_filter
            if signal is None or any(map(signal.has_signal, group_by_prompt(episodes))):
                self.complete[position] = episodes
            else:
                self._drop(position, episodes, signal)

    def _drop(self, position: int, episodes: list[Episode], group_filter: GroupFilter) -> None:
        """Leave out a group without signal; NoSignal once their number reaches the limit of a step."""
        self.dropped += episodes
        self.store.drop([position])
        self._share_of(position).end([position])
        size = group_filter.draw_size or self.plan.prompts_per_step
        limit, count = group_filter.max_batches * size or self.order.size, len(self.dropped) // len(episodes)
        if count >= limit:
            raise NoSignal(
                f"dynamic sampling: the responses of {count} groups of one step were equal in {group_filter.metric}, "
                f"and {len(self.complete)} of {self.plan.prompts_per_step} groups are complete; use data of other "
                "difficulty, raise actor_rollout_ref.rollout.n or set algorithm.filter_groups.enable=false"
            )
