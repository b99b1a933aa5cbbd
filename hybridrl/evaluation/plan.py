"""Which samples an evaluation needs: questions, how many responses to each, and the key of each response."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from hybridrl.checkpoint.fingerprints import digest
from hybridrl.config import ConfigError
from hybridrl.core.rollout import Sampling, request_seed
from hybridrl.data.prompts import ENVIRONMENTS, Prompt
from hybridrl.data.template_arguments import row_arguments
from hybridrl.evaluation.samples import GREEDY

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
        """What its seeds derive from: its content, so that files can be added, renamed and put in another order."""
        return digest(self.prompt.messages, self.repeat)

    @property
    def text(self) -> str:
        """The prompt as one text."""
        messages = self.prompt.messages
        if isinstance(messages, str):
            return messages
        return "\n".join(f"{message['role']}: {message['content']}" for message in messages)


@dataclass(frozen=True)
class PlannedResponse:
    """One response that the evaluation needs. `key` stands for all that determines it, `reward` for what determines
    its score besides it."""

    question: Question
    sample: int
    sampling: Sampling
    seed: int
    key: str
    reward: str


@dataclass(frozen=True)
class Origin:
    """Fingerprints: of the model and all that it samples with besides a request, and of the reward function. With
    `whole_rows` a response depends on all columns of its row, as that of an environment does."""

    policy: str
    reward: str
    whole_rows: bool = False


def collect_questions(files: Mapping[str, Sequence[Prompt]]) -> list[Question]:
    """Return the questions of all files. A dataset is named by its data source, or by its file if several files have
    the same; a question by the row's `id`, else its `extra_info.index`, else its row, whichever are unique."""
    sources = Counter(source for prompts in files.values() for source in {one.data_source for one in prompts})
    names = _file_names(list(files), {source for source, count in sources.items() if count == 1})
    questions: list[Question] = []
    seen: Counter[str] = Counter()
    for file, prompts in files.items():
        groups: dict[str, list[Prompt]] = {}
        for prompt in prompts:
            shared = sources[prompt.data_source] > 1
            groups.setdefault(names[file] if shared else prompt.data_source, []).append(prompt)
        for dataset, some in groups.items():
            for identity, prompt in zip(_identities(some), some, strict=True):
                content = digest(prompt.messages)
                questions.append(Question(len(questions), dataset, identity, prompt, seen[content]))
                seen[content] += 1
    return questions


def _file_names(files: Sequence[str], taken: set[str]) -> dict[str, str]:
    """Return a unique name of each file: its stem, with as many of its parent folders as that takes."""
    paths = [Path(file).absolute() for file in files]
    parts = [(*path.parts[:-1], path.stem) for path in paths]
    names = {}
    for file, mine in zip(files, parts, strict=True):
        choices = ["/".join(mine[-size:]) for size in range(1, len(mine))]
        others = [f"/{'/'.join(one)}" for one in parts]
        unique = (name for name in choices if sum(one.endswith(f"/{name}") for one in others) == 1)
        names[file] = next((name for name in unique if name not in taken), file)  # the same stem: a.jsonl and a.json
    return names


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
) -> list[PlannedResponse]:
    """Return every response that is needed, by question; `greedy` is the sampling of an additional greedy one."""
    wanted = []
    for question in questions:
        numbers = [*([GREEDY] if greedy else []), *range(responses[question.dataset])]
        prompt = question.prompt
        reward = digest(origin.reward, prompt.data_source, prompt.ground_truth, prompt.extra_info)
        shown = [prompt.tools, row_arguments(prompt.columns, None)]  # where a prompt has no token ids that show them
        further = [shown] if any(shown) and not prompt.ids else []
        for number in numbers:
            used = greedy if number == GREEDY and greedy else sampling
            own = request_seed(seed, question.seed_key, number)
            content = [
                prompt.ids or prompt.messages,
                *further,
                question.repeat,
                prompt.columns if origin.whole_rows else None,
            ]
            key = digest(origin.policy, number, own, asdict(used), content)
            wanted.append(PlannedResponse(question, number, used, own, key, reward))
    return wanted


def reject_large_k(ks: Sequence[int], most: int, fix: str = "set eval.n={}") -> None:
    """Raise ConfigError if a k is larger than the number of responses; `fix` may name the largest k."""
    if too_many := [k for k in ks if k > most]:
        cause = f"eval.k={too_many[0]}: there are {most} responses per question"
        raise ConfigError(cause, fix=fix.format(max(too_many)), keys="eval.k")
