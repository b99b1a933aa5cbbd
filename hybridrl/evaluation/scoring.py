"""From episodes and texts to the samples of an evaluation. Stored responses are scored without engines and Ray; a model
behind an address of OpenAI's API gets chat messages and returns texts without token ids."""

import asyncio
import json
import os
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import openai
import pyarrow
import pyarrow.parquet

from hybridrl.agents.environments.conversations import transcript
from hybridrl.checkpoint.resume import sample_hash
from hybridrl.config import ConfigError
from hybridrl.config.schema_parts import RewardConfig
from hybridrl.core.experience.trajectory import Episode
from hybridrl.data.pictures import PictureFault, with_data_urls
from hybridrl.data.prompts import Prompt
from hybridrl.data.template_arguments import row_arguments
from hybridrl.data.tokenizer import Chat, as_chat
from hybridrl.evaluation.plan import PlannedResponse, Question
from hybridrl.evaluation.samples import Sample, SampleFile
from hybridrl.rewards.rescoring import Rescorer, conversation_facts
from hybridrl.rewards.score import Score, ScoringRequest
from hybridrl.runs.settings import reward_code

REWARD_LOG = Path("logs", "reward.log")  # output of the reward
RESPONSES = "responses.parquet"  # as verl's generation writes it


def episode_sample(planned: PlannedResponse, episode: Episode, seconds: float) -> Sample:
    """Return the sample of an episode."""
    trajectory = episode.trajectory
    sample = blank_sample(planned)
    sample = replace(
        sample,
        response=episode.text,
        tokens=trajectory.sampled_tokens,
        finish=trajectory.stop,
        seconds=round(seconds, 3),
        conversation=transcript(trajectory),
    )
    return with_score(sample, episode.score)


def blank_sample(planned: PlannedResponse) -> Sample:
    """Return a sample without its response."""
    question = planned.question
    return Sample(
        dataset=question.dataset,
        id=question.id,
        sample=planned.sample,
        seed=planned.seed,
        prompt=question.text,
        response="",
        truth=question.prompt.ground_truth,
        tokens=0,
        finish="completed",
        score=None,
        key=planned.key,
        reward=planned.reward,
    )


def with_score(sample: Sample, score: Score) -> Sample:
    """Return the sample with a score, its components, and the prediction if the reward gives one."""
    extras = {name: value for name, value in score.extras.items() if name != "score"}
    pred = extras.get("pred")
    return replace(
        sample,
        score=score.value,
        extras=extras,
        pred=None if pred is None else str(pred),
        fault=score.fault,
        detail=score.detail,
    )


def reward_digest(reward: RewardConfig) -> str:
    """Return a fingerprint of the reward: the section `reward` and the files that it names."""
    return sample_hash(asdict(replace(reward, num_workers=0)), reward_code(reward))


def score_again(rescorer: Rescorer, stale: Sequence[tuple[PlannedResponse, Sample]], file: SampleFile) -> None:
    """Score stored responses and write them to the file; they replace the earlier samples."""
    requests = [scoring_request(planned.question.prompt, sample) for planned, sample in stale]
    groups = [planned.question.number for planned, _ in stale]
    scores = rescorer.rescore(requests, [sample.tokens for _, sample in stale], groups)
    for (planned, sample), score in zip(stale, scores, strict=True):
        truth = planned.question.prompt.ground_truth
        file.append(replace(with_score(sample, score), reward=planned.reward, truth=truth))


def scoring_request(prompt: Prompt, sample: Sample) -> ScoringRequest:
    """Return the request to score a sample as the response to its prompt."""
    extra = prompt.extra_info | conversation_facts(sample.conversation | {"stop": sample.finish})
    return ScoringRequest(prompt.data_source, sample.response, prompt.ground_truth, extra, prompt=prompt.messages)


