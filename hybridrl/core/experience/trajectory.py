"""Episodes as data: turns of the policy as token ids, their rows in a batch, and the interfaces that run and score
them.

Token ids from the engine are never encoded again: training uses exactly the sampled ids.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal, Protocol

import numpy as np

from hybridrl.core.carried import Encoded, Fields, declared, joined
from hybridrl.core.experience.responses import ResponseStore
from hybridrl.core.pictures import Picture, without_pixels
from hybridrl.core.rollout import Completion, Goal, Request, Sampling
from hybridrl.data.prompts import Prompt
from hybridrl.rewards.score import Score, ScoringRequest

# Stop reasons of an episode. After one of TRUNCATED the response is incomplete.
TRUNCATED = ("max_tokens", "max_turn_tokens", "context_overflow")
STOPS = ("completed", "max_turns", *TRUNCATED, "invalid_calls", "timeout", "fault")


EpisodeKey = tuple[str, int, int]  # stream, position and sample: every episode of a run has its own


class ScoredCall(Protocol):
    """The outcome of a tool call: the part that this package reads (see agents.environments)."""

    @property
    def reward(self) -> float | None: ...


@dataclass(frozen=True)
class Turn:
    """One call of the policy."""

    observed: Sequence[int]  # tokens added to the context before the call; in the first turn the prompt
    sampled: np.ndarray  # [T] int64, the end token included
    log_probs: np.ndarray  # [T] float32, as sampled
    versions: np.ndarray | int  # the weight version of each token [T], or one for all
    stop: str  # "stop", or "length" if the response was truncated
    fresh: bool = False  # `observed` is a whole new context, which replaced the previous one
    calls: Sequence[ScoredCall] = ()  # tool calls in the response
    reward: float | None = None  # the environment's, for this turn
    seconds_model: float = 0.0  # from the request to the response
    seconds_tools: float = 0.0  # for its calls
    carried: Fields = field(default_factory=dict)  # fields for the observed and the sampled tokens

    @property
    def token_versions(self) -> np.ndarray:
        return np.broadcast_to(self.versions, len(self.sampled))

    @staticmethod
    def of(observed: Encoded, completion: Completion, *, fresh: bool = False) -> "Turn":
        stop = "length" if completion.truncated else "stop"
        sampled = completion.token_ids, completion.log_probs, completion.versions
        carried = {**observed.carried, **completion.carried} if completion.carried else observed.carried
        return Turn(observed.ids, *sampled, stop, fresh=fresh, carried=carried)

    def without_last(self, count: int) -> "Turn":
        """Return the turn without the last tokens that were sampled."""
        length = len(self.sampled) - count
        versions = self.versions if isinstance(self.versions, int) else self.versions[:length]
        sampled, log_probs, carried = self.sampled[:length], self.log_probs[:length], dict(self.carried)
        for name, value in self.carried.items():
            if declared(name).axis == "response":
                carried[name] = value[: len(value) - count]
        return replace(self, sampled=sampled, log_probs=log_probs, versions=versions, carried=carried)


def continued_prompt(ids: list[int], turns: Sequence[Turn], observed: Encoded) -> Encoded:
    """Return the ids of a context with its prompt fields: those of the turns of one row, then those of `observed`."""
    fields = [{key: turn.carried[key] for key in turn.carried if declared(key).filled_by == "prompt"} for turn in turns]
    read, wrote = [len(turn.observed) for turn in turns], [len(turn.sampled) for turn in turns]
    return Encoded(ids, joined([*fields, observed.carried], [*read, len(observed.ids)], [*wrote, 0]))


@dataclass(frozen=True)
class Row:
    """One row of a batch: turns with a growing context. Its response has all tokens after the first prompt, and is made
    of the turns on demand. Tokens that the policy did not sample have log-prob 0 and the version of the turn before
    them."""

    prompt_ids: Sequence[int]
    turns: Sequence[Turn]

    @property
    def response_ids(self) -> np.ndarray:  # [T] int64
        return self._column(lambda turn: turn.sampled, lambda turn: np.asarray(turn.observed, dtype=np.int64))

    @property
    def log_probs(self) -> np.ndarray:  # [T] float32
        return self._column(lambda turn: turn.log_probs, lambda turn: np.zeros(len(turn.observed), dtype=np.float32))

    @property
    def mask(self) -> np.ndarray:  # [T] bool: the tokens that the policy sampled
        return self._column(
            lambda turn: np.ones(len(turn.sampled), dtype=bool), lambda turn: np.zeros(len(turn.observed), dtype=bool)
        )

    @property
    def rewards(self) -> np.ndarray:  # [T] float32: the reward of each turn on its last sampled token
        rewards = [np.zeros(len(turn.observed) * (at > 0) + len(turn.sampled)) for at, turn in enumerate(self.turns)]
        for of_turn, turn in zip(rewards, self.turns, strict=True):
            of_turn[-1] = turn.reward or 0.0
        return np.concatenate(rewards, dtype=np.float32)

    @property
    def versions(self) -> np.ndarray:  # [T] int64
        versions = [self.turns[0].token_versions]
        for turn in self.turns[1:]:
            versions += [np.repeat(versions[-1][-1:], len(turn.observed)), turn.token_versions]
        return np.concatenate(versions)

    @cached_property
    def carried(self) -> Fields:
        """The fields of the row, with a value for each element of an axis, as in a batch."""
        read, wrote = [len(turn.observed) for turn in self.turns], [len(turn.sampled) for turn in self.turns]
        return joined([turn.carried for turn in self.turns], read, wrote)

    def _column(self, sampled: Callable[[Turn], np.ndarray], observed: Callable[[Turn], np.ndarray]) -> np.ndarray:
        first, *later = self.turns
        if not later:
            return sampled(first)
        return np.concatenate([sampled(first), *(part(turn) for turn in later for part in (observed, sampled))])


@dataclass(frozen=True)
class Trajectory:
    """An episode before it is scored: its turns, its stop reason (one of STOPS), and the conversation as messages.

    `text` is the decoded text after the last row's prompt, observed tokens included; None: not decoded yet. `reward` is
    the environment's; None: the reward function scores the episode. `fault` (with `detail`) names the cause if the
    policy did not end the episode; such an episode is excluded. `metrics` are the environment's. `pictures` hold the
    pixels of those that it has besides its prompt's.
    """

    turns: Sequence[Turn]
    stop: str = "completed"
    messages: Sequence[dict[str, Any]] = ()
    text: str | None = None
    reward: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    fault: str | None = None
    detail: str = ""
    pictures: Sequence[Picture] = ()

    @property
    def truncated(self) -> bool:
        return self.stop in TRUNCATED

    @property
    def sampled_tokens(self) -> int:
        return sum(len(turn.sampled) for turn in self.turns)

    def rows(self) -> list[Row]:
        """Return the rows: one as long as the context only grows, and a further one from each fresh turn on."""
        starts = [index for index, turn in enumerate(self.turns) if turn.fresh or not index]
        spans = pairwise([*starts, len(self.turns)])
        return [Row(self.turns[start].observed, self.turns[start:end]) for start, end in spans]


@dataclass(frozen=True, slots=True)
class Episode:
    """One episode of a prompt with its score.

    `position` is the prompt's index in its `stream` of prompts: in the run's order (""), or the row in the validation
    data ("validation"). `sample` numbers the episodes of a prompt. `text` is the decoded response.
    """

    prompt: Prompt
    position: int
    sample: int
    trajectory: Trajectory
    text: str
    score: Score
    stream: str = ""

    @property
    def key(self) -> EpisodeKey:
        return self.stream, self.position, self.sample

    def without_pixels(self) -> "Episode":
        """Return the episode of pictures whose pixels are not needed any more."""
        prompt, trajectory = self.prompt, self.trajectory
        if not (prompt.pictures or trajectory.pictures):
            return self
        of_prompt, further = (tuple(map(without_pixels, each.pictures)) for each in (prompt, trajectory))
        return replace(
            self, prompt=replace(prompt, pictures=of_prompt), trajectory=replace(trajectory, pictures=further)
        )

    @property
    def truncated(self) -> bool:
        return self.trajectory.truncated

    @property
    def sampled_tokens(self) -> int:
        return self.trajectory.sampled_tokens


@dataclass(frozen=True, slots=True)
class EpisodeRequest:
    """One episode to run. `number`: index of the prompt in this call; `position`: its index in the `stream`; `sample`:
    index among the prompt's episodes. Its seed derives from `seed_key` and `sample`."""

    prompt: Prompt
    number: int
    position: int
    sample: int
    seed_key: int | str
    sampling: Sampling
    stream: str = ""


