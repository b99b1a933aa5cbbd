"""One episode, from the first messages to its end: sampling, the environment's steps, token ids, and every limit.

The order of the checks after each turn is in `_stop`, and nowhere else.
"""

import asyncio
import contextlib
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any, Self, TypeVar

import numpy as np
from transformers import PreTrainedTokenizerBase

from hybridrl.agents.environments import Environment, EpisodeFault, Message, Response, Step, ToolCall
from hybridrl.agents.environments.calls import CallParser, call_parser
from hybridrl.agents.environments.dialogue import LONG, Dialogue, characters
from hybridrl.agents.environments.pictures import LIMIT, ConversationPictures, picture_parts
from hybridrl.agents.environments.user_code import UserCodeError, contained, finished, metrics_of, reward_of
from hybridrl.config.custom_code import once, own
from hybridrl.core.carried import Encoded, Fields, superseded
from hybridrl.core.experience.trajectory import Policy, Trajectory, Turn, continued_prompt
from hybridrl.core.pictures import Picture
from hybridrl.core.rollout import Completion
from hybridrl.data.pictures import PictureFault
from hybridrl.data.processor import PictureReader
from hybridrl.data.tokenizer import ResponseDecoder
from hybridrl.rewards.score import OutOfTime

logger = logging.getLogger(__name__)

SHORTEST_TURN = 16  # tokens that must be left for a turn
ENCODER = ThreadPoolExecutor(1, thread_name_prefix="encoder")
T = TypeVar("T")


@dataclass(frozen=True)
class EpisodeLimits:
    """The bounds of an episode. Token limits count one row: `prompt` its first prompt, `response` all that follows,
    sampled or observed, `turn` one response, `context` both together, which has at most `pictures`. Times are in
    seconds; where rollouts outlive a step the policy is `held` while the devices train, and `timeout` does not count
    the time that it takes."""

    prompt: int
    response: int
    context: int
    turn: int | None = None
    turns: int | None = None
    user_turns: int | None = None
    invalid_calls: int | None = None  # in a row
    call_timeout: float = 30.0  # of a method of the environment; tools have their own, which is shorter
    timeout: float = 1800.0
    held: bool = False
    pictures: int = 0


@dataclass(frozen=True)
class EpisodeTools:
    """The parts that all episodes of a process share; `parser` returns that of calls, made once there are tools.
    `reader` reads their pictures, if the model does."""

    tokenizer: PreTrainedTokenizerBase
    dialogue: Dialogue
    parser: Callable[[], CallParser]
    end_ids: frozenset[int]
    limits: EpisodeLimits
    decode: ResponseDecoder
    reader: PictureReader | None = None

    @classmethod
    def of(
        cls,
        tokenizer: PreTrainedTokenizerBase,
        end_ids: Sequence[int],
        limits: EpisodeLimits,
        *,
        format: str = "auto",
        model_type: str = "",
        arguments: Mapping[str, Any] = MappingProxyType({}),
        history_reasoning: str = "keep",
        reader: PictureReader | None = None,
    ) -> Self:
        """Return the kit of a model: `format` of its tool calls, `arguments` of its chat template."""
        dialogue = Dialogue(tokenizer, end_ids, arguments=arguments, history_reasoning=history_reasoning)
        parser = once(partial(call_parser, format, model_type, dialogue))
        ends = frozenset((*end_ids, *dialogue.stop_ids))
        return cls(tokenizer, dialogue, parser, ends, limits, ResponseDecoder(tokenizer, ends), reader)

    def of_row(self, row: Mapping[str, Any]) -> Self:
        """Return the kit of an episode, whose row may have arguments of its own for the chat template."""
        dialogue = self.dialogue.of_row(row)
        return self if dialogue is self.dialogue else replace(self, dialogue=dialogue)

    def pictures(self, row_pictures: Sequence[Picture] = ()) -> ConversationPictures:
        """Return the pictures of a conversation, whose row has `row_pictures`."""
        return ConversationPictures(self.reader, self.limits.pictures, row_pictures)

    def content(self, sampled: np.ndarray) -> list[int]:
        """Return the ids of a response without its end tokens."""
        ids = sampled.tolist()
        while ids and ids[-1] in self.end_ids:
            ids.pop()
        return ids


