"""Episodes: conversations from prompts, with their scores. Independent of the order of prompts and of training.

A single response is an episode of one turn, sampled by the engines directly; with environments the episodes run in
separate processes. Episodes are scored while others are in flight, and returned in the order of (prompt, sample),
so that the order in which they finish changes nothing.
"""

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from itertools import chain, groupby
from operator import itemgetter
from typing import Literal

from hybridrl.core.carried import Encoded, declared
from hybridrl.core.cluster.dispatch import Arrivals, in_lists
from hybridrl.core.experience.responses import ResponseStore, StoredResponse
from hybridrl.core.experience.trajectory import (
    ConversationSource,
    Episode,
    EpisodeRequest,
    Finished,
    OnScore,
    Sampler,
    Scorers,
    Source,
    Trajectory,
    Turn,
)
from hybridrl.core.rollout import Completion, Request, RequestFault, Sampling, request_seed
from hybridrl.data.prompts import Prompt
from hybridrl.required import required
from hybridrl.rewards.score import WRITTEN_IDS, Score, ScoringRequest, Shaping
from hybridrl.tracking.sink import Activity

OnFinished = Callable[[Episode], None]  # called with each scored episode
Scored = tuple[int, Trajectory, Score | Exception]  # index of the episode, the episode, and its score


@dataclass
class SingleResponses:
    """Episodes of one turn, sampled by the engines directly. Responses and scores in the store are used again; new ones
    are added to it."""

    client: Sampler
    requests: Sequence[Request]
    store: ResponseStore

    async def finished(self) -> AsyncIterator[list[Finished]]:
        stored = {index: hit for index, request in enumerate(self.requests) if (hit := self.store.find(request))}
        whole = {index: hit for index, hit in stored.items() if not hit.completion.interrupted}
        if whole:
            yield [(index, _single(self.requests[index], hit.completion), hit.score) for index, hit in whole.items()]
        begun = {index: hit.completion for index, hit in stored.items()}
        missing = [index for index in range(len(self.requests)) if index not in whole]
        futures = (self.client.generate(self.requests[index], begun.get(index)) for index in missing)
        async for arrived in in_lists(futures):
            outcomes = [(missing[place], future.exception() or future.result()) for place, future in arrived]
            yield [(index, _single(self.requests[index], outcome), None) for index, outcome in outcomes]

    def scoring_started(self, episodes: Sequence[tuple[int, Trajectory]]) -> OnScore:
        if self.store.carries:
            for index, trajectory in episodes:
                self.store.carry(self.requests[index], StoredResponse(_completion_of(trajectory)))
        return partial(self._scored, episodes, self.store.spool_origin)

    def _scored(self, episodes: Sequence[tuple[int, Trajectory]], origin: str, place: int, score: Score) -> None:
        index, trajectory = episodes[place]
        self.store.add_score(origin, self.requests[index], _completion_of(trajectory), score)


@dataclass
class ReadableEpisodes:
    """The episodes of a source, for prompts with readable pictures; those of other `requests` end at once, with the
    fault of their prompt."""

    source: Source
    requests: Sequence[EpisodeRequest]
    readable: Sequence[int]  # the index among `requests` of each episode of the source

    async def finished(self) -> AsyncIterator[list[Finished]]:
        faults = [(index, request.prompt.fault) for index, request in enumerate(self.requests) if request.prompt.fault]
        yield [(index, Trajectory([], "fault", fault="picture", detail=fault), None) for index, fault in faults]
        if self.readable:
            async for ended in self.source.finished():
                yield [(self.readable[index], trajectory, score) for index, trajectory, score in ended]

    def scoring_started(self, episodes: Sequence[tuple[int, Trajectory]]) -> OnScore:
        places = {index: place for place, index in enumerate(self.readable)}
        return self.source.scoring_started([(places[index], trajectory) for index, trajectory in episodes])


