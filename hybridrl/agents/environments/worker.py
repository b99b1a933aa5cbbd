"""A process that runs episodes: the Ray actor in which environments and tools live, with the chat template.

It asks for turns and returns finished episodes in `take`; episodes and turns come by `give`. The driver has the
engines, so this process needs neither weights nor a device.
"""

import asyncio
import contextlib
import gc
import logging
import pickle
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import numpy as np
from transformers import PreTrainedTokenizerBase

from hybridrl.agents.environments import (
    MULTI_TURN,
    Environment,
    EnvironmentSettings,
    EpisodeFault,
    Message,
    Response,
    Step,
)
from hybridrl.agents.environments.episode_loop import AgentLoop, EpisodeLimits, EpisodeRun, EpisodeTools, PausablePolicy
from hybridrl.agents.environments.load import environment_of, runs_function
from hybridrl.agents.environments.user_code import UserCodeError, contained
from hybridrl.config.custom_code import own
from hybridrl.core.carried import Encoded, brought
from hybridrl.core.experience.trajectory import Policy, Trajectory
from hybridrl.core.pictures import Picture
from hybridrl.core.rollout import Completion, Request, RequestFault, Sampling, request_seed
from hybridrl.data.pictures import Encoded as EncodedPicture
from hybridrl.data.processor import PictureReader
from hybridrl.runtime.guard import begin_actor

logger = logging.getLogger(__name__)

COALESCE_SECONDS = 0.005  # a pause in which more becomes ready: a remote call costs more than a turn
HEARTBEAT_SECONDS = 5.0  # after which `take` returns nothing, to show that the process responds

EpisodeTicket = int  # names an episode between driver and process
CHECK: EpisodeTicket = -1  # no episode, but the question why no turn can be sampled, which is answered by a text
Answer = Completion | RequestFault | str
# A turn to sample, the pictures of later ones, the end of an episode; None: the question of CHECK.
Taken = Request | list[Picture] | Trajectory | None
# Episodes to start, and turns.
Given = tuple[list[tuple[EpisodeTicket, "EpisodeSpec"]], list[tuple[EpisodeTicket, Answer]]]


@dataclass(frozen=True)
class EpisodeSpec:
    """One episode to run. `row` has all columns of its row; its seeds derive from `seed`, `seed_key` and `sample`. The
    parts of its messages name the `pictures`, without pixels; an agent that sends messages itself has them `encoded`.
    """

    prompt: int
    sample: int
    messages: Sequence[Message]
    row: Mapping[str, Any]
    sampling: Sampling
    seed: int
    seed_key: int | str
    pictures: Sequence[Picture] = ()
    encoded: Sequence[EncodedPicture] = ()


@dataclass(frozen=True)
class EpisodeSettings:
    """Settings of the processes of a run, as plain values; `load_tokenizer` is called once in each, as is
    `load_reader`, for their pictures."""

    load_tokenizer: Callable[[], PreTrainedTokenizerBase]
    environments: EnvironmentSettings
    limits: EpisodeLimits
    end_ids: tuple[int, ...]
    formats: Mapping[str, Any] = field(default_factory=dict)  # the arguments of EpisodeTools.of that are given by name
    configuration: Mapping[str, Any] = field(default_factory=dict)  # the run's or evaluation's, for verl's loops
    # Makes what runs the user's function, with EpisodeWorker.check.
    agents: Callable[[EpisodeTools, Callable[[], Awaitable[None]]], "AgentRunner"] | None = None
    load_reader: Callable[[PreTrainedTokenizerBase], PictureReader | None] | None = None


class AgentRunner(Protocol):
    """Runs episodes that have a loop of their own, at most `concurrency` of a call at a time."""

    concurrency: int | None

    async def start(self) -> Any:
        """Prepare for episodes."""

    async def run(
        self,
        policy: Policy,
        messages: Sequence[Message],
        row: Mapping[str, Any],
        pictures: Sequence[Picture],
        encoded: Sequence[EncodedPicture],
    ) -> Trajectory:
        """Run one episode. The messages have these `pictures`, which an agent gets as `encoded`."""