@dataclass
class EpisodeRun:
    """One episode in progress."""

    kit: EpisodeTools
    policy: Policy
    environment: Environment
    turns: list[Turn] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    trusted: Sequence[Message] = ()  # those of the row, which may hold special tokens on purpose
    metrics: dict[str, float] = field(default_factory=dict)
    context: list[int] = field(default_factory=list)  # of the current row
    prompt_length: int = 0  # of the current row
    row_start: int = 0  # the first turn of the current row
    invalid: int = 0  # responses in a row with calls of which none could be read
    user_turns: int = 0
    reward: float | None = None
    carried: Fields = field(default_factory=dict)  # those of the row, which belong to the first prompt
    pictures: ConversationPictures = field(default_factory=lambda: ConversationPictures(None))

    async def run(self, messages: Sequence[Message]) -> Trajectory:
        """Run the episode; whatever ends it, the environment is closed."""
        stop, fault, detail, clock = "timeout", None, "", asyncio.timeout(self.kit.limits.timeout)
        try:
            async with clock:
                if self.kit.limits.held:
                    self.policy = PausablePolicy(self.policy, clock)
                with contained(self.environment, EpisodeFault, PictureFault):  # what it returns can be anything
                    stop = await self._turns(self.pictures.of_row(messages))
        except (EpisodeFault, PictureFault) as error:
            stop, fault, detail = "fault", "environment", str(error)
        except UserCodeError as error:
            logger.exception("an environment failed")
            stop, fault, detail = "fault", error.fault, str(error)
        except TimeoutError:  # of the clock
            pass
        finally:  # also if the episode is abandoned
            try:
                with contained(self.environment):
                    self.metrics |= metrics_of(await self._call(self.environment.close), self.environment)
            except UserCodeError:
                logger.exception("an environment's close failed")
        if not self.turns and fault is None:
            fault, detail = "timeout", "the episode reached its time limit before its first response"
        text = self.kit.decode(self.context[self.prompt_length :])
        return Trajectory(self.turns, stop, self.messages, text, self.reward, self.metrics, fault, detail)

    async def _turns(self, messages: list[Message]) -> str:
        """Alternate between policy and environment; return why the episode ended."""
        self.trusted = messages
        self.messages = await self._read(await self._call(self.environment.reset, own(list(messages))))
        observed, fresh = await self._start(), True
        if len(observed.ids) > self.kit.limits.prompt:
            raise EpisodeFault(
                f"the first messages have {len(observed.ids)} tokens, more than data.max_prompt_length="
                f"{self.kit.limits.prompt}; raise it, or shorten what the environment's reset returns"
            )
        while True:
            await self._sample(observed, fresh=fresh)
            response = self._response()
            began = time.monotonic()
            step = await self._call(self.environment.step, response)
            self._take(response, step, time.monotonic() - began)
            if stop := self._stop(response, step):
                return stop
            messages = await self._read(step.messages if step.replace is None else step.replace)
            if fresh := self._replaces(step):
                self.messages = messages if step.replace else [*self.messages, *messages]
            observed = await (self._start() if fresh else self._delta(response, messages))
            if not observed.ids:
                return "context_overflow"

    async def _sample(self, observed: Encoded, *, fresh: bool) -> None:
        """Add a turn of the policy after the observed tokens."""
        if fresh:
            self.context, self.prompt_length, self.row_start = [], len(observed.ids), len(self.turns)
        self.context += observed.ids
        prompt = continued_prompt(self.context, self.turns[self.row_start :], observed)
        began = time.monotonic()
        if new := self.pictures.new(prompt.carried):
            self.policy.show(new)
        completion = await self.policy.generate(prompt, max_tokens=self._left())
        turn = Turn.of(observed, completion, fresh=fresh and bool(self.turns))
        if self.turns and not fresh:
            carried = superseded(self.turns[-1].carried, turn.carried)
            self.turns[-1] = replace(self.turns[-1], carried=carried)
        self.turns.append(replace(turn, seconds_model=time.monotonic() - began))
        self.context += completion.token_ids.tolist()

    def _left(self) -> int:
        """Return the tokens that the next turn may have."""
        limits, used = self.kit.limits, len(self.context)
        left = min(limits.response - (used - self.prompt_length), limits.context - used)
        return left if limits.turn is None else min(left, limits.turn)

    def _response(self) -> Response:
        """Decode and parse the last turn, and add it to the conversation."""
        kit, turn = self.kit, self.turns[-1]
        ids, calls = kit.content(turn.sampled), []
        text = kit.tokenizer.decode(ids) if self.environment.tools else kit.decode(ids)
        if self.environment.tools:
            text, calls = kit.parser()(text, self.environment.tools)
        message: Message = {"role": "assistant", "content": text}
        if calls:
            message["tool_calls"] = [_as_message(call) for call in calls]
        self.messages.append(message)
        self.invalid = self.invalid + 1 if calls and all(call.error for call in calls) else 0
        limits, number = kit.limits, len(self.turns)
        last = turn.stop == "length" or number == limits.turns or self.invalid == limits.invalid_calls
        left = max(min(limits.response + self.prompt_length, limits.context) - len(self.context), 0)
        return Response(text, calls, ids, number - 1, left, last=last)

    def _take(self, response: Response, step: Step, seconds: float) -> None:
        """Record what the environment did."""
        if not isinstance(step, Step):
            kind, name = type(step).__name__, type(self.environment).__name__
            raise EpisodeFault(f"{name}.step returned {kind}, not a Step (hybridrl.environments.Step)")
        reward = reward_of(step.reward, self.environment)
        self.turns[-1] = replace(self.turns[-1], calls=tuple(step.calls), reward=reward, seconds_tools=seconds)
        if reward is not None:
            self.reward = (self.reward or 0.0) + reward
        self.metrics |= metrics_of(step.metrics, self.environment)

    def _stop(self, response: Response, step: Step) -> str | None:
        """Return why the episode ends after this turn, or None."""
        limits, turn = self.kit.limits, self.turns[-1]
        if turn.stop == "length":
            return "max_turn_tokens" if len(turn.sampled) == limits.turn else "max_tokens"
        if self.invalid == limits.invalid_calls:
            return "invalid_calls"
        if step.done:
            return "completed"
        self.user_turns += any(message["role"] == "user" for message in step.messages)
        beyond = limits.user_turns is not None and self.user_turns > limits.user_turns
        return "max_turns" if beyond or len(self.turns) == limits.turns else None

    def _replaces(self, step: Step) -> bool:
        """Whether the next turn has a new context: from the environment, or without the reasoning of earlier turns."""
        dialogue, read = self.kit.dialogue, any(message["role"] == "user" for message in step.messages)
        strips = dialogue.history_reasoning == "strip" and dialogue.strips_reasoning
        return step.replace is not None or (strips and read)

    async def _start(self) -> Encoded:
        """Return the conversation so far as a prompt; none if it does not fit, after the first turn."""
        limits, dialogue = self.kit.limits, self.kit.dialogue
        room = limits.context - min(SHORTEST_TURN, limits.response)
        too_many = self.pictures.too_many(self.messages)
        if too_many or dialogue.exceeds(self.messages, room):
            if self.turns:
                return Encoded([])
            what = f"of {limits.pictures} pictures ({LIMIT})" if too_many else f"of {limits.context} tokens"
            raise EpisodeFault(f"the first messages do not fit into a context {what}")
        start = partial(dialogue.start, self.messages, self.environment.tools, trusted=self.trusted)
        encoded = self.pictures.expanded(await _encoded(start, self.messages), self.messages)
        if not self.turns:
            return replace(encoded, carried={**self.carried, **encoded.carried})
        return encoded if len(encoded.ids) <= room else Encoded([])

    async def _delta(self, response: Response, messages: Sequence[Message]) -> Encoded:
        """Return the tokens that the context grows by; none if they do not fit."""
        limits, turn, dialogue = self.kit.limits, self.turns[-1], self.kit.dialogue
        long = dialogue.exceeds(messages, limits.context - len(self.context))
        if long or self.pictures.too_many([*self.messages, *messages]):
            return Encoded([])
        sampled, ended = turn.sampled.tolist(), int(turn.sampled[-1]) in self.kit.end_ids
        options = {"ended": ended, "called": bool(response.calls), "tools": self.environment.tools}
        delta = await _encoded(partial(dialogue.delta, messages, sampled, **options), messages)
        delta = self.pictures.expanded(delta, messages)
        if dropped := delta.dropped:  # the template has another end token there
            self.turns[-1] = turn.without_last(dropped)
            del self.context[-dropped:]
        used = len(self.context) + len(delta.ids)
        left = min(limits.response - (used - self.prompt_length), limits.context - used)
        if left < min(SHORTEST_TURN, limits.response):
            return Encoded([])
        self.messages += messages
        return delta

    async def _read(self, messages: Sequence[Message]) -> list[Message]:
        """Return messages of the environment with its pictures read, in a thread."""
        if self.kit.reader is None or not any(picture_parts(messages)):
            return self.pictures.read(messages)
        return await asyncio.wrap_future(self.kit.reader.start(self.pictures.read, messages))

    async def _call(self, method: Callable[..., Any], *arguments: Any) -> Any:
        """Call a method of the environment; EpisodeFault at the time limit. Tools have limits of their own."""
        if getattr(method, "__func__", None) in (Environment.reset, Environment.close):  # which return at once
            return method(*arguments)
        limit = None if self.environment.tools else self.kit.limits.call_timeout
        try:
            return await finished(method, *arguments, seconds=limit)
        except OutOfTime as error:
            name = f"{type(self.environment).__name__}.{method.__name__}"
            raise EpisodeFault(f"{name}: {error} (actor_rollout_ref.rollout.multi_turn.tool_timeout)") from error


