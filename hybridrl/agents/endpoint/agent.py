"""Agents as episodes: the endpoint of a process that runs episodes, with a session for each agent.

The turns of an agent are sampled as those of an environment are, with the seeds and the sampling of the run.
"""

import asyncio
import logging
import math
from asyncio import Timeout
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import cached_property
from typing import Any

from hybridrl.agents.endpoint import bound
from hybridrl.agents.endpoint.app import HealthCheck, create_app, serving
from hybridrl.agents.endpoint.core import SamplingOptions
from hybridrl.agents.endpoint.fields import AUTO, Rules
from hybridrl.agents.endpoint.functions import Agent, call_agent, load_agent, run_in_process
from hybridrl.agents.endpoint.requests import rejected
from hybridrl.agents.endpoint.sessions import AgentSessions, Session
from hybridrl.agents.environments import ONLINE, EpisodeFault, Message
from hybridrl.agents.environments.episode_loop import EpisodeTools, PausablePolicy
from hybridrl.agents.environments.user_code import UserCodeError, contained, reward_of
from hybridrl.config.custom_code import own
from hybridrl.config.schema_parts import AgentConfig
from hybridrl.core.carried import Encoded
from hybridrl.core.experience.trajectory import Policy, Trajectory
from hybridrl.core.pictures import Picture
from hybridrl.core.rollout import Completion
from hybridrl.data.pictures import Encoded as EncodedPicture
from hybridrl.data.pictures import PictureFault, with_data_urls

logger = logging.getLogger(__name__)

HELD_SECONDS = 7 * 86400.0  # that a request may take where the policy is held while the devices train
CLAIM_SECONDS = 4.0  # that a request for an episode waits for one; clients may have a time limit of 5 s
INSIDE = ("127.0.0.1", 0)  # the address for agents of the run itself: a free port for each process
UNUSED_SECONDS = 120.0  # after which an agent that took an episode and sent no request may be lost


class OneAtATime:
    """The policy of one session, which samples its turns one after another. A turn whose client has gone is sampled to
    its end, so that the next one is not mistaken for it."""

    def __init__(self, policy: Policy) -> None:
        self.policy, self.lock = policy, asyncio.Lock()
        self.tasks: set[asyncio.Task] = set()

    async def generate(self, prompt: Encoded, sampling: SamplingOptions, new: Sequence[Picture]) -> Completion:
        """Sample a turn. `new` are pictures of it whose pixels the driver does not have."""
        if new:
            self.policy.show(new)
        task = asyncio.create_task(self._generate(prompt, sampling))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():  # by the end of the episode, not by the client
                raise rejected(409, "the episode of this session has ended", code="session_closed") from None
            raise

    async def _generate(self, prompt: Encoded, sampling: SamplingOptions) -> Completion:
        async with self.lock:
            return await self.policy.generate(prompt, max_tokens=sampling.max_tokens, stop=sampling.stop)

    def close(self) -> None:
        for task in self.tasks:
            task.cancel()


class Waiting:
    """Episodes that wait for an agent outside the run: who asks first gets the one that has waited longest."""

    def __init__(self, sessions: AgentSessions) -> None:
        self.sessions = sessions
        self.offers: asyncio.Queue[tuple[Session, Mapping[str, Any], asyncio.Future[None]]] = asyncio.Queue()

    async def offer(self, session: Session, data: Mapping[str, Any]) -> None:
        """Wait until an agent has taken the session."""
        taken = asyncio.get_running_loop().create_future()
        self.offers.put_nowait((session, data, taken))
        await taken

    async def claim(self) -> tuple[Session, Mapping[str, Any]]:
        """Return a session with its row, which waits for an agent; rejects the request if none does for a while."""
        try:
            async with asyncio.timeout(CLAIM_SECONDS):
                while True:
                    session, data, taken = await self.offers.get()
                    if not taken.done() and not session.begun.is_set():  # else abandoned, or its first agent came
                        taken.set_result(None)
                        self.sessions.renew_key(session)
                        return session, data
        except TimeoutError:
            raise rejected(429, "no episode waits for an agent; ask again", code="no_episode") from None


