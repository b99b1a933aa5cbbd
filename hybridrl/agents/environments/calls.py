"""Tool calls in the text of a response: which format the model writes, and reading it.

A call that cannot be read is a call with an error for the policy, never the end of the episode. The usual formats are
those of FORMATS; vLLM, which reads the others, is imported for these only.

TagFormat reads calls with a tag for each argument, whose value is plain text between the tags and cannot be escaped.
A value with tags of the format in it is read whole if the text after it shows its end; otherwise the call has an
error: a tool never runs with a part of a value.
"""

import importlib
import logging
import re
from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from hybridrl.agents.environments import Schema, ToolCall
from hybridrl.agents.environments.call_values import (
    MOST_CALLS,
    Calls,
    Parse,
    bare,
    decoded,
    harmony,
    marked,
    pythonic,
    tool_call,
)
from hybridrl.agents.environments.dialogue import Dialogue
from hybridrl.agents.environments.template import RESPONSE, TOOL
from hybridrl.config.custom_code import attempt
from hybridrl.config.findings import ConfigError

KEY = "actor_rollout_ref.rollout.multi_turn.format"
VLLM = "hybridrl.core.rollout.vllm.tool_calls"
# verl's names of formats, and vLLM's for them.
VERL_NAMES = {
    "glm": "glm45",
    "seed": "seed_oss",
    "minimax": "minimax_m2",
    "kimi": "kimi_k2",
    "openai": "gpt-oss",
    "llama3_json": "json",
    "qwen3_xml": "qwen3_coder",
}
# Beginnings of model types -> vLLM's format, where the template's own calls are read by none of FORMATS.
MODEL_TYPES = {
    "glm": "glm45",
    "gemma": "gemma4",
    "deepseek": "deepseek_v3",
    "kimi": "kimi_k2",
    "minimax": "minimax_m2",
    "seed": "seed_oss",
    "mistral": "mistral",
    "ministral": "mistral",
    "granite": "granite",
    "ernie": "ernie45",
    "internlm": "internlm",
    "step3": "step3",
    "hunyuan": "hunyuan_a13b",
    "muse": "muse_glimmer",
}
THINK, REASONING_END = "<think>", "</think>"
BAR, BLANK = "\uff5c", "\u2581"  # characters of DeepSeek's tokens
NAMES = {"True": True, "False": False, "None": None}  # as templates write Python's values
NULL = ("null", "None")


class TagError(ValueError):
    """The reason why a call cannot be read, in words for the policy."""


@dataclass(frozen=True)
class TagFormat:
    """A format by its tags, as regular expressions; those of a function and of an argument have its name as their
    group. The tag `end_function` may be empty. With `lines` a value stands on lines of its own."""

    call: str
    function: str
    argument: str
    end_argument: str
    end_function: str
    end_call: str
    lines: bool = False

    def __call__(self, text: str, tools: Sequence[Schema]) -> Calls:
        begin = re.compile(self.call)
        if (mark := begin.search(text)) is None:
            return text, []
        content, calls, reader = text[: mark.start()], list[ToolCall](), _Reader(self, text, tools)
        while mark and len(calls) < MOST_CALLS:
            at = mark.end()
            try:
                call, at = reader.call(at)
            except TagError as error:
                call = ToolCall("", {}, error=f"the call cannot be read: {error}")
            calls.append(call)
            mark = begin.search(text, at)
        return content, calls


