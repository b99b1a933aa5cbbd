"""Chat messages and texts -> token ids, and compact storage of token ids. Does not know files or rewards."""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

Message = dict[str, Any]

CHUNK = 1000  # rows per call of the tokenizer: enough for its threads, few enough for memory
MEDIA = ("images", "videos", "audios")  # verl's columns for content that is not text


def as_messages(value: Any) -> list[Message] | None:
    """Return the value as chat messages without the null fields that parquet adds, or None if it is not a chat."""
    value = value.tolist() if isinstance(value, np.ndarray) else value
    if not isinstance(value, list) or not value:
        return None
    for item in value:
        if not isinstance(item, dict) or not item.get("role") or not isinstance(item.get("content"), str | list):
            return None
    return [{name: field for name, field in item.items() if field is not None} for item in value]


def as_chat(prompt: list[Message] | str) -> list[Message]:
    """Return the prompt as chat messages; a plain text becomes one user message."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


def multimodal_fault(values: dict[str, Any], messages: Any) -> str:
    """Describe the content of a row that is not text, or return "" if there is none.

    This is a non-empty column of images, videos or audios, or a message part of such a type. The characters "<image>"
    alone are text, as in verl, which replaces them only if such a column is non-empty.
    """
    content = [f"the column {name}" for name in MEDIA if _is_filled(values.get(name))]
    contents = [message.get("content") for message in messages] if isinstance(messages, list) else []
    parts = [part for parts in contents if isinstance(parts, list) for part in parts if isinstance(part, dict)]
    kinds = sorted({str(part.get("type")) for part in parts})
    content += [f"a part of type {kind}" for kind in kinds if any(name[:-1] in kind for name in MEDIA)]
    return f"more than text: {', '.join(content)}; leave such rows out: only text is supported" if content else ""


def _is_filled(value: Any) -> bool:
    return value is not None and (not hasattr(value, "__len__") or len(value) > 0)


def render(
    tokenizer: PreTrainedTokenizerBase,
    chats: Iterable[list[Message]],
    arguments: dict[str, Any],
    *,
    add_generation_prompt: bool,
) -> Iterator[list[int] | TemplateError]:
    """Yield the token ids of each conversation, or the template's error for it."""

    def apply(chats: Any) -> Any:
        options = {"add_generation_prompt": add_generation_prompt, "tokenize": True, "return_dict": False}
        return tokenizer.apply_chat_template(chats, **options, **arguments)

    def apply_alone(chat: list[Message]) -> list[int] | TemplateError:
        try:
            return apply(chat)
        except TemplateError as error:
            return error

    for chunk in _chunks(chats):
        try:
            rendered = apply(chunk)
        except TemplateError:
            rendered = map(apply_alone, chunk)
        yield from rendered


def encode(
    tokenizer: PreTrainedTokenizerBase, texts: Iterable[str], *, add_special_tokens: bool = True
) -> Iterator[list[int]]:
    """Yield the token ids of plain texts; special tokens are those that the tokenizer adds, such as a leading bos."""
    for chunk in _chunks(texts):
        yield from tokenizer(chunk, add_special_tokens=add_special_tokens)["input_ids"]


def _chunks(items: Iterable[Any]) -> Iterator[list[Any]]:
    rest = iter(items)
    while chunk := list(islice(rest, CHUNK)):
        yield chunk


class TokenRows:
    """Rows of token ids, concatenated in one array; lists of Python integers take about nine times the memory."""

    def __init__(self) -> None:
        self._values = array("i")
        self._ends = array("q", [0])

    def append(self, row: Sequence[int]) -> None:
        self._values.extend(row)
        self._ends.append(len(self._values))

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, index: int) -> list[int]:
        index = range(len(self))[index]
        return self._values[self._ends[index] : self._ends[index + 1]].tolist()

    @property
    def largest(self) -> int:
        """The largest id of all rows; -1 if there are no tokens."""
        return max(self._values, default=-1)

    @property
    def lengths(self) -> np.ndarray:  # [rows], int64
        return np.diff(np.array(self._ends))


def truncate(row: list[int], limit: int, side: str) -> list[int]:
    """Cut the row to `limit` tokens by removing tokens on the left, on the right or in the middle."""
    if len(row) <= limit:
        return row
    kept_left = {"left": 0, "right": limit, "middle": limit // 2}[side]
    return row[:kept_left] + row[len(row) - (limit - kept_left) :]
