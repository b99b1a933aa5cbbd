"""Tool calls that are values in the text of a response: JSON, between the marks of a format or without any, or a Python
list, [name(argument="value"), ...].

JSON is read from its beginning to its own end, so that marks within its texts end no call. No text raises, and reading
takes a time in proportion to the text's length.
"""

import ast
import json
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

from hybridrl.agents.environments import Schema, ToolCall

Calls = tuple[str, list[ToolCall]]  # the content before the first call, and the calls
Parse = Callable[[str, Sequence[Schema]], Calls]

SHAPE = 'a call is {"name": ..., "arguments": {...}}'
ARGUMENTS = ("arguments", "parameters")
FIELDS = frozenset(("name", "type", "id", *ARGUMENTS))
MOST_CALLS = 128  # read from one response
DEEPEST = 64  # lists and objects within one another in the arguments of a call: more would end what walks them
SURROGATE = re.compile("[\ud800-\udfff]")
BARE = re.compile(r'(?:<\|python_tag\|>\s*)?((?:\[\s*)?\{\s*"(?:name|type|id|function|arguments|parameters)"\s*:)')
BETWEEN_BARE = re.compile(r"(?:[;,\s]|<\|python_tag\|>)*")
GIVES_ARGUMENTS = re.compile(r'"(?:arguments|parameters)"\s*:\s*[{"]')
HARMONY = re.compile(r"to=functions\.(?P<name>[\w.-]*)|<\|(?P<part>message|start|end|call|return)\|>")
WHITE_SPACE = re.compile(r"\s+")
HARMONY_END = re.compile(r"\s*(?:<\|(?:start|end|call|return)\|>|\Z)")
OPENING = re.compile(r"(?:^[ \t]*|<\|[a-z_]+\|>\s{0,8})(?=\[\s*([A-Za-z_][\w.]*)\()", re.MULTILINE)
MOST_LISTS = 8  # tried in one response
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


def decoded(text: str, at: int = 0) -> tuple[Any, int, str]:
    """Return the JSON value at this place after white space, where it ends, and why it cannot be read."""
    try:
        if space := WHITE_SPACE.match(text, at):
            at = space.end()
        return *json.JSONDecoder().raw_decode(text, at), ""
    except json.JSONDecodeError as error:
        return None, max(error.pos, at), f"the call is not valid JSON ({error})"
    except ValueError as error:  # a number of too many digits
        return None, at, f"the call is not valid JSON ({error})"
    except RecursionError:
        return None, at, "the call is nested too deeply"


def tool_call(name: Any, arguments: Any) -> ToolCall:
    """Return the call. It has an error unless its name is a text and its arguments a JSON object or the text of one.

    Arguments that are absent, null or an empty text are none.
    """
    if isinstance(arguments, str) and arguments.strip():
        arguments, end, error = decoded(text := arguments)
        if error or text[end:].strip():
            return ToolCall(str(name), {}, error=f"the arguments are not valid JSON; {SHAPE}")
    arguments = {} if arguments is None or isinstance(arguments, str) else arguments
    if not name or not isinstance(name, str) or not isinstance(arguments, dict):
        return ToolCall(name if isinstance(name, str) else "", {}, error=f"name or arguments are missing; {SHAPE}")
    if error := _unusable(arguments):
        return ToolCall(name, {}, error=error)
    return ToolCall(name, arguments)


def _unusable(arguments: dict[str, Any]) -> str:
    """Return why what reads the arguments could fail, "" if it cannot."""
    level: list[Any] = [arguments]
    for _ in range(DEEPEST):
        objects = [item for item in level if isinstance(item, dict)]
        texts = [item for item in [*level, *(key for item in objects for key in item)] if isinstance(item, str)]
        if any(isinstance(item, float) and not math.isfinite(item) for item in level):
            return "the arguments have a number that is infinite or none (NaN)"
        if any(not text.isascii() and SURROGATE.search(text) for text in texts):
            return "the arguments have half of a character (a lone surrogate)"
        level = [inner for item in level if isinstance(item, list) for inner in item]
        level += [inner for item in objects for inner in item.values()]
        if not level:
            return ""
    return f"the arguments are nested more than {DEEPEST} levels deep"


def _calls_of(value: Any) -> list[ToolCall]:
    """Return the calls that a JSON value is: one, or a list of them."""
    return [_call_of(item) for item in value] if isinstance(value, list) and value else [_call_of(value)]


def _call_of(value: Any) -> ToolCall:
    value = _function(value)
    present = [name for name in ARGUMENTS if name in value]
    if unknown := [] if present else sorted(value.keys() - FIELDS):
        error = f"the call has {', '.join(unknown)} in place of arguments; {SHAPE}"
        return ToolCall(str(value.get("name") or ""), {}, error=error)
    return tool_call(value.get("name"), value[present[0]] if present else None)


def _function(value: Any) -> dict[str, Any]:
    """Return the fields of a call, which some models write under `function`; none if `value` is not an object."""
    value = value if isinstance(value, dict) else {}
    return value["function"] if isinstance(value.get("function"), dict) and "name" not in value else value