def write_responses(directory: Path, questions: Sequence[Question], samples: Sequence[Sample]) -> None:
    """Write each row with its own columns and its responses, without greedy ones, in the form of verl's main_eval."""
    texts: dict[tuple[str, str], list[str]] = {}
    for sample in samples:
        if not sample.greedy:
            texts.setdefault((sample.dataset, sample.id), []).append(_encodable(sample.response))
    rows = [
        {
            "data_source": question.prompt.data_source,
            "prompt": question.prompt.messages,
            "reward_model": {"style": "rule", "ground_truth": question.prompt.ground_truth},
        }
        | question.prompt.columns
        | {"responses": texts.get((question.dataset, question.id), [])}
        for question in questions
    ]
    names = dict.fromkeys(name for row in rows for name in row)
    table = pyarrow.table({name: _column([row.get(name) for row in rows]) for name in names})
    pyarrow.parquet.write_table(table, directory / RESPONSES)


def _encodable(text: str) -> str:
    return text.encode(errors="replace").decode()


def _column(values: list[Any]) -> pyarrow.Array:
    """Return a column of a table; values of several types become texts, in `reward_model` only the truths."""
    try:
        column = pyarrow.array(values)
        if not _is_empty_struct(column.type):  # parquet files cannot hold an empty struct
            return column
    except (pyarrow.ArrowException, UnicodeError, OverflowError):
        pass
    if all(isinstance(value, dict) and "ground_truth" in value for value in values):
        truths = [None if (truth := value["ground_truth"]) is None else _encodable(str(truth)) for value in values]
        return pyarrow.array(
            [{"style": str(row.get("style")), "ground_truth": truth} for row, truth in zip(values, truths, strict=True)]
        )
    return pyarrow.array([json.dumps(value, default=str) for value in values])


def _is_empty_struct(kind: pyarrow.DataType) -> bool:
    if pyarrow.types.is_struct(kind):
        return kind.num_fields == 0 or any(_is_empty_struct(field.type) for field in kind)
    return pyarrow.types.is_list(kind) and _is_empty_struct(kind.value_type)


KEY_VARIABLE = "OPENAI_API_KEY"
CONNECT_SECONDS, REQUEST_SECONDS, RETRIES = 10.0, 3600.0, 5


@dataclass(frozen=True)
class Endpoint:
    """A model at an address."""

    address: str
    model: str
    concurrency: int

    async def sample(self, client: openai.AsyncOpenAI, chat: Chat, planned: PlannedResponse) -> Sample:
        """Return the model's response; a failure after the retries is a fault, not an exception. Tool calls stay in the
        text, as with a local model."""
        sampling, blank = planned.sampling, blank_sample(planned)
        beyond: dict[str, Any] = {"top_k": sampling.top_k} if sampling.top_k > 0 else {}  # OpenAI's own fields
        beyond |= {"chat_template_kwargs": dict(chat.arguments)} if chat.arguments else {}
        options: dict[str, Any] = {"extra_body": beyond} if beyond else {}
        options |= {"stop": list(sampling.stop)} if sampling.stop else {}
        options |= {"tools": chat.tools, "tool_choice": "none"} if chat.tools else {}
        try:
            answer = await client.chat.completions.create(
                model=self.model,
                messages=chat.messages,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                max_tokens=sampling.max_tokens,
                seed=planned.seed,
                **options,
            )
        except openai.OpenAIError as error:
            return _fault(blank, f"raised:{type(error).__name__}", error)
        except ValueError as error:  # JSON was promised
            return _fault(blank, "reply", error)
        return _parsed(blank, answer)


def _parsed(blank: Sample, answer: Any) -> Sample:
    """Return the response in a server's answer with status 200. Any field of the answer may be missing."""
    try:
        choice, message = answer.choices[0], answer.choices[0].message
        text = message.content or ""
        reasoning = getattr(message, "reasoning_content", None) or getattr(message, "reasoning", None)
        tokens = answer.usage.completion_tokens if answer.usage else 0
        if isinstance(text, str):
            finish = "max_tokens" if choice.finish_reason == "length" else "completed"
            conversation = {"reasoning": reasoning} if reasoning else {}
            return replace(blank, response=text, tokens=tokens or 0, finish=finish, conversation=conversation)
    except (AttributeError, IndexError, KeyError, TypeError):
        pass
    return _fault(blank, "reply", f"no choices[0].message in the reply {answer!r}")


