"""Conversations for supervised fine-tuning: rows -> token ids and the tokens that the loss is on.

Knows neither models nor batches; the order of the conversations is order.py's.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from hybridrl.config.error import ConfigError
from hybridrl.config.schema_sft import SFTDataConfig
from hybridrl.data.chat import Message, as_chat, as_messages, encode, render
from hybridrl.data.forms import more_than_text
from hybridrl.data.rows import Faults, Row, Rows, load_rows, long_rows, with_progress
from hybridrl.data.tokens import TokenRows, cut

logger = logging.getLogger(__name__)

BROKEN_PREFIX = (
    "the chat template writes the beginning of this conversation in another way than the whole, so where an "
    "answer lies is unknown; give one answer a row, or another template (model.custom_chat_template)"
)


@dataclass(frozen=True)
class Conversation:
    """`loss_mask` is 1 on each token of the assistant's, with the one that ends its turn, and 0 elsewhere."""

    ids: list[int]
    loss_mask: list[int]


class ConversationDataset(Sequence[Conversation]):
    """The tokenized conversations of a run, in the order of their files."""

    def __init__(self) -> None:
        self._ids = TokenRows()
        self._loss_masks = TokenRows()

    def append(self, conversation: Conversation) -> None:
        self._ids.append(conversation.ids)
        self._loss_masks.append(conversation.loss_mask)

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, index: int) -> Conversation:
        return Conversation(self._ids[index], self._loss_masks[index])

    @property
    def largest_id(self) -> int:
        return self._ids.largest

    @property
    def lengths(self) -> np.ndarray:  # [conversations], tokens
        return self._ids.lengths


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

    A row has chat messages that end with the assistant's, or a prompt and a response. `max_samples`,
    `shuffle` and `key` as in `load_rows`. Raises ConfigError that shows all bad rows at once.
    """
    faults = Faults(key)
    rows = load_rows(files, faults, key=key, max_samples=max_samples, shuffle=shuffle, seed=config.seed)
    tokenize = _tokenize_chats if tokenizer.chat_template else _tokenize_texts
    dataset, over, unanswered = ConversationDataset(), [], 0
    tokenized = zip(rows, tokenize(rows, config, tokenizer, faults), strict=True)
    for row, conversation in with_progress(tokenized, len(rows)):
        if conversation is None:
            continue
        if len(conversation.ids) > config.max_length:
            over.append((len(conversation.ids), row.place))
            if config.truncation == "error":
                continue
            conversation = _cut(conversation, config)
        if any(conversation.loss_mask):
            dataset.append(conversation)
        else:
            unanswered += 1
    faults.close()
    _report_long(over, unanswered, len(rows), config, key)
    return dataset


def _tokenize_chats(
    rows: Rows, config: SFTDataConfig, tokenizer: PreTrainedTokenizerBase, faults: Faults
) -> Iterator[Conversation | None]:
    """Each answer's place is found by rendering the conversation up to its beginning and up to its end."""
    parsed = [_chat(row, config, faults) for row in rows]
    faults.close()
    chats = [chat for chat in parsed if chat is not None]
    arguments = config.apply_chat_template_kwargs
    befores = [chat[:i] for chat in chats for i in _answers(chat)]
    untils = [chat[: i + 1] for chat in chats for i in _answers(chat)]
    opened = render(tokenizer, befores, arguments, opens_answer=True)
    closed = render(tokenizer, untils, arguments, opens_answer=False)
    special = {tokenizer.eos_token_id, *tokenizer.added_tokens_decoder}
    for row, chat in zip(rows, chats, strict=True):
        count = len(_answers(chat))
        starts, ends = list(islice(opened, count)), list(islice(closed, count))
        complaint = next((item for item in starts + ends if isinstance(item, TemplateError)), None)
        if complaint is not None:
            faults.add(row.place, f"the chat template refuses it: {complaint}")
            yield None
        elif any(part != ends[-1][: len(part)] for part in starts + ends):
            faults.add(row.place, BROKEN_PREFIX)
            yield None
        else:
            yield _with_loss(starts, ends, tokenizer, special)


