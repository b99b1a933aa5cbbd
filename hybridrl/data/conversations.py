"""Conversations for supervised fine-tuning: rows -> token ids, and the tokens on which the loss is computed.

Knows neither models nor batches; the order of the conversations is in order.py.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
import torch
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from hybridrl.batch import Batch, pack
from hybridrl.config.findings import ConfigError
from hybridrl.config.schema import SFTDataConfig
from hybridrl.data.chat import Message, TokenRows, as_chat, as_messages, encode, multimodal_fault, render, truncate
from hybridrl.data.rows import Faults, Row, Rows, describe_overlong, load_rows, with_progress

logger = logging.getLogger(__name__)

BROKEN_PREFIX = (
    "the chat template renders the beginning of this conversation differently from the full conversation, so the "
    "position of its responses is unknown; give one response per row, or another template (model.custom_chat_template)"
)


@dataclass(frozen=True)
class Conversation:
    """`loss_mask` is 1 on each token of the assistant, including the one that ends its turn, and 0 elsewhere."""

    ids: list[int]
    loss_mask: list[int]


@dataclass(frozen=True)
class ConversationDataset(Sequence[Conversation]):
    """The tokenized conversations of a run, in the order of their files."""

    ids: TokenRows = field(default_factory=TokenRows)
    loss_masks: TokenRows = field(default_factory=TokenRows)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> Conversation:
        return Conversation(self.ids[index], self.loss_masks[index])

    @property
    def largest_id(self) -> int:
        return self.ids.largest

    @property
    def lengths(self) -> np.ndarray:  # [conversations], tokens
        return self.ids.lengths


def load_conversations(
    files: list[str],
    config: SFTDataConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_samples: int,
    shuffle: bool,
    key: str,
) -> ConversationDataset:
    """Read, check and tokenize the rows of `files`.

    A row has chat messages that end with the assistant's, or a prompt and a response. `max_samples`, `shuffle` and
    `key` are as in `load_rows`. Raises ConfigError that lists all bad rows together.
    """
    faults = Faults(key)
    rows = load_rows(files, faults, key=key, max_samples=max_samples, shuffle=shuffle, seed=config.seed)
    tokenize = _tokenize_chats if tokenizer.chat_template else _tokenize_texts
    dataset, overlong, dropped = ConversationDataset(), [], 0
    tokenized = zip(rows, tokenize(rows, config, tokenizer, faults), strict=True)
    for row, conversation in with_progress(tokenized, len(rows)):
        if conversation is None:
            continue
        ids, loss_mask = conversation.ids, conversation.loss_mask
        if len(ids) > config.max_length:
            overlong.append((len(ids), row.place))
            if config.truncation == "error":
                continue
            ids, loss_mask = (truncate(part, config.max_length, config.truncation) for part in (ids, loss_mask))
        if any(loss_mask):
            dataset.ids.append(ids)
            dataset.loss_masks.append(loss_mask)
        else:
            dropped += 1
    faults.close()
    if overlong:
        message = f"{key}: {describe_overlong(overlong, len(rows), f'data.max_length={config.max_length}')}"
        if config.truncation == "error" or dropped == len(rows):
            fix = "raise data.max_length, or truncate them with data.truncation=left|right"
            raise ConfigError(message, fix=fix)
        details = (
            f"truncated (data.truncation={config.truncation}), {dropped} dropped because no response token is left"
        )
        logger.warning("%s; %s", message, details)
    return dataset


def _tokenize_chats(
    rows: Rows, config: SFTDataConfig, tokenizer: PreTrainedTokenizerBase, faults: Faults
) -> Iterator[Conversation | None]:
    """Locate each response by rendering the conversation up to its beginning and up to its end."""
    parsed = [_chat(row, config, faults) for row in rows]
    faults.close()
    chats = [chat for chat in parsed if chat is not None]
    turns = [[i for i, message in enumerate(chat) if message["role"] == "assistant"] for chat in chats]
    arguments = config.apply_chat_template_kwargs
    before = [chat[:i] for chat, places in zip(chats, turns, strict=True) for i in places]
    until = [chat[: i + 1] for chat, places in zip(chats, turns, strict=True) for i in places]
    opened = render(tokenizer, before, arguments, add_generation_prompt=True)
    closed = render(tokenizer, until, arguments, add_generation_prompt=False)
    special = {tokenizer.eos_token_id, *tokenizer.added_tokens_decoder}
    for row, places in zip(rows, turns, strict=True):
        starts, ends = list(islice(opened, len(places))), list(islice(closed, len(places)))
        error = next((item for item in starts + ends if isinstance(item, TemplateError)), None)
        if error is not None:
            faults.add(row.place, f"the chat template rejects it: {error}")
            yield None
        elif any(prefix != ends[-1][: len(prefix)] for prefix in starts + ends):
            faults.add(row.place, BROKEN_PREFIX)
            yield None
        else:
            yield _with_loss_mask(starts, ends, tokenizer, special)


def _with_loss_mask(
    starts: list[list[int]], ends: list[list[int]], tokenizer: PreTrainedTokenizerBase, special: set[int]
) -> Conversation:
    """Return the full conversation (`ends[-1]`) with a loss mask from the end of each start to its end."""
    ids = ends[-1]
    loss_mask = [0] * len(ids)
    for start, end in zip(starts, ends, strict=True):
        first, stop = len(start), len(end)
        after_special = max((i + 1 for i in range(first, stop) if ids[i] in special), default=stop)
        # The model does not generate the line break that a template adds after the end of a turn.
        if not tokenizer.decode(ids[after_special:stop]).strip():
            stop = after_special
        loss_mask[first:stop] = [1] * (stop - first)
    return Conversation(ids, loss_mask)


def _tokenize_texts(
    rows: Rows, config: SFTDataConfig, tokenizer: PreTrainedTokenizerBase, faults: Faults
) -> Iterator[Conversation | None]:
    """Without a chat template: the prompt as it is, the response, and the end-of-sequence token."""
    parsed = [_texts(row, config, faults) for row in rows]
    faults.close()
    pairs = [pair for pair in parsed if pair is not None]
    prompts = encode(tokenizer, [prompt for prompt, _ in pairs])
    responses = encode(tokenizer, [response for _, response in pairs], add_special_tokens=False)
    for prompt, response in zip(prompts, responses, strict=True):
        response = [*response, tokenizer.eos_token_id]
        yield Conversation(prompt + response, [0] * len(prompt) + [1] * len(response))


def _chat(row: Row, config: SFTDataConfig, faults: Faults) -> list[Message] | None:
    """Return the row's conversation, or None after adding its fault."""
    values = row.values
    if fault := multimodal_fault(values, values.get(config.messages_key)):
        return faults.add(row.place, fault)
    if values.get(config.messages_key) is not None:
        chat = as_messages(values[config.messages_key])
        if chat is not None and chat[-1]["role"] == "assistant":
            return chat
        return faults.add(
            row.place,
            f"data.messages_key={config.messages_key} must hold chat messages ([{{role, content}}, "
            "...]), the last of them from the assistant",
        )
    prompt, response = values.get(config.prompt_key), values.get(config.response_key)
    chat = as_messages(as_chat(prompt))
    if chat and isinstance(response, str):
        return [*chat, {"role": "assistant", "content": response}]
    return faults.add(
        row.place,
        f"neither chat messages (data.messages_key={config.messages_key}) nor a prompt and a response "
        f"(data.prompt_key={config.prompt_key}, data.response_key={config.response_key}); "
        f"its columns: {', '.join(values)}",
    )


