"""The endpoint as a web application: the routes and errors of OpenAI's API, and AReaL's for sessions."""

import asyncio
import json
import logging
import secrets
from collections.abc import Callable, Coroutine, Mapping
from functools import cache
from typing import Any, TypeVar

from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException as RouteError

from hybridrl.endpoint.core import Core, Generate, Reply
from hybridrl.endpoint.formats import ChatRequest, CompletionRequest, Sampled, chat_body, completion_body, stream_of
from hybridrl.endpoint.messages import as_rendered, rejected
from hybridrl.endpoint.sessions import KEY_PREFIX, Session, Sessions
from hybridrl.endpoint.translations import MessagesRequest, ResponsesRequest

logger = logging.getLogger(__name__)
T = TypeVar("T")
Claim = Callable[[], Coroutine[Any, Any, tuple[Session, Mapping[str, Any]]]]  # a session and its row

CLIENT_GONE = 499  # which nobody reads
WITHOUT_EFFECT = ("store", "parallel_tool_calls", "frequency_penalty", "presence_penalty", "service_tier")


class StartSession(BaseModel):
    """A request for a session."""

    task_id: str = ""


class SetReward(BaseModel):
    """The reward of a completion, by default of the last one; AReaL's name of its id is accepted too."""

    reward: float
    completion_id: str | None = None
    interaction_id: str | None = None


class Api:
    """The routes over one policy, which clients may name as they like.

    With an `admin_key` its owner starts sessions; without one only this process does. With `claim` these are sessions
    that wait for an agent, with their rows.
    """

    def __init__(self, core: Core, model: str, admin_key: str | None, claim: Claim | None) -> None:
        self.core, self.sessions, self.model, self.admin_key = core, core.sessions, model, admin_key
        self.claim = claim

    async def chat(self, request: Request, body: ChatRequest) -> Response:
        wanted, tools, messages = body.wanted(), body.schemas(), as_rendered(body.messages)
        session, reads_calls = self.session_of(request, body), bool(tools) and body.tool_choice == "auto"
        work = self.core.respond(session, messages, tools, wanted, reads_calls=reads_calls)
        reply = await while_connected(request, work)
        return _answer(chat_body(reply, body, self.model, self.core.kit.tokenizer), body)

    async def completions(self, request: Request, body: CompletionRequest) -> Response:
        wanted, prompt, session = body.wanted(), body.single_prompt(), self.session_of(request, body)
        reply: Reply = await while_connected(request, self.core.complete(session, prompt, wanted))
        return _answer(completion_body(reply, body, self.model, self.core.kit.tokenizer), body)

    async def responses(self, request: Request, body: ResponsesRequest) -> Response:
        return await self._translated(request, body)

    async def messages(self, request: Request, body: MessagesRequest) -> Response:
        return await self._translated(request, body)

    async def _translated(self, request: Request, body: ResponsesRequest | MessagesRequest) -> Response:
        wanted, tools, messages = body.wanted(), body.schemas(), as_rendered(body.chat())
        session = self.session_of(request, body)
        work = self.core.respond(session, messages, tools, wanted, reads_calls=body.reads_calls)
        answer = body.body(await while_connected(request, work), self.model)
        if body.stream:
            return StreamingResponse(body.events(answer), media_type="text/event-stream")
        return JSONResponse(answer)

    async def models(self) -> dict[str, Any]:
        limit = self.core.kit.limits.context
        model = {"id": self.model, "object": "model", "created": 0, "owned_by": "hybridrl", "max_model_len": limit}
        return {"object": "list", "data": [model]}

    async def health(self) -> dict[str, Any]:
        open_sessions = sum(not session.closed for session in self.sessions.by_id.values())
        return {"status": "ok", "sessions": open_sessions, "unrecorded": self.sessions.unrecorded}

    async def start_session(self, request: Request, body: StartSession | None = None) -> Response:
        self._check_admin(request)
        if self.claim is None:
            session, row = self.sessions.start(task=body.task_id if body else ""), {}
        else:
            session, row = await while_connected(request, self.claim())
        answer = {"session_id": session.id, "api_key": session.api_key} | ({"row": row} if row else {})
        return Response(json.dumps(answer, default=_plain), media_type="application/json")

    async def set_reward(self, request: Request, body: SetReward) -> dict[str, Any]:
        session = self._own_session(request)
        session.set_reward(body.reward, body.completion_id or body.interaction_id)
        return {"session_id": session.id, "reward": body.reward}

    async def end_session(self, request: Request) -> dict[str, Any]:
        session = self._own_session(request)
        session.close()
        return {"session_id": session.id, "turns": len(session.turns)}

    async def describe(self, request: Request, session_id: str, turn_discount: float = 1.0) -> dict[str, Any]:
        session = self.sessions.by_id.get(session_id)
        if session is None or _key(request) != session.api_key:
            self._check_admin(request)
        if session is None:
            raise rejected(404, f"there is no session {session_id}")
        turns = [
            {"id": turn.id, "parent": turn.parent and turn.parent.id, "reward": turn.reward, "messages": turn.messages}
            for turn in session.turns
        ]
        trajectory = session.trajectory(turn_discount)
        rows = [
            {
                name: [*map(float if name in ("log_probs", "rewards") else int, values)]
                for name, values in vars(row).items()
            }
            for row in (trajectory.rows() if turns else ())
        ]
        about = {"session_id": session_id, "task_id": session.task, "closed": session.closed, "forks": session.forks}
        return about | {"reward": trajectory.reward, "turns": turns, "rows": rows}

    def session_of(self, request: Request, body: Sampled) -> Session | None:
        """Return the session that a request belongs to; None if it names none."""
        for name in WITHOUT_EFFECT:
            if name in (body.model_extra or {}):
                _warn_once(name)
        key = _key(request)
        if key.startswith(KEY_PREFIX):
            return self._own_session(request)
        named = request.headers.get("X-Session-ID") or (body.metadata or {}).get("session_id")
        session = self.sessions.by_id.get(str(named or body.user))
        if session is None and named:
            raise rejected(404, f"there is no session {named}: start one, or leave the name out", code="no_session")
        if session is None:
            self.sessions.unrecorded += 1
            return None
        return self.sessions.opened(session)

    def _own_session(self, request: Request) -> Session:
        session = self.sessions.by_key.get(_key(request))
        if session is None:
            raise rejected(401, "this API key belongs to no session", code="invalid_api_key")
        return self.sessions.opened(session)

    def _check_admin(self, request: Request) -> None:
        if self.admin_key is None or not secrets.compare_digest(_key(request), self.admin_key):
            raise rejected(401, "this needs the admin key, as Authorization: Bearer KEY", code="invalid_api_key")