def marked(tag: str, header: str = "", end: str = r"\Z") -> Parse:
    """Return the reader of calls that are JSON after a mark, by regular expressions: `tag` matches the mark, `header`
    the text after it (its group is the tool's name, if the JSON has none), and `end` the end of a call."""
    begin, head, close = re.compile(tag), re.compile(header), re.compile(rf"\s*(?:{end}|{tag}|\Z)")

    def read(text: str, tools: Sequence[Schema]) -> Calls:
        content, calls, at = text, list[ToolCall](), 0
        while len(calls) < MOST_CALLS and (mark := begin.search(text, at)):
            content, at = content if calls else text[: mark.start()], mark.end()
            if (name_match := head.match(text, at)) is None:
                calls.append(ToolCall("", {}, error=f"the call does not begin with its name after {mark[0].strip()}"))
                continue
            name = name_match[1] if head.groups else None
            value, at, error = _body(text, name_match.end(), close, named=name is not None)
            if error:
                calls.append(ToolCall(name or "", {}, error=f"{error}; {SHAPE}"))
            else:
                calls += _calls_of(value) if name is None else [tool_call(name, value)]
        return content, calls

    return read


def _body(text: str, at: int, close: re.Pattern[str], *, named: bool) -> tuple[Any, int, str]:
    """Return the JSON of a call, where it ends, and why it cannot be read; a call with a name may have none."""
    if named and close.match(text, at):
        return None, at, ""
    value, at, error = decoded(text, at)
    return value, at, error or ("" if close.match(text, at) else "the call has a text after its JSON")


def bare(text: str, tools: Sequence[Schema]) -> Calls:
    """Read {"name": ..., "parameters": {...}}, several of them in a list or separated by a semicolon.

    JSON of another form is an answer, unless it names an offered tool.
    """
    offered = {tool["function"]["name"] for tool in tools}
    content, calls, at = text, list[ToolCall](), 0
    for _ in range(MOST_CALLS):
        opening = BARE.search(text, at)
        if opening is None or (calls and not BETWEEN_BARE.fullmatch(text, at, opening.start())):
            break
        value, end, error = decoded(text, opening.start(1))
        at, new = max(end, opening.end()), list[ToolCall]()
        if not error and all(_is_call(item, offered) for item in (value if isinstance(value, list) else [value])):
            new = _calls_of(value)
        elif error and (GIVES_ARGUMENTS.search(text, opening.start()) or _names(text, opening.start(), offered)):
            new = [ToolCall("", {}, error=f"{error}; {SHAPE}")]
        content = text[: opening.start()] if new and not calls else content
        calls += new
    return content, calls


def _is_call(value: Any, offered: set[str]) -> bool:
    fields = _function(value)
    arguments = [fields[name] for name in ARGUMENTS if name in fields]
    if not arguments or not fields.keys() <= FIELDS:
        return isinstance(fields.get("name"), str) and fields["name"] in offered
    return arguments[0] is None or isinstance(arguments[0], dict | str)


def _names(text: str, at: int, offered: set[str]) -> bool:
    """Return whether JSON that cannot be read begins with the name of an offered tool."""
    name = re.compile(r'\[?\s*\{\s*"name"\s*:\s*"([^"]{0,256})"').match(text, at)
    return name is not None and name[1] in offered


def harmony(text: str, tools: Sequence[Schema]) -> Calls:
    """Read to=functions.name ... <|message|>{...}, in the header of a message."""
    content, calls, at = text, list[ToolCall](), 0
    name, in_body = None, False
    while len(calls) < MOST_CALLS and (token := HARMONY.search(text, at)):
        at = token.end()
        if token["part"] == "message" and name is not None:
            value, at, error = _body(text, at, HARMONY_END, named=True)
            calls.append(ToolCall(name, {}, error=f"{error}; {SHAPE}") if error else tool_call(name, value))
            name, in_body = None, True
        elif token["part"]:
            calls += [] if name is None else [ToolCall(name, {}, error="the call has no <|message|>")]
            name, in_body = None, token["part"] == "message"
        elif not in_body and name is None:
            content, name = content if calls else text[: token.start()], token["name"]
    calls += [] if name is None else [ToolCall(name, {}, error="the call has no <|message|>")]
    return content, calls


def pythonic(text: str, tools: Sequence[Schema]) -> Calls:
    """Read the lists at the beginning of a line or after a special token.

    A list of anything else than calls is an answer, unless it begins with the name of an offered tool.
    """
    offered = {tool["function"]["name"] for tool in tools}
    content, calls, end = text, list[ToolCall](), 0
    for _ in range(MOST_LISTS):
        if (opening := OPENING.search(text, end)) is None:
            break
        end, new = opening.end() + 1, list[ToolCall]()
        try:
            pieces, end = _items(text, opening.end())
            new = [_call(piece) for piece in pieces[:MOST_CALLS]]
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            if opening[1] in offered:
                reason = f"the calls cannot be read ({error}); they are a list of the form [name(argument=value)]"
                new = [ToolCall("", {}, error=reason)]
        content = text[: opening.start()] if new and not calls else content
        calls += new
    return content, calls


def _items(text: str, at: int) -> tuple[list[str], int]:
    """Return the items, separated by commas, of the brackets that open here, and their end."""
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
        raise ValueError(f"{source.strip()!r:.40} is not a call")
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
    raise ValueError("a value is not a literal")