@dataclass(eq=False)
class DispatchCall:
    """The episodes of one dispatch of the driver. `ready` has tickets, each with what its episode sends; `faults` are
    of episodes with a turn that could not be sampled. `places` limits the agents that run: those of another call must
    not wait for them, since they may be held while the other call runs."""

    places: AbstractAsyncContextManager = field(default_factory=nullcontext)

    tasks: dict[EpisodeTicket, asyncio.Task] = field(default_factory=dict)
    asked: dict[EpisodeTicket, asyncio.Future] = field(default_factory=dict)
    ready: asyncio.Queue[tuple[EpisodeTicket, Taken]] = field(default_factory=asyncio.Queue)
    faults: dict[EpisodeTicket, RequestFault] = field(default_factory=dict)

    async def ask(self, ticket: EpisodeTicket, request: Request) -> Completion:
        """Have the driver sample one turn; raises a RequestFault if it cannot be."""
        future = self.asked[ticket] = asyncio.get_running_loop().create_future()
        self.ready.put_nowait((ticket, request))
        return await future

    async def check(self) -> str:
        """Return why the driver can have no turn sampled; "" if it can, or no episode runs."""
        if self.tasks and CHECK not in self.asked:
            self.asked[CHECK] = asyncio.get_running_loop().create_future()
            self.ready.put_nowait((CHECK, None))
        return await asyncio.shield(self.asked[CHECK]) if CHECK in self.asked else ""

    def answer(self, ticket: EpisodeTicket, result: Answer) -> None:
        future = self.asked.pop(ticket, None)
        if isinstance(result, RequestFault):
            self.faults[ticket] = result
        if future is not None and not future.done():
            future.set_exception(result) if isinstance(result, RequestFault) else future.set_result(result)

    def abandon(self) -> None:
        self.answer(CHECK, "")
        for task in self.tasks.values():
            task.cancel()


class SingleResponse(Environment):
    """What a row without an environment runs in: one response ends the episode."""

    def step(self, response: Response) -> Step:
        return Step(done=True)


class WorkerPolicy:
    """The policy of one episode: passes each turn to the driver, with a seed of its own."""

    def __init__(
        self, kit: EpisodeTools, call: DispatchCall, ticket: EpisodeTicket, spec: EpisodeSpec, sampling: Sampling
    ) -> None:
        self.kit, self.call, self.ticket, self.spec, self.sampling = kit, call, ticket, spec, sampling
        self.turn = 0
        self.versions: list[np.ndarray] = []  # of the weights that each token was sampled with, by turn

    def show(self, pictures: Sequence[Picture]) -> None:
        self.call.ready.put_nowait((self.ticket, list(pictures)))

    async def generate(self, prompt: Encoded, *, max_tokens: int | None = None, stop: Sequence[str] = ()) -> Completion:
        spec, turn, context = self.spec, self.turn, self.kit.limits.context
        if len(prompt.ids) >= context:
            raise EpisodeFault(
                f"turn {turn} has a prompt of {len(prompt.ids)} tokens, and the model's context has {context} "
                "(actor_rollout_ref.rollout.max_model_len)"
            )
        self.turn += 1
        most = min(self.sampling.max_tokens, context - len(prompt.ids))
        # The first turn has the seed of a single response, which an episode of one turn then equals.
        seed = request_seed(spec.seed, spec.seed_key, spec.sample, *([turn] if turn else []))
        most = most if max_tokens is None else min(most, int(max_tokens))
        # Plain values: the driver and the engines cannot import an agent's own classes.
        sampling = replace(self.sampling, max_tokens=most, stop=(*self.sampling.stop, *map(str, stop)))
        ids = list(map(int, prompt.ids))
        request = Request(spec.prompt, spec.sample, ids, seed, sampling, turn, carried=prompt.carried)
        completion = await self.call.ask(self.ticket, request)
        self.versions.append(np.broadcast_to(completion.versions, len(completion.token_ids)))
        return completion


