"""Prompts for reinforcement learning: rows -> token ids with what the reward will ask for.

Knows neither models nor scorers; the order of the prompts is order.py's.
"""

import difflib
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from hybridrl.config.error import ConfigError
from hybridrl.config.schema import DataConfig
from hybridrl.data.chat import Message, as_chat, as_messages, encode, render
from hybridrl.data.custom_dataset import own_rows
from hybridrl.data.forms import SKYRL, VERL, in_form_of_verl, more_than_text
from hybridrl.data.rows import Faults, Row, Rows, load_rows, long_rows, with_progress
from hybridrl.data.tokens import TokenRows, cut

logger = logging.getLogger(__name__)

# A row needs no data_source where the reward function is the user's own; a built-in scorer finds none for it.
UNKNOWN_SOURCE = "unknown"
# What the prompt's column is called elsewhere.
PROMPT_NAMES = ("question", "problem", "query", "instruction", "input", "messages", "text")


@dataclass(frozen=True)
class Prompt:
    """`row` counts the rows of all files from 0; `messages` is what the row has, also a plain text."""

    row: int
    ids: list[int]
    messages: list[Message] | str
    data_source: str
    ground_truth: Any
    extra_info: dict[str, Any]


@dataclass(frozen=True)
class PromptDataset(Sequence[Prompt]):
    """The tokenized prompts of a run, in the order of their files.

    `over` of the rows read were longer than data.max_prompt_length and have been dropped or cut.
    """

    rows: Rows
    ids: TokenRows
    config: DataConfig
    data_sources: set[str]
    over: int

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> Prompt:
        prompt = _parse(self.rows[index], self.config)
        assert isinstance(prompt, Prompt)  # it was when it was loaded
        return replace(prompt, ids=self.ids[index])

    @property
    def lengths(self) -> np.ndarray:  # [prompts], tokens
        return self.ids.lengths

    @property
    def largest_id(self) -> int:
        return self.ids.largest


def load_prompts(
    files: list[str],
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_samples: int,
    shuffle: bool,
    key: str,
    own: dict[str, Any] | None = None,
) -> PromptDataset:
    """Read, check and tokenize the rows of `files`, or those of a data set class of the user's own.

    `max_samples`, `shuffle` and `key` as in `load_rows`; `own` are the keys of the user's under `data`, for such a
    class. A prompt beyond `config.max_prompt_length` is dropped, cut or refused, as the configuration says.
    Raises ConfigError that shows all bad rows at once.
    """
    faults, chosen = Faults(key), {"max_samples": max_samples, "shuffle": shuffle, "seed": config.seed or 0}
    if config.custom_cls.path:
        rows = own_rows(config, files, tokenizer, faults, own=own or {}, **chosen)
    else:
        rows = load_rows(files, faults, key=key, **chosen)
    sources = _check(rows, config, faults, key)

    kept, ids, over = [], TokenRows(), []
    tokenized = zip(rows, _tokenize(rows, config, tokenizer, key), strict=True)
    for number, (row, tokens) in enumerate(with_progress(tokenized, len(rows))):
        if isinstance(tokens, TemplateError):
            faults.add(row.place, f"the chat template refuses it: {tokens}")
            continue
        if len(tokens) > config.max_prompt_length:
            over.append((len(tokens), row.place))
            if config.filter_overlong_prompts or config.truncation == "error":
                continue
            tokens = cut(tokens, config.max_prompt_length, config.truncation)
        kept.append(number)
        ids.append(tokens)
    faults.close()
    _report_long(over, len(rows), config, key)
    return PromptDataset(Rows(rows.packed, rows.numbers[kept]), ids, config, sources, len(over))


def _check(rows: Rows, config: DataConfig, faults: Faults, key: str) -> set[str]:
    """Gather what is wrong with the rows, say in what form they are, and return their data sources."""
    forms: Counter[str] = Counter()
    sources: set[str] = set()
    for row in with_progress(rows, len(rows), "checking"):
        found = _parse(row, config)
        if isinstance(found, Prompt):
            forms[in_form_of_verl(row.values, config.reward_fn_key)[0]] += 1
            sources.add(found.data_source)
        else:
            faults.add(row.place, "; ".join(found))
    faults.close()
    told = ", ".join(f"{count} in {form} form" for form, count in forms.items() if form != VERL)
    logger.info("%s: %d rows%s", key, len(rows), f" ({told})" if told else "")
    if SKYRL in forms:
        logger.info("%s: of SkyRL's rows reward_spec and data_source are read; no env_class is run", key)
    return sources


def _parse(row: Row, config: DataConfig) -> Prompt | list[str]:
    """The row as a prompt without ids, or all that is wrong with it."""
    form, values = in_form_of_verl(row.values, config.reward_fn_key)
    prompt = values.get("prompt" if form not in (VERL, SKYRL) else config.prompt_key)
    messages = prompt if isinstance(prompt, str) else as_messages(prompt)
    wrong = [] if messages else [_no_prompt(row.values, config)]
    reward = values.get("reward_model")
    ground_truth = reward.get("ground_truth") if isinstance(reward, dict) else None
    if ground_truth is None:
        wrong.append('no ground truth: the column reward_model is to hold {"style": "rule", "ground_truth": ...}')
    wrong += more_than_text(row.values, messages)
    extra_info = values.get("extra_info") or {}
    if not isinstance(extra_info, dict):
        wrong.append("extra_info is no object ({...})")
    if wrong or not messages:
        return wrong
    source = values.get(config.reward_fn_key)
    data_source = UNKNOWN_SOURCE if source is None else str(source)
    return Prompt(row.number, [], messages, data_source, ground_truth, extra_info)


def _no_prompt(values: dict[str, Any], config: DataConfig) -> str:
    key = config.prompt_key
    near = difflib.get_close_matches(key, values, n=1) or [name for name in PROMPT_NAMES if name in values]
    hint = f"; set data.prompt_key={near[0]}?" if near and key not in values else ""
    return (
        f"no prompt: data.prompt_key={key} is to hold chat messages ([{{role, content}}, ...]) or a text; "
        f"the row has {', '.join(values) or 'no columns'}{hint}"
    )


def _tokenize(
    rows: Rows, config: DataConfig, tokenizer: PreTrainedTokenizerBase, key: str
) -> Iterator[list[int] | TemplateError]:
    shown = (prompt.messages for row in rows if isinstance(prompt := _parse(row, config), Prompt))
    if tokenizer.chat_template:
        chats = (as_chat(messages) for messages in shown)
        return render(tokenizer, chats, config.apply_chat_template_kwargs, opens_answer=True)
    return encode(tokenizer, _texts(shown, key))


def _texts(shown: Iterator[list[Message] | str], key: str) -> Iterator[str]:
    for messages in shown:
        if not isinstance(messages, str):
            count = 1 + sum(not isinstance(other, str) for other in shown)
            raise ConfigError(
                f"{key}: {count} rows have chat messages, but the tokenizer has no chat "
                "template; set actor_rollout_ref.model.custom_chat_template, or give the prompts as plain strings"
            )
        yield messages


def _report_long(over: list[tuple[int, str]], count: int, config: DataConfig, key: str) -> None:
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