Finished = tuple[int, Trajectory, Score | None]  # index of the episode, the episode, and its score if known
OnScore = Callable[[int, Score], object]  # called with the index of a response among those scored together


class Source(Protocol):
    """The episodes of one call, as they end."""

    def finished(self) -> AsyncIterator[list[Finished]]:
        """Yield episodes as they end; episodes that end together come in one list."""

    def scoring_started(self, episodes: Sequence[tuple[int, Trajectory]]) -> OnScore:
        """Called when episodes are sent to the scorers; their scores are passed to the result, in any thread."""


class ConversationSource(Protocol):
    """Runs episodes of several turns; passed in by a run with environments."""

    def source(self, requests: Sequence[EpisodeRequest], store: ResponseStore, *, grouped: bool = False) -> Source:
        """Return the episodes of one call. Turns in the store are used again; new ones are added to it. If `grouped`,
        the episodes of several groups run in one event loop, until `close`."""

    def close(self) -> None:
        """Abandon the groups that have not ended, in their event loop."""

    def metrics(self, episodes: Sequence[Episode]) -> dict[str, float]: ...
    def transcript(self, trajectory: Trajectory) -> dict[str, Any]: ...


class Scorers(Protocol):
    """The reward of a run. `per` is the unit that it scores in one call, once all of it has ended: a response, the
    responses to a prompt, or the responses of a step."""

    @property
    def per(self) -> Literal["response", "group", "step"]: ...

    def score(self, requests: Sequence[ScoringRequest], scored: Callable[[int, Score | Exception], object]) -> None:
        """Score responses. `scored` is called with the index and the score of each, in any thread, or with the error
        because of which it has none."""