class Agents:
    """The agents of a process that runs episodes, with one endpoint for all of them. At most `concurrency` of one call
    of the driver run at a time (None: all). An episode without a reward is a fault if it `needs_reward`, else the
    reward function scores it. Agents outside the run get sessions by the `admin_key`."""

    def __init__(
        self,
        settings: AgentConfig,
        concurrency: int | None,
        admin_key: str | None,
        kit: EpisodeTools,
        check: HealthCheck | None = None,
        *,
        needs_reward: bool = True,
    ) -> None:
        self.settings, self.kit, self.check = settings, kit, check
        self.concurrency, self.admin_key, self.needs_reward = concurrency, admin_key, needs_reward
        self.sessions = AgentSessions(kit, timeout=math.inf)  # an episode has a time limit of its own
        self.policies: dict[str, OneAtATime] = {}
        self.waiting = Waiting(self.sessions) if settings.mode == ONLINE else None
        self.open = AsyncExitStack()
        self.starting: asyncio.Future[str] | None = None

    async def run(
        self,
        policy: Policy,
        messages: Sequence[Message],
        row: Mapping[str, Any],
        pictures: Sequence[Picture] = (),
        encoded: Sequence[EncodedPicture] = (),
    ) -> Trajectory:
        """Run one episode. The messages have these `pictures`, which an agent gets as `encoded`."""
        session, turns = self.sessions.start(messages, row=row, pictures=pictures), OneAtATime(policy)
        self.policies[session.id] = turns
        stop, fault, detail, clock = "", None, "", None
        try:
            data = own({**row, "messages": with_data_urls(messages, encoded)})
            address = await self.start()
            if self.waiting:
                await self.waiting.offer(session, data)
            async with asyncio.timeout(self.kit.limits.timeout) as clock:
                if self.kit.limits.held:
                    turns.policy = PausablePolicy(policy, clock)
                with contained(self.settings.name, EpisodeFault):
                    self._take(session, await self._call(session, data, f"{address}/v1", clock))
        except (EpisodeFault, PictureFault) as error:
            fault, detail = "environment", str(error)
        except UserCodeError as error:
            if not session.stop:  # else it was the end of the conversation that it does not handle
                logger.exception("an agent failed")
                fault, detail = error.fault, str(error)
        except TimeoutError:
            if clock is None or not clock.expired():
                raise
            stop = "timeout"
        finally:
            turns.close()
            del self.policies[session.id]
            self.sessions.remove(session)
        return self._trajectory(session, stop, fault, detail)

    def _trajectory(self, session: Session, stop: str, fault: str | None, detail: str) -> Trajectory:
        trajectory = session.trajectory(self.settings.turn_discount)
        if fault is None and not session.turns:
            fault, detail = "no turns", "the agent ended before the policy had responded"
        if fault is None and trajectory.reward is None and self.needs_reward:
            fault, detail = "no reward", f"the episode of {self.settings.name} ended with {stop or trajectory.stop}"
        return replace(trajectory, stop="fault" if fault else stop or trajectory.stop, fault=fault, detail=detail)

    def _take(self, session: Session, returned: Any) -> None:
        """Give the session the rewards that the agent returned."""
        source = f"the agent {self.function}"
        if isinstance(returned, Mapping):
            for name, reward in returned.items():
                session.set_reward(reward_of(reward, source), name)
        elif (reward := reward_of(returned, source)) is not None and session.turns:
            for turn in session.turns:
                turn.reward = None
            session.set_reward(reward)

    async def start(self) -> str:
        """Return the endpoint's address, which is started once."""
        if self.starting is None:
            claim, settings = self.waiting and self.waiting.claim, self.settings
            host, port = (settings.host, settings.port) if self.waiting else INSIDE
            rules = Rules(trains=True, forced_as_auto=settings.forced_tool_choice == AUTO)
            options = {"admin_key": self.admin_key, "claim": claim, "rules": rules, "host": host}
            app = create_app(self._generate, self.sessions, check=self.check, **options)
            self.starting = asyncio.ensure_future(self.open.enter_async_context(serving(app, bound(host, port))))
        return await asyncio.shield(self.starting)

    async def _generate(self, session: Session, prompt: Encoded, sampling: SamplingOptions) -> Completion:
        if session.id not in self.policies:
            raise rejected(401, "use the API key that the agent was called with", code="invalid_api_key")
        return await self.policies[session.id].generate(prompt, sampling, session.pictures.new(prompt.carried))

    async def _outside(self, waiting: Waiting, session: Session, data: Mapping[str, Any], clock: Timeout) -> None:
        """Wait until the agent ends its session; its rewards were set before. While it has sent no request for long,
        another one may take the episode, each time after twice as long: it may take long to begin."""
        seconds, now = UNUSED_SECONDS, asyncio.get_running_loop().time
        async with asyncio.TaskGroup() as tasks:
            begun = tasks.create_task(session.begun.wait())
            while not (await asyncio.wait([begun], timeout=seconds))[0]:
                logger.warning("session %s: no request for %g s; another agent may take it", session.id, seconds)
                offered = tasks.create_task(waiting.offer(session, data))
                await asyncio.wait([begun, offered], return_when=asyncio.FIRST_COMPLETED)
                if offered.done():
                    clock.reschedule(now() + self.kit.limits.timeout)
                offered.cancel()
                seconds *= 2
        await session.ended.wait()

    def _call(self, session: Session, data: Mapping[str, Any], base_url: str, clock: Timeout) -> Awaitable[Any]:
        if self.waiting:
            return self._outside(self.waiting, session, data, clock)
        limits = self.kit.limits
        arguments = data, base_url, session.api_key, HELD_SECONDS if limits.held else limits.timeout
        if self.settings.mode == "process":
            return run_in_process(self.function, *arguments)
        return call_agent(self.agent, *arguments)

    @cached_property
    def agent(self) -> Agent:
        return load_agent(self.function)

    @property
    def function(self) -> str:
        return f"{self.settings.path}:{self.settings.name}"
