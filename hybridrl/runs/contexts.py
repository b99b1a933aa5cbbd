"""Contexts of teachers: for each row of a step what its teacher reads in place of the prompt.

A policy that reads a right response or a comment on its own can teach itself (SDPO, Huebotter et al. 2026; on-policy
self-distillation). The tokens of the response stay those that were sampled.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from hybridrl.config.files import resolve_model
from hybridrl.config.judge import FIELD
from hybridrl.config.schema import DataConfig, ModelConfig
from hybridrl.config.teachers import BASE, OWN, POLICY, DistillationConfig, TeacherConfig
from hybridrl.core.carried import CONTEXT, TEACHER
from hybridrl.core.experience.collector import Groups
from hybridrl.core.experience.trajectory import Episode, Trajectory
from hybridrl.data.prompts import Prompt, prompt_tokens
from hybridrl.data.tokenizer import read_tokenizer
from hybridrl.rewards.score import Score
from hybridrl.runs.models import text_settings

TEMPLATES = {
    "sibling": "{{prompt}}\n\nThis is a correct response:\n\n{{context}}\n\nRespond in your own words.",
    "feedback": "{{prompt}}\n\nThis is known about an earlier response:\n\n{{context}}\n\nRespond again.",
    "column": "{{prompt}}\n\nThis may help:\n\n{{context}}",
}
CUT = " [...] "  # in place of the middle of a context that is too long


@dataclass(frozen=True)
class Hint:
    """A text for a teacher, in addition to a prompt; the template shows both."""

    text: str
    template: str

    def shown_in(self, prompt: Prompt) -> Prompt | None:
        """Return the prompt with the hint in its last message of a user; None if it has none."""
        if isinstance(prompt.messages, str):
            return replace(prompt, messages=self._filled(prompt.messages))
        places = [at for at, message in enumerate(prompt.messages) if message["role"] == "user"]
        if not places or not isinstance(text := prompt.messages[places[-1]].get("content"), str):
            return None
        messages = [dict(message) for message in prompt.messages]
        messages[places[-1]]["content"] = self._filled(text)
        return replace(prompt, messages=messages)

    def _filled(self, prompt: str) -> str:
        """Replace each field once: what is inserted is not read as a template."""
        fields = {"prompt": prompt, "context": self.text}
        return FIELD.sub(lambda match: fields[match[1]], self.template)


@dataclass(frozen=True)
class Contexts:
    """Gives the rows of a step what their teachers read. A row for which there is nothing has no teacher in this
    step."""

    teachers: Sequence[TeacherConfig]  # by the number that a row has
    longest: Sequence[int]  # the most tokens of a row, of each teacher
    tokenizers: Sequence[PreTrainedTokenizerBase]  # by the number too: each renders what its teacher reads
    data: DataConfig
    drops_reasoning: bool  # in a response that others read

    @classmethod
    def of(
        cls,
        section: DistillationConfig,
        policy: ModelConfig,
        data: DataConfig,
        tokenizer: PreTrainedTokenizerBase,
        *,
        drops_reasoning: bool,
        most: int,
    ) -> "Contexts":
        """`most`: the tokens of a micro-batch. A row also has at most as many as its teacher's model has positions."""
        teachers = [*section.teachers.values()]
        paths = [policy.path if each.model_path in (None, POLICY, BASE) else each.model_path for each in teachers]
        settings = [text_settings(replace(policy, path=path)) for path in paths]
        longest = [min(getattr(each, "max_position_embeddings", None) or most, most) for each in settings]
        readers = [_reader(each, policy) if each.prompt == OWN else tokenizer for each in teachers]
        return cls(teachers, longest, readers, data, drops_reasoning)

    def __call__(self, groups: Groups) -> tuple[Groups, dict[str, float]]:
        """Return the groups with their contexts, and metrics."""
        counts: Counter[str] = Counter()
        episodes = [episode for group in groups for episode in group]
        hints = [self._hint(episode, group) for group in groups for episode in group]
        tokens = self._tokens(episodes, hints, counts)
        taught = iter([self._with_context(*pair, counts) for pair in zip(episodes, tokens, strict=True)])
        groups = [[next(taught) for _ in group] for group in groups]
        metrics = {"distillation/without_context": counts["without"] / max(counts["rows"], 1)}
        return groups, metrics | {"distillation/cut_contexts": float(counts["cut"])}

    def read_before(self, prompt: Prompt, trajectory: Trajectory) -> list[int] | None:
        """Return what the teacher of an episode's first row reads before the response, as far as that is known before
        the episode has a score; None if there is nothing."""
        episode = Episode(prompt, 0, 0, trajectory, "", Score(None))
        return self._tokens([episode], [self._hint(episode, [])], Counter())[0]

    def _number(self, episode: Episode) -> int:
        """Return the number of an episode's teacher; -1: none."""
        return int(episode.prompt.carried[TEACHER][0]) if TEACHER in episode.prompt.carried else 0

    def _hint(self, episode: Episode, group: Sequence[Episode]) -> Hint | None:
        """Return the first hint that there is for an episode of this group, in the order of its teacher's sources."""
        if (number := self._number(episode)) < 0:
            return None
        teacher = self.teachers[number]
        for source in teacher.context or ():
            if text := self._text(source, teacher, episode, group):
                return Hint(text, teacher.template or TEMPLATES[source.partition(":")[0]])
        return Hint("", "{{prompt}}") if teacher.prompt == OWN and not teacher.context else None

    def _text(self, source: str, teacher: TeacherConfig, episode: Episode, group: Sequence[Episode]) -> str:
        if source == "sibling":
            least = 1.0 if teacher.threshold is None else teacher.threshold
            right = (other for other in group if (other.score.value or 0.0) >= least and other.sample != episode.sample)
            sibling = min(right, key=lambda other: other.sample, default=None)
            text = sibling.text if sibling else ""
            return (text.rpartition("</think>")[2] if self.drops_reasoning else text).strip()
        prompt, column = episode.prompt, source.partition(":")[2]
        value = prompt.columns.get(column, prompt.extra_info.get(column)) if column else None
        value = value if column else episode.score.extras.get("feedback")
        return "" if value is None else str(value).strip()

    def _tokens(
        self, episodes: Sequence[Episode], hints: Sequence[Hint | None], counts: Counter[str]
    ) -> list[list[int] | None]:
        """Return the tokens that show each hint; a hint that is too long for the model is cut in its middle."""
        tokens = self._encoded(episodes, hints)
        cut: list[Hint | None] = [None] * len(episodes)
        for at, (episode, hint, ids) in enumerate(zip(episodes, hints, tokens, strict=True)):
            excess = len(ids or ()) - self._room(episode)
            if hint is not None and excess > 0:
                tokenizer = self.tokenizers[self._number(episode)]
                cut[at], tokens[at] = _shortened(tokenizer, hint, excess), None
        for at, ids in enumerate(self._encoded(episodes, cut)):
            if ids is not None and len(ids) <= self._room(episodes[at]):
                tokens[at] = ids
                counts["cut"] += 1
        return tokens

    def _room(self, episode: Episode) -> int:
        """Return the largest number of tokens before the response of an episode's first row."""
        response = len(episode.trajectory.rows()[0].response_ids)
        return self.longest[self._number(episode)] - response

    def _encoded(self, episodes: Sequence[Episode], hints: Sequence[Hint | None]) -> list[list[int] | None]:
        shown = [hint and hint.shown_in(episode.prompt) for episode, hint in zip(episodes, hints, strict=True)]
        tokens: list[list[int] | None] = [None] * len(episodes)
        for number, tokenizer in enumerate(self.tokenizers):
            own = {at: p for at, p in enumerate(shown) if p and self._number(episodes[at]) == number}
            for at, ids in zip(own, prompt_tokens([*own.values()], self.data, tokenizer), strict=True):
                tokens[at] = ids if isinstance(ids, list) else None
        return tokens

    def _with_context(self, episode: Episode, tokens: list[int] | None, counts: Counter[str]) -> Episode:
        """Return an episode whose first row has these tokens as its context; further rows began with another prompt,
        and have no teacher."""
        number, turns = self._number(episode), [*episode.trajectory.turns]
        last_of_rows = [at for at in range(len(turns)) if at + 1 == len(turns) or turns[at + 1].fresh]
        fields = [_numbered(number)] * len(last_of_rows)
        if number >= 0 and self.teachers[number].reads_other:
            context = {CONTEXT: np.array(tokens, dtype=np.int32)} if tokens else {}
            fields = [_numbered(number if tokens else -1) | context, *[_numbered(-1)] * (len(last_of_rows) - 1)]
            counts["rows"] += len(fields)
            counts["without"] += len(fields) - bool(tokens)
        for at, added in zip(last_of_rows, fields, strict=True):
            turns[at] = replace(turns[at], carried={**turns[at].carried, **added})
        return replace(episode, trajectory=replace(episode.trajectory, turns=turns))


def _reader(teacher: TeacherConfig, policy: ModelConfig) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a teacher."""
    place = resolve_model(str(teacher.model_path))
    return read_tokenizer(str(place), trusted=policy.trust_remote_code, local=place.is_dir())


def _shortened(tokenizer: PreTrainedTokenizerBase, hint: Hint, excess: int) -> Hint | None:
    """Return a hint without tokens of its middle; None if nothing is left of it."""
    ids = tokenizer.encode(hint.text, add_special_tokens=False)
    half = (len(ids) - excess - len(tokenizer.encode(CUT, add_special_tokens=False)) - 2) // 2
    return replace(hint, text=CUT.join(map(tokenizer.decode, (ids[:half], ids[-half:])))) if half > 0 else None


def _numbered(number: int) -> dict[str, Any]:
    return {TEACHER: np.array([number]), "taught": np.array([number >= 0])}
