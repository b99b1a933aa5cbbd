"""Messages of the API in the form that chat templates read, and when two of them are the same message.

Frameworks send a response back in their own form: with arguments in another order, a null for an empty text, or without
the reasoning. It is still the message that was sampled.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import HTTPException

from hybridrl.environments import Message, Schema
from hybridrl.environments.calls import REASONING_END

REASONING_START = "<think>"
TEXT_PARTS = ("text", "input_text", "output_text")
ROLES = {"developer": "system", "function": "tool"}  # newer and older names of the API -> those of templates


def rejected(status: int, message: str, *, code: str | None = None, param: str | None = None) -> HTTPException:
    """Make the error of a request, which the client reads in OpenAI's form."""
    return HTTPException(status, {"message": message, "param": param, "code": code})


def as_rendered(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Return messages as a chat template reads them: texts as strings, results of tools with the name of the tool.

    Fields that no template reads are left out. Rejects content that is not text.
    """
    names: dict[str, str] = {}  # of tools, by the id of the call
    rendered = []
    for number, given in enumerate(messages):
        role = given.get("role")
        if not isinstance(role, str):
            raise rejected(400, f"messages[{number}] has no role", param=f"messages[{number}].role")
        message: Message = {"role": ROLES.get(role, role), "content": _text(given.get("content"), number)}
        if reasoning := given.get("reasoning_content"):
            message["reasoning_content"] = reasoning
        if calls := given.get("tool_calls"):
            message["tool_calls"] = [_call(call, number) for call in calls]
            names |= {call["id"]: call["function"]["name"] for call in message["tool_calls"]}
        if message["role"] == "tool":
            called = str(given.get("tool_call_id", ""))
            message |= {"tool_call_id": called, "name": given.get("name") or names.get(called, "")}
        rendered.append(message)
    return rendered


def _text(content: Any, number: int) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    parts = content if isinstance(content, list) else [content]
    if not all(isinstance(part, Mapping) and part.get("type") in TEXT_PARTS for part in parts):
        raise rejected(400, f"messages[{number}]: the policy reads text only", param=f"messages[{number}].content")
    return "".join(part.get("text") or "" for part in parts)


def _call(call: Any, number: int) -> dict[str, Any]:
    try:
        function = {"name": str(call["function"]["name"]), "arguments": call["function"].get("arguments") or "{}"}
        return {"id": str(call.get("id", "")), "type": "function", "function": function}
    except (TypeError, KeyError, AttributeError) as error:
        param = f"messages[{number}].tool_calls"
        raise rejected(400, f"{param}: a call is {{id, function: {{name, arguments}}}}", param=param) from error


def split_reasoning(text: str) -> tuple[str, str]:
    """Return the reasoning of a response, empty if it has none, and its content."""
    reasoning, end, content = text.partition(REASONING_END)
    return (reasoning.removeprefix(REASONING_START).strip("\n"), content.lstrip("\n")) if end else ("", text)


def digests(messages: Sequence[Message], tools: Sequence[Schema]) -> list[bytes]:
    """Return what identifies the conversation up to and with each message; equal for messages that are the same."""
    state, found = hashlib.blake2b(json.dumps(list(tools), sort_keys=True).encode(), digest_size=16), []
    for message in messages:
        state.update(json.dumps(_identity(message), sort_keys=True).encode())
        found.append(state.digest())
    return found


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
