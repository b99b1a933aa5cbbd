"""Tool calls in the text of a response: which format the model writes, and reading it.

A call that cannot be read is a call with an error for the policy, never the end of the episode. The usual formats are
read here; vLLM, which reads the others, is imported for these only.
"""

import ast
import contextlib
import importlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from hybridrl.config.findings import ConfigError
from hybridrl.environments.dialogue import Dialogue
from hybridrl.environments.environment import Schema, ToolCall
from hybridrl.environments.template import RESPONSE, TOOL

KEY = "actor_rollout_ref.rollout.multi_turn.format"
VLLM = "hybridrl.rollout.vllm.tool_calls"
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
SHAPE = 'a call is {"name": ..., "arguments": {...}}'
REASONING_END = "</think>"
JSON_NAMES = {"true": True, "false": False, "null": None}

Parse = Callable[[str, Sequence[Schema]], tuple[str, list[ToolCall]]]


@dataclass(frozen=True)
class CallParser:
    """Reads the tool calls of a response in one format; calls in its reasoning count for nothing."""

    format: str
    parse: Parse

    def __call__(self, text: str, tools: Sequence[Schema]) -> tuple[str, list[ToolCall]]:
        """Return the content before the first call, and the calls; decode `text` with its special tokens, but without
        the end token."""
        reasoning, end, rest = text.partition(REASONING_END)
        if not end:
            reasoning, rest = "", text
        content, calls = self.parse(rest, tools)
        return reasoning + end + content, [replace(call, id=f"call{n:05}") for n, call in enumerate(calls)]

    def reads(self, written: str) -> bool:
        """Return whether this is the format of a call that the template has written (Dialogue.written_call)."""
        calls = self(written, [TOOL])[1]
        return [(call.name, call.arguments) for call in calls] == [("lookup", {"word": RESPONSE})]


def call_parser(format: str, model_type: str, dialogue: Dialogue) -> CallParser:
    """Return the parser of a format; `auto` is the format in which the model's chat template writes calls.

    Raises ConfigError for a format that is unknown, or that the tokenizer lacks tokens for.
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


def _names() -> str:
    return ", ".join(sorted({*FORMATS, *VERL_NAMES, *importlib.import_module(VLLM).names()}))


def _from_vllm(name: str, written: str, tokenizer: PreTrainedTokenizerBase) -> CallParser:
    parsers = importlib.import_module(VLLM)
    if name not in parsers.names():
        raise ConfigError(f"{KEY}={name}: unknown", fix=f"set it to one of auto, {_names()}")
    try:
        parse = parsers.load(name, tokenizer)
    except (RuntimeError, ValueError) as error:
        raise ConfigError(f"{KEY}={name}: {error}", fix=f"set {KEY}=auto") from error
    # What opens a call: the parsers report a call that they cannot read as none.
    tags = re.findall(r"<[^<>/][^<>]*>|\[[A-Z_]+\]", written.rpartition("lookup")[0])
    opening = tags[-1] if tags else None

    def read(text: str, tools: Sequence[Schema]) -> tuple[str, list[ToolCall]]:
        content, pairs = parse(text, tools)
        if pairs or opening is None or opening not in text:
            return content, [_call(name, arguments) for name, arguments in pairs]
        return text.partition(opening)[0], [ToolCall("", {}, error=f"the call after {opening} cannot be read")]

    return CallParser(name, read)


# -- formats -----------------------------------------------------------------------------------------------------------


def _call(name: Any, arguments: Any) -> ToolCall:
    """Return the call, with an error if its name is no text or its arguments no JSON object, nor the text of one."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError as error:
            return ToolCall(str(name), {}, error=f"the arguments are not valid JSON ({error}); {SHAPE}")
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return ToolCall(name if isinstance(name, str) else "", {}, error=f"name or arguments are missing; {SHAPE}")
    return ToolCall(name, arguments)


def _call_of(value: Any) -> ToolCall:
    value = value if isinstance(value, dict) else {}
    return _call(value.get("name"), value.get("arguments", value.get("parameters")))


def _hermes(text: str, tools: Sequence[Schema]) -> tuple[str, list[ToolCall]]:
    """<tool_call>{"name": ..., "arguments": {...}}</tool_call>"""
    content, *bodies = text.split("<tool_call>")
    calls = []
    for body in bodies:
        try:
            calls.append(_call_of(json.loads(body.partition("</tool_call>")[0])))
        except ValueError as error:
            calls.append(ToolCall("", {}, error=f"the call is not valid JSON ({error}); {SHAPE}"))
    return content, calls


