"""Prompts for reinforcement learning: rows of files or of a custom dataset class (data.custom_cls, constructed as in
verl) -> token ids, and the columns that the reward needs.

Independent of models and scorers; the order of the prompts is in order.py.
"""

import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from hybridrl.config.compose import as_section
from hybridrl.config.custom_code import calling, construct, load_class
from hybridrl.config.files import LINES
from hybridrl.config.findings import ConfigError
from hybridrl.config.schema import DataConfig
from hybridrl.config.schema_parts import NO_SOURCE
from hybridrl.core.carried import TEACHER, Fields, brought
from hybridrl.data import NO_TRUTH, TRUTHS, no_prompt, no_truth
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
    as_object,
    as_tools,
    encode,
    from_json,
    multimodal_fault,
    render,
    truncate,
)

logger = logging.getLogger(__name__)

CUSTOM = "data.custom_cls.path"
VERL, SKYRL, AREAL = "verl", "SkyRL", "AReaL"
ENVIRONMENTS = ("agent_name", "env_class")  # verl's and SkyRL's columns for a row's environment
EPISODE_FIELDS = ("tools_kwargs", "interaction_kwargs", "tool_selection")  # columns, or fields of extra_info
ROLES = {"system", "user", "assistant", "tool", "developer", "function"}  # usual ones
SYSTEM_FIX = "; put the system message into the user's, or set actor_rollout_ref.model.custom_chat_template"
NULL_TRUTH = "the ground truth is null: set reward.custom_reward_function.path, a built-in reward needs one"
# AReaL's texts contain the turns of one model's chat template, which the template of the trained model adds again.
TURNS = re.compile(r"<[|\uff5c]User[|\uff5c]>(.*)<[|\uff5c]Assistant[|\uff5c]>(?:<think>)?\s*", re.DOTALL)


@dataclass(frozen=True)
class Prompt:
    """`row` counts the rows of all files from 0; `messages` is the prompt of the row, which may be a plain text;
    `columns` are all columns of the row, for environments. `tools` are the schemas that the row gives to the model."""

    row: int
    ids: list[int]
    messages: list[Message] | str
    data_source: str
    ground_truth: Any
    extra_info: dict[str, Any]
    columns: dict[str, Any] = field(default_factory=dict, compare=False)
    tools: list[dict[str, Any]] = field(default_factory=list, compare=False)
    carried: Fields = field(default_factory=dict, compare=False)  # from its columns carried.NAME


