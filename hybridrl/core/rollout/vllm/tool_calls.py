"""vLLM's parsers of tool calls, for formats that agents/environments/calls.py does not read. Starts no engine."""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from transformers import PreTrainedTokenizerBase
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.tool_parsers import ToolParserManager

EngineParser = Callable[[str, Sequence[Mapping[str, Any]]], tuple[str, list[tuple[str, str]]]]


def parser_names() -> list[str]:
    """Return the names of the formats that vLLM reads."""
    return ToolParserManager.list_registered()


def load_parser(name: str, tokenizer: PreTrainedTokenizerBase) -> EngineParser:
    """Return a parser. From a text and the schemas of tools it returns the content, and calls as names with JSON
    arguments. Raises RuntimeError or ValueError if the tokenizer lacks tokens that the format needs.
    """
    parser_class = ToolParserManager.get_tool_parser(name)

    @lru_cache(maxsize=64)  # making a parser reads the whole vocabulary
    def make(tools: str) -> tuple[Any, ChatCompletionRequest]:
        request = ChatCompletionRequest(messages=[], tools=json.loads(tools) or None)
        return parser_class(tokenizer, request.tools), request

    def parse(text: str, tools: Sequence[Mapping[str, Any]]) -> tuple[str, list[tuple[str, str]]]:
        parser, request = make(json.dumps(tools))
        result = parser.extract_tool_calls(text, request)
        return result.content or "", [(call.function.name, call.function.arguments) for call in result.tool_calls]

    make("[]")
    return parse