class _Reader:
    """The tags of a text, their nesting, and the ends of arguments after which another argument or the end may come."""

    def __init__(self, format: TagFormat, text: str, tools: Sequence[Schema]) -> None:
        self.format, self.text, self.tools = format, text, tools
        self.tags = list(re.finditer(f"{format.argument}|({format.end_argument})", text))
        self.starts = [tag.start() for tag in self.tags]
        last = rf"{format.end_function}\s*{format.end_call}"
        self.function, self.argument = re.compile(rf"\s*{format.function}"), re.compile(rf"\s*{format.argument}")
        self.end, follows = re.compile(rf"\s*{last}"), re.compile(rf"\s*(?:{format.argument}|{last})")
        self.stray = re.compile(f"({format.call})|{format.end_argument}")
        self.ends = [tag for tag in self.tags if tag[2] and follows.match(text, tag.end())]
        self.end_starts = [tag.start() for tag in self.ends]
        self.pairs: dict[int, re.Match[str]] = {}  # begin of a value -> its argument's end
        opened: list[int] = []
        for tag in self.tags:
            if tag[1]:
                opened.append(tag.end())
            elif opened:
                self.pairs[opened.pop()] = tag

    def call(self, at: int) -> tuple[ToolCall, int]:
        """Return the call that begins at this place, and its end."""
        if (function := self.function.match(self.text, at)) is None:
            raise TagError("it does not begin with the name of a tool")
        properties, arguments = _properties(function[1], self.tools), dict[str, Any]()
        at = function.end()
        while argument := self.argument.match(self.text, at):
            end = self.end_of(argument, properties)
            value = self.text[argument.end() : end.start()]
            if self.format.lines:
                value = value.removeprefix("\n").removesuffix("\n")
            if argument[1] in arguments:
                raise TagError(f"{argument[1]} is given twice")
            arguments[argument[1]] = typed(value, properties.get(argument[1]))
            at = end.end()
        if (end := self.end.match(self.text, at)) is None:
            raise TagError("there is a text that is not an argument")
        stray = self.stray.search(self.text, end.end())
        if stray and not stray[1]:
            raise TagError("a value contains tags of calls, and it is not clear where it ends")
        return tool_call(function[1], arguments), end.end()

    def end_of(self, argument: re.Match[str], arguments: Collection[str]) -> re.Match[str]:
        """Return the tag that ends an argument's value: its own, else the first before another argument or the end of
        the call. `arguments` are the names of the tool's."""
        begin = argument.end()
        index = bisect_left(self.end_starts, begin)
        if index == len(self.ends):
            raise TagError(f"{argument[1]} has no end")
        end, pair = self.ends[index], self.pairs.get(begin)
        if pair and self.end_starts[bisect_left(self.end_starts, pair.start()) % len(self.ends)] == pair.start():
            following = self.argument.match(self.text, end.end())
            if end is not pair and following and following[1] in arguments:
                raise TagError(f"it is not clear where {argument[1]} ends")
            return pair
        inner = self.tags[bisect_left(self.starts, begin) : bisect_left(self.starts, end.start())]
        names = [tag[1] for tag in inner]
        if any(name in arguments for name in names) or (None in names and any(names)):
            raise TagError(f"it is not clear where {argument[1]} ends")
        return end


def _properties(name: str, tools: Sequence[Schema]) -> Mapping[str, Any]:
    """Return the schemas of a tool's arguments by name."""
    functions = [tool["function"] for tool in tools if tool["function"]["name"] == name]
    return (functions[0].get("parameters") or {}).get("properties") or {} if functions else {}


def typed(value: str, schema: Any) -> Any:
    """Return the value of an argument: a text, or JSON if its schema allows no text."""
    kinds = _kinds(schema)
    if "null" in kinds and value in NULL:
        return None
    if not kinds or "string" in kinds:
        return value
    if value.strip() in NAMES:
        return NAMES[value.strip()]
    read, end, error = decoded(value)
    return value if error or value[end:].strip() else read


def _kinds(schema: Any) -> set[str]:
    """Return the types that a schema allows, as far as it names them."""
    if not isinstance(schema, Mapping):
        return set()
    kinds = schema.get("type") or []
    kinds = {kinds} if isinstance(kinds, str) else set(kinds)
    for inner in (*(schema.get("anyOf") or ()), *(schema.get("oneOf") or ())):
        kinds |= _kinds(inner)
    return kinds | ({"null"} if schema.get("nullable") else set())


