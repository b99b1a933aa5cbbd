"""Conversations of agents with the policy, as token ids: a session is a tree of the turns that were sampled for it.

A request whose messages begin with a recorded conversation continues its token ids; what was sampled is never encoded
again. Where the agent changed what the policy wrote, the conversation is rendered as a new one.
"""

import asyncio
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import InitVar, dataclass, field, replace
from itertools import count
from types import MappingProxyType
from typing import Any

from hybridrl.agents.endpoint.messages import digests
from hybridrl.agents.endpoint.requests import rejected
from hybridrl.agents.environments import EpisodeFault, Message, Schema
from hybridrl.agents.environments.dialogue import Dialogue
from hybridrl.agents.environments.episode_loop import SHORTEST_TURN, EpisodeTools
from hybridrl.agents.environments.pictures import LIMIT, NUMBERS, ConversationPictures
from hybridrl.config.findings import ConfigError
from hybridrl.core.carried import Encoded, Fields, superseded
from hybridrl.core.experience.trajectory import Trajectory, Turn, continued_prompt
from hybridrl.core.pictures import Picture
from hybridrl.core.rollout import Completion

KEY_PREFIX = "sk-sess-"
LOST_SECONDS = 60.0  # after which a client that disconnected is not waited for


@dataclass(eq=False)
class SampledTurn:
    """A response of the policy. Its prompt is the ids of its `parent`, less the last `dropped` (0 or 1), then
    `observed`; without a parent it is `observed`. `messages` are the conversation with the response; `called` says
    whether it has tool calls."""

    id: str
    parent: "SampledTurn | None"
    observed: Encoded
    dropped: int
    completion: Completion
    messages: list[Message]
    called: bool
    seconds: float
    reward: float | None = None

    def path(self) -> list["SampledTurn"]:
        """Return the turns from the first one of the conversation to this one."""
        turns, turn = [], self
        while turn is not None:
            turns.append(turn)
            turn = turn.parent
        return turns[::-1]

    def ids(self) -> list[int]:
        """Return the whole context, the response included."""
        ids: list[int] = []
        for turn in self.path():
            del ids[len(ids) - turn.dropped :]
            ids += [*turn.observed.ids, *turn.completion.token_ids.tolist()]
        return ids

    def followed_by(self, observed: Encoded, dropped: int) -> Encoded:
        """Return the context that this turn, less its last `dropped` tokens, and what is observed after it are."""
        ids, path = self.ids(), self.path()
        cut = [*(turn.dropped for turn in path[1:]), dropped]
        turns = [Turn.of(turn.observed, turn.completion).without_last(n) for turn, n in zip(path, cut, strict=True)]
        return continued_prompt(ids[: len(ids) - dropped] + observed.ids, turns, observed)


@dataclass(frozen=True)
class RenderedPrompt:
    """The prompt of a turn: its `ids` with their fields, of which `observed` are new after the parent's. `left` is the
    number of tokens that the response may have, `name` the id of its turn."""

    ids: list[int]
    parent: SampledTurn | None
    observed: Encoded
    dropped: int
    messages: list[Message]
    tools: Sequence[Schema]
    left: int
    name: str = field(default_factory=lambda: f"chatcmpl-{secrets.token_hex(12)}")
    carried: Fields = field(default_factory=dict)


