"""The endpoint as a web application: the paths and errors of OpenAI's API, and AReaL's for sessions."""

import asyncio
import logging
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Annotated, Any, TypeVar

import uvicorn
from fastapi import FastAPI, HTTPException, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response, StreamingResponse
from pydantic import Field
from pydantic_core import to_json
from starlette.exceptions import HTTPException as RouteError

from hybridrl.agents.endpoint import bound
from hybridrl.agents.endpoint.core import Core, Generate, Reply, SamplingOptions
from hybridrl.agents.endpoint.fields import NONE, SERVED, Rules, Sampled
from hybridrl.agents.endpoint.formats import (
    ChatRequest,
    CompletionRequest,
    MessagesRequest,
    ResponsesRequest,
    chat_body,
    completion_body,
)
from hybridrl.agents.endpoint.messages import PICTURE_BYTES
from hybridrl.agents.endpoint.requests import Member, Route, body_limit, on_invalid, on_rejection, rejected, reply
from hybridrl.agents.endpoint.sessions import KEY_PREFIX, LOST_SECONDS, AgentSessions, Session
from hybridrl.rewards.score import LARGEST

T = TypeVar("T")
Claim = Callable[[], Coroutine[Any, Any, tuple[Session, Mapping[str, Any]]]]  # a session and its row
HealthCheck = Callable[[], Awaitable[Any]]  # raises if the policy cannot be sampled from

Form = Callable[[Reply], dict[str, Any]]  # makes the body of an answer
Work = Callable[..., Coroutine[Any, Any, Reply]]
logger = logging.getLogger(__name__)

CLIENT_GONE = 499  # nobody reads this status
CHECK_SECONDS = 10.0
BACKLOG = 2048
# Clients close a connection that was idle for 5 s (httpx, and so OpenAI's and Anthropic's). If the server closes it at
# that moment, the next request is lost.
IDLE_SECONDS = 75
# Columns of a row in an export; carried fields are for the trainer.
COLUMNS = {"prompt_ids": int, "response_ids": int, "log_probs": float, "mask": int, "rewards": float, "versions": int}
Discount = Annotated[float, Query(ge=0, le=1)]


class StartSession(Member):
    """A request for a session."""

    task_id: str = Field("", max_length=1000)


class NamedSession(Member):
    """A session, by default that of the API key."""

    session_id: str = ""


class SetReward(NamedSession):
    """The reward of a completion, by default of the last one; AReaL's name of its id is accepted too."""

    reward: float = Field(ge=-LARGEST, le=LARGEST)
    completion_id: str | None = None
    interaction_id: str | None = None


