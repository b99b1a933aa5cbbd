"""OpenAI's Responses and Anthropic's Messages as chats: their requests in, their responses out."""

import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from hybridrl.agents.endpoint.core import Reply, SamplingOptions
from hybridrl.agents.endpoint.fields import COMMON_HINTS, Format, Rules, Sampled, Stops, tool_schema
from hybridrl.agents.endpoint.formats import event
from hybridrl.agents.endpoint.messages import Fields, Text, as_rendered, rejected
from hybridrl.agents.environments.environment import Message, Schema

Json = dict[str, Any]
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}  # Anthropic's


class Item(Fields):
    """A part of the conversation of Responses: a message, a call of a function, or its output."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: str = ""
    content: Any = ""
    call_id: str = ""
    name: str = ""
    arguments: str = ""
    output: Text = ""


class TextOptions(Fields):
    """The format of the response of Responses."""

    format: Format = Format(type="text")


class ResponsesRequest(Sampled):
    """A request of OpenAI's Responses; the whole conversation is in `input`."""

    HINTS = COMMON_HINTS | {"include", "reasoning"}
    SCHEMA = "text.format"

    input: Any
    instructions: str = ""
    tools: list[Any] = Field([])
    max_output_tokens: int | None = Field(None, gt=0)
    text: TextOptions = TextOptions()

    def wanted(self, rules: Rules) -> SamplingOptions:
        self.max_tokens = self.max_output_tokens or self.max_tokens
        return super().wanted(rules)

    def schema_wanted(self) -> str | None:
        return self.text.format.schema_text(self.SCHEMA)

    def schemas(self) -> list[Schema]:
        kinds = ("function",)
        return [_schema(tool, "parameters", kinds, number, self.read) for number, tool in enumerate(self.tools)]

    def conversation(self) -> list[Message]:
        """Return the conversation as chat messages; calls belong to the response before them."""
        messages: list[Json] = [{"role": "system", "content": self.instructions}] if self.instructions else []
        places = ["instructions"] * len(messages)
        items = [{"role": "user", "content": self.input}] if isinstance(self.input, str) else self.input
        if not isinstance(items, list) or not items:
            raise rejected(400, "input: a text, or a list with at least one item", param="input")
        for number, given in enumerate(items):
            item = self.read(Item, given, f"input[{number}]")
            if item.type == "function_call" and messages and messages[-1]["role"] == "assistant":
                messages[-1].setdefault("tool_calls", []).append(_response_call(item))
            elif item.type != "reasoning":
                messages.append(_as_chat(item))
                places.append(f"input[{number}]")
        return as_rendered(messages, places, self.read)

    def body(self, reply: Reply, model: str) -> Json:
        message, cut = reply.message, reply.finish == "length"
        output: list[Json] = []
        if message["content"]:
            text = {"type": "output_text", "text": message["content"], "annotations": [], "logprobs": []}
            output.append({"type": "message", "id": f"msg_{reply.turn.id}", "role": "assistant", "content": [text]})
        for call in message.get("tool_calls", ()):
            output.append({"type": "function_call", "id": call["id"], "call_id": call["id"], **call["function"]})
        prompt, sampled = len(reply.prompt_ids), len(reply.turn.completion.token_ids)
        return {
            "id": reply.turn.id,
            "object": "response",
            "created_at": int(time.time()),
            "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "error": None,
            "model": model,
            "output": [item | {"status": "completed"} for item in output],
            "parallel_tool_calls": True,
            "tool_choice": self.tool_choice,
            "tools": self.tools,
            "usage": {
                "input_tokens": prompt,
                "input_tokens_details": {"cached_tokens": 0},
                "output_tokens": sampled,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": prompt + sampled,
            },
        }

    def events(self, body: Json) -> Iterator[str]:
        """Return a response as server-sent events, each item as a whole."""
        started = body | {"status": "in_progress", "output": [], "usage": None}
        events: list[Json] = [{"type": "response.created", "response": started}]
        for number, item in enumerate(body["output"]):
            events.append({"type": "response.output_item.added", "output_index": number, "item": item})
            if item["type"] == "message":
                place = {"item_id": item["id"], "output_index": number, "content_index": 0, "logprobs": []}
                text = item["content"][0]["text"]
                events.append({"type": "response.output_text.delta", "delta": text, **place})
                events.append({"type": "response.output_text.done", "text": text, **place})
            events.append({"type": "response.output_item.done", "output_index": number, "item": item})
        events.append({"type": f"response.{body['status']}", "response": body})
        for number, one in enumerate(events):
            yield event(one | {"sequence_number": number}, one["type"])


class Block(Fields):
    """A part of a message of Anthropic's."""

    type: Literal["text", "tool_use", "tool_result", "thinking", "redacted_thinking"]
    text: str = ""
    id: str = ""
    name: str = ""
    input: dict[str, Any] = Field({})
    tool_use_id: str = ""
    content: Text = ""
    is_error: bool = False

    def result(self) -> str:
        """Return the result of a tool as the policy reads it: an error begins as those of environments do."""
        if not self.is_error or self.content.startswith("Error"):
            return self.content
        return f"Error: {self.content}" if self.content else "Error"


def _as_blocks(content: Any) -> Any:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


