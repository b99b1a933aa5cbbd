"""Calls of a model's endpoint, with further attempts after a failure; and of a judge's, with a file of verdicts.

A line is `{"key", "text", "finish", "prompt_tokens", "completion_tokens", "seconds"}`. Failures are not kept.
"""

import asyncio
import hashlib
import json
import logging
import os
import sys
import time
import zlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx

from hybridrl.config import ConfigError
from hybridrl.config.judge import LONGEST_WAIT, JudgeConfig
from hybridrl.rewards.score import JUDGE_CALLS, NoScore, as_number
from hybridrl.tracking.faults import read_end
from hybridrl.tracking.secrets import mask_text

logger = logging.getLogger(__name__)
T = TypeVar("T")

SHOWN = 200  # characters of a text in messages
_TRANSIENT = {408, 409, 425, 429}  # and 5xx: the same request may succeed later
_FIRST_WAIT, _LONGEST_BACKOFF = 0.5, 30.0  # seconds before another attempt, doubled each time
_ON_THIS_MACHINE = ("localhost", "127.0.0.1", "::1")  # a proxy could not reach these


class CallFailed(NoScore):
    """A call without a result, which a judge's calls have as a fault. `transient`: another attempt may succeed, after
    the server's `wait` seconds."""

    def __init__(self, kind: str | int, detail: str, *, transient: bool = False, wait: float | None = None) -> None:
        super().__init__(fault=f"judge:{kind}", detail=detail)
        self.kind, self.transient, self.wait = kind, transient, wait

    def after(self, calls: list[dict[str, Any]]) -> NoScore:
        """Return the fault of a response with all calls about it."""
        return NoScore(fault=self.fault, detail=str(self), extras={JUDGE_CALLS: calls})


class Pace:
    """Starts at most `at_once` requests at the same time, `seconds` apart, and calls `started` for each."""

    def __init__(
        self, at_once: int | None = None, seconds: float = 0.0, started: Callable[[], None] = lambda: None
    ) -> None:
        self._places, self._seconds, self._started = asyncio.Semaphore(at_once or sys.maxsize), seconds, started
        self._next = 0.0

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        async with self._places:
            now = time.monotonic()
            begin = max(self._next, now)
            self._next = begin + self._seconds
            await asyncio.sleep(begin - now)
            self._started()
            yield


class ModelServer:
    """A path of a model's server. All calls run in one event loop. `section`: the keys of `api_key_env`; `hint`
    names the key of the time limit."""

    def __init__(
        self,
        url: str,
        api_key_env: str | None,
        section: str,
        *,
        timeout: float,
        retries: int,
        hint: str = "",
        pace: Pace | None = None,
    ) -> None:
        self._pace = pace or Pace()
        self.url, self._seconds, self._retries, self._hint = url, timeout, retries, hint
        self._headers = {"Content-Type": "application/json"}
        if api_key_env:
            if not (key := os.environ.get(api_key_env, "").strip()):
                cause = f"{section}.api_key_env={api_key_env}: this environment variable is not set"
                raise ConfigError(cause, fix=f"export {api_key_env}=..., or leave {section}.api_key_env out")
            self._headers["Authorization"] = f"Bearer {key}"
        self._http: httpx.AsyncClient | None = None

    async def ask(
        self, body: dict[str, Any], read: Callable[[httpx.Response], T], call: dict[str, Any] | None = None
    ) -> T:
        """Return what `read` makes of the reply to a request; CallFailed once it fails for good. `call` gets the number
        of further attempts as `retries`."""
        content = json.dumps(body).encode()
        jitter = zlib.crc32(content) / 2**32  # different requests wait differently
        for attempt in range(self._retries + 1):
            if call is not None:
                call["retries"] = attempt
            try:
                async with self._pace.turn():
                    reply = await self._post(content)
                return read(reply)
            except CallFailed as failure:
                wait = min(_FIRST_WAIT * 2**attempt, _LONGEST_BACKOFF) * (1 + jitter) / 2
                wait = wait if failure.wait is None else failure.wait
                if not failure.transient or attempt == self._retries or wait > LONGEST_WAIT:
                    raise
                await asyncio.sleep(wait)
        raise AssertionError("the last attempt returns or raises")

    async def _post(self, content: bytes) -> httpx.Response:
        """Send one request; CallFailed if the response is not that of success."""
        if self._http is None:
            proxied, limits = urlsplit(self.url).hostname not in _ON_THIS_MACHINE, httpx.Limits(max_connections=None)
            self._http = httpx.AsyncClient(headers=self._headers, timeout=None, limits=limits, trust_env=proxied)
        try:
            async with asyncio.timeout(self._seconds):
                reply = await self._http.post(self.url, content=content)
        except TimeoutError:
            cause = f"{self.url} sent no response within {self._seconds:g} s{self._hint}"
            raise CallFailed("timeout", cause, transient=True) from None
        except httpx.HTTPError as error:
            cause = mask_text(f"{self.url}: {type(error).__name__}: {error}")
            raise CallFailed("connection", cause, transient=True) from None
        status = reply.status_code
        if status != httpx.codes.OK:
            transient = status in _TRANSIENT or status >= httpx.codes.INTERNAL_SERVER_ERROR
            cause, wait = f"{self.url} answered {status}: {shown(reply)}", reply.headers.get("Retry-After", "")
            raise CallFailed(status, cause, transient=transient, wait=_seconds_until(wait))
        return reply

    async def close(self) -> None:
        if self._http is not None:
            await self._http.aclose()