class Api:
    """The paths over one policy, which clients may name as they like while it is trained.

    With an `admin_key` its owner starts sessions; without one only this process does. With `claim` these are sessions
    that wait for an agent, with their rows.
    """

    def __init__(
        self,
        core: Core,
        model: str,
        admin_key: str | None,
        *,
        claim: Claim | None,
        check: HealthCheck | None,
        rules: Rules,
    ) -> None:
        self.core, self.sessions, self.model, self.admin_key = core, core.sessions, model, admin_key
        self.claim, self.check, self.rules = claim, check, rules

    async def chat(self, request: Request, body: ChatRequest) -> Response:
        form = partial(chat_body, request=body, model=self.model, tokenizer=self.core.kit.tokenizer)
        return await self._respond(request, body, form, template=body.chat_template_kwargs)

    async def completions(self, request: Request, body: CompletionRequest) -> Response:
        sampling, tokenizer, session = body.wanted(self.rules), self.core.kit.tokenizer, self.session_of(request, body)
        # A policy may sample padding rows of its head: a teacher scores them if its model has them.
        prompt = body.single_prompt(len(tokenizer) if body.prompt_logprobs is None else 2**31)
        form = partial(completion_body, request=body, model=self.model, tokenizer=tokenizer)
        return await self._answered(request, body, session, sampling, form, partial(self.core.complete, prompt=prompt))

    async def responses(self, request: Request, body: ResponsesRequest) -> Response:
        return await self._respond(request, body, partial(body.body, model=self.model))

    async def messages(self, request: Request, body: MessagesRequest) -> Response:
        return await self._respond(request, body, partial(body.body, model=self.model))

    async def _respond(
        self, request: Request, body: ChatRequest | ResponsesRequest | MessagesRequest, form: Form, **options: Any
    ) -> Response:
        """Answer with the response to a conversation."""
        sampling, tools, session = body.wanted(self.rules), body.schemas(), self.session_of(request, body)
        if reads := session.picture_reader():
            messages = await self.core.prepared(session, body.seen_by(reads).conversation)
        else:
            messages = body.conversation()
        options |= {"reads_calls": bool(tools) and body.choice() != NONE}
        work = partial(self.core.respond, messages=messages, tools=tools, **options)
        return await self._answered(request, body, session, sampling, form, work)

    async def _answered(
        self, request: Request, body: Sampled, session: Session, sampling: SamplingOptions, form: Form, work: Work
    ) -> Response:
        """Answer with what some work samples, or as a stream with the events of it meanwhile; and with the fields that
        had no effect."""
        if body.model not in ("", self.model) and not self.rules.trains:
            message = f"The model `{body.model}` does not exist; this endpoint serves `{self.model}`"
            raise rejected(404, message, code="model_not_found", param="model")
        warnings = {"warnings": unread} if (unread := body.warnings(self.rules)) else {}
        parts: asyncio.Queue[Reply | None] = asyncio.Queue()
        if body.stream and not self.rules.trains:
            sampling = replace(sampling, hear=parts.put_nowait)
        task = asyncio.create_task(self._sampled(request, session, work(session, sampling=sampling)))
        if not body.stream:
            return reply(form(await task) | warnings)
        task.add_done_callback(lambda _: parts.put_nowait(None))
        first = await parts.get() or await task  # an error before the first token has its status
        events = stream(first, parts, task, body, lambda reply: form(reply) | warnings)
        return StreamingResponse(events, media_type="text/event-stream")

    async def _sampled(self, request: Request, session: Session, work: Coroutine[Any, Any, Reply]) -> Reply:
        """Return a response; where an agent outside the run disconnects, its episode waits for it LOST_SECONDS."""
        try:
            with session.request():
                return await while_connected(request, work)
        except HTTPException as error:
            if error.status_code == CLIENT_GONE and self.claim is not None:
                asyncio.get_running_loop().call_later(LOST_SECONDS, session.close_if_lost, session.requests)
            raise

    async def models(self) -> dict[str, Any]:
        limit = self.core.kit.limits.context
        model = {"id": self.model, "object": "model", "created": 0, "owned_by": "hybridrl", "max_model_len": limit}
        return {"object": "list", "data": [model]}

    async def health(self) -> Response:
        open_sessions = sum(not session.closed for session in self.sessions.by_id.values())
        about = {"sessions": open_sessions, "unrecorded": self.sessions.unrecorded}
        checks = [asyncio.wait_for(self.check(), CHECK_SECONDS)] if self.check else []
        for error in filter(None, await asyncio.gather(*checks, return_exceptions=True)):
            cause = str(error) or type(error).__name__
            return reply({"status": f"the policy cannot be sampled from: {cause}"} | about, 503)
        return reply({"status": "ok"} | about)

    async def start_session(self, request: Request, body: StartSession | None = None) -> Response:
        self._check_admin(request)
        if self.claim is None:
            session, row = self.sessions.start(task=body.task_id if body else ""), {}
        else:
            session, row = await while_connected(request, self.claim())
        taken = {"session_id": session.id, "api_key": session.api_key} | ({"row": row} if row else {})
        return reply(taken, plain=_plain)

    async def set_reward(self, request: Request, body: SetReward) -> dict[str, Any]:
        session = self._own_session(request, body.session_id)
        session.set_reward(body.reward, body.completion_id or body.interaction_id)
        return {"session_id": session.id, "reward": body.reward}

    async def end_session(self, request: Request, body: NamedSession | None = None) -> dict[str, Any]:
        session = self._own_session(request, body.session_id if body else "")
        session.close()
        return {"session_id": session.id, "turns": len(session.turns)}

    async def describe(self, request: Request, session_id: str, turn_discount: Discount = 1.0) -> Response:
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
            {name: [*map(kind, getattr(row, name))] for name, kind in COLUMNS.items()}
            for row in (trajectory.rows() if turns else ())
        ]
        about = {"session_id": session_id, "task_id": session.task, "closed": session.closed, "forks": session.forks}
        return reply(about | {"reward": trajectory.reward, "turns": turns, "rows": rows})

    def session_of(self, request: Request, body: Sampled) -> Session:
        """Return the session that a request belongs to, by its key, or named with the admin key; one for it alone,
        recorded nowhere, if to none."""
        if _key(request).startswith(KEY_PREFIX):
            return self._own_session(request)
        user = body.user if body.user in self.sessions.by_id else ""
        if named := request.headers.get("X-Session-ID") or body.session_id() or user:
            return self._own_session(request, named)
        self.sessions.unrecorded += 1
        return Session(self.core.kit)

    def _own_session(self, request: Request, named: str = "") -> Session:
        """Return the session of the request's key, or the named one if it is the admin key."""
        key = _key(request)
        session = self.sessions.by_id.get(named) if named and self._is_admin(key) else self.sessions.by_key.get(key)
        if session is None and named and self._is_admin(key):
            raise rejected(404, f"there is no session {named}")
        if session is None or named not in ("", session.id):
            whose = f"session {named} needs its own API key, or the admin key" if named else "this key has no session"
            raise rejected(401, whose, code="invalid_api_key")
        return self.sessions.opened(session)

    def _is_admin(self, key: str) -> bool:
        return self.admin_key is not None and secrets.compare_digest(key.encode(), self.admin_key.encode())

    def _check_admin(self, request: Request) -> None:
        if not self._is_admin(_key(request)):
            raise rejected(401, "this needs the admin key, as Authorization: Bearer KEY", code="invalid_api_key")


