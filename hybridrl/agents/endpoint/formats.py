"""The four forms of the API, requests in and responses out: OpenAI's chat completions, completions and Responses, and
Anthropic's Messages; the last two as chats."""

import json
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BeforeValidator, Field
from transformers import PreTrainedTokenizerBase

from hybridrl.agents.endpoint.core import Reply, SamplingOptions, token_bytes
from hybridrl.agents.endpoint.fields import COMMON_HINTS, DEFAULTS, Format, Rules, Sampled, Stops, tool_schema
from hybridrl.agents.endpoint.messages import Block, Content, Text, as_rendered
from hybridrl.agents.endpoint.requests import Member, Name, rejected
from hybridrl.agents.environments import Message, Schema

STREAM_END = "data: [DONE]\n\n"
Json = dict[str, Any]
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}  # Anthropic's
LOWEST = -9999.0  # OpenAI's log-prob of what is as good as impossible


class ChatRequest(Sampled):
    """A request for a chat completion."""

    HINTS = COMMON_HINTS | {"prediction"}
    SCHEMA = "response_format"
    TEXTS, END = ("content", "reasoning_content"), STREAM_END

    messages: list[Any] = Field(min_length=1)
    tools: list[Any] = Field([])
    max_completion_tokens: int | None = Field(None, gt=0)
    response_format: Format = Format(type="text")
    logprobs: bool = False
    chat_template_kwargs: dict[Name, bool | int | float | str] = Field({})

    def wanted(self, rules: Rules) -> SamplingOptions:
        self.max_tokens = self.max_completion_tokens or self.max_tokens
        return super().wanted(rules)

    def schema_wanted(self) -> str | None:
        return self.response_format.schema_text(self.SCHEMA)

    def schemas(self) -> list[Schema]:
        """Return the tools as chat templates read them."""
        tools = [self.read(ToolField, tool, f"tools[{number}]") for number, tool in enumerate(self.tools)]
        return [tool_schema(tool.function, f"tools[{n}].function", self.read) for n, tool in enumerate(tools)]

    def conversation(self) -> list[Message]:
        return as_rendered(self.messages, read=self.read)

    def events(self, body: Json, piece: Message) -> list[Json]:
        choice = dict(body["choices"][0])
        message = choice.pop("message")
        calls = [{"index": number, **call} for number, call in enumerate(message.get("tool_calls", ()))]
        others = {"tool_calls": calls} if calls else {}
        choice["delta"] = {"role": message["role"], "content": None} | piece | others
        return chunks(body | {"object": "chat.completion.chunk"}, choice, usage=self.stream_options.include_usage)


class ToolField(Member):
    """A tool of a chat."""

    type: Literal["function"]
    function: Json


class CompletionRequest(Sampled):
    """A request to continue a text or token ids."""

    DEFAULTS = DEFAULTS | {"add_special_tokens": True}  # those that the tokenizer adds, such as a leading bos
    END = STREAM_END

    prompt: Any
    logprobs: int | None = Field(None, ge=0, le=1)
    prompt_logprobs: int | None = Field(None, ge=0)

    def wanted(self, rules: Rules) -> SamplingOptions:
        if self.prompt_logprobs is not None and (rules.trains or self.stream):
            message = "prompt_logprobs: only a model that is not trained has them, and not in a stream"
            raise rejected(400, message, param="prompt_logprobs")
        return replace(super().wanted(rules), prompt_log_probs=self.prompt_logprobs)

    def single_prompt(self, vocabulary: int) -> str | list[int]:
        """Return the text, or the token ids; rejects those that are not below `vocabulary`."""
        prompt = self.prompt
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
            if len(prompt) > 1:
                raise rejected(400, "prompt: send one request per prompt", param="prompt")
            prompt = prompt[0]
        ids = isinstance(prompt, list) and all(type(item) is int and 0 <= item < vocabulary for item in prompt)
        if not ids and not isinstance(prompt, str):
            message = f"prompt: a prompt is a text, or a list of token ids from 0 to {vocabulary - 1}"
            raise rejected(400, message, param="prompt")
        return prompt

    def events(self, body: Json, piece: Message) -> list[Json]:
        choice = body["choices"][0] | {"text": piece.get("content", "")}
        return chunks(body, choice, usage=self.stream_options.include_usage)