@dataclass(frozen=True)
class PromptDataset(Sequence[Prompt]):
    """The tokenized prompts of a run, in the order of their files.

    `over` counts the rows longer than data.max_prompt_length, which were dropped or truncated. `environments` are the
    names in the columns agent_name and env_class; `fields` are the EPISODE_FIELDS that occur in rows.
    """

    rows: Rows
    ids: TokenRows
    config: DataConfig
    data_sources: set[str]
    over: int
    environments: set[str] = field(default_factory=set)
    fields: set[str] = field(default_factory=set)
    teacher_of: Callable[[Mapping[str, Any]], int] | None = None  # number of the teacher by a row's columns; -1: none

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> Prompt:
        prompt = _parse(self.rows[index], self.config)
        assert isinstance(prompt, Prompt)  # checked by load_prompts
        if self.teacher_of is not None:
            number = np.array([self.teacher_of(prompt.columns)])
            prompt = replace(prompt, carried={**prompt.carried, TEACHER: number, "taught": number >= 0})
        return replace(prompt, ids=self.ids[index])

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
    custom_keys: dict[str, Any] | None = None,
    needs_truth: bool = True,
) -> PromptDataset:
    """Read, check and tokenize the rows of `files`, or those of a custom dataset class.

    `max_samples`, `shuffle` and `key` are as in `load_rows`; `custom_keys` are the user's own keys under `data`, for a
    custom class; with `needs_truth` a ground truth must not be null. A prompt beyond `config.max_prompt_length` is
    dropped, truncated or rejected as configured. Raises ConfigError that lists all bad rows together.
    """
    faults, selection = Faults(key), {"shuffle": shuffle, "seed": config.seed or 0}
    check_template_arguments(tokenizer, config.apply_chat_template_kwargs)
    if config.custom_cls.path:
        section = as_section(asdict(config) | (custom_keys or {}))
        arguments = {"data_files": files, "tokenizer": tokenizer, "processor": None, "config": section}
        rows = _custom_rows(config, arguments | {"max_samples": max_samples}, faults).sample(max_samples, **selection)
    else:
        rows = load_rows(files, faults, key=key, max_samples=max_samples, **selection)
    sources, environments, fields = _check(rows, config, tokenizer, faults, key, needs_truth)
    kept, ids, overlong = [], TokenRows(), []
    parsed = (prompt for row in rows if isinstance(prompt := _parse(row, config), Prompt))
    tokenized = zip(rows, prompt_tokens(parsed, config, tokenizer), strict=True)
    for index, (row, tokens) in enumerate(with_progress(tokenized, len(rows))):
        if isinstance(tokens, TemplateError):
            prompt = _parse(row, config)
            roles = [message["role"] for message in as_chat(prompt.messages)] if isinstance(prompt, Prompt) else []
            faults.add(row.place, f"the chat template rejects it: {tokens}{SYSTEM_FIX if 'system' in roles else ''}")
            continue
        if len(tokens) > config.max_prompt_length:
            overlong.append((len(tokens), row.place))
            if config.filter_overlong_prompts or config.truncation == "error":
                continue
            tokens = truncate(tokens, config.max_prompt_length, config.truncation)
        kept.append(index)
        ids.append(tokens)
    faults.close()
    outcome = f"truncated (data.truncation={config.truncation})" if config.truncation != "error" else ""
    if config.filter_overlong_prompts:
        outcome = "dropped" if kept else ""
    limit = f"data.max_prompt_length={config.max_prompt_length}"
    fix = "raise data.max_prompt_length, drop them with data.filter_overlong_prompts=true or truncate them with "
    fix += "data.truncation=left|right|middle"
    report_overlong(overlong, len(rows), limit, key=key, outcome=outcome, fix=fix)
    return PromptDataset(rows.of(kept), ids, config, sources, len(overlong), environments, fields)


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

    @property
    def data_sources(self) -> set[str]:
        return {one.data_source for one in self}


def read_prompts(
    files: list[str], config: DataConfig, *, max_samples: int, shuffle: bool, key: str, needs_truth: bool = True
) -> Prompts:
    """Read and check the rows of `files` without token ids, for callers such as an endpoint. The options are those of
    `load_prompts`. Raises ConfigError that lists all bad rows together."""
    faults = Faults(key)
    rows = load_rows(files, faults, key=key, max_samples=max_samples, shuffle=shuffle, seed=config.seed or 0)
    return Prompts(prompt for _, prompt in _parsed(rows, config, faults, needs_truth))


def read_responses(
    files: list[str], config: DataConfig, *, key: str, truth_key: str, needs_truth: bool = True
) -> Prompts:
    """Read the rows of stored responses, which need no prompt; `truth_key` is the column of the ground truth,
    `needs_truth` as in `load_prompts`. Raises ConfigError that lists all bad rows together."""
    faults, prompts = Faults(key), Prompts()
    for row in load_rows(files, faults, key=key, max_samples=-1, shuffle=False, seed=0):
        values = {config.prompt_key: "none"} | row.values | {"reward_model": row.values.get(truth_key)}
        prompt = _parse(replace(row, values=values), config, needs_truth=needs_truth)
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
    rows: Iterable[DataRow], config: DataConfig, faults: Faults, needs_truth: bool
) -> Iterator[tuple[DataRow, Prompt]]:
    """Yield the rows that are prompts; raise ConfigError with the faults of all others at the end."""
    for row in rows:
        prompt = _parse(row, config, needs_truth=needs_truth)
        if isinstance(prompt, Prompt):
            yield row, prompt
        else:
            faults.add(row.place, "; ".join(prompt))
    faults.close()


