"""Prompts for reinforcement learning: rows of files or of a custom dataset class (data.custom_cls, constructed as in
verl) -> token ids, and the columns that the reward needs.

Independent of models and scorers; the order of the prompts is in order.py.
"""

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from hybridrl.config.compose import as_section
from hybridrl.config.findings import ConfigError
from hybridrl.config.schema import DataConfig
from hybridrl.core.carried import PICTURE_DIGEST, TEACHER
from hybridrl.core.pictures import digest_of, expanded
from hybridrl.data.custom_dataset import custom_rows
from hybridrl.data.formats import EPISODE_FIELDS, VERL, to_verl_format, with_objects
from hybridrl.data.pictures import PLACE, Encoded, PictureFault, T, content, decoded, in_threads
from hybridrl.data.processor import BLIND, THREADS, PictureReader, Seen
from hybridrl.data.prompt import Prompt, parse_row
from hybridrl.data.rows import DataRow, Faults, Rows, load_rows, report_overlong, with_progress
from hybridrl.data.template_arguments import arguments_read, check_template_arguments, row_arguments, unread_column
from hybridrl.data.tokenizer import Chat, TokenRows, as_chat, encode, render, truncate
from hybridrl.required import required

logger = logging.getLogger(__name__)

ENVIRONMENTS = ("agent_name", "env_class")  # verl's and SkyRL's columns for a row's environment
ROLES = {"system", "user", "assistant", "tool", "developer", "function"}  # usual ones
SYSTEM_FIX = "; put the system message into the user's, or set actor_rollout_ref.model.custom_chat_template"


@dataclass(frozen=True)
class PromptDataset(Sequence[Prompt]):
    """The tokenized prompts of a run, in the order of their files.

    `over` counts the rows longer than data.max_prompt_length, which were dropped or truncated. `environments` are the
    names in the columns agent_name and env_class; `fields` are the EPISODE_FIELDS that occur in rows. `ids` have one
    placeholder per picture; `seen` is what is known of these, as Seen after Seen.
    """

    rows: Rows
    ids: TokenRows
    config: DataConfig
    data_sources: set[str]
    over: int
    environments: set[str] = field(default_factory=set)
    fields: set[str] = field(default_factory=set)
    teacher_of: Callable[[Mapping[str, Any]], int] | None = None  # number of the teacher by a row's columns; -1: none
    reader: PictureReader | None = None
    seen: TokenRows = field(default_factory=TokenRows)
    _begun: dict[int, Future[Prompt]] = field(default_factory=dict, compare=False)  # read ahead, by index

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> Prompt:
        begun = self._begun.pop(index, None)
        return begun.result() if begun is not None else self._drawn(index)

    def __iter__(self) -> Iterator[Prompt]:
        for index in range(len(self)):
            self.read_ahead(range(index, min(index + 2 * THREADS, len(self))))
            yield self[index]

    def read_ahead(self, indices: Iterable[int], limit: float = math.inf) -> None:
        """Begin to read the pictures of these prompts in threads, in this order, up to `limit` bytes of pixels."""
        if self.reader is None:
            return
        for index in indices:
            tokens = sum(picture.tokens for picture in _seen(self.seen[index]))
            limit -= tokens * self.reader.bytes_per_token
            if limit < 0:
                return
            if tokens and index not in self._begun:
                self._begun[index] = self.reader.start(self._drawn, index)

    def without_pixels(self, index: int) -> Prompt:
        """Return a prompt whose pictures are not read; its ids have one placeholder for each."""
        prompt = parse_row(self.rows[index], self.config, sees=self.reader is not None)
        assert isinstance(prompt, Prompt)  # checked by load_prompts
        carried = prompt.carried
        if self.teacher_of is not None:
            number = np.array([self.teacher_of(prompt.columns)])
            carried = {**carried, TEACHER: number, "taught": number >= 0}
        return replace(prompt, ids=self.ids[index], carried=carried)

    def _drawn(self, index: int) -> Prompt:
        prompt = self.without_pixels(index)
        if self.reader is None or not prompt.encoded:
            return prompt
        try:
            seen = zip(prompt.encoded.values(), _seen(self.seen[index]), strict=True)
            pictures = tuple(self.reader.picture(*each) for each in seen)
        except PictureFault as fault:
            return replace(prompt, fault=f"{self.rows[index].place}: {fault}")
        whole = expanded(prompt.ids, self.reader.placeholder, pictures)
        return replace(prompt, ids=whole.ids, carried={**prompt.carried, **whole.carried}, pictures=pictures)

    @property
    def largest_id(self) -> int:
        return self.ids.largest

    @property
    def most_pictures(self) -> int:
        """The largest number of pictures of a prompt."""
        return int(self.seen.lengths.max(initial=0)) // len(Seen._fields)

    def teachers_of_pictures(self) -> set[int]:
        """Return the numbers of the teachers of prompts with pictures."""
        rows = [row for row, seen in zip(self.rows, self.seen.lengths, strict=True) if seen]
        return {self.teacher_of(with_objects(row.values)) for row in rows} if self.teacher_of else set()

    def pictures(self) -> Iterator[list[Seen]]:
        """Yield the pictures of each prompt."""
        return (_seen(self.seen[index]) for index in range(len(self.seen)))

    @property
    def lengths(self) -> np.ndarray:
        """The tokens of each prompt with all of its pictures [rows], int64."""
        added = [sum(picture.tokens - 1 for picture in seen) for seen in self.pictures()]
        return self.ids.lengths + np.array(added or 0)