@dataclass(eq=False)
class Session:
    """The recorded turns of one agent. Special tokens are read as such in the `trusted` messages only, whose pictures
    are the `row_pictures`.

    `forks` counts requests with a history that differs from what the policy wrote. `closed` says why it takes no more
    requests.
    """

    kit: EpisodeTools
    trusted: Sequence[Message] = ()
    task: str = ""
    row_pictures: InitVar[Sequence[Picture]] = ()
    pictures: ConversationPictures = field(init=False)
    id: str = field(default_factory=lambda: secrets.token_hex(8))
    api_key: str = field(default_factory=lambda: KEY_PREFIX + secrets.token_urlsafe(24))
    turns: list[SampledTurn] = field(default_factory=list)
    recorded: dict[bytes, SampledTurn] = field(default_factory=dict)  # by the digest of the conversation
    forks: int = 0
    stop: str = ""  # the limit that ended it
    closed: str = ""
    begun: asyncio.Event = field(default_factory=asyncio.Event)  # it had a request, or is closed
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    preparing: asyncio.Lock = field(default_factory=asyncio.Lock)  # of one prompt at a time
    requests: int = 0  # number so far
    open: int = 0  # requests that are not answered yet
    used: float = 0.0

    def __post_init__(self, row_pictures: Sequence[Picture]) -> None:
        self.pictures = self.kit.pictures(row_pictures)
        self.trusted = self.pictures.of_row(self.trusted)

    def close(self, why: str = "it has ended") -> None:
        """Take no more requests."""
        self.closed = self.closed or why
        self.begun.set()
        self.ended.set()

    @contextmanager
    def request(self) -> Iterator[None]:
        """Count a request while it is open."""
        self.requests, self.open = self.requests + 1, self.open + 1
        try:
            yield
        finally:
            self.open -= 1

    def close_if_lost(self, requests: int) -> None:
        """Take no more requests if none came since there were so many: the client has gone."""
        if not self.open and self.requests == requests:
            self.close(f"its client disconnected and sent nothing for {LOST_SECONDS:g} s")

    def picture_reader(self) -> Callable[[bytes], int] | None:
        """Return what reads the pictures of one request, from their files, and names them; None if the model reads
        none. It rejects more than a context may have."""
        numbers = count(1)

        def read(encoded: bytes) -> int:
            if next(numbers) > self.pictures.limit:
                self.stop = "context_overflow"
                message = f"a context has at most {self.pictures.limit} pictures ({LIMIT})"
                raise rejected(400, message, code="context_length_exceeded", param="messages")
            return self.pictures.digest(encoded)

        return read if self.pictures.reader else None

    def prompt_for(
        self,
        messages: Sequence[Message],
        tools: Sequence[Schema] = (),
        template: Mapping[str, Any] = MappingProxyType({}),
    ) -> RenderedPrompt:
        """Return the prompt of a conversation: the recorded ids and what its further messages add, or all rendered."""
        tools_and_template = [*tools, dict(template)] if template else tools  # what a conversation is continued with
        candidates = (self.recorded.get(digest) for digest in reversed(digests(messages, tools_and_template)))
        parent = next((turn for turn in candidates if turn is not None), None)
        new = messages[len(parent.messages) :] if parent else messages
        dialogue = self._dialogue(template)
        try:
            if parent is None or not new or _sampled(new):
                self.forks += bool(self.turns) and _sampled(messages)
                first = dialogue.start(messages, tools, trusted=self.trusted)
                first = self.pictures.expanded(first, messages)
                return self._prompt(None, first, 0, messages, tools_and_template)
            if template.get(NUMBERS):
                cause = (
                    f"chat_template_kwargs: {NUMBERS} numbers the pictures of one prompt, and not those of later turns"
                )
                raise rejected(400, cause, param="chat_template_kwargs")
            sampled = parent.completion.token_ids.tolist()
            ended = sampled[-1] in self.kit.end_ids
            delta = dialogue.delta(new, sampled, ended=ended, called=parent.called, tools=tools)
            delta = self.pictures.expanded(delta, new)
        except (ConfigError, EpisodeFault) as error:
            raise rejected(400, str(error), param="messages") from error
        return self._prompt(parent, delta, delta.dropped, messages, tools_and_template)

    def _dialogue(self, template: Mapping[str, Any]) -> Dialogue:
        try:
            return self.kit.dialogue.with_arguments(template) if template else self.kit.dialogue
        except ConfigError as error:
            raise rejected(400, f"chat_template_kwargs: {error}", param="chat_template_kwargs") from error

    def prompt_of(self, prompt: str | list[int]) -> RenderedPrompt:
        """Return the prompt of a text, or of token ids, which continue the longest recorded context that they begin
        with."""
        ids = self.kit.tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt
        if not ids:
            raise rejected(400, "prompt: it has no tokens", param="prompt")
        if self.pictures.reader and self.pictures.reader.placeholder_fault(ids, 0):
            raise rejected(400, "prompt: it has tokens that stand for pictures, which chats have", param="prompt")
        contexts = [(turn, context) for turn in self.turns if ids[: len(context := turn.ids())] == context]
        parent, prefix = max(contexts, key=lambda pair: len(pair[1]), default=(None, []))
        messages = [{"role": "user", "content": self.kit.tokenizer.decode(ids)}]
        return self._prompt(parent, Encoded(ids[len(prefix) :]), 0, messages)

    def _prompt(
        self,
        parent: SampledTurn | None,
        observed: Encoded,
        dropped: int,
        messages: Sequence[Message],
        tools: Sequence[Schema] = (),
    ) -> RenderedPrompt:
        """Return the prompt if a response fits after it."""
        limits, whole = self.kit.limits, parent.followed_by(observed, dropped) if parent else observed
        ids, first = whole.ids, len((parent.path()[0].observed if parent else observed).ids)
        left = min(limits.context - len(ids), limits.response - (len(ids) - first))
        if limits.turns is not None and len(self.turns) >= limits.turns:
            self.stop = "max_turns"
            raise rejected(400, f"this session has had its {limits.turns} turns", code="max_turns_exceeded")
        if left < min(SHORTEST_TURN, limits.response):
            self.stop = "context_overflow"
            message = f"the maximum context length is {limits.context} tokens, of which {limits.response} may follow "
            message += f"the first prompt; your messages have {len(ids)} tokens after a first prompt of {first}"
            raise rejected(400, message, code="context_length_exceeded", param="messages")
        left = min(left, limits.turn or left)
        return RenderedPrompt(ids, parent, observed, dropped, list(messages), tools, left, carried=whole.carried)

    def record(
        self,
        prompt: RenderedPrompt,
        completion: Completion,
        response: Message,
        *,
        called: bool = False,
        seconds: float = 0.0,
    ) -> SampledTurn:
        """Add the response that was sampled from a prompt."""
        messages = [*prompt.messages, response]
        turn = SampledTurn(
            prompt.name, prompt.parent, prompt.observed, prompt.dropped, completion, messages, called, seconds
        )
        if turn.parent:
            carried = superseded(turn.parent.completion.carried, completion.carried)
            turn.parent.completion = replace(turn.parent.completion, carried=carried)
        self.turns.append(turn)
        self.recorded[digests(messages, prompt.tools)[-1]] = turn
        return turn

    def set_reward(self, reward: float, completion_id: str | None = None) -> None:
        """Give a reward to a turn, by default to the last one."""
        named = [turn for turn in self.turns if completion_id in (None, turn.id)]
        if not named:
            what = f"no completion {completion_id}" if completion_id else "no completion yet"
            raise rejected(404, f"this session has {what}", param="completion_id")
        named[-1].reward = reward

    def trajectory(self, turn_discount: float = 1.0) -> Trajectory:
        """Return the session as an episode: one row for each path to a last turn, each turn trained on once.

        In a further row the turns that an earlier one has are part of its prompt. The reward of a turn counts
        `turn_discount` for each turn before it, so the episode's reward is the discounted return of its first turn.
        """
        parents, trained, turns = {turn.parent for turn in self.turns}, set(), []
        for leaf in (turn for turn in self.turns if turn not in parents):
            path = leaf.path()
            start = sum(turn in trained for turn in path)
            trained |= set(path)
            for depth, turn in enumerate(path[start:], start=start):
                dropped = path[depth + 1].dropped if turn is not leaf else 0
                fresh = depth == start
                observed = turn.observed
                if fresh and turn.parent:
                    observed = turn.parent.followed_by(observed, turn.dropped)
                reward = None if turn.reward is None else turn.reward * turn_discount**depth
                turns.append(_as_turn(turn, observed, dropped, reward, fresh=fresh and bool(turns)))
        rewards = [turn.reward for turn in turns if turn.reward is not None]
        metrics = {"endpoint/turns": len(turns), "endpoint/forks": self.forks}
        reward, stop = sum(rewards) if rewards else None, self.stop or "completed"
        if turns and turns[-1].stop == "length":
            stop = "max_tokens"
        trajectory = Trajectory(turns, stop, self.turns[-1].messages if turns else (), "", reward, metrics)
        text = self.kit.decode(trajectory.rows()[-1].response_ids) if turns else ""
        return Trajectory(turns, stop, trajectory.messages, text, reward, metrics)


