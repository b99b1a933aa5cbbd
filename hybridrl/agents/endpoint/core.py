"""From a conversation to a response of the policy, whatever form of the API the request has."""

import asyncio
import json
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from hybridrl.agents.endpoint.messages import split_reasoning
from hybridrl.agents.endpoint.requests import encodable, rejected
from hybridrl.agents.endpoint.sessions import AgentSessions, RenderedPrompt, SampledTurn, Session
from hybridrl.agents.environments import Message, Schema, ToolCall
from hybridrl.agents.environments.calls import REASONING_END
from hybridrl.agents.environments.episode_loop import EpisodeTools
from hybridrl.config.findings import ConfigError
from hybridrl.core.carried import Encoded
from hybridrl.core.rollout import Completion, RequestFault
from hybridrl.required import required

T = TypeVar("T")

ENCODERS = 2
NOTHING = Completion(np.empty(0, np.int64), np.empty(0, np.float32), truncated=False, versions=0)  # sampled so far


@dataclass(frozen=True)
class SamplingOptions:
    """A client's options of sampling; None: as the endpoint does by default. A text of `stop` ends a response."""

    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    ignore_eos: bool = False
    json_schema: str | None = None  # the response must match it
    forced: bool = False  # it is that of a call
    prompt_log_probs: int | None = None  # as in Request
    hear: Callable[[Any], None] | None = None  # called meanwhile: the core's with tokens, and its own with replies


# Samples a response to token ids for a session; max_tokens is a number.
Generate = Callable[[Session, Encoded, SamplingOptions], Awaitable[Completion]]


@dataclass(frozen=True)
class Reply:
    """A response, with the ids that it was sampled from."""

    turn: SampledTurn
    prompt_ids: list[int]
    ended: bool = True

    @property
    def message(self) -> Message:
        """The response as the conversation has it."""
        return self.turn.messages[-1]

    @property
    def finish(self) -> str | None:
        """The reason of its end, as OpenAI names it: stop, length or tool_calls; None: it has not ended."""
        if not self.ended:
            return None
        if "tool_calls" in self.message:
            return "tool_calls"
        return "length" if self.turn.completion.truncated else "stop"


class Growing:
    """A response while it is sampled: `hear` is called with the part of it that later tokens do not change, which lacks
    half a character, the beginning of a text of `stop`, and reasoning until it has ended."""

    def __init__(self, kit: EpisodeTools, prompt: RenderedPrompt, options: SamplingOptions, *, chat: bool) -> None:
        self.kit, self.prompt, self.stop, self.hear = kit, prompt, options.stop, required(options.hear)
        self.ids, self.text = list[int](), ""
        self.begin = self.end = 0  # tokens in between: decoded again with new ones, as their context
        thinks = chat and REASONING_END in str(kit.tokenizer.chat_template)
        self.thinks = thinks and not kit.tokenizer.decode(prompt.ids[-8:]).rstrip().endswith(REASONING_END)

    def add(self, ids: list[int]) -> None:
        self.ids += ids
        before, now = (_decoded(self.kit, np.array(self.ids[self.begin : end])) for end in (self.end, None))
        if len(now) > len(before) and not now.endswith("\ufffd"):
            self.text += now[len(before) :]
            self.begin, self.end = self.end, len(self.ids)
        held_back = max((n for s in self.stop for n in range(1, len(s)) if self.text.endswith(s[:n])), default=0)
        text = _cut(self.text[: len(self.text) - held_back], self.stop)
        if not self.thinks or REASONING_END in text:
            message = _message(text, [], 0) if self.thinks else {"role": "assistant", "content": text}
            turn = SampledTurn(self.prompt.name, None, Encoded([]), 0, NOTHING, [message], False, 0.0)
            self.hear(Reply(turn, self.prompt.ids, ended=False))


