"""Tool calls that are written with a tag for each argument, whose value is plain text between the tags.

Such a value cannot be escaped. One that contains tags of the format is read whole where what follows shows its end;
otherwise the call is one with an error: a tool never runs with a part of a value.
"""

import re
from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hybridrl.agents.environments.call_values import MOST_CALLS, Calls, decoded, tool_call
from hybridrl.agents.environments.environment import Schema, ToolCall

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
    """The tags of a text: which ends of arguments are followed by what may follow one, and how tags nest."""

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
        self.pairs: dict[int, re.Match[str]] = {}  # the end that belongs to the argument whose value begins there
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
            raise TagError("there is a text that is no argument")
        stray = self.stray.search(self.text, end.end())
        if stray and not stray[1]:
            raise TagError("a value contains tags of calls, and it is not clear where it ends")
        return tool_call(function[1], arguments), end.end()

    def end_of(self, argument: re.Match[str], known: Collection[str]) -> re.Match[str]:
        """Return the tag that ends the value of an argument: the one that belongs to it, else the first that is
        followed by what may follow a value."""
        begin = argument.end()
        index = bisect_left(self.end_starts, begin)
        if index == len(self.ends):
            raise TagError(f"{argument[1]} has no end")
        end, pair = self.ends[index], self.pairs.get(begin)
        if pair and self.end_starts[bisect_left(self.end_starts, pair.start()) % len(self.ends)] == pair.start():
            following = self.argument.match(self.text, end.end())
            if end is not pair and following and following[1] in known:
                raise TagError(f"it is not clear where {argument[1]} ends")
            return pair
        inner = self.tags[bisect_left(self.starts, begin) : bisect_left(self.starts, end.start())]
        names = [tag[1] for tag in inner]
        if any(name in known for name in names) or (None in names and any(names)):
            raise TagError(f"it is not clear where {argument[1]} ends")
        return end


def _properties(name: str, tools: Sequence[Schema]) -> Mapping[str, Any]:
    """Return the schemas of a tool's arguments by name."""
    functions = [tool["function"] for tool in tools if tool["function"]["name"] == name]
    return (functions[0].get("parameters") or {}).get("properties") or {} if functions else {}


def typed(value: str, schema: Any) -> Any:
    """Return the value of an argument: a text, or JSON where the schema is that of no text."""
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