def _seen(values: Sequence[int]) -> list[Seen]:
    return [Seen(*pair) for pair in zip(values[::2], values[1::2], strict=True)]


def load_prompts(
    files: list[str],
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_samples: int,
    shuffle: bool,
    key: str,
    custom_keys: dict[str, Any] | None = None,
    needs_truth: bool = True,
    pictures: PictureReader | str = BLIND,
) -> PromptDataset:
    """Read, check and tokenize the rows of `files`, or those of a custom dataset class.

    `max_samples`, `shuffle` and `key` are as in `load_rows`; `custom_keys` are the user's own keys under `data`, for a
    custom class; with `needs_truth` a ground truth must not be null. `pictures` reads those of rows, or says why rows
    may have none. A prompt beyond `config.max_prompt_length` is dropped, truncated or rejected as configured.
    Raises ConfigError that lists all bad rows together.
    """
    faults, selection = Faults(key), {"shuffle": shuffle, "seed": config.seed or 0}
    reader = pictures if isinstance(pictures, PictureReader) else None
    check_template_arguments(tokenizer, config.apply_chat_template_kwargs)
    if config.custom_cls.path:
        section = as_section(asdict(config) | (custom_keys or {}))
        processor = reader and reader.processor
        arguments = {"data_files": files, "tokenizer": tokenizer, "processor": processor, "config": section}
        rows = custom_rows(config, arguments | {"max_samples": max_samples}, faults).sample(max_samples, **selection)
    else:
        rows = load_rows(files, faults, key=key, max_samples=max_samples, **selection)
    parse = partial(parse_row, config=config, sees=reader is not None, blind=str(pictures))
    facts = _check(rows, partial(parse, needs_truth=needs_truth), config, tokenizer, faults, key, reader)
    kept, ids, seen, overlong, uncut = [], TokenRows(), TokenRows(), [], []
    parsed = (prompt for row in rows if isinstance(prompt := parse(row), Prompt))
    tokenized = zip(rows, facts.seen, prompt_tokens(parsed, config, tokenizer), strict=True)
    for index, (row, shown, tokens) in enumerate(with_progress(tokenized, len(rows))):
        if isinstance(tokens, TemplateError):
            faults.add(row.place, _template_fault(parse(row), tokens))
            continue
        if reader and (fault := reader.placeholder_fault(tokens, len(_seen(shown)))):
            faults.add(row.place, fault)
            continue
        length = len(tokens) + sum(picture.tokens - 1 for picture in _seen(shown))
        if length > config.max_prompt_length:
            overlong.append((length, row.place))
            if shown:
                uncut.append((length, row.place))
            if config.filter_overlong_prompts or config.truncation == "error" or shown:
                continue
            tokens = truncate(tokens, config.max_prompt_length, config.truncation)
        kept.append(index)
        ids.append(tokens)
        seen.append(shown)
    faults.close()
    _report_overlong(overlong, uncut, len(rows), config, key, dropped=bool(kept))
    names = facts.sources, len(overlong), facts.environments, facts.fields
    prompts = PromptDataset(rows.of(kept), ids, config, *names, reader=reader, seen=seen)
    if reader and (first := next((index for index in range(len(prompts)) if seen[index]), None)) is not None:
        _check_expansion(prompts, first, tokenizer, reader)
    return prompts


def _template_fault(prompt: Prompt | list[str], error: TemplateError) -> str:
    roles = [message["role"] for message in as_chat(prompt.messages)] if isinstance(prompt, Prompt) else []
    return f"the chat template rejects it: {error}{SYSTEM_FIX if 'system' in roles else ''}"


