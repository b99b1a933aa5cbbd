"""A model's chat template as a function of messages: rendering them in the form it reads, and encoding its text."""

import contextlib
import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from hybridrl.agents.environments import Message, Schema, schema_of_texts
from hybridrl.config.findings import ConfigError
from hybridrl.data.template_arguments import FIXED, arguments_read

KEY = "actor_rollout_ref.model.custom_chat_template"
# Stand-ins that no message contains. CUT marks places in a text at which its encoding is split.
RESPONSE, CONTENT, CUT = "qzresponsezq", "qzcontentzq", "\ufdd0\ufdd1\ufdd0"
TOOL = schema_of_texts("lookup", "Look a word up.", word="The word.")
# Exceptions of a template: raised on purpose, or by unexpected values.
REJECTIONS = (TemplateError, TypeError, ValueError, LookupError, AttributeError)


class ChatTemplate:
    """The chat template of a tokenizer, with its `arguments`; `reserved` matches the texts that it may not copy from a
    message as tokens: special tokens, and added tokens that it writes itself."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, arguments: Mapping[str, Any]) -> None:
        if not tokenizer.chat_template:
            cause = "conversations of several turns need a chat template, and the model has none"
            raise ConfigError(cause, fix=f"set {KEY}=chatml, or a file")
        self._tokenizer, self.arguments = tokenizer, dict(arguments)
        source, added = str(tokenizer.chat_template), tokenizer.added_tokens_decoder.values()
        special = {token.content for token in added if token.special}
        written = {token.content for token in added if token.content in source and token.content.strip()}
        self._special, self.reserved = _any_of(special), _any_of(special | written)
        self._as_parts = self._as_text = False  # the forms of contents and of calls' arguments
        self._as_parts = self._requires("_as_parts", CONTENT, [user(CONTENT)])
        self._as_text = self._requires("_as_text", RESPONSE, [user("question"), with_calls(1, [])], [TOOL])

    def _requires(self, form: str, text: str, *conversation: Any) -> bool:
        """Return whether the template writes the text of a conversation in the form of this attribute only."""
        written = []
        for value in (False, True):
            setattr(self, form, value)
            with contextlib.suppress(ConfigError):
                written += [value] * (text in self.text(*conversation))
        return written == [True]

    def text(self, messages: Sequence[Message], tools: Sequence[Schema] = (), *, prompt: bool = False) -> str:
        """Render messages, with a generation prompt if wanted. Raises ConfigError if the template rejects them."""
        options = {"tools": list(tools) or None, "add_generation_prompt": prompt, "tokenize": False}
        try:
            if self._as_parts:
                messages = [_with_parts(message) for message in messages]
            messages = [_with_arguments(m, as_text=self._as_text) if m.get("tool_calls") else m for m in messages]
            return self._tokenizer.apply_chat_template(messages, **options, **self.arguments)
        except REJECTIONS as error:
            raise ConfigError(f"the chat template rejects these messages: {error}", fix=f"set {KEY}") from error

    @cached_property
    def _reads(self) -> set[str] | None:
        return arguments_read(self._tokenizer)

    def reads(self, names: Iterable[str]) -> set[str]:
        """Return the names that the template reads, without those reserved by rendering."""
        free = set(names) - FIXED - {*self._tokenizer.special_tokens_map}
        return free if self._reads is None else free & self._reads

    def encode(self, text: str) -> list[int]:
        """Return the ids of a rendered text; the parts between marks that `plain` has set are encoded one by one."""
        options = {"add_special_tokens": False, "return_attention_mask": False}
        pieces = [self._tokenizer(piece, **options)["input_ids"] for piece in text.split(CUT)]
        return pieces[0] if len(pieces) == 1 else [token for piece in pieces for token in piece]

    def plain(self, message: Message) -> Message:
        """Return the message with a CUT inside each text of a special token, so that it is encoded as plain text.

        Tokenizers that begin each piece with a space add one there. A response of the policy keeps the tokens that are
        not special to the tokenizer, such as those of reasoning.
        """
        pattern = self._special if message["role"] == "assistant" else self.reserved

        def split(value: Any) -> Any:
            if isinstance(value, str):
                return pattern.sub(lambda match: match[1][0] + CUT, value)
            if isinstance(value, Mapping):
                return {split(name): split(item) for name, item in value.items()}
            return [split(item) for item in value] if isinstance(value, list | tuple) else value

        return split(message)


def _any_of(texts: Collection[str]) -> re.Pattern[str]:
    """Match the first character of any of the texts, the longest of which is the first group."""
    alternatives = "|".join(re.escape(text) for text in sorted(texts, key=len, reverse=True) if len(text) > 1)
    return re.compile(f"(?=({alternatives or '(?!)'})).", re.DOTALL)


def user(content: str) -> Message:
    return {"role": "user", "content": content}


def response(_: Sequence[Message]) -> Message:
    return {"role": "assistant", "content": RESPONSE}


def with_calls(count: int, results: Sequence[Message]) -> Message:
    """Return a response with the calls that the results belong to; the last argument of the last is RESPONSE."""
    named = [result for result in results if result["role"] == "tool"]
    calls = []
    for number in range(count):
        result = named[number] if number < len(named) else {}
        arguments = {"word": RESPONSE if number == count - 1 else "word"}
        function = {"name": result.get("name", "lookup"), "arguments": arguments}
        calls.append({"id": result.get("tool_call_id", f"call{number:05}"), "type": "function", "function": function})
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _with_parts(message: Message) -> Message:
    """Return the message with its text as a list of parts, which some templates require."""
    content = message.get("content")
    return message | {"content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def _with_arguments(message: Message, *, as_text: bool) -> Message:
    """Return the message with the arguments of its calls as JSON text or as objects, as the template requires."""
    calls = []
    for call in message["tool_calls"]:
        function = call.get("function", call)
        arguments = function.get("arguments")
        if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
            arguments = {}
        if as_text != isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False) if as_text else json.loads(arguments)
        function = function | {"arguments": arguments}
        calls.append(call | {"function": function} if "function" in call else function)
    return message | {"tool_calls": calls}
