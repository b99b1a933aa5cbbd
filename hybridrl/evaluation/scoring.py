"""From episodes and texts to the samples of an evaluation. Stored responses are scored without engines and Ray."""

import json
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Self

import pyarrow
import pyarrow.parquet
from transformers import PreTrainedTokenizerBase

from hybridrl.agents.environments.conversations import transcript
from hybridrl.checkpoint.fingerprints import digest
from hybridrl.config.schema_parts import RewardConfig
from hybridrl.core.experience.trajectory import Episode
from hybridrl.data.prompts import Prompt
from hybridrl.evaluation.plan import PlannedResponse, Question
from hybridrl.evaluation.samples import Sample, SampleFile
from hybridrl.rewards.pool import ScorerPool
from hybridrl.rewards.score import Score, ScoringRequest
from hybridrl.runs.ppo import build_shaping
from hybridrl.runs.resume import reward_code

REWARD_LOG = Path("logs", "reward.log")  # what the reward printed
RESPONSES = "responses.parquet"  # as verl's generation writes it


def episode_sample(wanted: PlannedResponse, episode: Episode, seconds: float) -> Sample:
    """Return the sample of an episode."""
    trajectory = episode.trajectory
    sample = blank_sample(wanted)
    sample = replace(
        sample,
        response=episode.text,
        tokens=trajectory.sampled_tokens,
        finish=trajectory.stop,
        seconds=round(seconds, 3),
        conversation=transcript(trajectory),
    )
    return with_score(sample, episode.score)


def blank_sample(wanted: PlannedResponse) -> Sample:
    """Return a sample without its response."""
    question = wanted.question
    return Sample(
        dataset=question.dataset,
        id=question.id,
        sample=wanted.sample,
        seed=wanted.seed,
        prompt=question.text,
        response="",
        truth=question.prompt.ground_truth,
        tokens=0,
        finish="completed",
        score=None,
        key=wanted.key,
        reward=wanted.reward,
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
    """Return a fingerprint of what scores: the section `reward`, and the files that it names."""
    return digest(asdict(replace(reward, num_workers=0)), reward_code(reward))


class Rescorer:
    """Scores texts in processes of this machine, as the reward of a run does. `tokenizer` encodes texts for a reward
    that reads token ids, which are not stored."""

    def __init__(
        self,
        reward: RewardConfig,
        data_sources: set[str],
        log: Path,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> None:
        self.pool, self.tokenizer = ScorerPool(reward, log, data_sources), tokenizer
        self.shaping = build_shaping(reward)

    def score_again(self, stale: Sequence[tuple[PlannedResponse, Sample]], file: SampleFile) -> None:
        """Score stored responses and write them to the file, where they replace earlier ones."""
        futures = self.submit([(one.question.prompt, sample) for one, sample in stale])
        for (one, sample), future in zip(stale, futures, strict=True):
            score = self.shaping.shaped(future.result(), sample.tokens)
            file.append(replace(with_score(sample, score), reward=one.reward, truth=one.question.prompt.ground_truth))

    def submit(self, pairs: Sequence[tuple[Prompt, Sample]]) -> list[Future[Score]]:
        """Have samples scored as responses to their prompts."""
        return self.pool.submit([self._request(prompt, sample) for prompt, sample in pairs])

    def _request(self, prompt: Prompt, sample: Sample) -> ScoringRequest:
        ids = None
        if self.pool.takes_tokens and self.tokenizer is not None:
            ids = self.tokenizer(sample.response, add_special_tokens=False)["input_ids"]
            ids.append(self.tokenizer.eos_token_id)
        facts = prompt.extra_info | _conversation_facts(sample)
        return ScoringRequest(prompt.data_source, sample.response, prompt.ground_truth, facts, ids)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.pool.close()


def _conversation_facts(sample: Sample) -> dict[str, Any]:
    """Return what a reward function reads of a conversation in `extra_info`; nothing for a single response."""
    turns = sample.conversation.get("turns")
    if not turns:
        return {}
    calls = [call for turn in turns for call in turn["calls"]]
    return {
        "num_turns": len(turns),
        "turn_scores": [turn["reward"] for turn in turns if turn["reward"] is not None],
        "tool_rewards": [call["reward"] for call in calls if call["reward"] is not None],
        "messages": sample.conversation["messages"],
        "stop": sample.finish,
    }


def write_responses(directory: Path, questions: Sequence[Question], samples: Sequence[Sample]) -> None:
    """Write each row with its own columns and the responses to it, as verl's main_eval reads it, without greedy
    ones."""
    texts: dict[tuple[str, str], list[str]] = {}
    for one in samples:
        if not one.greedy:
            texts.setdefault((one.dataset, one.id), []).append(_encodable(one.response))
    rows = [
        {
            "data_source": one.prompt.data_source,
            "prompt": one.prompt.messages,
            "reward_model": {"style": "rule", "ground_truth": one.prompt.ground_truth},
        }
        | one.prompt.columns
        | {"responses": texts.get((one.dataset, one.id), [])}
        for one in questions
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
        if not _is_empty_struct(column.type):  # which no parquet file can hold
            return column
    except (pyarrow.ArrowException, UnicodeError, OverflowError):
        pass
    if all(isinstance(one, dict) and "ground_truth" in one for one in values):
        truths = [_encodable(str(one["ground_truth"])) for one in values]
        return pyarrow.array(
            [{"style": str(one.get("style")), "ground_truth": truth} for one, truth in zip(values, truths, strict=True)]
        )
    return pyarrow.array([json.dumps(one, default=str) for one in values])


def _is_empty_struct(kind: pyarrow.DataType) -> bool:
    if pyarrow.types.is_struct(kind):
        return kind.num_fields == 0 or any(_is_empty_struct(field.type) for field in kind)
    return pyarrow.types.is_list(kind) and _is_empty_struct(kind.value_type)
