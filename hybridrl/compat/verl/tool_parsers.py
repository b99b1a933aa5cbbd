"""verl's parsers of tool calls, by their names: each reads a format of calls.py. Files may register their own."""

import asyncio
import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from pydantic import BaseModel

from hybridrl.agents.environments.calls import call_parser, named_parser
from hybridrl.agents.environments.dialogue import Dialogue
from hybridrl.compat.verl.tools import as_schema
from hybridrl.core.required import required


class FunctionCall(BaseModel, extra="allow"):
    """A call whose arguments are JSON text."""

    name: str
    arguments: str
    tool_call_id: str | None = None


class ToolParser:
    """The base class of parsers, and that of the formats that are read here; calls that cannot be read are none."""

    format: str | None = None
    stop_token_ids: Sequence[int] = ()  # these end a response here already

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    @classmethod
    def register(cls, name: str) -> Callable[[type], type]:
        """Register a class as the parser of this name. Raises TypeError for one that reads no calls."""

        def decorate(parser: type) -> type:
            reads = getattr(parser, "extract_tool_calls", None) not in (None, ToolParser.extract_tool_calls)
            if not reads and getattr(parser, "format", None) is None:
                raise TypeError(f"{parser.__name__}, the parser {name}, defines no extract_tool_calls")
            _parsers[name] = parser
            return parser

        return decorate

    @classmethod
    def get_tool_parser(cls, name: str, tokenizer: Any) -> "ToolParser":
        """Return a registered parser, else that of a format. Raises ConfigError for a name that is neither."""
        if name in _parsers:
            return _parsers[name](tokenizer)
        parser = ToolParser(tokenizer)
        if name == "auto":
            # In an episode the tokenizer has what auto stands for (AgentLoop.run); a script may have one of its own.
            template = Dialogue(tokenizer, [tokenizer.eos_token_id])
            configured = getattr(tokenizer, "call_parser", None) or partial(call_parser, name, "", template)
            name = configured().format
        parser.format = named_parser(name, tokenizer).format
        return parser

    async def extract_tool_calls(
        self, responses_ids: Sequence[int], tools: Sequence[Any] | None = None
    ) -> tuple[str, list[FunctionCall]]:
        """Return the content before the first call, and the calls."""
        ids = [*responses_ids]
        if ids and ids[-1] == self.tokenizer.eos_token_id:
            ids.pop()
        text = await asyncio.to_thread(self.tokenizer.decode, ids, skip_special_tokens=False)
        content, calls = named_parser(required(self.format), self.tokenizer)(
            text, [as_schema(tool) for tool in tools or ()]
        )
        read = [call for call in calls if not call.error]
        return content, [
            FunctionCall(
                name=call.name, arguments=json.dumps(call.arguments, ensure_ascii=False), tool_call_id=call.id or None
            )
            for call in read
        ]


_parsers: dict[str, Callable[[Any], ToolParser]] = {}  # by the names that files register


class HermesToolParser(ToolParser):
    """Calls as JSON in <tool_call> tags."""

    format = "hermes"


class GptOssToolParser(ToolParser):
    """Calls in Harmony's format."""

    format = "gpt-oss"


class Qwen3XMLToolParser(ToolParser):
    """Calls in tags of functions and parameters."""

    format = "qwen3_coder"


def is_registered(name: str) -> bool:
    """Whether a file that has been loaded registers a parser of this name."""
    return name in _parsers


NAMES: dict[str, dict[str, Callable[..., Any] | None]] = {
    "verl.experimental.agent_loop.tool_parser": {
        cls.__name__: cls for cls in (FunctionCall, ToolParser, HermesToolParser, GptOssToolParser, Qwen3XMLToolParser)
    }
}