def _report_overlong(
    overlong: list[tuple[int, str]],
    uncut: list[tuple[int, str]],
    count: int,
    config: DataConfig,
    key: str,
    *,
    dropped: bool,
) -> None:
    """Log or reject the rows that are too long, of `count` in all; `uncut` are those of them that have pictures."""
    report = partial(report_overlong, limit=f"data.max_prompt_length={config.max_prompt_length}", key=key)
    drop = "drop them with data.filter_overlong_prompts=true"
    if config.filter_overlong_prompts or config.truncation == "error":
        fix = f"raise data.max_prompt_length, {drop} or truncate them with data.truncation=left|right|middle"
        report(overlong, count, outcome="dropped" if config.filter_overlong_prompts and dropped else "", fix=fix)
        return
    report(uncut, count, outcome="", fix=f"a picture cannot be cut: raise data.max_prompt_length, or {drop}")
    report(overlong, count, outcome=f"truncated (data.truncation={config.truncation})", fix="")


def _check_expansion(
    prompts: PromptDataset, index: int, tokenizer: PreTrainedTokenizerBase, reader: PictureReader
) -> None:
    prompt = prompts[index]
    if prompt.fault:
        raise ConfigError(prompt.fault)
    options = prompts.config.apply_chat_template_kwargs | row_arguments(prompt.columns, arguments_read(tokenizer))
    options |= {"tools": prompt.tools or None, "add_generation_prompt": True, "tokenize": False}
    text = str(tokenizer.apply_chat_template(as_chat(prompt.messages), **options))
    reader.check_expansion(text, prompt.encoded.values(), prompt.ids)


def prompt_tokens(
    prompts: Iterable[Prompt], config: DataConfig, tokenizer: PreTrainedTokenizerBase
) -> Iterator[list[int] | TemplateError]:
    """Yield the token ids of each prompt's messages, or the chat template's error for it."""
    if not tokenizer.chat_template:
        return encode(tokenizer, (str(prompt.messages) for prompt in prompts))
    read = arguments_read(tokenizer)
    chats = (Chat(as_chat(one.messages), one.tools, row_arguments(one.columns, read)) for one in prompts)
    return render(tokenizer, chats, config.apply_chat_template_kwargs, add_generation_prompt=True)


class Prompts(list[Prompt]):
    """Prompts without token ids."""

    def without_pixels(self, index: int) -> Prompt:
        return self[index]

    @property
    def data_sources(self) -> set[str]:
        return {one.data_source for one in self}


def read_prompts(
    files: list[str], config: DataConfig, *, max_samples: int, shuffle: bool, key: str, needs_truth: bool = True
) -> Prompts:
    """Read and check the rows of `files` without token ids, for callers such as an endpoint. The options are those of
    `load_prompts`. Pictures are known by digests of their files. Raises ConfigError that lists all bad rows together.
    """
    faults = Faults(key)
    rows = load_rows(files, faults, key=key, max_samples=max_samples, shuffle=shuffle, seed=config.seed or 0)
    parse = partial(parse_row, config=config, needs_truth=needs_truth, sees=True)
    return Prompts(_with_digests(prompt, seen) for _, prompt, seen in _parsed(rows, parse, faults, _file_digest))


def _file_digest(encoded: Encoded) -> int:
    """Decode a picture, for its faults, and return the digest of its file."""
    decoded(data := content(encoded))
    return digest_of({"file": np.frombuffer(data, np.uint8)})


def _with_digests(prompt: Prompt, digests: Sequence[int]) -> Prompt:
    return replace(prompt, carried={**prompt.carried, PICTURE_DIGEST: np.array(digests)}) if digests else prompt


def read_responses(
    files: list[str], config: DataConfig, *, key: str, truth_key: str, needs_truth: bool = True
) -> Prompts:
    """Read the rows of stored responses, which need no prompt; `truth_key` is the column of the ground truth,
    `needs_truth` as in `load_prompts`. Raises ConfigError that lists all bad rows together."""
    faults, prompts = Faults(key), Prompts()
    for row in load_rows(files, faults, key=key, max_samples=-1, shuffle=False, seed=0):
        shown = {} if config.prompt_key in row.values else {config.prompt_key: "none", config.image_key: None}
        values = row.values | shown | {"reward_model": row.values.get(truth_key)}
        prompt = parse_row(replace(row, values=values), config, needs_truth=needs_truth, sees=True)
        if isinstance(prompt, Prompt) and config.reward_fn_key not in {"data_source", *row.values}:
            names = ", ".join(row.values)
            faults.add(row.place, f"no data source: data.reward_fn_key={config.reward_fn_key}; the row has {names}")
        elif isinstance(prompt, Prompt):
            messages = prompt.messages if config.prompt_key in row.values else ""
            prompts.append(replace(prompt, messages=messages, columns=row.values))
        else:
            faults.add(row.place, "; ".join(prompt))
    faults.close()
    return prompts


