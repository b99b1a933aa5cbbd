"""The requests and responses of OpenAI's chat completions and completions."""

import json
import time
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, PositiveInt
from transformers import PreTrainedTokenizerBase

from hybridrl.endpoint.core import Reply, Wanted
from hybridrl.endpoint.messages import rejected
from hybridrl.environments import Schema

UNSUPPORTED = {
    "logit_bias": "it changes what is sampled",
    "audio": "the policy writes text only",
    "functions": "write them as tools",
}
STREAM_END = "data: [DONE]\n\n"


class Sampled(BaseModel):
    """What all forms of a request share; other fields have no effect."""

    model_config = ConfigDict(extra="allow")

    n: int = 1
    stop: str | list[str] | None = None
    temperature: NonNegativeFloat | None = None
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = None
    seed: int | None = None
    max_tokens: PositiveInt | None = None
    stream: bool = False
    stream_options: dict[str, Any] | None = None
    return_token_ids: bool = False
    user: str | None = None
    metadata: dict[str, Any] | None = None

    def wanted(self) -> Wanted:
        """Return how a response is sampled; rejects what no response can have."""
        if self.n != 1:
            raise rejected(400, f"n={self.n} is not supported: send one request per response", param="n")
        for name, reason in UNSUPPORTED.items():
            if (self.model_extra or {}).get(name):
                raise rejected(400, f"{name} is not supported: {reason}", param=name)
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        return Wanted(self.max_tokens, stop, self.temperature, self.top_p, self.top_k, self.seed)


class ChatRequest(Sampled):
    """A request for a chat completion."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] = "auto"
    max_completion_tokens: PositiveInt | None = None
    response_format: dict[str, Any] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    def wanted(self) -> Wanted:
        self.max_tokens = self.max_completion_tokens or self.max_tokens
        if self.response_format and self.response_format.get("type") != "text":
            message = "response_format: the policy is not constrained; ask for the format in the prompt"
            raise rejected(400, message, param="response_format")
        if self.tool_choice not in ("auto", "none"):
            message = f"tool_choice={self.tool_choice} is not supported: choose auto or none"
            raise rejected(400, message, param="tool_choice")
        if self.top_logprobs:
            raise rejected(400, "top_logprobs: only the sampled token has a log-prob", param="top_logprobs")
        return super().wanted()

    def schemas(self) -> list[Schema]:
        """Return the tools as chat templates read them."""
        for number, tool in enumerate(self.tools or ()):
            if tool.get("type") != "function" or not (tool.get("function") or {}).get("name"):
                param = f"tools[{number}]"
                raise rejected(400, f"{param}: a tool is {{type: function, function: {{name, ...}}}}", param=param)
        return [
            {"type": "function", "function": {name: value for name, value in tool["function"].items() if value}}
            for tool in self.tools or ()
        ]


class CompletionRequest(Sampled):
    """A request to continue a text or token ids."""

    prompt: str | list[int] | list[str] | list[list[int]]
    logprobs: int | None = None
    echo: bool = False

    def single_prompt(self) -> str | list[int]:
        if isinstance(self.prompt, list) and self.prompt and not isinstance(self.prompt[0], int):
            if len(self.prompt) > 1:
                raise rejected(400, "prompt: send one request per prompt", param="prompt")
            return self.prompt[0]
        return self.prompt  # type: ignore[return-value]

    def wanted(self) -> Wanted:
        if self.echo:
            raise rejected(400, "echo is not supported", param="echo")
        return super().wanted()


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
    return body | {"usage": usage(reply)}


def usage(reply: Reply) -> dict[str, int]:
    prompt, sampled = len(reply.prompt_ids), len(reply.turn.completion.token_ids)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def _chat_log_probs(reply: Reply, tokenizer: PreTrainedTokenizerBase) -> list[dict[str, Any]]:
    completion, found = reply.turn.completion, []
    for token, log_prob in zip(completion.token_ids.tolist(), completion.log_probs.tolist(), strict=True):
        text = tokenizer.decode([token])
        found.append({"token": text, "logprob": log_prob, "bytes": list(text.encode()), "top_logprobs": []})
    return found


def stream_of(body: dict[str, Any], options: dict[str, Any] | None) -> Iterator[str]:
    """Return a completion as server-sent events: all of it in one chunk, then the usage if it is wanted."""
    body, (choice,) = dict(body), body["choices"]
    used = body.pop("usage")
    if message := choice.pop("message", None):
        calls = [{"index": number, **call} for number, call in enumerate(message.pop("tool_calls", ()))]
        choice["delta"] = message | ({"tool_calls": calls} if calls else {})
        body["object"] = "chat.completion.chunk"
    yield event(body)
    if (options or {}).get("include_usage"):
        yield event(body | {"choices": [], "usage": used})
    yield STREAM_END


def event(body: dict[str, Any], name: str = "") -> str:
    """Return one server-sent event."""
    return (f"event: {name}\n" if name else "") + f"data: {json.dumps(body)}\n\n"
