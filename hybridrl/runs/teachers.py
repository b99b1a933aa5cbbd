"""Checks of all teachers before the start; and teachers behind an endpoint: the log-probs of a response's tokens,
requested as soon as its episode has ended.

A response without them is a fault of its episode, which is excluded: no value takes their place.
"""

import asyncio
import math
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from typing import Any

import httpx
import numpy as np
from transformers import PreTrainedTokenizerBase

from hybridrl.config import ConfigError, PPOConfig
from hybridrl.config.custom_code import attempt
from hybridrl.config.files import resolve_model
from hybridrl.config.teachers import BASE, OWN, POLICY, TOP_FORM, DistillationConfig, TeacherConfig
from hybridrl.core.carried import TEACHER, TEACHER_TOP
from hybridrl.core.experience.trajectory import EpisodeRequest, Finished, Row, Source, Trajectory
from hybridrl.data.prompts import Prompt, PromptDataset, prompt_tokens
from hybridrl.data.tokenizer import read_tokenizer
from hybridrl.required import required
from hybridrl.rewards.judge_client import CallFailed, ModelServer, shown
from hybridrl.rewards.score import Score
from hybridrl.runs.contexts import Contexts
from hybridrl.runs.models import taught
from hybridrl.runs.settings import TAUGHT_BY

LIMITS = {"timeout": 600.0, "retries": 4}  # seconds of a request, and further attempts
AT_ONCE = 64  # requests of a step to all teachers
Table = Mapping[str, Mapping[str, Any]]  # entries by token


class TaughtSource:
    """Episodes with the log-probs that their teachers give. Those of a validation, and of teachers in the training
    ranks, pass as they are."""

    def __init__(
        self,
        section: DistillationConfig,
        source: Source,
        requests: Sequence[EpisodeRequest],
        *,
        contexts: Contexts | None = None,
        **limits: Any,
    ) -> None:
        """`contexts`: what teachers read if it is not the policy's prompt."""
        self._source, self._requests, self.scoring_started = source, requests, source.scoring_started
        self._contexts = contexts
        numbered, loss = enumerate(section.teachers.items()), section.distillation_loss
        self._field, top = (TEACHER_TOP, loss.topk) if loss.loss_mode == TOP_FORM else (TAUGHT_BY, 0)
        self._teachers = {number: Teacher(*named, top, **limits) for number, named in numbered if named[1].base_url}
        self._turn = asyncio.Semaphore(AT_ONCE)

    async def finished(self) -> AsyncIterator[list[Finished]]:
        """Yield episodes once they are taught, while others are in flight."""
        episodes = aiter(self._source.finished())
        coming: asyncio.Future | None = asyncio.ensure_future(anext(episodes, None))
        asked: set[asyncio.Future] = set()
        try:
            while coming or asked:
                done, _ = await asyncio.wait(asked | ({coming} if coming else set()), return_when="FIRST_COMPLETED")
                if coming in done:
                    ended = coming.result()
                    asked |= {asyncio.ensure_future(self._taught(*episode)) for episode in ended or ()}
                    coming = None if ended is None else asyncio.ensure_future(anext(episodes, None))
                if taught := [task.result() for task in done & asked]:
                    yield taught
                asked -= done
        finally:
            for task in [*asked, *([coming] if coming else [])]:
                task.cancel()
            await asyncio.gather(*(teacher.endpoint.close() for teacher in self._teachers.values()))

    async def _taught(self, index: int, trajectory: Trajectory, score: Score | None) -> Finished:
        """Return the episode with the field on the last turn of each row, or without turns if a request fails."""
        prompt = self._requests[index].prompt
        teacher = self._teachers.get(int(prompt.carried.get(TEACHER, [0])[0]))
        if teacher is None or trajectory.fault is not None or self._requests[index].stream:
            return index, trajectory, score
        turns, rows = list(trajectory.turns), trajectory.rows()
        ends = [end for end in range(len(turns)) if end + 1 == len(turns) or turns[end + 1].fresh]
        if teacher.reads_other:  # further rows began with another prompt
            read = self._contexts and self._contexts.read_before(prompt, trajectory)
            rows = [replace(rows[0], prompt_ids=read)] if read else []
        try:
            for end, row in zip(ends, rows, strict=False):
                if self._field not in row.carried:
                    async with self._turn:
                        values = await teacher.values(row)
                    turns[end] = replace(turns[end], carried={**turns[end].carried, self._field: values})
        except CallFailed as failure:
            fault, detail = f"teacher:{failure.kind}", str(failure)
            return index, replace(trajectory, turns=[], stop="fault", fault=fault, detail=detail), None
        return index, replace(trajectory, turns=turns), score