class EpisodeWorker:
    """Episodes as tasks of one event loop; plain functions of environments run in threads. Episodes of several calls
    run at the same time, and those that a call has left are abandoned when it ends."""

    def __init__(self, log: str, settings: EpisodeSettings) -> None:
        begin_actor(log)
        logging.basicConfig(format="%(asctime)s %(message)s")
        self.begin(settings)

    def begin(self, settings: EpisodeSettings) -> None:
        """Begin without episodes, in a process whose output goes where it is."""
        tokenizer = settings.load_tokenizer()
        reader = settings.load_reader and settings.load_reader(tokenizer)
        self.kit = EpisodeTools.of(tokenizer, settings.end_ids, settings.limits, reader=reader, **settings.formats)
        self.environments, self.configuration = settings.environments, settings.configuration
        self.agents = settings.agents(self.kit, self.check) if settings.agents else None
        self.calls: dict[str, DispatchCall] = {}
        self.over: set[str] = set()  # calls that have ended: what arrives late is not started
        gc.freeze()  # the many objects of the libraries need not be visited by every full collection

    async def start(self) -> bool:
        """Return once the process is ready."""
        if self.agents:
            await self.agents.start()
        return True

    async def check(self) -> None:
        """Raise if episodes run and no turn can be sampled. While the policy is trained none run: the engines sleep."""
        for call in [*self.calls.values()]:
            if cause := await call.check():
                raise RuntimeError(cause)

    async def give(self, name: str, content: bytes) -> None:
        """Start episodes of a call of the driver, and give sampled turns to those that asked for them; a pickled
        Given."""
        if name in self.over:
            return
        call, (specs, turns) = self._call(name), pickle.loads(content)
        for ticket, result in turns:
            call.answer(ticket, result)
        for ticket, spec in specs:
            call.tasks[ticket] = asyncio.create_task(self._run(call, ticket, spec))

    async def take(self, name: str) -> bytes:
        """Return what episodes of this call ask for, and those that ended, as pickled pairs of ticket and Taken;
        nothing after some seconds without any."""
        queue, ready = self._call(name).ready, []
        with contextlib.suppress(TimeoutError):
            ready.append(await asyncio.wait_for(queue.get(), HEARTBEAT_SECONDS))
            await asyncio.sleep(COALESCE_SECONDS)
        while not queue.empty():
            ready.append(queue.get_nowait())
        return pickle.dumps(ready, pickle.HIGHEST_PROTOCOL)

    async def end(self, name: str) -> None:
        """Abandon what is left of a call."""
        self.over.add(name)
        if call := self.calls.pop(name, None):
            call.abandon()

    def _call(self, name: str) -> DispatchCall:
        if name in self.calls:
            return self.calls[name]
        limit = self.agents.concurrency if self.agents else None
        call = DispatchCall(asyncio.Semaphore(limit) if limit else nullcontext())
        if name not in self.over:
            self.calls[name] = call
        return call

    async def _run(self, call: DispatchCall, ticket: EpisodeTicket, spec: EpisodeSpec) -> None:
        try:
            with contained("an episode", EpisodeFault):  # such as an environment that cannot be made, or an agent
                trajectory = await self._episode(call, ticket, spec)
        except EpisodeFault as error:
            trajectory = Trajectory([], "fault", text="", fault="environment", detail=str(error))
        except UserCodeError as error:
            logger.exception("an episode failed")
            trajectory = Trajectory([], "fault", text="", fault=error.fault, detail=str(error))
        if fault := call.faults.pop(ticket, None):
            trajectory = replace(trajectory, stop="fault", fault=fault.kind, detail=str(fault))
        call.tasks.pop(ticket, None)
        call.ready.put_nowait((ticket, trajectory))

    async def _episode(self, call: DispatchCall, ticket: EpisodeTicket, spec: EpisodeSpec) -> Trajectory:
        spec = replace(spec, messages=own([*spec.messages]), row=own(spec.row))  # which samples of a prompt share
        kit = self.kit.of_row(spec.row)
        policy = partial(WorkerPolicy, kit, call, ticket, spec)
        if self.agents and runs_function(spec.row, self.environments):
            async with call.places:
                sees = spec.pictures, spec.encoded
                return await self.agents.run(policy(self._with_stops(spec.sampling)), spec.messages, spec.row, *sees)
        make = environment_of(spec.row, self.environments)
        if isinstance(make, AgentLoop):
            loop_sampling = self._with_stops(spec.sampling) if make.needs_tools else spec.sampling
            return await self._verl_loop(make, policy(loop_sampling), spec, kit)
        environment = SingleResponse({}, spec.row) if make is None else make()
        sampling = self._with_stops(spec.sampling) if environment.tools else spec.sampling
        own_fields = {"carried": brought(spec.row), "pictures": kit.pictures(spec.pictures)}
        return await EpisodeRun(kit, policy(sampling), environment, **own_fields).run(spec.messages)

    async def _verl_loop(
        self, loop: AgentLoop, policy: "WorkerPolicy", spec: EpisodeSpec, kit: EpisodeTools
    ) -> Trajectory:
        """Run an agent loop of verl, which returns the rows of its episode."""
        sampling, tokenizer, configuration = spec.sampling, kit.tokenizer, self.configuration
        if kit is not self.kit:  # the loop renders the messages itself
            data = {**configuration["data"], "apply_chat_template_kwargs": dict(kit.dialogue.arguments)}
            configuration = {**configuration, "data": data}
        parameters = {name: vars(sampling)[name] for name in ("temperature", "top_p", "top_k", "repetition_penalty")}
        limit = self.kit.limits.timeout
        clock = asyncio.timeout(limit)
        try:
            async with clock:
                asked = PausablePolicy(policy, clock) if self.kit.limits.held else policy
                shared = (tokenizer, configuration, parameters, kit.dialogue, kit.parser)
                outputs = await loop.run(asked, list(spec.messages), *shared)
        except TimeoutError as error:
            if not clock.expired():
                raise
            raise EpisodeFault(f"the agent loop took more than {limit:g} s ({MULTI_TURN}.episode_timeout)") from error
        return loop.trajectory(outputs, np.concatenate(policy.versions or [[]]), tokenizer)

    def _with_stops(self, sampling: Sampling) -> Sampling:
        """Return the sampling of episodes with tools, which further tokens end."""
        return replace(sampling, stop_ids=tuple(sorted({*sampling.stop_ids, *self.kit.dialogue.stop_ids})))