def _texts(row: Row, config: SFTDataConfig, faults: Faults) -> tuple[str, str] | None:
    """Return the row's prompt and response, or None after adding its fault."""
    prompt, response = row.values.get(config.prompt_key), row.values.get(config.response_key)
    if fault := multimodal_fault(row.values, None):
        return faults.add(row.place, fault)
    if isinstance(prompt, str) and prompt and isinstance(response, str):
        return prompt, response
    return faults.add(
        row.place,
        f"without a chat template a row needs plain text in data.prompt_key={config.prompt_key} and "
        f"data.response_key={config.response_key}; for chat messages set model.custom_chat_template",
    )


def to_batch(conversations: Sequence[Conversation]) -> Batch:
    """Conversations as rows: what precedes the first token with loss is the prompt."""
    starts = [max(conversation.loss_mask.index(1), 1) for conversation in conversations]
    pairs = list(zip(conversations, starts, strict=True))
    prompt_ids, prompt_lengths = pack([item.ids[:start] for item, start in pairs], torch.int32)
    response_ids, response_lengths = pack([item.ids[start:] for item, start in pairs], torch.int32)
    mask, _ = pack([item.loss_mask[start:] for item, start in pairs], torch.bool)
    numbers = torch.arange(len(conversations))
    return Batch(
        prompt_lengths=prompt_lengths,
        response_lengths=response_lengths,
        prompt_ids=prompt_ids,
        response_ids=response_ids,
        group=numbers,
        position=numbers,
        sample=torch.zeros_like(numbers),
        response_mask=mask,
    )
