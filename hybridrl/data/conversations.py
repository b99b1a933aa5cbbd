"""Conversations for supervised fine-tuning: rows -> token ids, and the tokens on which the loss is computed.

Independent of models; the order of the conversations is in order.py.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from hybridrl.config.findings import ConfigError
from hybridrl.config.schema import SFTDataConfig
from hybridrl.core.batch import Batch, pack
from hybridrl.data.pictures import multimodal_fault
from hybridrl.data.rows import DataRow, Faults, Rows, load_rows, report_overlong, with_progress
from hybridrl.data.template_arguments import (
    arguments_read,
    check_template_arguments,
    row_arguments,
    row_fault,
    unread_column,
)
from hybridrl.data.tokenizer import (
    Chat,
    Message,
    TokenRows,
    as_chat,
    as_messages,
    as_tools,
    encode,
    render,
    truncate,
)

# Maps the fields of a Chat to token ids and mask, as if its responses were sampled turn by turn; raises ConfigError if
# the template does not support this.
Replay = Callable[[Sequence[Message], Sequence[dict[str, Any]], Mapping[str, Any]], tuple[list[int], list[int]]]
REPLAYED = (
    "%s: the chat template renders earlier turns of %d conversations differently once others follow; they are trained "
    "on as they are sampled, turn by turn"
)
BROKEN_PREFIX = (
    "the chat template renders the beginning of this conversation differently from the full conversation, so the "
    "position of its responses is unknown; give one response per row, or another template (model.custom_chat_template)"
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Conversation:
    """`loss_mask` is 1 on each token of the assistant, including its end-of-turn token, and 0 elsewhere."""

    ids: list[int]
    loss_mask: list[int]
    replayed: bool = False


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


def load_conversations(
    files: list[str],
    config: SFTDataConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_samples: int,
    shuffle: bool,
    key: str,
    replay: Replay | None = None,
) -> ConversationDataset:
    """Read, check and tokenize the rows of `files`.

    A row has chat messages that end with the assistant's, or a prompt and a response. `max_samples`, `shuffle` and
    `key` are as in `load_rows`. `replay` is for conversations whose beginning is rendered differently alone; without
    it, these are bad rows. Raises ConfigError that lists all bad rows together.
    """
    faults, read = Faults(key), arguments_read(tokenizer)
    check_template_arguments(tokenizer, config.apply_chat_template_kwargs)
    rows = load_rows(files, faults, key=key, max_samples=max_samples, shuffle=shuffle, seed=config.seed)
    parse = _chat if tokenizer.chat_template else _texts
    parsed, given = [], 0
    for row in rows:
        parsed.append(parse(row, config, faults))
        given += bool(row_arguments(row.values, None))
    faults.close()
    if unread := unread_column(given, read):
        logger.warning("%s: %s", key, unread)
    if tokenizer.chat_template:
        conversations = _tokenize_chats(rows, parsed, config, tokenizer, faults, replay)
    else:
        conversations = _tokenize_texts(parsed, tokenizer)
    dataset, overlong, dropped, replayed = ConversationDataset(), [], 0, 0
    for row, conversation in with_progress(zip(rows, conversations, strict=True), len(rows)):
        if conversation is None:
            continue
        replayed += conversation.replayed
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
    if replayed:
        logger.warning(REPLAYED, key, replayed)
    outcome = f"truncated (data.truncation={config.truncation}), {dropped} dropped because no response token is left"
    outcome = "" if config.truncation == "error" or dropped == len(rows) else outcome
    fix = "raise data.max_length, or truncate them with data.truncation=left|right"
    report_overlong(overlong, len(rows), f"data.max_length={config.max_length}", key=key, outcome=outcome, fix=fix)
    return dataset


def _tokenize_chats(
    rows: Rows,
    chats: list[list[Message]],
    config: SFTDataConfig,
    tokenizer: PreTrainedTokenizerBase,
    faults: Faults,
    replay: Replay | None,
) -> Iterator[Conversation | None]:
    """Locate each response by rendering the conversation up to its beginning and up to its end."""
    turns = [[i for i, message in enumerate(chat) if message["role"] == "assistant"] for chat in chats]
    read, arguments = arguments_read(tokenizer), config.apply_chat_template_kwargs
    given = [(as_tools(row.values.get(config.tools_key)) or [], row_arguments(row.values, read)) for row in rows]
    responses = [(chat, i, own) for chat, places, own in zip(chats, turns, given, strict=True) for i in places]
    before = (Chat(chat[:i], *own) for chat, i, own in responses)
    until = (Chat(chat[: i + 1], *own) for chat, i, own in responses)
    opened = render(tokenizer, before, arguments, add_generation_prompt=True)
    closed = render(tokenizer, until, arguments, add_generation_prompt=False)
    added = tokenizer.added_tokens_decoder.items()  # one can be white space, such as Gemma's line break
    special = {tokenizer.eos_token_id, *(token for token, text in added if text.content.strip())}
    for row, places, chat, own in zip(rows, turns, chats, given, strict=True):
        starts, ends = list(islice(opened, len(places))), list(islice(closed, len(places)))
        error = next((item for item in starts + ends if isinstance(item, TemplateError)), None)
        if error is not None:
            yield faults.add(row.place, f"the chat template rejects it: {error}")
            continue
        if any(prefix != ends[-1][: len(prefix)] for prefix in starts + ends):
            yield _replayed(replay, Chat(chat, *own), row, faults)
            continue
        spans = [(len(start), len(end)) for start, end in zip(starts, ends, strict=True)]
        yield Conversation(ends[-1], _loss_mask(ends[-1], spans, tokenizer, special))


def _loss_mask(
    ids: list[int], spans: list[tuple[int, int]], tokenizer: PreTrainedTokenizerBase, special: set[int | None]
) -> list[int]:
    """1 on each token in `spans` that the model generates; `special` are the tokens that may end a turn."""
    loss_mask = [0] * len(ids)
    for first, stop in spans:
        after_special = max((i + 1 for i in range(first, stop) if ids[i] in special), default=stop)
        # The model does not generate the line break that a template adds after the end of a turn.
        if not tokenizer.decode(ids[after_special:stop]).strip():
            stop = after_special
        loss_mask[first:stop] = [1] * (stop - first)
    return loss_mask


def _replayed(replay: Replay | None, chat: Chat, row: DataRow, faults: Faults) -> Conversation | None:
    try:
        return Conversation(*replay(*chat), replayed=True) if replay else faults.add(row.place, BROKEN_PREFIX)
    except ConfigError as error:
        return faults.add(row.place, f"{BROKEN_PREFIX} ({error})")


def _tokenize_texts(pairs: list[tuple[str, str]], tokenizer: PreTrainedTokenizerBase) -> Iterator[Conversation]:
    """Without a chat template: the prompt as it is, the response, and the end-of-sequence token."""
    prompts = encode(tokenizer, [prompt for prompt, _ in pairs])
    responses = encode(tokenizer, [response for _, response in pairs], add_special_tokens=False)
    for prompt, response in zip(prompts, responses, strict=True):
        response = [*response, tokenizer.eos_token_id]
        yield Conversation(prompt + response, [0] * len(prompt) + [1] * len(response))


def _chat(row: DataRow, config: SFTDataConfig, faults: Faults) -> list[Message] | None:
    """Return the row's conversation, or None after adding its fault."""
    values = row.values
    if fault := multimodal_fault(values, values.get(config.messages_key)) or row_fault(values):
        return faults.add(row.place, fault)
    if as_tools(values.get(config.tools_key)) is None:
        needed = f"data.tools_key={config.tools_key} must hold a list of schemas of tools ([{{...}}, ...])"
        return faults.add(row.place, needed)
    if values.get(config.messages_key) not in (None, ""):
        chat = as_messages(values[config.messages_key])
        if chat is not None and chat[-1]["role"] == "assistant":
            return chat
        needed = f"data.messages_key={config.messages_key} must hold chat messages ([{{role, content}}, ...]), "
        return faults.add(row.place, f"{needed}the last of them from the assistant")
    prompt, response = values.get(config.prompt_key), values.get(config.response_key)
    chat = as_messages(prompt) or as_messages(as_chat(prompt))
    if chat and isinstance(response, str):
        return [*chat, {"role": "assistant", "content": response}]
    return faults.add(
        row.place,
        f"neither chat messages (data.messages_key={config.messages_key}) nor a prompt and a response "
        f"(data.prompt_key={config.prompt_key}, data.response_key={config.response_key}); "
        f"its columns: {', '.join(values)}",
    )


def _texts(row: DataRow, config: SFTDataConfig, faults: Faults) -> tuple[str, str] | None:
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


def conversation_batch(conversations: Sequence[Conversation]) -> Batch:
    """Return conversations as rows: the tokens before the first token with loss are the prompt."""
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