class Core:
    """The policy behind the endpoint.

    Pictures are read, prompts rendered and encoded in ENCODERS threads: a long one takes seconds, and hundreds of times
    its size.
    """

    def __init__(self, generate: Generate, sessions: AgentSessions) -> None:
        self.generate, self.sessions, self.kit = generate, sessions, sessions.kit
        self.encoders = ThreadPoolExecutor(ENCODERS, thread_name_prefix="encoder")

    async def respond(
        self,
        session: Session,
        messages: Sequence[Message],
        tools: Sequence[Schema],
        sampling: SamplingOptions,
        *,
        reads_calls: bool,
        template: Mapping[str, Any] = MappingProxyType({}),
        whole: bool = False,
    ) -> Reply:
        """Sample the next message of a conversation, and record it. `template` has arguments of the chat template. With
        `whole` its reasoning is heard too, as a part of its text."""
        prompt = await self.prepared(session, session.prompt_for, messages, tools, template)
        completion, seconds = await self._sample(session, prompt, sampling, hears=not tools, chat=not whole)
        text, calls, readable = self._text(completion, sampling.stop, special=bool(tools)), [], True
        if reads_calls:
            content, calls = _forced_call(text) if sampling.forced else self._read(text, tools)
            # What cannot be read as a call is left in the text: the agent decides what follows from it.
            readable = not any(call.error for call in calls)
            text = content if readable else text
        before = sum(len(message.get("tool_calls", ())) for message in messages)
        response = _message(text, calls if calls and readable else [], before)
        turn = session.record(prompt, completion, response, called=bool(calls), seconds=seconds)
        return Reply(turn, prompt.ids)

    async def complete(self, session: Session, prompt: str | list[int], sampling: SamplingOptions) -> Reply:
        """Continue a text or token ids, and record it."""
        place = await self.prepared(session, session.prompt_of, prompt)
        completion, seconds = await self._sample(session, place, sampling, hears=True, chat=False)
        response = {"role": "assistant", "content": self._text(completion, sampling.stop)}
        return Reply(session.record(place, completion, response, seconds=seconds), place.ids)

    async def prepared(self, session: Session, prepare: Callable[..., T], *arguments: Any) -> T:
        """Return the messages or the prompt of a request; those of one session in the order in which they arrived."""
        async with session.preparing:
            try:
                return await asyncio.get_running_loop().run_in_executor(self.encoders, prepare, *arguments)
            except RecursionError as error:
                raise rejected(400, "messages: something is nested too deeply", param="messages") from error

    async def _sample(
        self, session: Session, prompt: RenderedPrompt, sampling: SamplingOptions, *, hears: bool, chat: bool
    ) -> tuple[Completion, float]:
        if (vocabulary := len(self.kit.tokenizer)) <= max(sampling.stop_ids, default=0):
            raise rejected(400, f"stop_token_ids: token ids are below {vocabulary}", param="stop_token_ids")
        began, most = time.monotonic(), min(sampling.max_tokens or prompt.left, prompt.left)
        sampling = replace(sampling, max_tokens=most, min_tokens=min(sampling.min_tokens, most))
        if sampling.hear:  # a text with calls, which are read at its end, does not grow
            sampling = replace(sampling, hear=Growing(self.kit, prompt, sampling, chat=chat).add if hears else None)
        try:
            completion = await self.generate(session, Encoded(prompt.ids, prompt.carried), sampling)
        except RequestFault as fault:
            raise rejected(400, str(fault)) from fault
        return completion, time.monotonic() - began

    def _text(self, completion: Completion, stop: Sequence[str], *, special: bool = False) -> str:
        """Decode a response without its end token, up to the first of the texts in `stop`."""
        return _cut(_decoded(self.kit, completion.token_ids, special=special), stop)

    def _read(self, text: str, tools: Sequence[Schema]) -> tuple[str, list[ToolCall]]:
        try:
            return self.kit.parser()(text, tools)
        except ConfigError as error:
            raise rejected(400, str(error), param="tools") from error


def _decoded(kit: EpisodeTools, sampled: np.ndarray, *, special: bool = False) -> str:
    ids = kit.content(sampled)
    return kit.tokenizer.decode(ids) if special else kit.decode(ids)


def token_bytes(tokenizer: PreTrainedTokenizerBase) -> Callable[[int], bytes]:
    """Return a function from a token to its bytes, which need not be whole characters."""
    added, alphabet = tokenizer.added_tokens_decoder, {text: byte for byte, text in bytes_to_unicode().items()}
    by_byte = tokenizer.convert_tokens_to_string(["a\u0120"]) == "a "  # other vocabularies may have these letters too

    def written(token: int) -> bytes:
        piece = added[token].content if token in added else tokenizer.convert_ids_to_tokens(token) or ""
        if token not in added and by_byte and all(character in alphabet for character in piece):
            return bytes(alphabet[character] for character in piece)
        if single := re.fullmatch("<0x([0-9A-F]{2})>", piece):  # a byte in a vocabulary of text pieces
            return bytes.fromhex(single[1])
        return piece.replace("\u2581", " ").encode()

    return written


def _cut(text: str, stop: Sequence[str]) -> str:
    return text[: min((at for end in stop if (at := text.find(end)) >= 0), default=None)]


def _message(text: str, calls: Sequence[ToolCall], before: int) -> Message:
    """Return a response as a message; its calls are numbered after those `before` it, so that their ids differ."""
    reasoning, content = split_reasoning(text)
    message: Message = {"role": "assistant", "content": content}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = [_call(call, before + number) for number, call in enumerate(calls)]
    return message


def _forced_call(text: str) -> tuple[str, list[ToolCall]]:
    """Return the call that a response is, as JSON; one that was cut off is text."""
    try:
        call = json.loads(text)
        return "", [ToolCall(call["name"], call["arguments"])]
    except (ValueError, KeyError, TypeError):
        return text, []


def _call(call: ToolCall, number: int) -> dict[str, Any]:
    arguments = json.dumps(call.arguments, ensure_ascii=False)
    if not encodable(arguments):  # the policy may write half of a surrogate pair, which no response can hold
        arguments = json.dumps(call.arguments)
    function = {"name": call.name.encode(errors="replace").decode(), "arguments": arguments}
    return {"id": f"call{number:05}", "type": "function", "function": function}