def _sampled(messages: Sequence[Message]) -> bool:
    return any(message["role"] == "assistant" for message in messages)


def _as_turn(turn: SampledTurn, observed: Encoded, dropped: int, reward: float | None, *, fresh: bool) -> Turn:
    sampled = Turn.of(observed, turn.completion, fresh=fresh).without_last(dropped)
    return replace(sampled, reward=reward, seconds_model=turn.seconds)


class AgentSessions:
    """The sessions of an endpoint; one that is not used for `timeout` seconds is closed, and forgotten as much later.

    `unrecorded` counts requests that belonged to no session.
    """

    def __init__(self, kit: EpisodeTools, timeout: float = 3600.0, clock: Callable[[], float] = time.monotonic) -> None:
        self.kit, self.timeout, self.clock = kit, timeout, clock
        self.by_id: dict[str, Session] = {}
        self.by_key: dict[str, Session] = {}
        self.unrecorded = 0

    def start(
        self,
        trusted: Sequence[Message] = (),
        task: str = "",
        row: Mapping[str, Any] = MappingProxyType({}),
        pictures: Sequence[Picture] = (),
    ) -> Session:
        """Return a new session, for an episode of the `row` with its `pictures` if there is one."""
        for old in [session for session in self.by_id.values() if self.clock() - session.used > 2 * self.timeout]:
            self.remove(old)
        session = Session(self.kit.of_row(row), trusted, task, pictures, used=self.clock())
        self.by_id[session.id] = self.by_key[session.api_key] = session
        return session

    def remove(self, session: Session) -> None:
        session.close()
        del self.by_id[session.id], self.by_key[session.api_key]

    def renew_key(self, session: Session) -> None:
        """Give the session another key, so that who has the old one has it no more."""
        del self.by_key[session.api_key]
        session.api_key = Session(self.kit).api_key
        self.by_key[session.api_key] = session

    def opened(self, session: Session) -> Session:
        """Return the session for a request that changes it; rejects one that is closed."""
        now = self.clock()
        if not session.closed and now - session.used > self.timeout:
            session.close(f"it was not used for {self.timeout:g} s")
        if session.closed:
            raise rejected(409, f"session {session.id} is closed: {session.closed}", code="session_closed")
        session.used = now
        session.begun.set()
        return session