async def _encoded(encode: Callable[[], T], messages: Sequence[Message]) -> T:
    """Encode messages; long ones in a thread, while other episodes continue, and one at a time for their memory."""
    if characters(list(messages)) <= LONG:
        return encode()
    return await asyncio.get_running_loop().run_in_executor(ENCODER, encode)


def _as_message(call: ToolCall) -> Message:
    """Return a call as chat templates read it."""
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": own(dict(call.arguments))}}


class AgentLoop(ABC):
    """A class of another system that runs the episodes of a row, with its arguments: it renders and samples as it
    likes, and returns token ids."""

    needs_tools: bool  # whether it has the configuration's tools and interactions
    reads_configured_format: bool  # whether it is certain to read calls in the configured format

    @abstractmethod
    async def run(self, policy: Policy, messages: list[Message], *shared: Any) -> list[Any]:
        """Run an episode and return its rows."""

    @abstractmethod
    def trajectory(self, rows: Sequence[Any], versions: np.ndarray, tokenizer: Any) -> Trajectory:
        """Return the rows as an episode; `versions` are those of all tokens that were sampled, in order."""


@dataclass
class PausablePolicy:
    """The policy of an episode whose time limit `clock` stands still while a turn is sampled."""

    policy: Policy
    clock: asyncio.Timeout

    def show(self, pictures: Sequence[Picture]) -> None:
        self.policy.show(pictures)

    async def generate(self, prompt: Encoded, *, max_tokens: int | None = None, stop: Sequence[str] = ()) -> Completion:
        with paused(self.clock):
            return await self.policy.generate(prompt, max_tokens=max_tokens, stop=stop)


@contextlib.contextmanager
def paused(clock: asyncio.Timeout) -> Iterator[None]:
    """Pause a time limit, and continue it with the time that was left."""
    now, end = asyncio.get_running_loop().time, clock.when()
    if end is None or clock.expired():
        yield
        return
    left = end - now()
    clock.reschedule(None)
    try:
        yield
    finally:
        with contextlib.suppress(RuntimeError):  # the episode has ended meanwhile
            clock.reschedule(now() + left)