@dataclass
class EpisodeRunner:
    """Runs episodes and submits them for scoring: single responses, or `conversations`.

    The reward function scores episodes that already have an environment's reward only with `function_scores`; with
    `add_environment_reward` both rewards are added. `taught` adds the log-probs of teachers behind an endpoint.
    """

    client: Sampler
    scorers: Scorers
    seed: int
    shaping: Shaping = field(default_factory=Shaping)
    conversations: ConversationSource | None = None
    _: KW_ONLY
    function_scores: bool = False
    add_environment_reward: bool = False
    taught: Callable[[Source, Sequence[EpisodeRequest]], Source] | None = None

    def run(
        self,
        prompts: Sequence[Prompt],
        count: int,
        sampling: Sampling,
        positions: Sequence[int],
        store: ResponseStore | None = None,
        stream: str = "",
    ) -> tuple[list[Episode], dict[str, float]]:
        """Return `count` scored episodes per prompt, in order, and the seconds it took.

        Each seed derives from the prompt's position in its stream of prompts, the number of the sample and the turn.
        Responses in the store are not sampled again; new ones are added to it.
        """
        requests = [
            EpisodeRequest(prompt, at, position, sample, seed_key, sampling, stream)
            for at, (prompt, position) in enumerate(zip(prompts, positions, strict=True))
            for seed_key in [f"{stream} {position}" if stream else position]
            for sample in range(count)
        ]
        return self.run_requests(requests, store)

    def run_requests(
        self, requests: Sequence[EpisodeRequest], store: ResponseStore | None = None, finished: OnFinished | None = None
    ) -> tuple[list[Episode], dict[str, float]]:
        """Return the episodes of these requests, in order, and the seconds it took. `finished` is called with each
        episode as soon as it has its score, in the thread of the caller."""
        return asyncio.run(self.score_finished(self._source(requests, store or ResponseStore()), requests, finished))

    async def group(
        self, prompt: Prompt, position: int, count: int, sampling: Sampling, store: ResponseStore
    ) -> list[Episode]:
        """Return `count` scored episodes of one prompt, while others run in the same event loop."""
        requests = [EpisodeRequest(prompt, position, position, sample, position, sampling) for sample in range(count)]
        episodes, _ = await self.score_finished(self._source(requests, store, grouped=True), requests, shown=False)
        return episodes

    async def close(self) -> None:
        """Abandon the groups that have not ended, in their event loop."""
        if self.conversations is not None:
            self.conversations.close()

    def metrics(self, episodes: Sequence[Episode]) -> dict[str, float]:
        """Return the metrics of conversations; empty for single responses."""
        return self.conversations.metrics(episodes) if self.conversations else {}

    def _source(self, requests: Sequence[EpisodeRequest], store: ResponseStore, *, grouped: bool = False) -> Source:
        readable = [index for index, request in enumerate(requests) if not request.prompt.fault]
        if len(readable) < len(requests):
            source = self._source([requests[index] for index in readable], store, grouped=grouped)
            return ReadableEpisodes(source, requests, readable)
        if self.conversations is not None:
            source = self.conversations.source(requests, store, grouped=grouped)
        else:
            source = SingleResponses(self.client, [*map(self._request, requests)], store)
        return self.taught(source, requests) if self.taught else source

    def _request(self, asked: EpisodeRequest) -> Request:
        seed = request_seed(self.seed, asked.seed_key, asked.sample)
        place = asked.number, asked.sample, asked.prompt.ids, seed, asked.sampling
        return Request(*place, carried=asked.prompt.carried)

    async def score_finished(
        self,
        source: Source,
        requests: Sequence[EpisodeRequest],
        finished: OnFinished | None = None,
        *,
        shown: bool = True,
    ) -> tuple[list[Episode], dict[str, float]]:
        """Score the episodes of a source as they end. Returns them in the order of their requests, and metrics."""
        began = generated = time.monotonic()
        units, arrivals = _Units(self.scorers.per, requests), Arrivals[Scored]()
        show = Activity.is_now if shown else lambda text: None
        show(f"responses 0/{len(requests)}")
        try:
            async with asyncio.TaskGroup() as group:  # the first failure ends the sampling too
                scoring = group.create_task(self._episodes(requests, arrivals, finished))
                async for ended in source.finished():
                    whole = units.add(ended)
                    show(f"responses {units.ended}/{len(requests)}" if units.waiting else "reward")
                    self._submit(source, requests, whole, arrivals)
                generated = time.monotonic()
                show("reward")
        except BaseExceptionGroup as failures:
            first = failures.exceptions[0]
            raise first from first.__cause__
        seconds = {"timing_s/gen": generated - began, "timing_s/reward": time.monotonic() - generated}
        return scoring.result(), seconds

    async def _episodes(
        self, requests: Sequence[EpisodeRequest], arrivals: Arrivals[Scored], finished: OnFinished | None
    ) -> list[Episode]:
        """Return the episodes in the order of their requests, once each has its score."""
        episodes: dict[int, Episode] = {}
        while len(episodes) < len(requests):
            for index, trajectory, score in await arrivals.take():
                if isinstance(score, Exception):
                    raise score
                episodes[index] = episode = self._episode(requests[index], trajectory, score)
                if finished:
                    finished(episode)
        return [episodes[index] for index in range(len(requests))]

    def _submit(
        self,
        source: Source,
        requests: Sequence[EpisodeRequest],
        ended: Sequence[Finished],
        arrivals: Arrivals[Scored],
    ) -> None:
        """Submit unscored episodes for scoring; all arrive with their scores."""
        unscored: list[tuple[int, Trajectory]] = []
        for index, trajectory, stored in ended:
            score = stored or self._known_score(trajectory)
            if score is None:
                unscored.append((index, trajectory))
            else:
                arrivals.put((index, trajectory, score))
        by_prompt = self.scorers.per == "group"
        for _, unit in groupby(unscored, key=lambda pair: requests[pair[0]].number if by_prompt else 0):
            together = list(unit)
            to_score = [_scoring_request(requests[index].prompt, trajectory) for index, trajectory in together]
            keep = source.scoring_started(together)
            self.scorers.score(to_score, partial(_scored, together, keep, arrivals))

    def _known_score(self, trajectory: Trajectory) -> Score | None:
        """Return the score of an episode that needs no reward function; None if it needs one."""
        if trajectory.fault is not None:
            return Score(None, fault=trajectory.fault, detail=trajectory.detail, text=trajectory.text)
        if trajectory.reward is None or self.function_scores:
            return None
        return Score(trajectory.reward, {"score": trajectory.reward}, text=trajectory.text)

    def _episode(self, request: EpisodeRequest, trajectory: Trajectory, score: Score) -> Episode:
        """Return the episode with the shaped score and the rewards of its turns. A wrong number of token rewards is a
        fault of the grader."""
        text = trajectory.text if trajectory.text is not None else score.text or ""
        if trajectory.reward is not None and score.value is not None:
            score = self._with_turn_rewards(score, trajectory)
        if score.token_rewards is not None:
            length = sum(len(row.response_ids) for row in trajectory.rows())
            if len(score.token_rewards) != length:
                detail = f"returned {len(score.token_rewards)} token_rewards for a response of {length} tokens"
                score = Score(None, fault="type", detail=detail)
        score = self.shaping.shaped(score, trajectory.sampled_tokens)
        return Episode(request.prompt, request.position, request.sample, trajectory, text, score, request.stream)

    def _with_turn_rewards(self, score: Score, trajectory: Trajectory) -> Score:
        """Return the score with the environment's rewards for single turns, each on the last token of its turn."""
        if self.function_scores and not self.add_environment_reward:
            return score
        total = required(trajectory.reward) + (required(score.value) if self.function_scores else 0.0)
        if len(trajectory.turns) == 1:
            return score.with_value(total)
        rewards = list(chain.from_iterable(row.rewards.tolist() for row in trajectory.rows()))
        return replace(score, value=trajectory.reward, token_rewards=rewards).with_value(total)


