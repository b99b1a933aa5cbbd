"""Messages of requests in the form of chat templates, with a digest that is equal for equal messages.

Frameworks send a response back in their own form: with arguments in another order, a null for an empty text, or without
the reasoning. It is still the message that was sampled. A picture comes as the bytes of a file, in any API's form:
a client names no file, address or earlier picture.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PlainValidator,
    PrivateAttr,
    TypeAdapter,
    ValidationInfo,
    model_validator,
)
from pydantic_core import from_json

from hybridrl.agents.endpoint.requests import Member, Name, is_text, validated
from hybridrl.agents.environments import Message, Schema
from hybridrl.agents.environments.calls import REASONING_END
from hybridrl.agents.environments.pictures import DIGEST
from hybridrl.data.pictures import of_data_url

REASONING_START = "<think>"
ROLES = {"developer": "system", "function": "tool"}  # newer and older names of the API -> those of templates
TEXT_ONLY = "the policy reads text only: a string, or a list of {type: text, text}"
MOST_BYTES = 8 << 20  # a picture's file
PICTURE_BYTES = MOST_BYTES * 4 // 3  # in base64
NOT_SENT = "no picture is read from an address, a file or a name: send it as a data URL (data:image/png;base64,...)"


def content_text(content: Any) -> str:
    """Return the text of a content, which is a string or a list of parts."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [content]
    texts = [(part.get("text") or "") if is_text(part) else None for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError(TEXT_ONLY)
    return "".join(texts)


Text = Annotated[str, BeforeValidator(content_text)]


def _as_address(value: Any) -> Any:
    return {"url": value} if isinstance(value, str) else value


class PictureAddress(Member):
    """A picture in the form of OpenAI's API."""

    url: str = ""


class PictureSource(Member):
    """A picture in the form of Anthropic's API."""

    type: str = ""
    media_type: str = ""
    data: str = ""


class ContentPart(Member):
    """A part of a content: a text, or a picture. A picture is read with the part, by the function in the context."""

    type: Literal["text", "input_text", "output_text", "image_url", "input_image", "image"]
    text: str = ""
    image_url: Annotated[PictureAddress, BeforeValidator(_as_address)] = PictureAddress()
    source: PictureSource = PictureSource()

    _digest: int | None = PrivateAttr(None)

    @model_validator(mode="after")
    def _read(self, info: ValidationInfo) -> Self:
        if self.type in PICTURES and self._digest is None:
            if info.context is None:
                raise ValueError(f"{TEXT_ONLY}, not {self.type}")
            self._digest = info.context(self._file())
        return self

    def _file(self) -> bytes:
        source = self.source
        url = f"data:{source.media_type};base64,{source.data}" if source.type == "base64" else self.image_url.url
        if url[:5].lower() != "data:":
            raise ValueError(NOT_SENT)
        if len(data := of_data_url(url)) > MOST_BYTES:
            raise ValueError(f"the picture's file has {len(data):,} bytes, and at most {MOST_BYTES:,} are read")
        return data

    def rendered(self) -> dict[str, Any]:
        """Return the part as chat templates read it, with the name of its picture."""
        return {"type": "text", "text": self.text} if self._digest is None else {"type": "image", DIGEST: self._digest}


PICTURES = ("image_url", "input_image", "image")
PARTS = TypeAdapter(list[ContentPart])


def _content(content: Any, info: ValidationInfo) -> str | list[ContentPart]:
    """Return the text of a content, or its parts if it has pictures and the policy reads them."""
    pictures = isinstance(content, list) and any(map(is_picture, content))
    if info.context is None or not pictures:
        return content_text(content)
    if info.data.get("role") == "assistant":
        raise ValueError("a response has text only")
    return PARTS.validate_python(content, context=info.context)


def is_picture(part: Any) -> bool:
    return (part.type if isinstance(part, ContentPart) else isinstance(part, dict) and part.get("type")) in PICTURES


Content = Annotated[str | list[ContentPart], PlainValidator(_content)]


class Block(ContentPart):
    """A part of a message of Anthropic's."""

    type: Literal["text", "image", "tool_use", "tool_result", "thinking", "redacted_thinking"]
    id: str = ""
    name: str = ""
    input: dict[str, Any] = Field({})
    tool_use_id: str = ""
    content: Content = ""
    is_error: bool = False

    def result(self) -> str | list[ContentPart]:
        """Return the result of a tool as the policy reads it: an error begins as those of environments do."""
        content = self.content
        if not self.is_error or content[:5] == "Error":
            return content
        if isinstance(content, list):
            return [ContentPart(type="text", text="Error: "), *content]
        return f"Error: {content}" if content else "Error"


def _arguments(value: Any) -> Any:
    if not isinstance(value, str | dict):
        raise ValueError("the arguments of a call are JSON text")
    if isinstance(value, str) and "\\u" in value:  # half of a surrogate pair, which templates would write
        from_json(value)
    return value or "{}"


class Function(Member):
    """The function of a call, with its arguments as text or as an object."""

    name: Name
    arguments: Annotated[Any, AfterValidator(_arguments)] = "{}"


class Call(Member):
    """A call of a tool in a response."""

    id: str = ""
    function: Function


class ChatMessage(Member):
    """A message of a chat; fields that no template reads are left out."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Content = ""
    reasoning_content: str = ""
    tool_calls: list[Call] = Field([])
    tool_call_id: str = ""
    name: str = ""

    @model_validator(mode="after")
    def _without_name(self) -> Self:
        if self.name and self.role not in ("tool", "function"):  # no template reads it
            self.__pydantic_extra__ = {"name": self.name} | (self.model_extra or {})
        return self


def as_rendered(
    messages: Sequence[Any], places: Sequence[str] = (), read: Callable[..., Any] = validated
) -> list[Message]:
    """Return messages as a chat template reads them: texts as strings, results of tools with the name of the tool.

    Rejects content that is not read; `places` are the names of the fields that the messages come from.
    """
    names: dict[str, str] = {}  # name of the tool, by the id of the call
    rendered = []
    for number, item in enumerate(messages):
        fields = read(ChatMessage, item, places[number] if places else f"messages[{number}]")
        content = fields.content if isinstance(fields.content, str) else [part.rendered() for part in fields.content]
        message: Message = {"role": ROLES.get(fields.role, fields.role), "content": content}
        if fields.reasoning_content:
            message["reasoning_content"] = fields.reasoning_content
        if fields.tool_calls:
            message["tool_calls"] = [_call(call) for call in fields.tool_calls]
            names |= {call.id: call.function.name for call in fields.tool_calls}
        if message["role"] == "tool":
            message |= {"tool_call_id": fields.tool_call_id, "name": fields.name or names.get(fields.tool_call_id, "")}
        rendered.append(message)
    return rendered


def _call(call: Call) -> dict[str, Any]:
    function = {"name": call.function.name, "arguments": call.function.arguments}
    return {"id": call.id, "type": "function", "function": function}


def split_reasoning(text: str) -> tuple[str, str]:
    """Return the reasoning of a response, empty if it has none, and its content."""
    reasoning, end, content = text.partition(REASONING_END)
    return (reasoning.removeprefix(REASONING_START).strip("\n"), content.lstrip("\n")) if end else ("", text)


def digests(messages: Sequence[Message], tools: Sequence[Schema]) -> list[bytes]:
    """Return what identifies the conversation up to and with each message; equal for messages that are the same."""
    state, results = hashlib.blake2b(json.dumps(list(tools), sort_keys=True).encode(), digest_size=16), []
    for message in messages:
        state.update(json.dumps(_identity(message), sort_keys=True).encode())
        results.append(state.digest())
    return results


def _identity(message: Message) -> list[Any]:
    """Return what makes a message another one: neither its reasoning nor the ids of calls."""
    content = message["content"]
    if message["role"] == "assistant":
        content = split_reasoning(content)[1].strip()
    functions = [call["function"] for call in message.get("tool_calls", ())]
    return [message["role"], content, [[function["name"], _parsed(function["arguments"])] for function in functions]]


def _parsed(arguments: Any) -> Any:
    try:
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        return arguments
