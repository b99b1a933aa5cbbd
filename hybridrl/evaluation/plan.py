"""The samples that an evaluation needs: questions, how many responses to each, and the key of each response."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hybridrl.checkpoint.resume import sample_hash
from hybridrl.config import ConfigError
from hybridrl.core.carried import identity
from hybridrl.core.rollout import Sampling, request_seed
from hybridrl.data.prompts import ENVIRONMENTS, Prompt
from hybridrl.data.template_arguments import row_arguments
from hybridrl.evaluation.samples import GREEDY
from hybridrl.tracking.records import prompt_text

# Responses per question by the number of questions: the fewer questions, the more samples a mean needs.
COUNTS = ((500, 4), (100, 8), (0, 32))


@dataclass(frozen=True)
class Question:
    """A row of a dataset under its name there; `number` counts the questions of the evaluation, and `repeat` those
    before it with the same prompt."""

    number: int
    dataset: str
    id: str
    prompt: Prompt
    repeat: int = 0

    @property
    def environments(self) -> set[str]:
        """The names in the row's columns of environments."""
        return {str(name) for column in ENVIRONMENTS if (name := self.prompt.columns.get(column))}

    @property
    def seed_key(self) -> str:
        """The key of its seeds: a digest of its content, so that files can be added, renamed and reordered."""
        return sample_hash(*_asked(self.prompt), self.repeat)

    @property
    def text(self) -> str:
        """The prompt as one text."""
        return prompt_text(self.prompt.messages)


@dataclass(frozen=True)
class PlannedResponse:
    """One response that the evaluation needs. `key`: digest of model, sampling, prompt and seed. `reward`: digest of
    the reward function and its inputs from the row; with the response it determines the score."""

    question: Question
    sample: int
    sampling: Sampling
    seed: int
    key: str
    reward: str


@dataclass(frozen=True)
class Origin:
    """Fingerprints of the model and its settings (`policy`), and of the reward function. With `whole_rows` a response
    depends on all columns of its row, as in an environment."""

    policy: str
    reward: str
    whole_rows: bool = False


def _asked(prompt: Prompt) -> list[Any]:
    """Return what a question asks: its messages, and the pictures that these have."""
    pictures = identity(prompt.carried)
    return [prompt.messages, pictures.hex()] if pictures else [prompt.messages]


def collect_questions(files: Mapping[str, Sequence[Prompt]]) -> list[Question]:
    """Return the questions of all files. A dataset is named by its data source, or by its file if several files share
    the source. A question is named by the row's `id`, `extra_info.index`, or row number, the first that is unique."""
    sources = Counter(source for prompts in files.values() for source in {row.data_source for row in prompts})
    names = _file_names(list(files), {source for source, count in sources.items() if count == 1})
    questions: list[Question] = []
    seen: Counter[str] = Counter()
    for file, prompts in files.items():
        groups: dict[str, list[Prompt]] = {}
        for prompt in prompts:
            shared = sources[prompt.data_source] > 1
            groups.setdefault(names[file] if shared else prompt.data_source, []).append(prompt)
        for dataset, group in groups.items():
            for name, prompt in zip(_identities(group), group, strict=True):
                content = sample_hash(*_asked(prompt))
                questions.append(Question(len(questions), dataset, name, prompt, seen[content]))
                seen[content] += 1
    return questions


def _file_names(files: Sequence[str], taken: set[str]) -> dict[str, str]:
    """Return a unique name of each file: its stem, with as many parent folders as it needs."""
    paths = [Path(file).absolute() for file in files]
    parts = [(*path.parts[:-1], path.stem) for path in paths]
    names = {}
    for file, mine in zip(files, parts, strict=True):
        choices = ["/".join(mine[-size:]) for size in range(1, len(mine))]
        others = [f"/{'/'.join(folders)}" for folders in parts]
        unique = (name for name in choices if sum(other.endswith(f"/{name}") for other in others) == 1)
        names[file] = next((name for name in unique if name not in taken), file)  # the same stem: a.jsonl and a.json
    return names


def _identities(prompts: Sequence[Prompt]) -> list[str]:
    for name in ("id", "index"):
        values = [row.columns.get(name, row.extra_info.get(name)) for row in prompts]
        if None not in values and len(set(map(str, values))) == len(values):
            return list(map(str, values))
    return [str(row.row) for row in prompts]


def counts(questions: Sequence[Question], requested: int | None, temperature: float) -> dict[str, int]:
    """Return the responses per question of each dataset: `requested`, else by its size; one if sampling is greedy."""
    sizes = Counter(question.dataset for question in questions)
    if temperature == 0:
        return dict.fromkeys(sizes, 1)
    usual = {name: next(count for least, count in COUNTS if size >= least) for name, size in sizes.items()}
    return dict.fromkeys(sizes, requested) if requested else usual


def plan(
    questions: Sequence[Question],
    responses: Mapping[str, int],
    sampling: Sampling,
    greedy: Sampling | None,
    seed: int,
    origin: Origin,
) -> list[PlannedResponse]:
    """Return all responses to sample, by question; with `greedy` an additional one with that sampling."""
    planned = []
    for question in questions:
        numbers = [*([GREEDY] if greedy else []), *range(responses[question.dataset])]
        prompt = question.prompt
        reward = sample_hash(origin.reward, prompt.data_source, prompt.ground_truth, prompt.extra_info)
        shown = [prompt.tools, row_arguments(prompt.columns, None)]  # token ids, where a prompt has them, contain these
        further = [shown] if any(shown) and not prompt.ids else []
        for number in numbers:
            used = greedy if number == GREEDY and greedy else sampling
            own = request_seed(seed, question.seed_key, number)
            content = [
                prompt.ids or prompt.messages,
                *further,
                *_asked(prompt)[1:],
                question.repeat,
                prompt.columns if origin.whole_rows else None,
            ]
            key = sample_hash(origin.policy, number, own, asdict(used), content)
            planned.append(PlannedResponse(question, number, used, own, key, reward))
    return planned


def reject_large_k(ks: Sequence[int], most: int, fix: str = "set eval.n={}") -> None:
    """Raise ConfigError if a k is larger than the number of responses; `fix` may name the largest k."""
    if too_many := [k for k in ks if k > most]:
        cause = f"eval.k={too_many[0]}: there are {most} responses per question"
        raise ConfigError(cause, fix=fix.format(max(too_many)), keys="eval.k")