class Sampler(Protocol):
    """The rollout client as episodes and experience use it, or a wrapper of it (`wrap_client` of PPOJob). RolloutClient
    describes the methods."""

    @property
    def fixed(self) -> bool: ...  # whether the same requests must be sampled together every time
    @property
    def load(self) -> int: ...  # unfinished requests, without the paused ones
    @property
    def reprefilled(self) -> int: ...  # tokens of interrupted requests that were computed again
    def generate(self, request: Request, begun: Completion | None = None) -> asyncio.Future[Completion]: ...
    async def check(self) -> str: ...
    def paused(self) -> list[tuple[Request, Completion | None]]: ...
    async def interrupt(self) -> None: ...
    def resume(self, on_finished: Callable[[], None]) -> None: ...
    async def reach(self, goals: Sequence[Goal]) -> None: ...


class Policy(Protocol):
    """The policy as one episode uses it. Turns of an episode go to the same server, where their prefix is cached."""

    def show(self, pictures: Sequence[Picture]) -> None:
        """Send the pixels of pictures that later prompts name."""

    async def generate(self, prompt: Encoded, *, max_tokens: int | None = None, stop: Sequence[str] = ()) -> Completion:
        """Sample one turn. `max_tokens` lowers the limit of the run. A response ends with the token that completes one
        of the texts in `stop`."""