FORMATS: dict[str, Parse] = {
    "hermes": marked("<tool_call>", end="</tool_call>"),
    "qwen3_coder": TagFormat(
        "<tool_call>",
        r"<function=([^<>\n]+)>",
        r"<parameter=([^<>\n]+)>",
        "</parameter>",
        "</function>",
        "</tool_call>",
        lines=True,
    ),
    "gpt-oss": harmony,
    "mistral": marked(
        r"\[TOOL_CALLS\]", r"\s*(?=[\[{])|\s*([\w.-]+)\s*(?:\[CALL_ID\]\s*\w+\s*)?(?:\[ARGS\])?", end="</s>"
    ),
    "deepseek_v3": marked(
        f"(?:<{BAR}tool{BLANK}calls{BLANK}begin{BAR}>\\s*)?<{BAR}tool{BLANK}call{BLANK}begin{BAR}>",
        rf"\w*<{BAR}tool{BLANK}sep{BAR}>([^<>\n]+)\n```(?:json)?",
        end=f"```\\s*<{BAR}tool{BLANK}call{BLANK}end{BAR}>",
    ),
    "deepseek_v31": marked(
        f"(?:<{BAR}tool{BLANK}calls{BLANK}begin{BAR}>\\s*)?<{BAR}tool{BLANK}call{BLANK}begin{BAR}>",
        rf"\s*([^<>\n]+)<{BAR}tool{BLANK}sep{BAR}>",
        end=f"<{BAR}tool{BLANK}call{BLANK}end{BAR}>",
    ),
    "kimi_k2": marked(
        r"(?:<\|tool_calls_section_begin\|>\s*)?<\|tool_call_begin\|>",
        r"\s*(?:functions\.)?([\w.-]+?)(?::\d+)?\s*<\|tool_call_argument_begin\|>",
        end=r"<\|tool_call_end\|>",
    ),
    "glm45": TagFormat(
        "<tool_call>",
        r"([^<>\s]+)",
        r"<arg_key>([^<>\n]+)</arg_key>\s*<arg_value>",
        "</arg_value>",
        "",
        "</tool_call>",
    ),
    "json": bare,  # last, as other formats have JSON and lists within their marks
    "pythonic": pythonic,
}

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class CallParser:
    """Reads the tool calls of a response in one format; calls in its reasoning count for nothing."""

    format: str
    parse: Parse

    def __call__(self, text: str, tools: Sequence[Schema]) -> tuple[str, list[ToolCall]]:
        """Return the content before the first call, and the calls; decode `text` with its special tokens, but without
        the end token."""
        at = self._reasoning_end(text, tools)
        content, calls = self.parse(text[at:], tools)
        return text[:at] + content, [replace(call, id=f"call{n:05}") for n, call in enumerate(calls)]

    def _reasoning_end(self, text: str, tools: Sequence[Schema]) -> int:
        """Return where the reasoning of a response ends; its beginning may be in the prompt. The tag may also be in the
        arguments of a call, which can then be read, but not as far as the tag."""
        at = text.find(REASONING_END)
        if at < 0:
            return 0
        if not text.lstrip().startswith(THINK):
            cut, whole = self.parse(text[:at], tools)[1], self.parse(text, tools)[1]
            first = next((number for number, call in enumerate(cut) if call.error), len(whole))
            if first < len(whole) and not whole[first].error:
                return 0
        return at + len(REASONING_END)

    def reads(self, written: str) -> bool:
        """Return whether this is the format of a call that the template has written (Dialogue.written_call)."""
        calls = self(written, [TOOL])[1]
        return [(call.name, call.arguments) for call in calls] == [("lookup", {"word": RESPONSE})]


def call_parser(format: str, model_type: str, dialogue: Dialogue) -> CallParser:
    """Return the parser of a format; `auto` is the format in which the model's chat template writes calls.

    Raises ConfigError for an unknown format, or if the tokenizer lacks the format's tokens.
    """
    format = VERL_NAMES.get(format, format)
    if format in FORMATS:
        return CallParser(format, FORMATS[format])
    written = dialogue.written_call()
    if format != "auto":
        return _from_vllm(format, written, dialogue.tokenizer)
    for name, parse in FORMATS.items():
        if (parser := CallParser(name, parse)).reads(written):
            return parser
    name = next((name for start, name in MODEL_TYPES.items() if model_type.startswith(start)), "")
    if not written or not name:
        what = "which no known format is" if written else "but its chat template writes no calls"
        cause = f"{KEY}=auto follows the calls of the model, {what} (model type {model_type})"
        raise ConfigError(cause, fix=f"set {KEY} to one of {_names()}")
    return _from_vllm(name, written, dialogue.tokenizer)


def named_parser(format: str, tokenizer: PreTrainedTokenizerBase) -> CallParser:
    """Return the parser of a format by its name alone, or verl's for it. Raises ConfigError for any other."""
    format = VERL_NAMES.get(format, format)
    return CallParser(format, FORMATS[format]) if format in FORMATS else _from_vllm(format, "", tokenizer)


def _names() -> str:
    return ", ".join(sorted({*FORMATS, *VERL_NAMES, *importlib.import_module(VLLM).parser_names()}))


def _from_vllm(name: str, written: str, tokenizer: PreTrainedTokenizerBase) -> CallParser:
    parsers = importlib.import_module(VLLM)
    if name not in parsers.parser_names():
        raise ConfigError(f"{KEY}={name}: unknown", fix=f"set it to one of auto, {_names()}")
    try:
        parse = parsers.load_parser(name, tokenizer)
    except (RuntimeError, ValueError) as error:
        raise ConfigError(f"{KEY}={name}: {error}", fix=f"set {KEY}=auto") from error
    # The opening tag of a call: the parsers report unreadable calls as none.
    tags = re.findall(r"<[^<>/][^<>]*>|\[[A-Z_]+\]", written.rpartition("lookup")[0])
    opening = tags[-1] if tags else None

    def read(text: str, tools: Sequence[Schema]) -> tuple[str, list[ToolCall]]:
        parsed = attempt(lambda: parse(text, tools))
        if isinstance(parsed, Exception):
            logger.warning("vLLM's parser of %s calls failed on %.200r", name, text, exc_info=parsed)
            parsed = text, []
        content, pairs = parsed
        if pairs or opening is None or opening not in text:
            return content, [tool_call(name, arguments) for name, arguments in pairs[:MOST_CALLS]]
        return text.partition(opening)[0], [ToolCall("", {}, error=f"the call after {opening} cannot be read")]

    return CallParser(name, read)
