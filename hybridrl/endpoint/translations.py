"""OpenAI's Responses and Anthropic's Messages as chats: their requests in, their responses out."""

import json
import time
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import Field, PositiveInt

from hybridrl.endpoint.core import Reply, Wanted
from hybridrl.endpoint.formats import Sampled, event
from hybridrl.endpoint.messages import rejected
from hybridrl.environments import Schema

Json = dict[str, Any]
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}  # Anthropic's


class ResponsesRequest(Sampled):
    """A request of OpenAI's Responses; the whole conversation is in `input`."""

    input: str | list[Json]
    instructions: str | None = None
    tools: list[Json] | None = None
    tool_choice: str | Json = "auto"
    max_output_tokens: PositiveInt | None = None
    previous_response_id: str | None = None

    @property
    def reads_calls(self) -> bool:
        return bool(self.tools) and self.tool_choice == "auto"

    def wanted(self) -> Wanted:
        self.max_tokens = self.max_output_tokens
        if self.previous_response_id:
            message = "previous_response_id: responses are not stored; send the whole conversation as input"
            raise rejected(400, message, param="previous_response_id")
        if self.tool_choice not in ("auto", "none"):
            raise rejected(400, "tool_choice: choose auto or none", param="tool_choice")
        return super().wanted()

    def schemas(self) -> list[Schema]:
        return [_schema(tool, "parameters", number) for number, tool in enumerate(self.tools or ())]

    def chat(self) -> list[Json]:
        """Return the conversation as chat messages; calls belong to the response before them."""
        messages: list[Json] = [{"role": "system", "content": self.instructions}] if self.instructions else []
        items = [{"role": "user", "content": self.input}] if isinstance(self.input, str) else self.input
        for item in items:
            kind = item.get("type", "message")
            if kind == "function_call":
                if not messages or messages[-1]["role"] != "assistant":
                    messages.append({"role": "assistant", "content": ""})
                function = {"name": item.get("name"), "arguments": item.get("arguments")}
                messages[-1].setdefault("tool_calls", []).append({"id": item.get("call_id"), "function": function})
            elif kind == "function_call_output":
                result = {"tool_call_id": item.get("call_id"), "content": item.get("output")}
                messages.append({"role": "tool", **result})
            elif kind == "message":
                messages.append({"role": item.get("role"), "content": item.get("content")})
            elif kind != "reasoning":
                raise rejected(400, f"input items of the type {kind} are not supported", param="input")
        return messages

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
            "tools": self.tools or [],
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


class MessagesRequest(Sampled):
    """A request of Anthropic's Messages."""

    messages: list[Json] = Field(min_length=1)
    system: str | list[Json] | None = None
    tools: list[Json] | None = None
    tool_choice: Json | None = None
    stop_sequences: list[str] | None = None

    @property
    def reads_calls(self) -> bool:
        return bool(self.tools) and (self.tool_choice or {}).get("type", "auto") == "auto"

    def wanted(self) -> Wanted:
        self.stop = self.stop_sequences
        if (self.tool_choice or {}).get("type", "auto") not in ("auto", "none"):
            raise rejected(400, "tool_choice: choose auto or none", param="tool_choice")
        return super().wanted()

    def schemas(self) -> list[Schema]:
        return [_schema(tool, "input_schema", number) for number, tool in enumerate(self.tools or ())]

    def chat(self) -> list[Json]:
        """Return the conversation as chat messages; results of tools are messages of their own."""
        messages: list[Json] = [{"role": "system", "content": self.system}] if self.system else []
        for message in self.messages:
            content = message.get("content")
            blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content or []
            of_kind = {kind: [one for one in blocks if one.get("type") == kind] for kind in BLOCKS}
            if unknown := [one.get("type") for one in blocks if one.get("type") not in BLOCKS]:
                raise rejected(400, f"content of the type {unknown[0]} is not supported", param="messages")
            for result in of_kind["tool_result"]:
                messages.append(
                    {"role": "tool", "tool_call_id": result.get("tool_use_id"), "content": result.get("content")}
                )
            if of_kind["text"] or of_kind["tool_use"] or not of_kind["tool_result"]:
                messages.append({"role": message.get("role"), "content": of_kind["text"]})
            if calls := of_kind["tool_use"]:
                messages[-1]["tool_calls"] = [_chat_call(call) for call in calls]
        return messages

    def body(self, reply: Reply, model: str) -> Json:
        message = reply.message
        content: list[Json] = [{"type": "text", "text": message["content"]}] if message["content"] else []
        for call in message.get("tool_calls", ()):
            function = call["function"]
            arguments = json.loads(function["arguments"])
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


BLOCKS = ("text", "tool_use", "tool_result", "thinking", "redacted_thinking")


def _schema(tool: Mapping[str, Any], parameters: str, number: int) -> Schema:
    if tool.get("type", "function") not in ("function", "custom") or not tool.get("name"):
        raise rejected(400, f"tools[{number}] has no name, or is a tool of the provider", param=f"tools[{number}]")
    function = {"name": tool["name"], "description": tool.get("description"), "parameters": tool.get(parameters)}
    return {"type": "function", "function": {name: value for name, value in function.items() if value}}


def _chat_call(call: Json) -> Json:
    function = {"name": call.get("name"), "arguments": json.dumps(call.get("input") or {})}
    return {"id": call.get("id"), "function": function}
