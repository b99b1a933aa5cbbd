"""Prompts for reinforcement learning: rows in verl's form -> token ids with what the reward will ask for.

Knows neither models nor scorers; the order of the prompts is order.py's.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from hybridrl.config.error import ConfigError
from hybridrl.config.schema import DataConfig
from hybridrl.data.chat import Message, as_chat, as_messages, encode, render
from hybridrl.data.rows import Faults, Row, load_rows, long_rows, with_progress
from hybridrl.data.tokens import TokenRows, cut

logger = logging.getLogger(__name__)

# A row needs no data_source where the reward function is the user's own; a built-in scorer finds none for it.
UNKNOWN_SOURCE = "unknown"


@dataclass(frozen=True)
class Prompt:
    """`row` counts the rows of all files from 0; `messages` is what the row has, also a plain text."""

    row: int
    ids: list[int]
    messages: list[Message] | str
    data_source: str
    ground_truth: Any
    extra_info: dict[str, Any]


class PromptDataset(Sequence[Prompt]):
    """The tokenized prompts of a run, in the order of their files."""

    def __init__(self, prompts: list[Prompt], ids: TokenRows) -> None:
        self._prompts = prompts  # without ids
        self._ids = ids

    def __len__(self) -> int:
        return len(self._prompts)

    def __getitem__(self, index: int) -> Prompt:
        return replace(self._prompts[index], ids=self._ids[index])

    @property
    def lengths(self) -> np.ndarray:  # [prompts], tokens
        return self._ids.lengths

    @property
    def largest_id(self) -> int:
        return self._ids.largest

    @property
    def data_sources(self) -> set[str]:
        return {prompt.data_source for prompt in self._prompts}


def load_prompts(
    files: list[str],
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_samples: int,
    shuffle: bool,
    key: str,
) -> PromptDataset:
    """Read, check and tokenize the rows of `files`.

    `max_samples`, `shuffle` and `key` as in `load_rows`. A prompt beyond `config.max_prompt_length` is
    dropped, cut or refused, as the configuration says. Raises ConfigError that shows all bad rows at once.
    """
    faults = Faults(key)
    rows = load_rows(files, faults, key=key, max_samples=max_samples, shuffle=shuffle, seed=config.seed)
    parsed = [_parse(row, config, faults) for row in rows]
    faults.close()
    prompts = [prompt for prompt in parsed if prompt is not None]

    kept, ids, over = [], TokenRows(), []
    tokenized = zip(rows, prompts, _tokenize(prompts, config, tokenizer, key), strict=True)
    for row, prompt, tokens in with_progress(tokenized, len(rows)):
        if isinstance(tokens, TemplateError):
            faults.add(row.place, f"the chat template refuses it: {tokens}")
            continue
        if len(tokens) > config.max_prompt_length:
            over.append((len(tokens), row))
            if config.filter_overlong_prompts or config.truncation == "error":
                continue
            tokens = cut(tokens, config.max_prompt_length, config.truncation)
        kept.append(prompt)
        ids.append(tokens)
    faults.close()
    _report_long(over, len(rows), config, key)
    return PromptDataset(kept, ids)


def _parse(row: Row, config: DataConfig, faults: Faults) -> Prompt | None:
    """The row as a prompt without ids, or None with its faults noted."""
    values, wrong = row.values, []
    prompt = values.get(config.prompt_key)
    messages = prompt if isinstance(prompt, str) else as_messages(prompt)
    if not messages:
        wrong.append(
            f"no prompt: data.prompt_key={config.prompt_key} is to hold chat messages "
            f"([{{role, content}}, ...]) or a text; the row has {', '.join(values)}"
        )
    reward = values.get("reward_model")
    ground_truth = reward.get("ground_truth") if isinstance(reward, dict) else None
    if ground_truth is None:
        wrong.append('no ground truth: the column reward_model is to hold {"style": "rule", "ground_truth": ...}')
    extra_info = values.get("extra_info") or {}
    if not isinstance(extra_info, dict):
        wrong.append("extra_info is no object ({...})")
    if wrong or not messages:
        faults.add(row.place, "; ".join(wrong))
        return None
    source = values.get(config.reward_fn_key)
    data_source = UNKNOWN_SOURCE if source is None else str(source)
    return Prompt(row.number, [], messages, data_source, ground_truth, extra_info)


def _tokenize(
    prompts: list[Prompt], config: DataConfig, tokenizer: PreTrainedTokenizerBase, key: str
) -> Iterator[list[int] | TemplateError]:
    shown = [prompt.messages for prompt in prompts]
    if tokenizer.chat_template:
        chats = [as_chat(messages) for messages in shown]
        return render(tokenizer, chats, config.apply_chat_template_kwargs, opens_answer=True)
    texts = [messages for messages in shown if isinstance(messages, str)]
    if len(texts) < len(shown):
        raise ConfigError(
            f"{key}: {len(shown) - len(texts)} rows have chat messages, but the tokenizer has no chat "
            "template; set actor_rollout_ref.model.custom_chat_template, or give the prompts as plain strings"
        )
    return encode(tokenizer, texts)


def _report_long(over: list[tuple[int, Row]], count: int, config: DataConfig, key: str) -> None:
    if not over:
        return
    found = f"{key}: {long_rows(over, count, f'data.max_prompt_length={config.max_prompt_length}')}"
    if config.filter_overlong_prompts and len(over) < count:
        logger.warning("%s; dropped", found)
    elif not config.filter_overlong_prompts and config.truncation != "error":
        logger.warning("%s; cut (data.truncation=%s)", found, config.truncation)
    else:
        raise ConfigError(
            f"{found}. Raise data.max_prompt_length, drop them with data.filter_overlong_prompts=true "
            "or cut them with data.truncation=left|right|middle"
        )
