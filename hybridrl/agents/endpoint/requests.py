"""Requests from anyone: the allowed senders, sizes and JSON, and the answers to errors.

Whatever a client sends, a route reads a body of bounded size that is valid JSON, and the connection stays usable.
"""

import asyncio
import json
import logging
import math
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from ipaddress import ip_address
from typing import Annotated, Any, TypeVar, get_args
from urllib.parse import urlsplit

from fastapi import HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import from_json, to_json
from starlette.exceptions import HTTPException as RouteError

TEXT_PARTS = ("text", "input_text", "output_text")
Name = Annotated[str, Field(min_length=1, max_length=256)]
logger = logging.getLogger(__name__)

# A token of text has 1 to 12 bytes in JSON; tools and ids come on top of it.
BYTES_PER_TOKEN, FURTHER_BYTES = 32, 2**16
EVERY_ADDRESS = ("", "0.0.0.0", "::")


def rejected(status: int, message: str, *, code: str | None = None, param: str | None = None) -> HTTPException:
    """Make the error of a request, which the client reads in OpenAI's form."""
    return HTTPException(status, {"message": message, "param": param, "code": code})


class Member(BaseModel):
    """An object of a request. A field that is null is absent; numbers are finite. What is neither among its fields nor
    read as text is in `model_extra`."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        present = {name: item for name, item in values.items() if item is not None}
        texts = [
            name for name, field in cls.model_fields.items() if str in (field.annotation, *get_args(field.annotation))
        ]
        return present | {at: item for name in texts for at, item in _further_fields(name, present.get(name))}


def _further_fields(name: str, content: Any) -> Iterator[tuple[str, Any]]:
    """Yield the other fields of a text's parts: only their text is read."""
    for number, part in enumerate(content if isinstance(content, list) else ()):
        others = part.items() if is_text(part) else ()
        yield from ((f"{name}[{number}].{field}", item) for field, item in others if field not in ("type", "text"))


def unread(fields: Member, where: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the fields of an object, and of those in it, that nothing reads, by their places."""
    yield from ((f"{where}{name}", value) for name, value in (fields.model_extra or {}).items())
    for name in type(fields).model_fields:
        content = getattr(fields, name)
        inner = [(f"{name}[{n}]", c) for n, c in enumerate(content)] if isinstance(content, list) else [(name, content)]
        for at, item in inner:
            yield from unread(item, f"{where}{at}.") if isinstance(item, Member) else ()


def is_text(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") in TEXT_PARTS


F = TypeVar("F", bound=Member)


def field_name(path: Sequence[str | int]) -> str:
    """Return the name of a field: messages[0].content."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")


def validated(kind: type[F], value: Any, where: str, context: Any = None) -> F:
    """Return the request's object at `where`; rejects invalid fields by name. `context` reads its pictures, if any."""
    try:
        return kind.model_validate(value, context=context)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        param, value = field_name((where, *first["loc"])), first["input"]
        passed = f", not {value!r:.80}" if first["type"] == "literal_error" else ""
        raise rejected(400, f"{param}: {first['msg']}{passed}", param=param) from error


def encodable(text: str) -> bool:
    """Return whether a text has no half of a surrogate pair, which JSON can hold and no tokenizer can read."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def body_limit(context: int, pictures: int = 0) -> int:
    """Return the most bytes of a body, for a context of this number of tokens, and of `pictures` in bytes."""
    return context * BYTES_PER_TOKEN + FURTHER_BYTES + pictures


class BoundedRequest(Request):
    """A request with a bounded body, whose JSON every later part can hold."""

    def check_host(self) -> None:
        """Reject a request that was meant for another host: a page of another site may resolve to this address."""
        configured, header = self.app.state.host, self.headers.get("Host", "")
        if configured not in EVERY_ADDRESS and not _names(header, configured):
            raise rejected(403, f"Host: {header}: this endpoint answers requests to {configured} only", param="Host")

    async def body(self) -> bytes:
        if not hasattr(self, "_body"):
            limit, chunks, size = self.app.state.body_limit, [], 0
            declared = self.headers.get("Content-Length", "")
            if declared.isdigit() and int(declared[:20]) > limit:
                raise _too_large(limit)
            async for chunk in self.stream():
                size += len(chunk)
                if size > limit:
                    raise _too_large(limit)
                chunks.append(chunk)
            self._body = b"".join(chunks)
        return self._body

    async def json(self) -> Any:
        body = await self.body()
        try:
            return from_json(body, allow_inf_nan=False)
        except ValueError as error:
            field = _unfit(body)
            raise rejected(400, f"{field or 'body'}: this is not valid JSON: {error}", param=field) from error


class Route(APIRoute):
    """A route whose failures are answered here: outside of it the server would close the connection."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            bounded = BoundedRequest(request.scope, request.receive)
            try:
                bounded.check_host()
                return await handler(bounded)
            except (HTTPException, RequestValidationError):
                raise
            except asyncio.CancelledError:  # Ctrl-C
                return answer_error(503, "the server has been stopped")
            except Exception as error:  # whatever the policy raises
                logger.exception("a request failed: %s", request.url.path)
                return answer_error(500, f"{type(error).__name__}: {error}")

        return handle


def reply(body: Any, status: int = 200, plain: Callable[[Any], Any] = str) -> Response:
    """Return a response with JSON; `plain` makes of other values what JSON can hold."""
    content = to_json(body, inf_nan_mode="null", bytes_mode="base64", fallback=plain)
    return Response(content, status, media_type="application/json")


def answer_error(status: int, message: str, param: str | None = None, code: str | None = None) -> Response:
    """Return an error as OpenAI's clients read it, and Anthropic's."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return reply({"type": "error", "error": {"message": message, "type": kind, "param": param, "code": code}}, status)


async def on_rejection(_: Request, error: RouteError) -> Response:
    detail = error.detail if isinstance(error.detail, dict) else {"message": str(error.detail)}
    return answer_error(error.status_code, **detail)


async def on_invalid(request: Request, error: RequestValidationError) -> Response:
    first = error.errors()[0]
    param = field_name(first["loc"][1:])
    if not param and "json" not in request.headers.get("Content-Type", ""):
        return answer_error(400, "body: send a JSON object, with Content-Type: application/json")
    return answer_error(400, f"{param or 'body'}: {first['msg']}", param or None)


def _too_large(limit: int) -> HTTPException:
    return rejected(413, f"the body has more than the {limit} bytes that a full context can take", param="body")


def _names(header: str, configured: str) -> bool:
    """Return whether the header Host names this machine's own addresses, or the configured host."""
    try:
        name = urlsplit(f"//{header}").hostname or ""
        return name in ("localhost", configured.lower()) or ip_address(name).is_loopback
    except ValueError:
        return False


def _unfit(body: bytes) -> str | None:
    """Return the place of the first value that Python reads and JSON cannot hold: NaN, or half of a surrogate pair."""
    try:
        return next(
            (field_name(path) or "body" for path, value in _values(json.loads(body), ()) if not _fits(value)), None
        )
    except (ValueError, RecursionError):
        return None


def _values(value: Any, path: tuple[str | int, ...]) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """Yield the values and names in a value, with their places."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    yield path, value
    for name, item in items:
        yield path, name
        yield from _values(item, (*path, name))


def _fits(value: Any) -> bool:
    return encodable(value) if isinstance(value, str) else not isinstance(value, float) or math.isfinite(value)