def chat_body(reply: Reply, request: ChatRequest, model: str, tokenizer: PreTrainedTokenizerBase) -> Json:
    """Return a chat completion."""
    message = reply.message
    content = None if "tool_calls" in message and not message["content"] else message["content"]
    choice = {"message": message | {"content": content}, "logprobs": None}
    if request.logprobs:
        choice["logprobs"] = {"content": _chat_log_probs(reply, tokenizer)}
    return _body(reply, "chat.completion", choice, model, request)


def completion_body(reply: Reply, request: CompletionRequest, model: str, tokenizer: PreTrainedTokenizerBase) -> Json:
    """Return a completion of a text."""
    log_probs = None
    if request.logprobs is not None:
        tokens = _chat_log_probs(reply, tokenizer)
        texts, values = [entry["token"] for entry in tokens], [entry["logprob"] for entry in tokens]
        log_probs = {"tokens": texts, "token_logprobs": values, "top_logprobs": None, "text_offset": []}
    choice = {"text": reply.message["content"], "logprobs": log_probs}
    if (scored := reply.turn.completion.carried.get("prompt_log_probs")) is not None:
        choice["prompt_logprobs"] = [None, *(_prompt_token(entry, tokenizer) for entry in scored[1:])]
    return _body(reply, "text_completion", choice, model, request)


def _prompt_token(entry: np.ndarray, tokenizer: PreTrainedTokenizerBase) -> Json:
    """Return a token of a scored prompt, and the most probable in its place, in vLLM's form."""
    return {
        str(int(token)): {"logprob": log_prob, "rank": int(rank), "decoded_token": tokenizer.decode([int(token)])}
        for token, log_prob, rank in np.maximum(entry, LOWEST).tolist()  # NaN becomes null
    }


def _body(reply: Reply, kind: str, choice: Json, model: str, request: Sampled) -> Json:
    completion = reply.turn.completion
    choice = {"index": 0, **choice, "finish_reason": reply.finish}
    if request.return_token_ids:  # vLLM's names
        choice["token_ids"] = completion.token_ids.tolist()
    body = {"id": reply.turn.id, "object": kind, "created": int(time.time()), "model": model, "choices": [choice]}
    if request.return_token_ids:
        body["prompt_token_ids"] = reply.prompt_ids
    prompt, sampled = len(reply.prompt_ids), len(completion.token_ids)
    used = {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}
    return body | {"usage": used}


def _chat_log_probs(reply: Reply, tokenizer: PreTrainedTokenizerBase) -> list[Json]:
    completion, entries, written = reply.turn.completion, [], token_bytes(tokenizer)
    log_probs = np.nan_to_num(completion.log_probs, nan=LOWEST, neginf=LOWEST)
    for token, log_prob in zip(completion.token_ids.tolist(), log_probs.tolist(), strict=True):
        entry = {"token": tokenizer.decode([token]), "logprob": log_prob, "bytes": list(written(token))}
        entries.append(entry | {"top_logprobs": []})
    return entries


def chunks(body: Json, choice: Json, *, usage: bool) -> list[Json]:
    """Return a completion as events: a chunk with this choice, then the usage if it is wanted."""
    used = {"choices": [], "usage": body["usage"]}
    body = {name: value for name, value in body.items() if name != "usage"} | {"choices": [choice]}
    return [body, *([body | used] if usage else [])]