def _tagged(text: str, tools: Sequence[Schema]) -> tuple[str, list[ToolCall]]:
    """<tool_call><function=name><parameter=word>value</parameter></function></tool_call>; values that are not text by
    the tool's schema are JSON."""
    content, *bodies = text.split("<tool_call>")
    calls = []
    for body in bodies:
        function = re.match(r"\s*<function=([^>]+)>", body)
        if not function:
            calls.append(ToolCall("", {}, error="the call does not begin with <function=name>"))
            continue
        pairs = re.findall(r"<parameter=([^>]+)>\n?(.*?)\n?</parameter>", body, re.DOTALL)
        types = _types(function[1], tools)
        calls.append(ToolCall(function[1], {key: _typed(value, types.get(key)) for key, value in pairs}))
    return content, calls


def _types(name: str, tools: Sequence[Schema]) -> dict[str, Any]:
    """Return the types of a tool's arguments by name."""
    functions = [tool["function"] for tool in tools if tool["function"]["name"] == name]
    properties = functions[0].get("parameters", {}).get("properties", {}) if functions else {}
    return {key: value.get("type") for key, value in properties.items()}


def _typed(value: str, kind: Any) -> Any:
    if kind in (None, "string"):
        return value
    with contextlib.suppress(ValueError):
        return json.loads(value)
    return value


def _json(text: str, tools: Sequence[Schema]) -> tuple[str, list[ToolCall]]:
    """{"name": ..., "parameters": {...}}, several of them in a list or separated by a semicolon."""
    opening = re.search(r'(?:<\|python_tag\|>\s*)?(?:\[\s*)?\{\s*"(?:name|type)"\s*:', text)
    if not opening:
        return text, []
    at, calls = text.index("[" if "[" in opening[0] else "{", opening.start()), []
    while text[at : at + 1] in ("{", "["):
        try:
            value, at = json.JSONDecoder().raw_decode(text, at)
        except ValueError as error:
            calls.append(ToolCall("", {}, error=f"the call is not valid JSON ({error}); {SHAPE}"))
            break
        calls += [_call_of(item) for item in (value if isinstance(value, list) else [value])]
        at += len(text[at:]) - len(text[at:].lstrip("; \n"))
    return text[: opening.start()], calls


def _pythonic(text: str, tools: Sequence[Schema]) -> tuple[str, list[ToolCall]]:
    """[name(argument="value"), ...] at the beginning of a line."""
    opening = re.search(r"^[ \t]*((?:<[^<>]*>)?\s*)\[\s*[A-Za-z_][\w.]*\(", text, re.MULTILINE)
    if not opening:
        return text, []
    content, source = text[: opening.start()], text[opening.end(1) : text.rfind("]") + 1]
    try:
        calls = [_python_call(node) for node in ast.parse(source, mode="eval").body.elts]  # type: ignore[attr-defined]
    except (SyntaxError, ValueError, AttributeError, RecursionError, MemoryError) as error:
        reason = f"the calls cannot be read ({error}); they are a list of the form [name(argument=value)]"
        calls = [ToolCall("", {}, error=reason)]
    return content, calls


def _python_call(node: ast.expr) -> ToolCall:
    if not isinstance(node, ast.Call) or node.args or any(word.arg is None for word in node.keywords):
        raise ValueError("arguments are given by name")
    return ToolCall(ast.unparse(node.func), {str(word.arg): _literal(word.value) for word in node.keywords})


def _literal(node: ast.expr) -> Any:
    if isinstance(node, ast.Name) and node.id in JSON_NAMES:
        return JSON_NAMES[node.id]
    return ast.literal_eval(node)


def _harmony(text: str, tools: Sequence[Schema]) -> tuple[str, list[ToolCall]]:
    """to=functions.name ... <|message|>{...}, in the header of a message."""
    content, *bodies = re.split(r"to=functions\.", text)
    calls = []
    for body in bodies:
        header, _, arguments = body.partition("<|message|>")
        name = re.match(r"[\w.-]*", header)[0]  # type: ignore[index]
        calls.append(_call(name, re.split(r"<\|(?:call|end)\|>", arguments)[0]))
    return content, calls


FORMATS: dict[str, Parse] = {
    "hermes": _hermes,
    "qwen3_coder": _tagged,
    "json": _json,
    "pythonic": _pythonic,
    "gpt-oss": _harmony,
}