def _fault(blank: Sample, fault: str, detail: object) -> Sample:
    return replace(blank, finish="fault", fault=fault, detail=" ".join(str(detail).split())[:300])


def connect(address: str, model: str | None, concurrency: int, key: str = "eval.models") -> Endpoint:
    """Return the endpoint at an address after listing its models. Raises ConfigError if it does not respond, or has
    several models and none is named."""
    setting = f"{key}={address}"
    try:
        with openai.OpenAI(base_url=address, api_key=_key(), timeout=CONNECT_SECONDS, max_retries=1) as client:
            names = [model.id for model in client.models.list()]
    except openai.APIStatusError as error:
        if model and error.status_code in (404, 405, 501):  # it lists no models
            return Endpoint(address, model, concurrency)
        fix = f"set {KEY_VARIABLE}" if error.status_code in (401, 403) else "check the address, which ends in /v1"
        raise ConfigError(f"{setting}: it answers {address}/models with status {error.status_code}", fix=fix) from error
    except openai.OpenAIError as error:
        fix = "start the server, or check the address, which ends in /v1"
        raise ConfigError(f"{setting}: nothing responds there ({error})", fix=fix) from error
    if model is None and len(names) != 1:
        fix = f"name one: eval.served_model={names[0] if names else 'NAME'}"
        raise ConfigError(f"{setting} has {len(names)} models", fix=fix)
    if model is not None and names and model not in names:
        raise ConfigError(f"eval.served_model={model} is not at {address}", fix=f"choose {' | '.join(names[:8])}")
    return Endpoint(address, model or names[0], concurrency)


async def sample_remotely(
    endpoint: Endpoint,
    missing: Sequence[PlannedResponse],
    rescorer: Rescorer,
    keep: Callable[[Sample], None],
    arguments: Mapping[str, Any],
) -> None:
    """Sample responses at an address, score them here, and call `keep` with each scored sample. `arguments`: arguments
    of the chat template, which the server applies."""
    began, items = time.monotonic(), iter(missing)  # shared: each item is taken once
    unit = (lambda item: item.question.number) if rescorer.pool.per == "group" else (lambda item: item.key)
    sizes, ended = Counter(map(unit, missing)), defaultdict[Hashable, list[tuple[PlannedResponse, Sample]]](list)
    client = openai.AsyncOpenAI(base_url=endpoint.address, api_key=_key(), timeout=REQUEST_SECONDS, max_retries=RETRIES)

    async def work() -> None:
        for planned in items:
            prompt = planned.question.prompt
            template = {**arguments, **row_arguments(prompt.columns, None)}
            try:
                messages = with_data_urls(as_chat(prompt.messages), prompt.encoded.values())
                sample = await endpoint.sample(client, Chat(messages, prompt.tools, template), planned)
            except PictureFault as fault:
                sample = _fault(blank_sample(planned), "picture", fault)
            sample = replace(sample, seconds=round(time.monotonic() - began, 3))
            ended[unit(planned)].append((planned, sample))
            if len(ended[unit(planned)]) == sizes[unit(planned)]:
                for scored in await _scored(rescorer, ended.pop(unit(planned))):
                    keep(scored)

    async with client, asyncio.TaskGroup() as tasks:
        for _ in range(endpoint.concurrency):
            tasks.create_task(work())


async def _scored(rescorer: Rescorer, ended: Sequence[tuple[PlannedResponse, Sample]]) -> list[Sample]:
    """Return samples with their scores, which are computed in one call if the reward takes a group."""
    requests = [scoring_request(item.question.prompt, sample) for item, sample in ended if not sample.fault]
    scores = iter(await asyncio.gather(*map(asyncio.wrap_future, rescorer.submit(requests))))
    shaped = rescorer.shaping.shaped
    return [sample if sample.fault else with_score(sample, shaped(next(scores), sample.tokens)) for _, sample in ended]


def _key() -> str:
    return os.environ.get(KEY_VARIABLE) or "none"