def _parsed(
    rows: Iterable[DataRow],
    parse: Callable[[DataRow], Prompt | list[str]],
    faults: Faults,
    see: Callable[[Encoded], T] | None,
) -> Iterator[tuple[DataRow, Prompt, list[T]]]:
    """Yield the rows that are prompts, and the results of `see` for their pictures; raise ConfigError with all faults
    at the end."""

    def look(row: DataRow) -> tuple[DataRow, Prompt | list[str], list[T]]:
        prompt, seen, unread = parse(row), [], []
        for place, encoded in prompt.encoded.items() if isinstance(prompt, Prompt) else ():
            try:
                seen.append(required(see)(encoded))
            except PictureFault as fault:
                unread.append(f"{place}: {fault}")
        return row, unread or prompt, seen

    for row, prompt, seen in in_threads(look, rows) if see else map(look, rows):
        if isinstance(prompt, Prompt):
            yield row, prompt, seen
        else:
            faults.add(row.place, "; ".join(prompt))
    faults.close()


class _RowFacts(NamedTuple):
    """Of checked rows: their data sources, the environments and fields of episodes that they name, their pictures."""

    sources: set[str]
    environments: set[str]
    fields: set[str]
    seen: TokenRows


def _check(
    rows: Rows,
    parse: Callable[[DataRow], Prompt | list[str]],
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    faults: Faults,
    key: str,
    reader: PictureReader | None,
) -> _RowFacts:
    """Collect the faults of all rows, and log their formats and unknown roles."""
    formats, roles, template = Counter[str](), Counter[str](), str(tokenizer.chat_template or "")
    sources, environments, fields, pictures = set[str](), set[str](), set[str](), TokenRows()
    chats = with_tools = as_text = own_arguments = no_truth = marked = 0
    for row, prompt, seen in _parsed(with_progress(rows, len(rows), "checking"), parse, faults, reader and reader.seen):
        pictures.append([*chain.from_iterable(seen)])
        formats[to_verl_format(row.values, config.reward_fn_key)[0]] += 1
        sources.add(prompt.data_source)
        environments.update(str(name) for column in ENVIRONMENTS if (name := row.values.get(column)))
        fields |= {name for name in EPISODE_FIELDS if _holds(prompt, name)}
        chats += not isinstance(prompt.messages, str)
        with_tools += bool(prompt.tools)
        no_truth += prompt.ground_truth is None
        marked += reader is not None and not seen and PLACE in str(prompt.messages)
        own_arguments += bool(row_arguments(row.values, None))
        as_text += not isinstance(prompt.messages, str) and isinstance(row.values.get(config.prompt_key), str)
        roles.update({message["role"] for message in as_chat(prompt.messages)} - ROLES)
    for role, count in roles.items():
        if template and role not in template:
            cause = f"{count} rows have messages of the role {role}, which is not a usual one"
            logger.warning("%s: %s; rename it, such as to assistant, unless the model was trained on it", key, cause)
    if chats and not template:
        fix = "set actor_rollout_ref.model.custom_chat_template, or give the prompts as plain strings"
        raise ConfigError(f"{key}: {chats} rows have chat messages, but the tokenizer has no chat template", fix=fix)
    if unread := unread_column(own_arguments, arguments_read(tokenizer)):
        logger.warning("%s: %s", key, unread)
    if marked:
        logger.warning(
            "%s: %d rows have %s as text: no picture in data.image_key=%s", key, marked, PLACE, config.image_key
        )
    notes = [f"{count} in {name} format" for name, count in formats.items() if name != VERL]
    notes += [f"{with_tools} with tools (data.tools_key={config.tools_key})"] if with_tools else []
    notes += [f"{sum(pictures.lengths > 0)} with pictures"] if len(pictures) and pictures.lengths.any() else []
    notes += [f"{no_truth} without a ground truth"] if no_truth else []
    notes += [f"{as_text} with chat messages as JSON text"] if as_text else []
    logger.info("%s: %d rows%s", key, len(rows), f" ({', '.join(notes)})" if notes else "")
    return _RowFacts(sources, environments, fields, pictures)


def _holds(prompt: Prompt, name: str) -> bool:
    """Return whether a row has this field of episodes; columnar files have unused tools in every row, as null."""
    value = prompt.columns.get(name) or prompt.extra_info.get(name)
    return any(item is not None for item in value.values()) if isinstance(value, Mapping) else bool(value)
