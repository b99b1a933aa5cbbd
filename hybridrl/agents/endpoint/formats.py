"""The requests and responses of OpenAI's chat completions and completions."""

import re
import time
from collections.abc import Callable, Iterator
from typing import Any, Literal

import numpy as np
from pydantic import Field
from pydantic_core import to_json
from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from hybridrl.agents.endpoint.core import Reply, SamplingOptions
from hybridrl.agents.endpoint.fields import COMMON_HINTS, DEFAULTS, Format, Rules, Sampled, tool_schema
from hybridrl.agents.endpoint.messages import Fields, Name, as_rendered, rejected
from hybridrl.agents.environments.environment import Message, Schema

STREAM_END = "data: [DONE]\n\n"
LOWEST = -9999.0  # OpenAI's log-prob of what is as good as impossible


class ChatRequest(Sampled):
    """A request for a chat completion."""

    HINTS = COMMON_HINTS | {"prediction"}
    SCHEMA = "response_format"

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


class ToolField(Fields):
    """A tool of a chat."""

    type: Literal["function"]
    function: dict[str, Any]


class CompletionRequest(Sampled):
    """A request to continue a text or token ids."""

    DEFAULTS = DEFAULTS | {"add_special_tokens": True}  # those that the tokenizer adds, such as a leading bos

    prompt: Any
    logprobs: int | None = Field(None, ge=0, le=1)

    def single_prompt(self, vocabulary: int) -> str | list[int]:
        """Return the text, or the token ids; rejects those that are not below `vocabulary`."""
        prompt = self.prompt
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
            if len(prompt) > 1:
                raise rejected(400, "prompt: send one request per prompt", param="prompt")
            prompt = prompt[0]
        ids = isinstance(prompt, list) and all(type(one) is int and 0 <= one < vocabulary for one in prompt)
        if not ids and not isinstance(prompt, str):
            message = f"prompt: a prompt is a text, or a list of token ids from 0 to {vocabulary - 1}"
            raise rejected(400, message, param="prompt")
        return prompt


def chat_body(reply: Reply, request: ChatRequest, model: str, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Return a chat completion."""
    message = reply.message
    content = None if "tool_calls" in message and not message["content"] else message["content"]
    choice = {"message": message | {"content": content}, "logprobs": None}
    if request.logprobs:
        choice["logprobs"] = {"content": _chat_log_probs(reply, tokenizer)}
    return _body(reply, "chat.completion", choice, model, request)


def completion_body(
    reply: Reply, request: CompletionRequest, model: str, tokenizer: PreTrainedTokenizerBase
) -> dict[str, Any]:
    """Return a completion of a text."""
    log_probs = None
    if request.logprobs is not None:
        tokens = _chat_log_probs(reply, tokenizer)
        texts, values = [one["token"] for one in tokens], [one["logprob"] for one in tokens]
        log_probs = {"tokens": texts, "token_logprobs": values, "top_logprobs": None, "text_offset": []}
    choice = {"text": reply.message["content"], "logprobs": log_probs}
    return _body(reply, "text_completion", choice, model, request)


def _body(reply: Reply, kind: str, choice: dict[str, Any], model: str, request: Sampled) -> dict[str, Any]:
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


def _chat_log_probs(reply: Reply, tokenizer: PreTrainedTokenizerBase) -> list[dict[str, Any]]:
    completion, found, written = reply.turn.completion, [], token_bytes(tokenizer)
    log_probs = np.nan_to_num(completion.log_probs, nan=LOWEST, neginf=LOWEST)
    for token, log_prob in zip(completion.token_ids.tolist(), log_probs.tolist(), strict=True):
        one = {"token": tokenizer.decode([token]), "logprob": log_prob, "bytes": list(written(token))}
        found.append(one | {"top_logprobs": []})
    return found


def token_bytes(tokenizer: PreTrainedTokenizerBase) -> Callable[[int], bytes]:
    """Return a function that makes of a token its bytes, which need not be whole characters."""
    added, alphabet = tokenizer.added_tokens_decoder, {text: byte for byte, text in bytes_to_unicode().items()}
    by_byte = tokenizer.convert_tokens_to_string(["a\u0120"]) == "a "  # other vocabularies may have these letters too

    def written(token: int) -> bytes:
        piece = added[token].content if token in added else tokenizer.convert_ids_to_tokens(token) or ""
        if token not in added and by_byte and all(character in alphabet for character in piece):
            return bytes(alphabet[character] for character in piece)
        if single := re.fullmatch("<0x([0-9A-F]{2})>", piece):  # of a vocabulary of pieces of text
            return bytes.fromhex(single[1])
        return piece.replace("\u2581", " ").encode()

    return written


def stream_of(body: dict[str, Any], *, usage: bool) -> Iterator[str]:
    """Return a completion as server-sent events: all of it in one chunk, then the usage if it is wanted."""
    body, (choice,) = dict(body), body["choices"]
    used = body.pop("usage")
    if message := choice.pop("message", None):
        calls = [{"index": number, **call} for number, call in enumerate(message.pop("tool_calls", ()))]
        choice["delta"] = message | ({"tool_calls": calls} if calls else {})
        body["object"] = "chat.completion.chunk"
    yield event(body)
    if usage:
        yield event(body | {"choices": [], "usage": used})
    yield STREAM_END


def event(body: dict[str, Any], name: str = "") -> str:
    """Return one server-sent event."""
    return (f"event: {name}\n" if name else "") + f"data: {to_json(body, inf_nan_mode='null').decode()}\n\n"