class _Units:
    """Collects finished episodes into units. A unit is scored in one call: a response, a group or a step."""

    def __init__(self, per: Literal["response", "group", "step"], requests: Sequence[EpisodeRequest]) -> None:
        numbers = {"response": range(len(requests)), "group": [request.number for request in requests]}
        self.unit_of: Sequence[int] = numbers.get(per, [0] * len(requests))
        self.sizes, self.ended = Counter(self.unit_of), 0
        self.waiting = defaultdict[int, list[Finished]](list)

    def add(self, ended: Sequence[Finished]) -> list[Finished]:
        """Return the episodes of the units that are complete now; a partly scored unit is scored again."""
        whole: list[Finished] = []
        for episode in ended:
            self.waiting[unit := self.unit_of[episode[0]]].append(episode)
            if len(self.waiting[unit]) == self.sizes[unit]:
                members = sorted(self.waiting.pop(unit), key=itemgetter(0))
                scored = all(score is not None for _, _, score in members)
                whole += members if scored else [(index, trajectory, None) for index, trajectory, _ in members]
        self.ended += len(ended)
        return whole


def _scored(
    together: Sequence[tuple[int, Trajectory]],
    keep: OnScore,
    arrivals: Arrivals[Scored],
    place: int,
    score: Score | Exception,
) -> None:
    """Pass on the score of an episode, in any thread."""
    if isinstance(score, Score):
        try:
            keep(place, score)
        except Exception as error:  # ends the call, which would wait for this score otherwise
            score = error
    arrivals.put((*together[place], score))


def _completion_of(trajectory: Trajectory) -> Completion:
    """Return the response of an episode of one turn, with the fields that the engine or a teacher filled."""
    (turn,) = trajectory.turns
    sampled = turn.sampled, turn.log_probs, trajectory.truncated, turn.versions
    carried = {name: value for name, value in turn.carried.items() if declared(name).filled_by != "prompt"}
    return Completion(*sampled, carried=carried)


def _single(request: Request, completion: Completion | BaseException) -> Trajectory:
    if isinstance(completion, RequestFault):
        return Trajectory([], "fault", fault=completion.kind, detail=str(completion))
    if isinstance(completion, BaseException):
        raise completion
    stop = "max_tokens" if completion.truncated else "completed"
    return Trajectory((Turn.of(Encoded(request.prompt_ids, request.carried), completion),), stop)


def _scoring_request(prompt: Prompt, trajectory: Trajectory) -> ScoringRequest:
    """Return the input of the reward function: the response of the last row, and the conversation in `extra_info`."""
    source, truth, extra = prompt.data_source, prompt.ground_truth, prompt.extra_info
    if trajectory.text is None:  # a single response: its scorer decodes it
        return ScoringRequest(source, None, truth, extra, trajectory.turns[0].sampled, prompt.messages)
    turns = trajectory.turns
    last = max(index for index, turn in enumerate(turns) if turn.fresh or not index)
    conversation = {
        WRITTEN_IDS: [turn.sampled.tolist() for turn in turns[last:]],
        "num_turns": len(turns),
        "turn_scores": [turn.reward for turn in turns if turn.reward is not None],
        "tool_rewards": [call.reward for turn in turns for call in turn.calls if call.reward is not None],
        "messages": list(trajectory.messages),
        "episode_metrics": dict(trajectory.metrics),
        "stop": trajectory.stop,
    }
    ids = trajectory.rows()[-1].response_ids
    return ScoringRequest(source, trajectory.text, truth, extra | conversation, ids, prompt.messages)
