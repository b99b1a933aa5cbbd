"""Chat messages -> token ids by the tokenizer's template. Knows neither files nor rewards."""

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import numpy as np
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

Message = dict[str, Any]

# Rows handed to the tokenizer at a time: enough for its threads, few enough to hold.
CHUNK = 1000


def as_messages(value: Any) -> list[Message] | None:
    """The value as chat messages without the empty fields that parquet adds; None where it is none."""
    value = value.tolist() if isinstance(value, np.ndarray) else value
    if not isinstance(value, list) or not value or not all(_is_message(item) for item in value):
        return None
    return [{name: field for name, field in item.items() if field is not None} for item in value]


def as_chat(prompt: list[Message] | str) -> list[Message]:
    """The prompt as chat messages: a text is what the user says."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


def render(
    tokenizer: PreTrainedTokenizerBase,
    chats: Iterable[list[Message]],
    arguments: dict[str, Any],
    *,
    opens_answer: bool,
) -> Iterator[list[int] | TemplateError]:
    """The token ids of each conversation, or the template's complaint about it.

    `opens_answer`: the assistant's turn is opened, ready for the model to go on.
    """

    def apply(some: Any) -> Any:
        return tokenizer.apply_chat_template(
            some, add_generation_prompt=opens_answer, tokenize=True, return_dict=False, **arguments
        )

    def apply_alone(chat: list[Message]) -> list[int] | TemplateError:
        try:
            return apply(chat)
        except TemplateError as error:
            return error

    for part in _chunks(chats):
        try:
            rendered = apply(part)
        except TemplateError:
            rendered = [apply_alone(chat) for chat in part]
        yield from rendered


def encode(tokenizer: PreTrainedTokenizerBase, texts: Iterable[str], *, opens: bool = True) -> Iterator[list[int]]:
    """The token ids of plain texts; `opens`: with what the tokenizer puts before a text (a bos token)."""
    for part in _chunks(texts):
        yield from tokenizer(part, add_special_tokens=opens)["input_ids"]


def _is_message(item: Any) -> bool:
    return isinstance(item, dict) and bool(item.get("role")) and isinstance(item.get("content"), str | list)


def _chunks(items: Iterable[Any]) -> Iterator[list[Any]]:
    rest = iter(items)
    while part := list(islice(rest, CHUNK)):
        yield part
