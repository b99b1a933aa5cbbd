"""Pairs of conversations, of which the first is the better one, for training a reward model; token ids of conversations
for reward models, in training and in use."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from hybridrl.config.schema import SFTDataConfig
from hybridrl.core.batch import Batch, token_rows
from hybridrl.data import Message
from hybridrl.data.rows import DataRow, Faults, load_rows, report_overlong
from hybridrl.data.tokenizer import Chat, as_chat, as_messages, as_tools, render

CHOSEN, REJECTED, MARGIN = "chosen", "rejected", "margin"  # columns


def conversation_ids(tokenizer: PreTrainedTokenizerBase, chats: Sequence[Chat]) -> Iterator[list[int] | TemplateError]:
    """Yield the token ids of each conversation, or the template's error; a doubled bos is removed."""
    for ids in render(tokenizer, chats, {}, add_generation_prompt=False):
        doubled = isinstance(ids, list) and ids[:2] == [tokenizer.bos_token_id] * 2
        yield ids[1:] if doubled else ids


@dataclass(frozen=True)
class Pair:
    """Token ids of two conversations. The score of the chosen one is to be higher by more than the margin."""

    chosen: list[int]
    rejected: list[int]
    margin: float = 0.0


class Pairs(list[Pair]):
    """The pairs of a run, in the order of their files."""

    @property
    def largest_id(self) -> int:
        return max((max(pair.chosen + pair.rejected) for pair in self), default=-1)


def load_pairs(
    files: list[str],
    config: SFTDataConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_samples: int,
    shuffle: bool,
    key: str,
) -> Pairs:
    """Read, check and tokenize the rows of `files`, each with a prompt, `chosen` and `rejected`. Raises ConfigError
    with all bad rows; the two conversations of a row must not be the same tokens."""
    faults, pairs, overlong = Faults(key), Pairs(), []
    rows = load_rows(files, faults, key=key, max_samples=max_samples, shuffle=shuffle, seed=config.seed)
    chats = [_chats(row, config, faults) for row in rows]
    faults.close()
    sides = [conversation_ids(tokenizer, [chat[side] for chat in chats]) for side in (0, 1)]
    for row, *both in zip(rows, *sides, strict=True):
        errors = [ids for ids in both if isinstance(ids, TemplateError)]
        if errors:
            faults.add(row.place, f"the chat template rejects it: {errors[0]}")
            continue
        longest = max(map(len, both))
        if longest > config.max_length:
            overlong.append((longest, row.place))
        chosen, rejected = (ids[-config.max_length :] for ids in both)
        if chosen == rejected:
            cut = f" once they are cut to data.max_length={config.max_length}" * (longest > config.max_length)
            faults.add(row.place, f"{CHOSEN} and {REJECTED} are the same tokens{cut}; leave the row out")
        pairs.append(Pair(chosen, rejected, float(row.values.get(MARGIN) or 0)))
    faults.close()
    outcome = "" if config.truncation == "error" else "cut at their beginning"
    fix = "raise data.max_length, or cut them with data.truncation=left"
    report_overlong(overlong, len(rows), f"data.max_length={config.max_length}", key=key, outcome=outcome, fix=fix)
    return pairs


def _chats(row: DataRow, config: SFTDataConfig, faults: Faults) -> tuple[Chat, Chat]:
    """Return the two conversations of a row; without them, add its fault."""
    values = row.values
    prompt, tools = values.get(config.messages_key) or values.get(config.prompt_key), values.get(config.tools_key)
    start = as_messages(prompt) or (as_chat(prompt) if isinstance(prompt, str) and prompt else None)
    chats = [_conversation(start, values.get(side)) for side in (CHOSEN, REJECTED)]
    if not all(chats):
        needed = f"{CHOSEN} and {REJECTED} must be whole conversations, or responses to data.prompt_key="
        faults.add(row.place, f"{needed}{config.prompt_key}; the row has {', '.join(values)}")
    margin = values.get(MARGIN)
    if not isinstance(margin, int | float | None):
        faults.add(row.place, f"{MARGIN} is not a number: {margin!r:.40}")
    chosen, rejected = (Chat(chat or [], as_tools(tools) or []) for chat in chats)
    return chosen, rejected


def _conversation(prompt: list[Message] | None, answer: Any) -> list[Message] | None:
    """Return a whole conversation as it is, or a response after its prompt."""
    chat = as_messages(answer)
    if chat is None and isinstance(answer, str) and answer:
        chat = [{"role": "assistant", "content": answer}]
    if chat is None or chat[0]["role"] != "assistant":
        return chat
    return prompt and [*prompt, *chat]


def pair_batch(pairs: Sequence[Pair]) -> Batch:
    """Return pairs as rows, a chosen conversation before its rejected one; `rewards` of the former is the margin."""
    batch = token_rows([ids for pair in pairs for ids in (pair.chosen, pair.rejected)], slice(-1, None))
    margins = torch.tensor([margin for pair in pairs for margin in (pair.margin, 0.0)])
    mask, pair = torch.ones(len(batch), dtype=torch.bool), torch.arange(len(batch)) // 2
    return replace(batch, response_mask=mask, rewards=margins, group=pair)
