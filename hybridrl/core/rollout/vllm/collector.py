"""vLLM's engine in a thread, and its growing responses, in place of vLLM's output processor.

vLLM's own processor produces text, ranks, a table of log-probs and latencies for every token, for streaming clients.
Rollout needs ids and log-probs, once per response; for a small model that work would take a fifth of an iteration.
"""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, TypeVar

import msgspec
import numpy as np
from transformers import PreTrainedTokenizerBase
from vllm.v1.engine import EngineCoreEventType, EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.detokenizer import IncrementalDetokenizer
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.engine.output_processor import OutputProcessorOutput
from vllm.v1.metrics.loggers import StatLoggerBase
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.outputs import LogprobsTensors

from hybridrl.core.rollout.engine import EngineStats

T = TypeVar("T")

FAILED = (FinishReason.ABORT, FinishReason.ERROR)  # responses ended neither by the policy nor by a limit


# Engine statistics, from what vLLM's scheduler reports after every iteration.
class Observer(StatLoggerBase):
    """A stat logger for vLLM that only accumulates."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.stats, self.clock = EngineStats(), clock
        self.running = self.sampled = self.prefilled = self.hits = 0
        self.since: float | None = None  # the end of the last iteration, or the first request after a pause

    def submitted(self) -> None:
        """Note that the engine gets a request."""
        if self.since is None:
            self.since = self.clock()

    def pause(self) -> None:
        """Note that the engine has no request any more."""
        self.running, self.since = 0, None

    def take(self) -> EngineStats:
        """Return the statistics since the last call."""
        taken, self.stats = self.stats, EngineStats()
        return taken

    def record(self, scheduler_stats: SchedulerStats | None, *_: object, **__: object) -> None:
        """Add an iteration; `sampled` and `prefilled` have its tokens by then."""
        sampled, self.sampled, prefilled, self.prefilled = self.sampled, 0, self.prefilled, 0
        if scheduler_stats is None:
            return
        now, running = self.clock(), scheduler_stats.num_running_reqs
        waiting = scheduler_stats.num_waiting_reqs + scheduler_stats.num_skipped_waiting_reqs
        hits = scheduler_stats.prefix_cache_stats.hits
        self.hits += hits
        self.stats.prefix_queries += scheduler_stats.prefix_cache_stats.queries
        self.stats.prefix_hits += hits
        if self.since is not None:  # otherwise it is the probe of a weight sync
            # Requests that finished or were admitted in this iteration also ran in it.
            in_iteration, computed = max(running, self.running), max(prefilled - self.hits, 0)
            self.hits = max(self.hits - prefilled, 0)  # hits of prompts that are not complete yet
            self.stats.observe(now - self.since, in_iteration, waiting, scheduler_stats.kv_cache_usage, computed)
            self.stats.tokens += sampled
        self.running, self.since = running, now
        if not running and not waiting:
            self.since, self.hits = None, 0

    def log_engine_initialized(self) -> None:
        return


@dataclass(eq=False)
class EngineResponse:
    """Sampled tokens of a request, or the log-probs of a scored prompt."""

    name: str
    texts: IncrementalDetokenizer | None  # only for requests with stop texts
    hear: Callable[[list[int]], object] | None = None  # called with its tokens
    token_ids: list[int] = field(default_factory=list)
    parts: list[np.ndarray] = field(default_factory=list)  # log-probs of the tokens, by iteration
    prompt_tokens: int = 0
    prompt_parts: list[np.ndarray] = field(default_factory=list)  # as in the carried field prompt_log_probs
    route_parts: list[np.ndarray] = field(default_factory=list)  # routes of all computed tokens, by iteration
    truncated: bool = False
    interrupted: bool = False
    failure: str = ""  # why the engine ended a request that is not complete

    @property
    def log_probs(self) -> np.ndarray:
        return np.concatenate([np.empty(0), *self.parts], dtype=np.float32)

    @property
    def carried(self) -> dict[str, np.ndarray]:
        """The routes of each token of prompt and response but the last, if the engine returns routes and has computed
        any tokens; and the scored prompt, if it was requested."""
        computed = self.prompt_tokens + len(self.token_ids) - 1  # a text may end a response before its last token
        parts, scored = self.route_parts, self.prompt_parts
        fields = {"routes": np.concatenate(parts)[:computed].astype(np.int16)} if parts else {}
        return fields | ({"prompt_log_probs": np.concatenate([0 * scored[0][:1], *scored])} if scored else {})

    def add(self, output: EngineCoreOutput) -> bool:
        """Add the tokens of an iteration. Returns whether a stop text ends the response: its last token is then the one
        that completes the text."""
        token_ids, ended = output.new_token_ids, False
        if self.texts is not None:
            count = next((n for n, token in enumerate(token_ids, start=1) if self.texts.update([token], False)), None)
            token_ids, ended = token_ids[:count], count is not None
        self.token_ids += token_ids
        if self.hear:
            self.hear(token_ids)
        if output.new_logprobs is not None:  # the sampled token comes first in its row
            self.parts.append(output.new_logprobs.logprobs[: len(token_ids), 0])
        if output.routed_experts is not None:
            self.route_parts.append(output.routed_experts)
        if output.new_prompt_logprobs_tensors is not None:
            self.prompt_parts.append(_scored(output.new_prompt_logprobs_tensors))
        self.truncated = output.finish_reason == FinishReason.LENGTH and not ended
        self.failure = str(output.finish_reason) if output.finish_reason in FAILED and not ended else ""
        return ended


def _scored(prompt: LogprobsTensors) -> np.ndarray:
    """Return id, log-prob and rank of each token, and of the most probable ones in its place, without the first."""
    ids, log_probs = prompt.logprob_token_ids.numpy(), prompt.logprobs.numpy()
    ranks = np.tile(np.arange(ids.shape[1]), (len(ids), 1))
    ranks[:, 0] = prompt.selected_token_ranks.numpy()
    return np.stack([ids, log_probs, ranks], -1, dtype=np.float64)


class Collector:
    """The unfinished responses of an engine, with the methods of vLLM's OutputProcessor that LLMEngine calls."""

    def __init__(self, observer: Observer) -> None:
        self.observer = observer
        self.tokenizer: PreTrainedTokenizerBase | None = None  # needed where texts end responses
        self.responses: dict[str, EngineResponse] = {}
        self.begun: dict[str, int] = {}  # by name of a continued request: tokens of its response in the prompt
        self.hear: dict[str, Callable[[list[int]], object]] = {}  # by name: listeners for tokens
        self.sampled = 0  # tokens of finished responses

    def add_request(self, request: EngineCoreRequest, *_: Any) -> None:
        begun = self.begun.pop(request.external_req_id, 0)
        texts = self._texts(request, begun) if request.sampling_params.stop else None
        tokens, hear = len(request.prompt_token_ids), self.hear.pop(request.external_req_id, None)
        self.responses[request.request_id] = EngineResponse(request.external_req_id, texts, hear, prompt_tokens=tokens)

    def _texts(self, request: EngineCoreRequest, begun: int) -> IncrementalDetokenizer:
        """Return a detokenizer for stop texts; it also finds a text that begins before an interruption."""
        split = len(request.prompt_token_ids) - begun
        prompt, response = request.prompt_token_ids[:split], request.prompt_token_ids[split:]
        texts = IncrementalDetokenizer.from_new_request(
            self.tokenizer, msgspec.structs.replace(request, prompt_token_ids=prompt)
        )
        for token in response:
            texts.update([token], False)
        return texts

    def forget(self, name: str) -> list[str]:
        """Forget a request that the engine could not add; returns the engine's ids of it."""
        self.begun.pop(name, None)
        self.hear.pop(name, None)
        ids = [request_id for request_id, response in self.responses.items() if response.name == name]
        return [request_id for request_id in ids if self.responses.pop(request_id)]

    def interrupt(self) -> dict[str, EngineResponse]:
        """Return the unfinished responses by the engine's ids, and forget them."""
        interrupted, self.responses = self.responses, {}
        for response in interrupted.values():
            response.interrupted = True
            self.sampled += len(response.token_ids)
        return interrupted

    def process_outputs(self, outputs: Sequence[EngineCoreOutput], **_: Any) -> OutputProcessorOutput:
        """Add the outputs of an iteration; returns finished responses, and the ids of requests that the engine must
        end."""
        finished, ended = [], []
        for output in outputs:
            response = self.responses[output.request_id]
            self.observer.prefilled += 0 if response.token_ids else response.prompt_tokens
            self.observer.sampled += len(output.new_token_ids)
            by_text = response.add(output)
            if by_text and not output.finished:
                ended.append(output.request_id)
            if by_text or output.finished:
                finished.append(self.responses.pop(output.request_id))
                self.sampled += len(response.token_ids)
            for event in output.events or ():
                self.observer.stats.preemptions += event.type == EngineCoreEventType.PREEMPTED
        return OutputProcessorOutput(finished, ended)

    def tokens(self) -> int:
        """Return how many tokens were sampled so far, also of unfinished responses. Any thread may ask."""
        return self.sampled + sum(len(response.token_ids) for response in list(self.responses.values()))

    def has_unfinished_requests(self) -> bool:
        return bool(self.responses)

    def get_num_unfinished_requests(self) -> int:
        return len(self.responses)

    def update_scheduler_stats(self, _: Any) -> None:
        """Does nothing; vLLM counts the requests of its adapters here."""


