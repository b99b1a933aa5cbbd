"""Which samples an evaluation needs: questions, how many responses to each, and the key of each response."""

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hybridrl.data.prompts import ENVIRONMENTS, Prompt
from hybridrl.evaluation.samples import GREEDY
from hybridrl.rollout import Sampling, request_seed

# Responses per question by the number of questions: the fewer questions, the more samples a mean needs.
COUNTS = ((500, 4), (100, 8), (0, 32))


@dataclass(frozen=True)
class Question:
    """A row of a dataset under its name there; `number` counts the questions of the evaluation."""

    number: int
    dataset: str
    id: str
    prompt: Prompt

    @property
    def environments(self) -> set[str]:
        """The names in the row's columns of environments."""
        return {str(name) for column in ENVIRONMENTS if (name := self.prompt.columns.get(column))}

    @property
    def seed_key(self) -> str:
        return f"{self.dataset}/{self.id}"

    @property
    def text(self) -> str:
        """The prompt as one text."""
        messages = self.prompt.messages
        if isinstance(messages, str):
            return messages
        return "\n".join(f"{message['role']}: {message['content']}" for message in messages)


@dataclass(frozen=True)
class Wanted:
    """One response that the evaluation needs. `key` stands for all that determines it, `reward` for what determines
    its score besides it, `origin` for model and sampling."""

    question: Question
    sample: int
    sampling: Sampling
    seed: int
    key: str
    reward: str
    origin: str


@dataclass(frozen=True)
class Origin:
    """Fingerprints: of the model and all that it samples with besides a request, and of the reward function."""

    policy: str
    reward: str


def collect_questions(files: Mapping[str, Sequence[Prompt]]) -> list[Question]:
    """Return the questions of all files. A dataset is named by its data source, or by its file if several files have
    the same; a question by the row's `id`, else its `extra_info.index`, else its row, whichever are unique."""
    sources = Counter(source for prompts in files.values() for source in {one.data_source for one in prompts})
    questions: list[Question] = []
    for file, prompts in files.items():
        groups: dict[str, list[Prompt]] = {}
        for prompt in prompts:
            shared = sources[prompt.data_source] > 1
            groups.setdefault(Path(file).stem if shared else prompt.data_source, []).append(prompt)
        for dataset, some in groups.items():
            for identity, prompt in zip(_identities(some), some, strict=True):
                questions.append(Question(len(questions), dataset, identity, prompt))
    return questions


def _identities(prompts: Sequence[Prompt]) -> list[str]:
    for name in ("id", "index"):
        values = [one.columns.get(name, one.extra_info.get(name)) for one in prompts]
        if None not in values and len(set(map(str, values))) == len(values):
            return list(map(str, values))
    return [str(one.row) for one in prompts]


def counts(questions: Sequence[Question], wanted: int | None, temperature: float) -> dict[str, int]:
    """Return the responses per question of each dataset: as wanted, else by its size; one if sampling is greedy."""
    sizes = Counter(one.dataset for one in questions)
    if temperature == 0:
        return dict.fromkeys(sizes, 1)
    usual = {name: next(count for least, count in COUNTS if size >= least) for name, size in sizes.items()}
    return dict.fromkeys(sizes, wanted) if wanted else usual


def plan(
    questions: Sequence[Question],
    responses: Mapping[str, int],
    sampling: Sampling,
    greedy: Sampling | None,
    seed: int,
    origin: Origin,
) -> list[Wanted]:
    """Return every response that is needed, by question; `greedy` is the sampling of an additional greedy one."""
    wanted = []
    origins = [digest(origin.policy, asdict(one), seed) if one else "" for one in (sampling, greedy)]
    for question in questions:
        numbers = [*([GREEDY] if greedy else []), *range(responses[question.dataset])]
        prompt = question.prompt
        reward = digest(origin.reward, prompt.data_source, prompt.ground_truth, prompt.extra_info)
        for number in numbers:
            used = greedy if number == GREEDY and greedy else sampling
            own = request_seed(seed, question.seed_key, number)
            content = prompt.ids or prompt.messages
            key = digest(origin.policy, question.dataset, question.id, number, own, asdict(used), content)
            wanted.append(Wanted(question, number, used, own, key, reward, origins[number == GREEDY]))
    return wanted


def digest(*values: Any) -> str:
    """Return a short hash of plain values; equal values have equal hashes in every process."""
    text = json.dumps(values, sort_keys=True, default=str)
    return hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()[:20]