def _with_loss(
    starts: list[list[int]], ends: list[list[int]], tokenizer: PreTrainedTokenizerBase, special: set[int]
) -> Conversation:
    """The whole conversation (`ends[-1]`) with the loss from each start to its end."""
    ids = ends[-1]
    loss_mask = [0] * len(ids)
    for start, end in zip(starts, ends, strict=True):
        first, stop = len(start), len(end)
        after_special = max((i + 1 for i in range(first, stop) if ids[i] in special), default=stop)
        # The line break that a template writes after the end of a turn is not the model's to write.
        if not tokenizer.decode(ids[after_special:stop]).strip():
            stop = after_special
        loss_mask[first:stop] = [1] * (stop - first)
    return Conversation(ids, loss_mask)


def _tokenize_texts(
    rows: Rows, config: SFTDataConfig, tokenizer: PreTrainedTokenizerBase, faults: Faults
) -> Iterator[Conversation | None]:
    """Without a chat template: the prompt as it is, the response, and the end of the sequence."""
    parsed = [_texts(row, config, faults) for row in rows]
    faults.close()
    pairs = [pair for pair in parsed if pair is not None]
    prompts = encode(tokenizer, [prompt for prompt, _ in pairs])
    responses = encode(tokenizer, [response for _, response in pairs], opens=False)
    for prompt, response in zip(prompts, responses, strict=True):
        answer = [*response, tokenizer.eos_token_id]
        yield Conversation(prompt + answer, [0] * len(prompt) + [1] * len(answer))


def _answers(chat: list[Message]) -> list[int]:
    return [i for i, message in enumerate(chat) if message["role"] == "assistant"]


def _chat(row: Row, config: SFTDataConfig, faults: Faults) -> list[Message] | None:
    """The row's conversation, or None with its fault noted."""
    values = row.values
    if fault := more_than_text(values, values.get(config.messages_key)):
        return faults.add(row.place, fault[0])
    if values.get(config.messages_key) is not None:
        chat = as_messages(values[config.messages_key])
        if chat is None or chat[-1]["role"] != "assistant":
            faults.add(
                row.place,
                f"data.messages_key={config.messages_key} is to hold chat messages ([{{role, content}}, "
                "...]), the last of them the assistant's",
            )
            return None
        return chat
    prompt, response = values.get(config.prompt_key), values.get(config.response_key)
    asked = as_messages(as_chat(prompt))
    if not asked or not isinstance(response, str):
        faults.add(
            row.place,
            f"neither chat messages (data.messages_key={config.messages_key}) nor a prompt and a response "
            f"(data.prompt_key={config.prompt_key}, data.response_key={config.response_key}); "
            f"its columns: {', '.join(values)}",
        )
        return None
    return [*asked, {"role": "assistant", "content": response}]


def _texts(row: Row, config: SFTDataConfig, faults: Faults) -> tuple[str, str] | None:
    """The row's prompt and response, or None with its fault noted."""
    prompt, response = row.values.get(config.prompt_key), row.values.get(config.response_key)
    if fault := more_than_text(row.values, None):
        return faults.add(row.place, fault[0])
    if isinstance(prompt, str) and prompt and isinstance(response, str):
        return prompt, response
    faults.add(
        row.place,
        f"without a chat template a row needs plain text in data.prompt_key={config.prompt_key} and "
        f"data.response_key={config.response_key}; for chat messages set model.custom_chat_template",
    )
    return None


def _cut(conversation: Conversation, config: SFTDataConfig) -> Conversation:
    ids, loss_mask = (
        cut(part, config.max_length, config.truncation) for part in (conversation.ids, conversation.loss_mask)
    )
    return Conversation(ids, loss_mask)


def _report_long(over: list[tuple[int, str]], unanswered: int, count: int, config: SFTDataConfig, key: str) -> None:
    if not over:
        return
    found = f"{key}: {long_rows(over, count, f'data.max_length={config.max_length}')}"
    if config.truncation == "error" or unanswered == count:
        raise ConfigError(f"{found}. Raise data.max_length, or cut them with data.truncation=left|right")
    logger.warning(
        "%s; cut (data.truncation=%s), %d dropped as nothing of an answer was left",
        found,
        config.truncation,
        unanswered,
    )