def _check(
    rows: Rows, config: DataConfig, tokenizer: PreTrainedTokenizerBase, faults: Faults, key: str, needs_truth: bool
) -> tuple[set[str], set[str], set[str]]:
    """Collect the faults of all rows, log their formats and unknown roles, and return their data sources, and the
    environments and fields of episodes that they name."""
    formats, roles, template = Counter[str](), Counter[str](), str(tokenizer.chat_template or "")
    sources, environments, fields = set[str](), set[str](), set[str]()
    chats = with_tools = as_text = own_arguments = no_truth = 0
    for row, prompt in _parsed(with_progress(rows, len(rows), "checking"), config, faults, needs_truth):
        formats[to_verl_format(row.values, config.reward_fn_key)[0]] += 1
        sources.add(prompt.data_source)
        environments.update(str(name) for column in ENVIRONMENTS if (name := row.values.get(column)))
        fields |= {name for name in EPISODE_FIELDS if _holds(prompt, name)}
        chats += not isinstance(prompt.messages, str)
        with_tools += bool(prompt.tools)
        no_truth += prompt.ground_truth is None
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
    notes = [f"{count} in {name} format" for name, count in formats.items() if name != VERL]
    notes += [f"{with_tools} with tools (data.tools_key={config.tools_key})"] if with_tools else []
    notes += [f"{no_truth} without a ground truth"] if no_truth else []
    notes += [f"{as_text} with chat messages as JSON text"] if as_text else []
    logger.info("%s: %d rows%s", key, len(rows), f" ({', '.join(notes)})" if notes else "")
    return sources, environments, fields


def _holds(prompt: Prompt, name: str) -> bool:
    """Return whether a row has this field of episodes; columnar files have unused tools in every row, as null."""
    value = prompt.columns.get(name) or prompt.extra_info.get(name)
    return any(item is not None for item in value.values()) if isinstance(value, Mapping) else bool(value)


def _parse(row: DataRow, config: DataConfig, *, needs_truth: bool = False) -> Prompt | list[str]:
    """Return the row as a prompt without ids, or all faults of the row."""
    columns = with_objects(row.values)
    form, values = to_verl_format(columns, config.reward_fn_key)
    prompt = values.get(config.prompt_key if form != AREAL else "prompt")
    messages = as_messages(prompt) or (prompt if isinstance(prompt, str) else None)
    tools = as_tools(values.get(config.tools_key))
    faults = []
    if tools is None:
        faults.append(f"data.tools_key={config.tools_key} must hold a list of schemas of tools ([{{...}}, ...])")
    if not messages:
        faults.append(no_prompt(columns, config.prompt_key))
    has_truth, ground_truth = True, None
    if (key := config.ground_truth_key) and key != NO_TRUTH:
        has_truth, ground_truth = key in columns, columns.get(key)
        ground_truth = (as_object(ground_truth) or {}).get("ground_truth", ground_truth)  # from an object that has it
        # Put it into the columns in which environments look for it.
        columns |= {name: (as_object(columns.get(name)) or {}) | {"ground_truth": ground_truth} for name in TRUTHS}
    elif not key:
        reward = as_object(values.get("reward_model")) or {}
        has_truth, ground_truth = "ground_truth" in reward, reward.get("ground_truth")
    if not has_truth:
        faults.append(no_truth(row.values, values.get("reward_model"), key))
    elif ground_truth is None and needs_truth:
        faults.append(NULL_TRUTH + " (a text file has none)" * row.place.partition(", ")[0].endswith(LINES))
    faults += [fault for fault in (multimodal_fault(row.values, messages), row_fault(row.values)) if fault]
    extra_info = values.get("extra_info") or {}
    if not isinstance(extra_info, dict):
        fix = "write it with json.dumps, or under another name"
        faults.append(f"extra_info is not an object ({{...}}) or JSON text of one, but {extra_info!r:.60}: {fix}")
    source = values.get(config.reward_fn_key)
    if isinstance(source, list | dict):
        faults.append(f"data.reward_fn_key={config.reward_fn_key} must hold a text, the row has {source!r:.60}")
    try:
        carried = brought(columns)
    except ValueError as error:
        return [*faults, str(error)]
    if faults or not messages:
        return faults
    data_source = NO_SOURCE if source is None else str(source) or NO_SOURCE
    return Prompt(row.number, [], messages, data_source, ground_truth, extra_info, columns, tools or [], carried)


