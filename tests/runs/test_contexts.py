"""Contexts of the teachers of a step, by hand."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest

from hybridrl.config.schema import DataConfig
from hybridrl.config.teachers import TeacherConfig
from hybridrl.core.carried import CONTEXT, TEACHER
from hybridrl.core.experience.batching import to_batch
from hybridrl.core.experience.trajectory import Episode, Trajectory, Turn
from hybridrl.data.prompts import Prompt
from hybridrl.rewards.score import Score
from hybridrl.runs.contexts import Contexts
from tests.sections import section_of, teacher_of

SHOWN = "{{prompt}}|{{context}}"


class Tokenizer:
    """One id per character; no chat template."""

    chat_template = None

    def __call__(self, texts: Sequence[str], add_special_tokens: bool = True) -> dict[str, Any]:
        return {"input_ids": [self.encode(text) for text in texts]}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [ord(character) for character in text]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(map(chr, ids))


class OwnTokenizer(Tokenizer):
    """Another one, which begins with a mark."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return super().encode(f"#{text}" if add_special_tokens else text)


def contexts(*teachers: TeacherConfig, longest: int = 1000, drops_reasoning: bool = False) -> Contexts:
    data = section_of(DataConfig, "data", train_files=["none"])
    tokenizers = [cast(Any, OwnTokenizer() if each.prompt else Tokenizer()) for each in teachers]
    return Contexts(teachers, [longest] * len(teachers), tokenizers, data, drops_reasoning)


def teacher(*sources: str, template: str | None = SHOWN, threshold: float | None = None) -> TeacherConfig:
    return teacher_of(model_path="policy", context=[*sources] or None, template=template, threshold=threshold)


def episode(
    text: str, score: float, sample: int, *, prompt: Any = "q", turns: int = 1, fresh: bool = False, **extras: Any
) -> Episode:
    written = [
        Turn([1], np.array([5, 6]), np.zeros(2, np.float32), 0, "stop", fresh=fresh and number > 0)
        for number in range(turns)
    ]
    columns = {"answer": "41"}
    row = Prompt(0, [1], prompt, "maths", None, {"hint": "add"}, columns)
    return Episode(row, 0, sample, Trajectory(written), text, Score(score, extras=extras))


def read(groups: Sequence[list[Episode]]) -> list[str]:
    """The context of each row as text, "" for a row without one; a row without a teacher is "-"."""
    batch = to_batch(groups)
    lengths, ids = batch.carried.get("context_lengths"), batch.carried.get(CONTEXT)
    texts = [""] * len(batch)
    if lengths is not None and ids is not None:
        texts = [Tokenizer().decode(part.tolist()) for part in ids.split(lengths.tolist())]
    return [text if number >= 0 else "-" for text, number in zip(texts, batch.carried[TEACHER].tolist(), strict=True)]


def test_a_sibling_is_the_first_other_right_response_and_never_the_row_itself() -> None:
    group = [episode("wrong", 0.0, 0), episode("right", 1.0, 1), episode("also right", 1.0, 2)]
    groups, metrics = contexts(teacher("sibling"))([group])
    assert read(groups) == ["q|right", "q|also right", "q|right"]
    assert metrics == {"distillation/without_context": 0.0, "distillation/cut_contexts": 0.0}
    groups, metrics = contexts(teacher("sibling"))([group[:2]])
    assert read(groups) == ["q|right", "-"] and metrics["distillation/without_context"] == 0.5
    groups, _ = contexts(teacher("sibling", threshold=0.3))([[episode("x", 0.4, 0), episode("y", 0.2, 1)]])
    assert read(groups) == ["-", "q|x"]


# Sources; responses as TEXT SCORE, perhaps with !FEEDBACK; and what the teacher of each reads, "-" if it has none.
BY_HAND = """
sibling: a0 -> -
sibling: a1 -> -
sibling: a0 b0 -> - -
sibling: a0 b1 -> b -
sibling: a1 b0 -> - a
sibling: a1 b1 -> b a
sibling: a0 b0 c1 -> c c -
sibling: a0 b1 c0 -> b - b
sibling: a0 b1 c1 -> b c b
sibling: a1 b1 c1 -> b a a
sibling: a1 b0 c1 -> c a a
sibling: a0 b0.9 c1 -> c c -
sibling: a0.5 b0.5 -> - -
sibling: a0 b2 -> b -
sibling: a0!x b1!y -> b -
feedback: a0 b1 -> - -
feedback: a0!x b1 -> x -
feedback: a0!x b1!y -> x y
feedback: a1!x -> x
feedback: a0 b0!x c0 -> - x -
sibling,feedback: a0!x -> x
sibling,feedback: a0!x b0!y -> x y
sibling,feedback: a0!x b1!y -> b y
sibling,feedback: a1 b1!y -> b a
sibling,feedback: a0 b0!y c1 -> c c -
feedback,sibling: a0!x b1 -> x -
feedback,sibling: a0 b1!y -> b y
feedback,sibling: a0 b1 c0!z -> b - z
column:answer: a0 -> 41
column:answer: a0 b1 -> 41 41
column:hint: a1 -> add
column:other: a0 b1 -> - -
column:other,sibling: a0 b1 -> b -
column:other,column:answer: a0 -> 41
sibling,column:answer: a0 b1 -> b 41
sibling,column:answer: a0 b0 -> 41 41
feedback,column:answer: a0!x b0 -> x 41
sibling,feedback,column:answer: a0 b0!y -> 41 y
sibling,feedback,column:answer: a1 b0!y c0 -> 41 a a
column:answer,sibling: a0 b1 -> 41 41
"""


