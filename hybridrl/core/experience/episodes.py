"""Episodes: conversations from prompts, with their scores. Knows neither the order of prompts nor what is trained on.

A single response is an episode of one turn, which the engines sample directly; with environments the episodes run in
processes of their own. They are scored while others are still under way, and returned in the order of (prompt, sample),
so that the order in which they happened to finish changes nothing.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain

from hybridrl.core.experience.spool import ResponseStore, Spooled
from hybridrl.core.experience.trajectory import (
    ConversationSource,
    Ended,
    Episode,
    EpisodeRequest,
    Scorers,
    Source,
    Trajectory,
    Turn,
)
from hybridrl.core.required import required
from hybridrl.core.rollout import Completion, Request, RequestFault, RolloutClient, Sampling, request_seed
from hybridrl.data.prompts import Prompt
from hybridrl.rewards.score import WRITTEN_IDS, Score, ScoringRequest, Shaping
from hybridrl.tracking.sink import Activity

Finished = Callable[[Episode], None]  # called with an episode that has its score


@dataclass
class SingleResponses:
    """Episodes of one turn, which the engines sample directly. Responses and scores that are in the spool are used
    again, and the others are added to it."""

    client: RolloutClient
    requests: Sequence[Request]
    spool: ResponseStore | None
    scored_again: bool  # scores of the spool are not used: the reward function wants all responses in one call
    completions: dict[int, Completion] = field(default_factory=dict)

    async def ended(self) -> AsyncIterator[list[Ended]]:
        found = self.spool.find(self.requests) if self.spool else {}
        spooled = {index: one for index, one in found.items() if not one.completion.interrupted}
        if spooled:
            yield self._spooled(spooled)
        if missing := [index for index in range(len(self.requests)) if index not in spooled]:
            begun = {place: found[index].completion for place, index in enumerate(missing) if index in found}
            async for finished in self.client.stream([self.requests[index] for index in missing], begun):
                some = [(missing[place], result) for place, result in finished]
                self.completions.update((index, one) for index, one in some if isinstance(one, Completion))
                yield [(index, _single(self.requests[index], one), None) for index, one in some]

    def _spooled(self, spooled: Mapping[int, Spooled]) -> list[Ended]:
        scores = {index: None if self.scored_again else one.score for index, one in spooled.items()}
        self.completions = {index: one.completion for index, one in spooled.items() if scores[index] is None}
        return [(index, _single(self.requests[index], one.completion), scores[index]) for index, one in spooled.items()]

    def scoring(self, index: int, score: Future[Score]) -> None:
        if self.spool:
            self.spool.add(self.requests[index], self.completions.pop(index), score)


class EpisodeRunner:
    """Runs episodes and has them scored: single responses, or `conversations`.

    What an environment scored is scored by the reward function only with `function_scores`, and with
    `add_environment_reward` the two are added.
    """

    def __init__(
        self,
        client: RolloutClient,
        scorers: Scorers,
        seed: int,
        shaping: Shaping | None = None,
        conversations: ConversationSource | None = None,
        *,
        function_scores: bool = False,
        add_environment_reward: bool = False,
    ) -> None:
        self.client, self.scorers, self.seed, self.shaping = client, scorers, seed, shaping or Shaping()
        self.conversations, self.function_scores = conversations, function_scores
        self.add_environment_reward = add_environment_reward

    def run(
        self,
        prompts: Sequence[Prompt],
        count: int,
        sampling: Sampling,
        positions: Sequence[int],
        spool: ResponseStore | None = None,
        stream: str = "",
    ) -> tuple[list[Episode], dict[str, float]]:
        """Return `count` scored episodes per prompt, in order, and the seconds it took.

        Each seed derives from the prompt's position in its stream of prompts, the number of the sample and the turn.
        What the spool has is not sampled again, and the rest is added to it.
        """
        places = [
            EpisodeRequest(prompt, at, position, sample, f"{stream} {position}" if stream else position, sampling)
            for at, (prompt, position) in enumerate(zip(prompts, positions, strict=True))
            for sample in range(count)
        ]
        return self.run_places(places, spool)

    def run_places(
        self, places: Sequence[EpisodeRequest], spool: ResponseStore | None = None, finished: Finished | None = None
    ) -> tuple[list[Episode], dict[str, float]]:
        """Return the episodes of these places, in order, and the seconds it took. `finished` is called with each of
        them as soon as it has its score, in the thread of the caller."""
        return asyncio.run(self.score_ended(self._source(places, spool), places, finished))

    async def group(
        self, prompt: Prompt, position: int, count: int, sampling: Sampling, kept: ResponseStore | None = None
    ) -> list[Episode]:
        """Return `count` scored episodes of one prompt, while others run in the same event loop."""
        places = [EpisodeRequest(prompt, position, position, sample, position, sampling) for sample in range(count)]
        episodes, _ = await self.score_ended(self._source(places, kept, grouped=True), places, shown=False)
        return episodes

    async def close(self) -> None:
        """Abandon the groups that have not ended, in their event loop."""
        if self.conversations is not None:
            self.conversations.close()

    def metrics(self, episodes: Sequence[Episode]) -> dict[str, float]:
        """Return what is measured of conversations; empty for single responses."""
        return self.conversations.metrics(episodes) if self.conversations else {}

    def _source(
        self, places: Sequence[EpisodeRequest], spool: ResponseStore | None, *, grouped: bool = False
    ) -> Source:
        if self.conversations is not None:
            return self.conversations.source(places, spool, grouped=grouped)
        requests = [
            Request(
                one.number, one.sample, one.prompt.ids, request_seed(self.seed, one.seed_key, one.sample), one.sampling
            )
            for one in places
        ]
        return SingleResponses(self.client, requests, spool, self.scorers.in_one_call)

    async def score_ended(
        self,
        source: Source,
        places: Sequence[EpisodeRequest],
        finished: Finished | None = None,
        *,
        shown: bool = True,
    ) -> tuple[list[Episode], dict[str, float]]:
        """Score the episodes of a source as they end. Returns them in the order of their places, and metrics."""
        began = time.monotonic()
        ended: list[Ended] = []
        scores: list[Future[Score]] = []
        reports = Reports(len(places), finished) if finished else None
        show = Activity.is_now if shown else lambda text: None
        show(f"responses 0/{len(places)}")
        async for some in source.ended():
            ended += some
            show(f"responses {len(ended)}/{len(places)}")
            if not self.scorers.in_one_call:
                scores += self._submit(source, places, some, reports)
        generated = time.monotonic()
        show("reward")
        if self.scorers.in_one_call:
            ended.sort(key=lambda one: one[0])
            scores = self._submit(source, places, ended, reports)
        if reports:
            await reports.all()
        await asyncio.gather(*map(asyncio.wrap_future, scores))
        episodes = [
            (index, self._episode(places[index], trajectory, score.result()))
            for (index, trajectory, _), score in zip(ended, scores, strict=True)
        ]
        seconds = {"timing_s/gen": generated - began, "timing_s/reward": time.monotonic() - generated}
        return [episode for _, episode in sorted(episodes, key=lambda item: item[0])], seconds

    def _submit(
        self, source: Source, places: Sequence[EpisodeRequest], ended: Sequence[Ended], reports: "Reports | None"
    ) -> list[Future[Score]]:
        """Have episodes scored that have no score yet; return the scores to come, in order."""
        known = [score or self._known_score(trajectory) for _, trajectory, score in ended]
        unscored = [one for one, score in zip(ended, known, strict=True) if score is None]
        requests = [_scoring_request(places[index].prompt, trajectory) for index, trajectory, _ in unscored]
        futures = self.scorers.submit(requests) if requests else []
        for (index, _, _), future in zip(unscored, futures, strict=True):
            source.scoring(index, future)
        to_come = iter(futures)
        scores = [next(to_come) if score is None else _resolved(score) for score in known]
        if reports:
            for (index, trajectory, _), score in zip(ended, scores, strict=True):
                reports.expect(score, partial(self._episode, places[index], trajectory))
        return scores

    def _known_score(self, trajectory: Trajectory) -> Score | None:
        """Return the score of an episode that the reward function does not score."""
        if trajectory.fault is not None:
            return Score(None, fault=trajectory.fault, detail=trajectory.detail, text=trajectory.text)
        if trajectory.reward is None or self.function_scores:
            return None
        return Score(trajectory.reward, {"score": trajectory.reward}, text=trajectory.text)

    def _episode(self, place: EpisodeRequest, trajectory: Trajectory, score: Score) -> Episode:
        """Return the episode with the shaped score and the rewards of its turns; a number of token rewards other than
        that of tokens is a fault of the grader."""
        text = trajectory.text if trajectory.text is not None else score.text or ""
        if trajectory.reward is not None and score.value is not None:
            score = self._with_turn_rewards(score, trajectory)
        if score.token_rewards is not None:
            length = sum(len(row.response_ids) for row in trajectory.rows())
            if len(score.token_rewards) != length:
                detail = f"returned {len(score.token_rewards)} token_rewards for a response of {length} tokens"
                score = Score(None, fault="type", detail=detail)
        score = self.shaping.shaped(score, trajectory.sampled_tokens)
        return Episode(place.prompt, place.position, place.sample, trajectory, text, score)

    def _with_turn_rewards(self, score: Score, trajectory: Trajectory) -> Score:
        """Return the score with what the environment gave to single turns on their last tokens."""
        if self.function_scores and not self.add_environment_reward:
            return score
        total = required(trajectory.reward) + (required(score.value) if self.function_scores else 0.0)
        if len(trajectory.turns) == 1:
            return score.with_value(total)
        rewards = list(chain.from_iterable(row.rewards.tolist() for row in trajectory.rows()))
        return replace(score, value=trajectory.reward, token_rewards=rewards).with_value(total)


class Reports:
    """Calls `finished` with each of `count` episodes once it has its score, in the event loop's thread, while further
    ones are sampled: scores arrive in other threads. What it raises, `all` raises."""

    def __init__(self, count: int, finished: Finished) -> None:
        self.scored: asyncio.Queue[Episode | Exception] = asyncio.Queue()
        self.loop = asyncio.get_running_loop()
        self.task = asyncio.create_task(self._report(count, finished))

    def expect(self, score: Future[Score], make: Callable[[Score], Episode]) -> None:
        def done(future: Future[Score]) -> None:
            try:
                item = make(future.result())
            except Exception as error:  # raised where the episodes are awaited, which would wait forever otherwise
                item = error
            with contextlib.suppress(RuntimeError):  # the loop was closed: the call has ended
                self.loop.call_soon_threadsafe(self.scored.put_nowait, item)

        if self.task.done():  # it failed: nothing more is sampled
            self.task.result()
        score.add_done_callback(done)

    async def all(self) -> None:
        await self.task

    async def _report(self, count: int, finished: Finished) -> None:
        for _ in range(count):
            if isinstance(item := await self.scored.get(), Exception):
                raise item
            finished(item)


def _single(request: Request, completion: Completion | RequestFault) -> Trajectory:
    if isinstance(completion, RequestFault):
        return Trajectory([], "fault", fault=completion.kind, detail=str(completion))
    stop = "max_tokens" if completion.truncated else "completed"
    return Trajectory([Turn.of(request.prompt_ids, completion)], stop)


def _scoring_request(prompt: Prompt, trajectory: Trajectory) -> ScoringRequest:
    """Return what the reward function gets: the response of the last row, and the conversation in `extra_info`."""
    source, truth, extra = prompt.data_source, prompt.ground_truth, prompt.extra_info
    if trajectory.text is None:  # a single response, which is decoded where it is scored
        return ScoringRequest(source, None, truth, extra, trajectory.turns[0].sampled)
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
    return ScoringRequest(source, trajectory.text, truth, extra | conversation, trajectory.rows()[-1].response_ids)


def _resolved(score: Score) -> Future[Score]:
    future: Future[Score] = Future()
    future.set_result(score)
    return future