def create_app(
    generate: Generate,
    sessions: AgentSessions,
    *,
    model: str = "policy",
    admin_key: str | None = None,
    claim: Claim | None = None,
    check: HealthCheck | None = None,
    rules: Rules = SERVED,
    host: str = "127.0.0.1",
) -> FastAPI:
    """Make the application, for requests to `host`: `generate` samples, and `sessions` records."""
    api = Api(Core(generate, sessions), model, admin_key, claim=claim, check=check, rules=rules)
    app = FastAPI(title="hybridrl", openapi_url=None)
    app.router.route_class = Route
    limits = sessions.kit.limits
    app.state.host, app.state.body_limit = host, body_limit(limits.context, limits.pictures * PICTURE_BYTES)
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
    app.add_exception_handler(RouteError, on_rejection)
    app.add_exception_handler(RequestValidationError, on_invalid)
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


async def stream(
    reply: Reply, parts: asyncio.Queue[Reply | None], task: asyncio.Task[Reply], body: Sampled, form: Form
) -> AsyncIterator[str]:
    """Yield a response as server-sent events: its growing beginnings from `parts`, then the rest, once the task has
    returned the whole response."""
    sent, begin, numbers = dict.fromkeys(body.TEXTS, 0), 0, count()
    try:
        while True:
            texts = {name: reply.message.get(name) or "" for name in sent}
            piece = {name: text[sent[name] :] for name, text in texts.items() if len(text) > sent[name]}
            if piece or reply.ended:
                for event in body.events(form(reply), piece)[begin : None if reply.ended else body.TEXT + 1]:
                    numbered = {"sequence_number": next(numbers)} if isinstance(body, ResponsesRequest) else {}
                    yield _event(event | numbered)
                sent |= {name: len(texts[name]) for name in piece}
                begin = body.TEXT
            if reply.ended:
                break
            reply = await parts.get() or await task
    except Exception as error:  # whatever the policy raises; the status is sent already
        logger.exception("a stream failed")
        message = error.detail["message"] if isinstance(error, HTTPException) else f"{type(error).__name__}: {error}"
        failure = {"message": message, "type": "server_error", "param": None, "code": None}
        yield _event({"type": "error", "error": failure})
    finally:
        task.cancel()
    yield body.END


def _event(body: dict[str, Any]) -> str:
    """Return one server-sent event, with its type as its name if it has one."""
    name = f"event: {body['type']}\n" if "type" in body else ""
    return f"{name}data: {to_json(body, inf_nan_mode='null').decode()}\n\n"


def _key(request: Request) -> str:
    """Return the API key, as OpenAI's or Anthropic's clients send it."""
    return request.headers.get("Authorization", "").removeprefix("Bearer ") or request.headers.get("x-api-key", "")


def _plain(value: Any) -> Any:
    """Return a value that JSON can hold: rows have arrays and numbers of numpy."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


class _Server(uvicorn.Server):
    """A server that leaves signals to its process."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@asynccontextmanager
async def serving(app: FastAPI, listening: socket.socket | None = None) -> AsyncIterator[str]:
    """Serve an application of endpoint/app.py while the context is open, and return its address; by default on a free
    port of this machine alone."""
    listening = listening or bound("127.0.0.1", 0)
    options = {"log_level": "warning", "access_log": False, "lifespan": "off", "timeout_keep_alive": IDLE_SECONDS}
    config = uvicorn.Config(app, backlog=BACKLOG, **options)
    server = _Server(config)
    task = asyncio.create_task(server.serve([listening]))
    try:
        while not server.started and not task.done():
            await asyncio.sleep(0.01)
        if task.done():
            task.result()
        host, port = app.state.host, listening.getsockname()[1]
        yield f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    finally:
        server.should_exit = server.force_exit = True
        await task