class Item(Member):
    """A part of the conversation of Responses: a message, a call of a function, or its output."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: str = ""
    content: Any = ""
    call_id: str = ""
    name: str = ""
    arguments: str = ""
    output: Content = ""


class OutputOptions(Member):
    """The format of a response, in a field of Responses and of Messages."""

    format: Format = Format(type="text")


class ResponsesRequest(Sampled):
    """A request of OpenAI's Responses; the whole conversation is in `input`."""

    HINTS = COMMON_HINTS | {"include", "reasoning"}
    SCHEMA = "text.format"
    TEXT = 3

    input: Any
    instructions: str = ""
    tools: list[Any] = Field([])
    max_output_tokens: int | None = Field(None, gt=0)
    text: OutputOptions = OutputOptions()

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
        for number, value in enumerate(items):
            item = self.read(Item, value, f"input[{number}]")
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

    def events(self, body: Json, piece: Message) -> list[Json]:
        started = body | {"status": "in_progress", "output": [], "usage": None}
        events: list[Json] = [{"type": "response.created", "response": started}]
        for number, item in enumerate(body["output"]):
            parts = {"content": []} if item["type"] == "message" else {}
            events.append({"type": "response.output_item.added", "output_index": number, "item": item | parts})
            if parts:
                place, (part,) = {"item_id": item["id"], "output_index": number, "content_index": 0}, item["content"]
                for kind, details in (
                    ("content_part.added", {"part": part | {"text": ""}}),
                    ("output_text.delta", {"delta": piece.get("content", ""), "logprobs": []}),
                    ("output_text.done", {"text": part["text"], "logprobs": []}),
                    ("content_part.done", {"part": part}),
                ):
                    events.append({"type": f"response.{kind}", **place, **details})
            events.append({"type": "response.output_item.done", "output_index": number, "item": item})
        return [*events, {"type": f"response.{body['status']}", "response": body}]


def _as_blocks(content: Any) -> Any:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


Blocks = Annotated[list[Block], BeforeValidator(_as_blocks)]


class AnthropicMessage(Member):
    """A message of Anthropic's, with a text or blocks."""

    role: str
    content: Blocks = Field([])


class MessagesRequest(Sampled):
    """A request of Anthropic's Messages."""

    HINTS = COMMON_HINTS | {"thinking", "context_management", "betas", "cache_control", "inference_geo", "speed"}
    SCHEMA = "output_config.format"
    TEXT = 2

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
        for number, value in enumerate(self.messages):
            message = self.read(AnthropicMessage, value, f"messages[{number}]")
            chats = _as_chats(message)
            messages += chats
            places += [f"messages[{number}]"] * len(chats)
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
        return about | {"stop_reason": STOP_REASONS.get(reply.finish or ""), "stop_sequence": None, "usage": used}

    def events(self, body: Json, piece: Message) -> list[Json]:
        events: list[Json] = [{"type": "message_start", "message": body | {"content": [], "stop_reason": None}}]
        for number, block in enumerate(body["content"]):
            if block["type"] == "text":
                start, delta = block | {"text": ""}, {"type": "text_delta", "text": piece.get("content", "")}
            else:
                start = block | {"input": {}}
                delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
            events.append({"type": "content_block_start", "index": number, "content_block": start})
            events.append({"type": "content_block_delta", "index": number, "delta": delta})
            events.append({"type": "content_block_stop", "index": number})
        ended = {"stop_reason": body["stop_reason"], "stop_sequence": None}
        events.append({"type": "message_delta", "delta": ended, "usage": body["usage"]})
        return [*events, {"type": "message_stop"}]


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
    messages: list[Json] = [
        {"role": "tool", "tool_call_id": block.tool_use_id, "content": block.result()} for block in kinds["tool_result"]
    ]
    shown = [block for block in message.content if block.type in ("text", "image")]
    if shown or kinds["tool_use"] or not kinds["tool_result"]:
        content = shown if kinds["image"] else "".join(block.text for block in shown)
        messages.append({"role": message.role, "content": content})
    if calls := kinds["tool_use"]:
        functions = [{"name": call.name, "arguments": json.dumps(call.input)} for call in calls]
        messages[-1]["tool_calls"] = [{"id": c.id, "function": f} for c, f in zip(calls, functions, strict=True)]
    return messages