class JudgeClient:
    """Sends messages to the endpoint; `read` turns the judge's text into a score, or raises CallFailed; `limits` are
    those of Pace. All methods run in one event loop."""

    def __init__(self, config: JudgeConfig, read: Callable[[str], float], **limits: Any) -> None:
        self._config, self._read, self._verdicts = config, read, Verdicts(config.cache)
        url = f"{str(config.base_url).rstrip('/')}/chat/completions"
        options = {"timeout": config.timeout, "hint": " (reward.judge.timeout)", "pace": Pace(**limits)}
        self._endpoint = ModelServer(url, config.api_key_env, "reward.judge", **options, retries=config.retries)
        self._calls: dict[str, asyncio.Task[tuple[float, str]]] = {}  # in progress, by the key of the request

    async def ask(self, messages: Sequence[Mapping[str, str]], calls: list[dict[str, Any]]) -> tuple[float, str]:
        """Return the score and the text of a verdict, which may be a kept one; CallFailed if there is none. Adds to
        `calls` an object of `seconds`, `retries`, `tokens`, and `unparsed` or `cached` if this is so."""
        config = self._config
        body = {"model": config.model, "messages": messages, "temperature": config.temperature}
        body["max_tokens"] = config.max_tokens
        key = hashlib.sha256(json.dumps([self._endpoint.url, body]).encode()).hexdigest()
        if text := self._verdicts.texts.get(key):
            with suppress(CallFailed):  # it was read by another reward.judge.parse or scale
                score = self._read(text)
                calls.append({"cached": True})
                return score, text
        calls.append(call := {"cached": True} if key in self._calls else {})
        if key not in self._calls:  # the same response may be sampled twice
            asking = asyncio.create_task(self._verdict(key, body | {"seed": int(key[:8], 16) >> 1}, call))
            asking.add_done_callback(lambda done: (self._calls.pop(key), done.cancelled() or done.exception()))
            self._calls[key] = asking
        return await asyncio.shield(self._calls[key])

    async def _verdict(self, key: str, body: dict[str, Any], call: dict[str, Any]) -> tuple[float, str]:
        """Call the judge until it gives a verdict, which is kept, or fails for good; `call` gets what it took."""

        def read(reply: httpx.Response) -> tuple[float, dict[str, Any]]:
            text, finish, usage = _completion(reply)
            tokens = {name: usage.get(name) for name in ("prompt_tokens", "completion_tokens")}
            seconds = round(reply.elapsed.total_seconds(), 3)
            call.update(seconds=seconds, tokens=sum(as_number(count) or 0 for count in tokens.values()), unparsed=True)
            if finish == "length":
                fix = f"raise reward.judge.max_tokens={self._config.max_tokens}"
                raise CallFailed("length", f"the judge was cut off before its verdict; {fix}")
            score = self._read(text)
            del call["unparsed"]
            return score, {"key": key, "text": text, "finish": finish, **tokens, "seconds": seconds}

        score, verdict = await self._endpoint.ask(body, read, call)
        self._verdicts.add(verdict)
        return score, verdict["text"]


class Verdicts:
    """The texts of verdicts by the key of their request, read from a file and appended to it. None: there is no file.

    Processes may share the file: each line is appended in one write, and a line that a kill cut short is skipped.
    """

    def __init__(self, path: str | None) -> None:
        self._path, self.texts = Path(path).expanduser() if path else None, dict[str, str]()
        if self._path and self._path.is_file():
            with self._path.open(encoding="utf-8", errors="replace") as lines:
                for line in lines:
                    with suppress(ValueError, LookupError, TypeError, RecursionError):
                        verdict = json.loads(line)
                        self.texts[verdict["key"]] = str(verdict["text"])

    def add(self, verdict: dict[str, Any]) -> None:
        self.texts[verdict["key"]] = verdict["text"]
        if self._path is None:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            torn = (read_end(self._path, 1) or b"\n")[-1:] != b"\n"  # several bytes if another process writes
            with self._path.open("ab", buffering=0) as file:  # O_APPEND
                file.write(b"\n" * torn + json.dumps(verdict).encode() + b"\n")
        except OSError as error:  # the verdict counts though it cannot be kept
            logger.warning("reward.judge.cache=%s cannot be written: %s", self._path, error)


def _completion(reply: httpx.Response) -> tuple[str, str | None, Mapping[str, Any]]:
    """Return the text of a completion, why it ended, and its numbers of tokens."""
    try:
        content = reply.json()
        choice = content["choices"][0]
        return str(choice["message"]["content"] or ""), choice.get("finish_reason"), dict(content.get("usage") or {})
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        cause = f"{reply.url} sent something other than a chat completion: {shown(reply)}"
        raise CallFailed("reply", cause) from None


def shown(reply: httpx.Response) -> str:
    return mask_text(repr(" ".join(reply.text.split())[:SHOWN]))


def _seconds_until(header: str) -> float | None:
    """Return the seconds of a header Retry-After, which is a number or a time; None if it is neither."""
    with suppress(ValueError):
        return max(0.0, float(header))
    with suppress(ValueError, TypeError):
        return max(0.0, (parsedate_to_datetime(header) - datetime.now(UTC)).total_seconds())
    return None