class Teacher:
    """A model behind an endpoint, with its `top` most probable tokens if that is not 0."""

    def __init__(self, name: str, config: TeacherConfig, top: int, **limits: Any) -> None:
        place, url = f"distillation.teacher_models.{name}", f"{str(config.base_url).rstrip('/')}/completions"
        self.endpoint, self.reads_other = (
            ModelServer(url, config.api_key_env, place, **LIMITS | limits),
            config.reads_other,
        )
        self._top, self._model = top, {"model": config.served_name} if config.served_name else {}

    async def values(self, row: Row) -> np.ndarray:
        """Return the log-probs of a row's response tokens [T] float32, or the field teacher_top; CallFailed if there
        are none."""
        tables = (await self.tables([*row.prompt_ids, *row.response_ids.tolist()]))[-len(row.response_ids) :]
        if not self._top:
            return np.array([table[own]["logprob"] for own, table in tables], np.float32)
        likeliest = [sorted(_log_probs(table), reverse=True)[: self._top] for _, table in tables]
        log_probs, ids = np.moveaxis(np.array(likeliest), -1, 0)
        return np.stack([ids.astype(np.int32), log_probs.astype(np.float32).view(np.int32)], -1)

    async def tables(self, ids: list[int]) -> list[tuple[str, Table]]:
        """Return each token but the first, with its table: itself and the most probable tokens in its place."""
        body = {**self._model, "prompt": ids, "max_tokens": 1, "prompt_logprobs": self._top}
        return await self.endpoint.ask(body, partial(_tables, ids, self._top))


def _tables(ids: Sequence[int], top: int, reply: httpx.Response) -> list[tuple[str, Table]]:
    """Return each token but the first, and its table; CallFailed if the reply has others."""
    try:
        entries, tables = reply.json()["choices"][0]["prompt_logprobs"], []
        for position, (own, entry) in enumerate(zip_longest(ids[1:], entries[1:], fillvalue={}), start=1):
            if str(own) not in entry:
                ours, theirs = own if isinstance(own, int) else "none", ", ".join(entry) or "none"
                cause = f"{reply.url}: at position {position} the row has the token {ours}, and the reply {theirs}"
                raise CallFailed("other-tokens", cause)
            if len(entry) < max(top, 1) or not all(math.isfinite(log_prob) for log_prob, _ in _log_probs(entry)):
                raise ValueError("too few, or not log-probs")
            tables.append((str(own), entry))
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        cause = f"{reply.url} sent something other than the log-probs of a prompt: {shown(reply)}"
        raise CallFailed("reply", cause) from None
    return tables


def _log_probs(table: Table) -> list[tuple[float, int]]:
    return [(token["logprob"], int(number)) for number, token in table.items()]


def check_endpoints(config: PPOConfig, tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int]) -> None:
    """Request the log-probs of a row of the greatest length. Raises ConfigError if there are none, or if the teacher
    has other tokens at the same ids."""
    longest = required(config.actor_rollout_ref.rollout.max_model_len)
    ids, loss = (list(prompt) * (longest // len(prompt) + 1))[:longest], config.distillation.distillation_loss
    top = loss.topk if loss.loss_mode == TOP_FORM else 0
    for name, teacher in config.distillation.endpoints.items():
        key = f"distillation.teacher_models.{name}.base_url"
        try:
            tables = asyncio.run(Teacher(name, teacher, top).tables(ids))
        except CallFailed as failure:
            fix = f"name a server that returns prompt_logprobs for {longest} tokens: vLLM's, or hybridrl serve"
            raise ConfigError(f"{key}={teacher.base_url}: {failure}", fix=fix, keys=key) from failure
        for number, table in tables:
            ours = tokenizer.decode([int(number)])
            theirs = table[number].get("decoded_token") or ours
            if ours.strip() != theirs.strip() and "\ufffd" not in ours + theirs:  # half a character
                cause = f"{key}={teacher.base_url}: the token {number} is {theirs!r}, and the policy's {ours!r}"
                raise ConfigError(cause, fix="choose a teacher with the policy's tokens", keys=key)


def with_teachers(
    config: PPOConfig, prompts: PromptDataset, tokenizer: PreTrainedTokenizerBase, messages: list[str]
) -> PromptDataset:
    """Return the prompts with the number of each one's teacher, and add warnings to the messages. Raises ConfigError if
    a row has none, or if a teacher has no row or cannot read the policy's tokens."""
    section = config.distillation
    prompts = taught(prompts, section) if section.chooses else prompts
    messages += _other_templates(config, prompts.without_pixels(0), tokenizer)
    if section.endpoints:
        check_endpoints(config, tokenizer, prompts.without_pixels(0).ids)
    return prompts


def _other_templates(config: PPOConfig, prompt: Prompt, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Describe where chat templates of teachers render a prompt otherwise than the policy's. The log-probs of its
    responses are then those of a format for which a teacher was not trained."""
    differences, trusted = [], config.actor_rollout_ref.model.trust_remote_code
    teachers = [each for each in config.distillation.teachers.values() if each.prompt != OWN]
    paths = {str(each.model_path) for each in teachers} - {POLICY, BASE, "None"}
    for place in map(resolve_model, sorted(paths)):
        reader = attempt(partial(read_tokenizer, str(place), trusted=trusted, local=place.is_dir()))
        if isinstance(reader, Exception) or not reader.chat_template or isinstance(prompt.messages, str):
            continue
        ids = attempt(lambda reader=reader: next(prompt_tokens([prompt], config.data, reader)))
        if isinstance(ids, list) and ids != prompt.ids:
            theirs, ours = (tokenizer.decode(each) for each in (ids, prompt.ids))
            pairs = enumerate(zip_longest(ours, theirs))
            at = max(next((at for at, (their, our) in pairs if their != our), 0) - 10, 0)
            texts = f"{theirs[at : at + 40]!r} where the policy's has {ours[at : at + 40]!r}"
            cause = f"the chat template of the teacher {place} has {texts}; it reads the policy's"
            differences.append(f"warning: {cause}, or with prompt=own its own")
    return differences
