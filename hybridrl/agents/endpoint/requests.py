"""Requests from anyone: who may send them, how large they are, what their JSON may hold, and how errors are answered.

Whatever a client sends, a route reads a body of bounded size that is valid JSON, and the connection stays usable.
"""

import json
import logging
import math
from collections.abc import Callable, Coroutine, Iterator
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

from fastapi import HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from fastapi.routing import APIRoute
from pydantic_core import from_json, to_json
from starlette.exceptions import HTTPException as RouteError

from hybridrl.agents.endpoint.messages import encodable, place, rejected

logger = logging.getLogger(__name__)

# A token of text has 1 to 12 bytes in JSON; tools and ids come on top of it.
BYTES_PER_TOKEN, FURTHER_BYTES = 32, 2**16
EVERY_ADDRESS = ("", "0.0.0.0", "::")


def body_limit(context: int) -> int:
    """Return the bytes that a body may have where a context has so many tokens."""
    return context * BYTES_PER_TOKEN + FURTHER_BYTES


class BoundedRequest(Request):
    """A request whose body has a limit, and is JSON that every part behind it can hold."""

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
            except Exception as error:  # whatever the policy raises
                logger.exception("a request failed: %s", request.url.path)
                return answer_error(500, f"{type(error).__name__}: {error}")

        return handle


def answer(body: Any, status: int = 200, plain: Callable[[Any], Any] = str) -> Response:
    """Return a response with JSON; `plain` makes of other values what JSON can hold."""
    content = to_json(body, inf_nan_mode="null", fallback=plain)
    return Response(content, status, media_type="application/json")


def answer_error(status: int, message: str, param: str | None = None, code: str | None = None) -> Response:
    """Return an error as OpenAI's clients read it, and Anthropic's."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return answer({"type": "error", "error": {"message": message, "type": kind, "param": param, "code": code}}, status)


async def on_rejection(_: Request, error: RouteError) -> Response:
    detail = error.detail if isinstance(error.detail, dict) else {"message": str(error.detail)}
    return answer_error(error.status_code, **detail)


async def on_invalid(request: Request, error: RequestValidationError) -> Response:
    first = error.errors()[0]
    param = place(first["loc"][1:])
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
        return next((place(path) or "body" for path, value in _values(json.loads(body), ()) if not _fits(value)), None)
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