class EngineLoop:
    """An engine that coroutines use: requests, and calls of its methods, enter between two iterations.

    `build` makes the engine in the thread where it computes: OpenMP's threads belong to the thread that starts them.
    """

    def __init__(self, build: Callable[[], LLMEngine]) -> None:
        self.build = build
        self.engine: LLMEngine | None = None
        self.calls: SimpleQueue[tuple[Callable[[LLMEngine], Any], Future]] = SimpleQueue()
        self.responses: dict[str, Future[EngineResponse]] = {}  # unfinished requests by name
        self.held: list[Callable[[LLMEngine], Any]] | None = None  # requests that wait for `release`
        # Called with the name of each response that finished: whether to interrupt the others.
        self.enough: Callable[[str], bool] | None = None
        self.failure: Exception | None = None
        self.thread = Thread(target=self._run, name="engine", daemon=True)

    async def start(self) -> None:
        """Build the engine; raises its error if that fails."""
        self.thread.start()
        await self.call(lambda engine: None)

    async def call(self, function: Callable[[LLMEngine], T]) -> T:
        """Call a function with the engine, between two iterations."""
        return await asyncio.wrap_future(self._submit(function))

    async def generate(self, name: str, *request: Any, **options: Any) -> EngineResponse:
        """Return the response to a request, whose arguments are those of LLMEngine.add_request."""
        self.responses[name] = response = _future()
        response.add_done_callback(lambda _: self.responses.pop(name, None))

        def add(engine: LLMEngine) -> None:
            with _raised_by(response):
                engine.add_request(name, *request, **options)

        if self.held is None:
            self._submit(add)
        else:
            self.held.append(add)
        return await asyncio.wrap_future(response)

    def hold(self) -> None:
        """Keep requests from the engine until `release`."""
        self.held = []

    def release(self) -> None:
        """Give the engine all requests before its next iteration, in their order."""
        requests, self.held = self.held or [], None
        self._submit(lambda engine: [add(engine) for add in requests])

    async def interrupt(self) -> None:
        """End all requests between two iterations: their responses have the tokens so far."""
        await self.call(self._interrupt)

    def _interrupt(self, engine: LLMEngine) -> None:
        interrupted = engine.output_processor.interrupt()
        engine.engine_core.abort_requests(list(interrupted))
        engine.logger_manager.pause()
        for response in interrupted.values():
            self.responses[response.name].set_result(response)

    def check(self) -> None:
        """Raise if the engine is dead. Any thread may ask."""
        if self.failure is not None or getattr(self.engine and self.engine.model_executor, "is_failed", False):
            raise RuntimeError(f"the engine is dead: {self.failure or 'a process of its devices ended'}")

    def _submit(self, function: Callable[[LLMEngine], T]) -> Future[T]:
        result = _future()
        self.calls.put((function, result))
        if self.failure is not None:  # the thread may have ended before
            self._fail(self.failure)
        return result

    def _run(self) -> None:
        try:
            self.engine = engine = self.build()
            while True:
                self._make_calls(engine)
                finished = engine.step() if engine.has_unfinished_requests() else ()
                for response in finished:
                    self.responses[response.name].set_result(response)
                if self.enough is not None and any([self.enough(response.name) for response in finished]):
                    self._interrupt(engine)
        except BaseException as error:  # any end of the thread must end everything that waits for it
            self.failure = _as_exception(error)
            self._fail(self.failure)

    def _make_calls(self, engine: LLMEngine) -> None:
        """Make all calls that wait; waits for one if the engine has nothing else to do."""
        with suppress(Empty):
            while True:
                function, result = self.calls.get(block=not engine.has_unfinished_requests())
                with _raised_by(result):
                    result.set_result(function(engine))

    def _fail(self, error: Exception) -> None:
        """End everything that waits for the engine."""
        with suppress(Empty):
            while True:
                self.calls.get_nowait()[1].set_exception(error)
        for name in list(self.responses):
            if response := self.responses.pop(name, None):
                response.set_exception(error)


def _as_exception(error: BaseException) -> Exception:
    """Return the error of a thread, such as the panic of a Rust library, as an Exception that coroutines can catch."""
    return error if isinstance(error, Exception) else RuntimeError(f"{type(error).__name__}: {error}")


@contextmanager
def _raised_by(result: Future) -> Iterator[None]:
    """Pass an error of the block to a future; an error that is not an Exception also ends the thread."""
    try:
        yield
    except BaseException as error:  # vLLM may raise anything, and a library in Rust may panic
        result.set_exception(_as_exception(error))
        if not isinstance(error, Exception):
            raise


def _future() -> Future:
    """Return a future that callers cannot cancel when they stop waiting: the thread will set it."""
    future: Future = Future()
    future.set_running_or_notify_cancel()
    return future