def create_app(
    generate: Generate,
    sessions: Sessions,
    *,
    model: str = "policy",
    admin_key: str | None = None,
    claim: Claim | None = None,
) -> FastAPI:
    """Make the application over a function that samples, and the sessions that it records."""
    api = Api(Core(generate, sessions), model, admin_key, claim)
    app = FastAPI(title="hybridrl", openapi_url=None)
    for method, path, route in (
        ("POST", "/v1/chat/completions", api.chat),
        ("POST", "/v1/completions", api.completions),
        ("POST", "/v1/responses", api.responses),
        ("POST", "/v1/messages", api.messages),
        ("GET", "/v1/models", api.models),
        ("GET", "/health", api.health),
        ("POST", "/rl/start_session", api.start_session),
        ("POST", "/rl/set_reward", api.set_reward),
        ("POST", "/rl/end_session", api.end_session),
        ("GET", "/rl/session/{session_id}", api.describe),
    ):
        app.add_api_route(path, route, methods=[method], response_model=None)
    app.add_exception_handler(RouteError, _on_rejection)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(Exception, _on_failure)
    return app


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of some work, which is cancelled if the client disconnects."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait([task, gone], return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise HTTPException(CLIENT_GONE)
        return task.result()
    finally:
        task.cancel()
        gone.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _answer(body: dict[str, Any], request: Sampled) -> Response:
    if request.stream:
        return StreamingResponse(stream_of(body, request.stream_options), media_type="text/event-stream")
    return JSONResponse(body)


def _key(request: Request) -> str:
    """Return the API key, as OpenAI's or Anthropic's clients send it."""
    return request.headers.get("Authorization", "").removeprefix("Bearer ") or request.headers.get("x-api-key", "")


def _plain(value: Any) -> Any:
    """Return a value that JSON can hold: rows have arrays and numbers of numpy."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


@cache
def _warn_once(name: str) -> None:
    logger.warning("the endpoint ignores %s of requests", name)


def _error(status: int, message: str, param: str | None = None, code: str | None = None) -> JSONResponse:
    """Return an error as OpenAI's clients read it, and Anthropic's."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    error = {"message": message, "type": kind, "param": param, "code": code}
    return JSONResponse({"type": "error", "error": error}, status)


async def _on_rejection(_: Request, error: Any) -> Response:
    detail = error.detail if isinstance(error.detail, dict) else {"message": str(error.detail)}
    return _error(error.status_code, **detail)


async def _on_invalid(_: Request, error: Any) -> Response:
    first = error.errors()[0]
    param = ".".join(str(part) for part in first["loc"][1:])
    return _error(400, f"{param or 'body'}: {first['msg']}", param)


async def _on_failure(_: Request, error: Exception) -> Response:
    return _error(500, f"{type(error).__name__}: {error}")