Blocks = Annotated[list[Block], BeforeValidator(_as_blocks)]


class AnthropicMessage(Fields):
    """A message of Anthropic's, with a text or blocks."""

    role: str
    content: Blocks = Field([])


class OutputOptions(Fields):
    """The format of the response of Anthropic's Messages."""

    format: Format = Format(type="text")


class MessagesRequest(Sampled):
    """A request of Anthropic's Messages."""

    HINTS = COMMON_HINTS | {"thinking", "context_management", "betas", "cache_control", "inference_geo", "speed"}
    SCHEMA = "output_config.format"

    messages: list[Any] = Field(min_length=1)
    system: Text = ""
    tools: list[Any] = Field([])
    stop_sequences: Stops = Field([])
    output_config: OutputOptions = OutputOptions()

    def wanted(self, rules: Rules) -> SamplingOptions:
        self.stop = [*self.stop, *self.stop_sequences]
        return super().wanted(rules)

    def schema_wanted(self) -> str | None:
        return self.output_config.format.schema_text(self.SCHEMA)

    def schemas(self) -> list[Schema]:
        kinds = ("function", "custom")
        return [_schema(tool, "input_schema", kinds, number, self.read) for number, tool in enumerate(self.tools)]

    def conversation(self) -> list[Message]:
        """Return the conversation as chat messages; results of tools are messages of their own."""
        messages: list[Json] = [{"role": "system", "content": self.system}] if self.system else []
        places = ["system"] * len(messages)
        for number, given in enumerate(self.messages):
            message = self.read(AnthropicMessage, given, f"messages[{number}]")
            found = _as_chats(message)
            messages += found
            places += [f"messages[{number}]"] * len(found)
        return as_rendered(messages, places, self.read)

    def body(self, reply: Reply, model: str) -> Json:
        message = reply.message
        content: list[Json] = [{"type": "text", "text": message["content"]}] if message["content"] else []
        for call in message.get("tool_calls", ()):
            function = call["function"]
            arguments = json.loads(function["arguments"], parse_constant=str)
            content.append({"type": "tool_use", "id": call["id"], "name": function["name"], "input": arguments})
        used = {"input_tokens": len(reply.prompt_ids), "output_tokens": len(reply.turn.completion.token_ids)}
        about = {"id": reply.turn.id, "type": "message", "role": "assistant", "model": model, "content": content}
        return about | {"stop_reason": STOP_REASONS[reply.finish], "stop_sequence": None, "usage": used}

    def events(self, body: Json) -> Iterator[str]:
        """Return a message as server-sent events, each block as a whole."""
        events: list[Json] = [{"type": "message_start", "message": body | {"content": [], "stop_reason": None}}]
        for number, block in enumerate(body["content"]):
            if block["type"] == "text":
                start, delta = block | {"text": ""}, {"type": "text_delta", "text": block["text"]}
            else:
                start = block | {"input": {}}
                delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
            events.append({"type": "content_block_start", "index": number, "content_block": start})
            events.append({"type": "content_block_delta", "index": number, "delta": delta})
            events.append({"type": "content_block_stop", "index": number})
        ended = {"stop_reason": body["stop_reason"], "stop_sequence": None}
        events.append({"type": "message_delta", "delta": ended, "usage": body["usage"]})
        for one in [*events, {"type": "message_stop"}]:
            yield event(one, one["type"])


def _schema(tool: Any, parameters: str, kinds: Sequence[str], number: int, read: Callable[..., Any]) -> Schema:
    where = f"tools[{number}]"
    if not isinstance(tool, dict) or (tool.get("type") or "function") not in kinds:
        raise rejected(400, f"{where}: a tool is a function; the provider's own tools are not here", param=where)
    function = {"name": None, "description": None, "parameters": tool.get(parameters)}
    return tool_schema(function | {name: value for name, value in tool.items() if name != parameters}, where, read)


def _response_call(item: Item) -> Json:
    return {"id": item.call_id, "function": {"name": item.name, "arguments": item.arguments}}


def _as_chat(item: Item) -> Json:
    if item.type == "function_call":
        return {"role": "assistant", "content": "", "tool_calls": [_response_call(item)]}
    if item.type == "function_call_output":
        return {"role": "tool", "tool_call_id": item.call_id, "content": item.output}
    return {"role": item.role, "content": item.content}


def _as_chats(message: AnthropicMessage) -> list[Json]:
    """Return the results of tools in a message as messages, and then the message with its text and calls."""
    kinds: dict[str, list[Block]] = defaultdict(list)
    for block in message.content:
        kinds[block.type].append(block)
    found: list[Json] = [
        {"role": "tool", "tool_call_id": block.tool_use_id, "content": block.result()} for block in kinds["tool_result"]
    ]
    if kinds["text"] or kinds["tool_use"] or not kinds["tool_result"]:
        found.append({"role": message.role, "content": "".join(block.text for block in kinds["text"])})
    if calls := kinds["tool_use"]:
        functions = [{"name": call.name, "arguments": json.dumps(call.input)} for call in calls]
        found[-1]["tool_calls"] = [{"id": c.id, "function": f} for c, f in zip(calls, functions, strict=True)]
    return found