def with_objects(columns: dict[str, Any]) -> dict[str, Any]:
    """Return the columns with JSON texts decoded, in the columns in which rewards and environments look."""
    columns = _decoded(columns, (*TRUTHS, "extra_info", *EPISODE_FIELDS))
    extra = columns.get("extra_info")
    return columns | {"extra_info": _decoded(extra, EPISODE_FIELDS)} if isinstance(extra, dict) else columns


def _decoded(values: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    held = {name: from_json(values[name]) for name in names if isinstance(values.get(name), str)}
    return values | {n: one for n, one in held.items() if isinstance(one, dict) or (one and n in EPISODE_FIELDS)}


def to_verl_format(values: dict[str, Any], source_key: str) -> tuple[str, dict[str, Any]]:
    """Return the name of a row's format, and the row in verl's format; `source_key` is the column of the data source.

    SkyRL: {prompt, env_class, reward_spec: {ground_truth}}. AReaL (boba): {prompt, query_id, task, solutions}, for
    programs input_output instead of solutions. Any other row is treated as verl's, and checked as such.
    """
    values = with_objects(values)
    if isinstance(values.get("reward_model"), dict):
        return VERL, values
    if isinstance(values.get("reward_spec"), dict):
        source = values.get(source_key) or values.get("env_class")
        return SKYRL, values | {"reward_model": values["reward_spec"], source_key: source}
    if "query_id" not in values or not ("solutions" in values or "input_output" in values):
        return VERL, values
    prompt, task, solutions = values.get("prompt"), values.get("task") or "math", values.get("solutions")
    if isinstance(prompt, str) and (turns := TURNS.fullmatch(prompt.strip())):
        prompt = turns[1].strip()
    if task == "code":
        truth = values.get("input_output")
    else:
        solutions = [solutions] if isinstance(solutions, str) else solutions or []
        truth = solutions[0] if len(solutions) == 1 else solutions or None
    parsed = {"prompt", "task", "solutions", "input_output"}
    return AREAL, {
        "prompt": prompt,
        source_key: values.get(source_key) or f"areal/{task}",
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": {name: value for name, value in values.items() if name not in parsed},
    }


def _custom_rows(config: DataConfig, arguments: dict[str, Any], faults: Faults) -> Rows:
    """Read every item of the dataset once, each a mapping of the columns that a file would have.

    The class gets those of the arguments that it accepts.
    """
    path, name = str(config.custom_cls.path), str(config.custom_cls.name)
    setting, dataset = f"{CUSTOM}={path}", construct(load_class(path, name, CUSTOM), arguments, CUSTOM, path)
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise ConfigError(f"{setting}: {name} has no __len__ and __getitem__", fix="rows are read by index: add both")
    rows = Rows()
    for number in with_progress(range(len(dataset)), len(dataset), "reading"):
        with calling(f"{setting}: {name}[{number}]", path):
            values = dataset[number]
        if not isinstance(values, Mapping):
            faults.add(f"{name}, row {number}", f"a {type(values).__name__}, not a mapping of columns")
            continue
        columns = dict(values)
        if config.prompt_key not in columns and "raw_prompt" in columns:  # the name in verl's own dataset class
            columns[config.prompt_key] = columns["raw_prompt"]
        rows.append(f"{name}, row {number}", columns)
    if not rows:
        faults.close()
        raise ConfigError(f"{setting}: {name} has no rows")
    return rows
