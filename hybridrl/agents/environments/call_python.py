"""Tool calls that are a Python list: [name(argument="value"), ...]."""

import ast
import re
from collections.abc import Sequence
from typing import Any

from hybridrl.agents.environments.call_json import MOST_CALLS, Calls, tool_call
from hybridrl.agents.environments.environment import Schema, ToolCall

OPENING = re.compile(r"(?:^[ \t]*|<\|[a-z_]+\|>\s{0,8})(?=\[\s*([A-Za-z_][\w.]*)\()", re.MULTILINE)
MOST_LISTS = 8  # that are tried in a response
NAME, ARGUMENT = re.compile(r"\s*([A-Za-z_][\w.]*)\s*(?=\()"), re.compile(r"\s*([A-Za-z_]\w*)\s*=(?!=)")
# Texts, brackets and commas; a quotation mark by itself begins a text that does not end.
TOKENS = re.compile(
    r'"""(?:[^\\]|\\.)*?"""|'
    r"'''(?:[^\\]|\\.)*?'''|"
    r'"(?:[^"\\\n]|\\.)*"|'
    r"'(?:[^'\\\n]|\\.)*'|"
    r"(?P<endless>[\"'])|\\.|(?P<open>[(\[{])|(?P<close>[)\]}])|(?P<comma>,)",
    re.DOTALL,
)
JSON_NAMES = {"true": True, "false": False, "null": None}


def pythonic(text: str, tools: Sequence[Schema]) -> Calls:
    """Read the lists at the beginning of a line or after a special token.

    A list of anything else than calls is an answer, unless it begins with the name of an offered tool.
    """
    offered = {tool["function"]["name"] for tool in tools}
    content, calls, end = text, list[ToolCall](), 0
    for _ in range(MOST_LISTS):
        if (opening := OPENING.search(text, end)) is None:
            break
        end, found = opening.end() + 1, list[ToolCall]()
        try:
            pieces, end = _items(text, opening.end())
            found = [_call(piece) for piece in pieces[:MOST_CALLS]]
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            if opening[1] in offered:
                reason = f"the calls cannot be read ({error}); they are a list of the form [name(argument=value)]"
                found = [ToolCall("", {}, error=reason)]
        content = text[: opening.start()] if found and not calls else content
        calls += found
    return content, calls


def _items(text: str, at: int) -> tuple[list[str], int]:
    """Return what the commas separate within the brackets that open here, and where they close."""
    depth, begin, items = 0, at + 1, list[str]()
    for token in TOKENS.finditer(text, at):
        depth += bool(token["open"]) - bool(token["close"])
        if token["endless"]:
            raise ValueError("a text has no end")
        if depth == 0 or (depth == 1 and token["comma"]):
            items.append(text[begin : token.start()])
            begin = token.end()
        if depth == 0:
            return items[:-1] if not items[-1].strip() else items, token.end()
    raise ValueError("a bracket is not closed")


def _call(source: str) -> ToolCall:
    if (name := NAME.match(source)) is None:
        raise ValueError(f"{source.strip()!r:.40} is no call")
    items, end = _items(source, name.end())
    if source[end:].strip():
        raise ValueError(f"{source[end:].strip()!r:.40} follows a call")
    arguments = {}
    for item in items:
        if (argument := ARGUMENT.match(item)) is None:
            raise ValueError("arguments are given by name")
        arguments[argument[1]] = _literal(ast.parse(item[argument.end() :].strip(), mode="eval").body)
    return tool_call(name[1], arguments)


def _literal(node: ast.expr) -> Any:
    """Return the value of a Python or JSON literal."""
    match node:
        case ast.Constant(value=str() as text):  # JSON writes a character beyond U+FFFF as two surrogates
            return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16")
        case ast.Constant(value=bool() | int() | float() | None as value):
            return value
        case ast.Name(id=name) if name in JSON_NAMES:
            return JSON_NAMES[name]
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return -number
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_literal(item) for item in items]
        case ast.Dict(keys=keys, values=values) if all(isinstance(key, ast.Constant) for key in keys):
            return {str(_literal(key)): _literal(value) for key, value in zip(keys, values, strict=True) if key}
    raise ValueError("a value is no literal")