@pytest.mark.parametrize("case", BY_HAND.strip().splitlines())
def test_a_group_worked_out_by_hand(case: str) -> None:
    sources, _, rest = case.partition(": ")
    responses, _, expected = rest.partition(" -> ")
    group = []
    for sample, response in enumerate(responses.split()):
        written, _, feedback = response.partition("!")
        extras = {"feedback": feedback} if feedback else {}
        group.append(episode(written[0], float(written[1:]), sample, **extras))
    groups, metrics = contexts(teacher(*sources.split(",")))([group])
    texts = [f"q|{text}" if text != "-" else "-" for text in expected.split()]
    assert read(groups) == texts
    assert metrics["distillation/without_context"] == texts.count("-") / len(texts)


def test_sources_are_tried_in_their_order() -> None:
    group = [episode("wrong", 0.0, 0, feedback="too small"), episode("right", 1.0, 1)]
    assert read(contexts(teacher("sibling", "feedback"))([group])[0]) == ["q|right", "-"]
    assert read(contexts(teacher("feedback", "sibling"))([group])[0]) == ["q|too small", "-"]
    assert read(contexts(teacher("feedback", "column:answer"))([group])[0]) == ["q|too small", "q|41"]
    assert read(contexts(teacher("column:hint"))([group])[0]) == ["q|add", "q|add"]
    assert read(contexts(teacher("column:absent"))([group])[0]) == ["-", "-"]


def test_each_source_has_a_template_of_its_own_and_fields_are_replaced_once() -> None:
    group = [episode("{{prompt}} {{context}}", 1.0, 0), episode("wrong", 0.0, 1)]
    shown = read(contexts(teacher("sibling", template=None))([group])[0])[1]
    assert shown.startswith("q\n\nThis is a correct response:\n\n{{prompt}} {{context}}\n\n")


def test_reasoning_that_the_template_drops_is_not_shown() -> None:
    group = [episode("<think>\nlong\n</think>\n\n42", 1.0, 0), episode("wrong", 0.0, 1)]
    assert read(contexts(teacher("sibling"), drops_reasoning=True)([group])[0]) == ["-", "q|42"]
    assert "long" in read(contexts(teacher("sibling"))([group])[0])[1]


def test_a_context_that_is_too_long_is_cut_in_its_middle_and_never_the_response() -> None:
    group = [episode("wrong", 0.0, 0, feedback="a" * 40 + "b" * 40)]
    (context,), metrics = (lambda found: (read(found[0]), found[1]))(contexts(teacher("feedback"), longest=50)([group]))
    assert len(context) <= 48 and context.startswith("q|aaaa") and context.endswith("bbbb") and " [...] " in context
    assert metrics["distillation/cut_contexts"] == 1
    response = Turn([1], np.arange(20), np.zeros(20, np.float32), 0, "stop")
    longer = [replace(group[0], trajectory=Trajectory([response]))]
    for longest in range(60, 80):  # with the 20 tokens of the response
        (context,) = read(contexts(teacher("feedback"), longest=longest)([longer])[0])
        assert longest - 4 <= len(context) + 20 <= longest
    assert read(contexts(teacher("feedback"), longest=12)([group])[0]) == ["-"]  # nothing of it fits


def test_a_row_that_began_with_another_prompt_has_no_teacher() -> None:
    group = [episode("wrong", 0.0, 0, turns=2, fresh=True, feedback="no"), episode("x", 0.0, 1, turns=2, feedback="no")]
    groups, metrics = contexts(teacher("feedback"))([group])
    assert read(groups) == ["q|no", "-", "q|no"] and metrics["distillation/without_context"] == pytest.approx(1 / 3)


def test_only_teachers_with_a_context_read_one() -> None:
    group = [episode("wrong", 0.0, number, feedback="no") for number in range(3)]
    numbered = [
        replace(each, prompt=replace(each.prompt, carried={TEACHER: np.array([number])}))
        for each, number in zip(group, (1, 0, -1), strict=True)
    ]
    groups, metrics = contexts(teacher("feedback"), teacher())([numbered])
    assert read(groups) == ["", "q|no", "-"] and metrics["distillation/without_context"] == 0


def test_the_hint_is_in_the_last_message_of_a_user() -> None:
    from hybridrl.runs.contexts import Hint

    messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    prompt = episode("", 0.0, 0, prompt=messages).prompt
    shown = Hint("h", SHOWN).shown_in(prompt)
    assert shown is not None and shown.messages == [*messages[:3], {"role": "user", "content": "c|h"}]
    assert Hint("h", SHOWN).shown_in(replace(prompt, messages=messages[:1])) is None


def test_a_teacher_with_a_prompt_of_its_own_reads_what_its_tokenizer_makes_of_the_prompt() -> None:
    own = teacher_of(model_path="teacher", prompt="own")
    assert read(contexts(own)([[episode("x", 0.0, 0)]])[0]) == ["#q"]
    informed = teacher_of(model_path="teacher", prompt="own", context=["column:answer"], template=SHOWN)
    group = [episode("x", 0.0, number) for number in range(2)]
    numbered = [
        replace(each, prompt=replace(each.prompt, carried={TEACHER: np.array([number])}))
        for each, number in zip(group, (1, 0), strict=True)
    ]
    assert read(contexts(own, informed)([numbered])[0]) == ["#q|41", "#q"]
    assert read(contexts(teacher("column:answer"), own)([numbered])[0]) == ["#q", "q|41"]


def test_what_an_endpoint_is_sent_is_known_before_the_score() -> None:
    asked = contexts(teacher("column:answer"))
    one = episode("x", 0.0, 0)
    text = Tokenizer().decode(asked.read_before(one.prompt, one.trajectory) or [])
    assert text == "q|41" == read(asked([[one]])[0])[0]
    assert contexts(teacher("column:absent")).read_before(one.prompt, one.trajectory) is None
