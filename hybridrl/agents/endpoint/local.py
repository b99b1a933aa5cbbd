"""A model's files behind the endpoint: an engine in this process, without trainers and without Ray."""

import asyncio
import secrets
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from fastapi import HTTPException
from transformers import AutoConfig

from hybridrl.agents.endpoint.app import create_app, serving
from hybridrl.agents.endpoint.core import Core, SamplingOptions
from hybridrl.agents.endpoint.fields import OF_THE_RUN
from hybridrl.agents.endpoint.requests import rejected
from hybridrl.agents.endpoint.sessions import AgentSessions, Session
from hybridrl.agents.environments import Message
from hybridrl.agents.environments.episode_loop import EpisodeLimits, EpisodeTools
from hybridrl.agents.environments.user_code import UserCodeError, contained
from hybridrl.config import ConfigError
from hybridrl.config.files import resolve_model
from hybridrl.config.schema import ModelConfig, RolloutConfig
from hybridrl.core.carried import Encoded
from hybridrl.core.rollout import Completion, Request, Sampling
from hybridrl.core.rollout.engine import EngineEntry, RolloutEngine
from hybridrl.data.tokenizer import end_tokens, load_tokenizer
from hybridrl.tracking.console import info

LONGEST = 32768  # tokens of a context, unless rollout.max_model_len is set
CHECK_SECONDS, STALLED_SECONDS = 0.5, 60.0
NO_TEMPLATE = "{{ raise_exception('the model has none, which is needed for all but /v1/completions') }}"
# Fields of Sampling that a request may choose.
SAMPLING = (*(name for name in OF_THE_RUN if name != "seed"), "min_tokens", "ignore_eos", "json_schema")


class Local:
    """Samples as each request wants, by default as `rollout` says."""

    def __init__(self, engine: RolloutEngine, rollout: RolloutConfig, kit: EpisodeTools) -> None:
        self.engine, self.rollout, self.kit = engine, rollout, kit
        self.unfinished = 0  # requests
        self.moved = time.monotonic()  # when the engine was last seen to work, or to have nothing to do

    async def __call__(self, session: Session, prompt: Encoded, options: SamplingOptions) -> Completion:
        seed = secrets.randbits(31) if options.seed is None else options.seed
        defaults = {name: getattr(self.rollout, name, None) for name in SAMPLING}
        values = {name: value for name in SAMPLING if (value := getattr(options, name)) is not None}
        chosen = {name: value for name, value in (defaults | values).items() if value is not None}
        sampling = Sampling(
            max_tokens=options.max_tokens or 1,
            stop_ids=tuple(sorted(self.kit.end_ids | {*options.stop_ids})),
            stop=(*self.rollout.stop, *options.stop),
            **chosen,
        )
        self.unfinished += 1
        try:
            with contained("the engine"):
                hear = options.hear and partial(asyncio.get_running_loop().call_soon_threadsafe, options.hear)
                scored = {"carried": prompt.carried, "prompt_log_probs": options.prompt_log_probs}
                request = Request(0, 0, prompt.ids, seed, sampling, hear=hear, **scored)
                return await self.engine.generate(request)
        except UserCodeError as failure:
            await self.engine.check()  # raises if it is dead; else it rejects this request only, such as its schema
            raise rejected(400, f"the engine rejects this request: {failure.cause}") from failure
        finally:
            self.unfinished -= 1

    async def check(self) -> None:
        """Raise if the engine is dead, or has requests and samples nothing."""
        await self.engine.check()
        if (silence := time.monotonic() - self.moved) > STALLED_SECONDS:
            raise TimeoutError(f"{self.unfinished} requests and no token for {silence:.0f} s")

    async def watch(self) -> None:
        """Raise once the engine is dead."""
        tokens = -1
        while True:
            before, tokens = tokens, await self.engine.check()
            if tokens != before or not self.unfinished:
                self.moved = time.monotonic()
            await asyncio.sleep(CHECK_SECONDS)


def make_kit(model: ModelConfig, rollout: RolloutConfig) -> EpisodeTools:
    """Return the chat template of a model, and its formats. Contexts have at most LONGEST tokens, unless it is set."""
    settings = AutoConfig.from_pretrained(resolve_model(model.path), trust_remote_code=model.trust_remote_code)
    positions = getattr(settings.get_text_config(), "max_position_embeddings", None) or LONGEST
    context = rollout.max_model_len = rollout.max_model_len or min(positions, LONGEST)
    tokenizer = load_tokenizer(
        model.path,
        tokenizer_path=model.tokenizer_path,
        trust_remote_code=model.trust_remote_code,
        custom_chat_template=model.custom_chat_template,
    )
    tokenizer.chat_template = tokenizer.chat_template or NO_TEMPLATE
    limits, formats = EpisodeLimits(context, context, context), {"format": rollout.multi_turn.format}
    formats |= {"model_type": settings.model_type}
    return EpisodeTools.of(tokenizer, end_tokens(model.path, tokenizer), limits, **formats)


def _signalled(ended: asyncio.Event) -> asyncio.Event:
    """Set the event once this process gets a signal to end; return it."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    return ended


async def start(
    entry: EngineEntry, model: ModelConfig, rollout: RolloutConfig, device: str, kit: EpisodeTools, *, schemas: bool
) -> Local:
    """Start an engine of this entry with a Hugging Face model, and return its policy; `schemas`: of responses too."""
    # By default the engine expects a trainer's weights, and has no tokenizer: schemas need one, which takes seconds.
    for arguments in vars(rollout.engine_kwargs).values():
        arguments |= {"load_format": "auto", "skip_tokenizer_init": not schemas}
    engine = entry.build(device, model, rollout, 1)
    await engine.connect()
    return Local(engine, rollout, kit)


class TerminalChat:
    """A conversation at a terminal. A model without a chat template continues each text by itself."""

    def __init__(self, kit: EpisodeTools, max_tokens: int, system: str | None) -> None:
        self.kit, self.system = kit, [{"role": "system", "content": system}] if system else []
        self.options, self.continues = SamplingOptions(max_tokens), kit.tokenizer.chat_template == NO_TEMPLATE
        if system and self.continues:
            fix = "leave it out, or set model.custom_chat_template"
            raise ConfigError("--system: the model has no chat template, and continues texts", fix=fix)
        self.reset()

    def reset(self) -> None:
        """Forget all turns."""
        self.session, self.messages = Session(self.kit), self.system

    def messages_with(self, text: str) -> list[Message]:
        """Return the messages with the user's next one. Raises ConfigError if no response fits after it."""
        messages = [*self.messages, {"role": "user", "content": text}]
        try:
            self.session.prompt_of(text) if self.continues else self.session.prompt_for(messages)
        except HTTPException as error:
            fix = "send less, set rollout.max_model_len, or forget earlier turns: /reset"
            raise ConfigError(error.detail["message"], fix=fix) from error
        return messages

    async def respond(self, policy: Local, text: str, show: Callable[[str], object]) -> bool:
        """Sample a response, shown as it grows with its reasoning; return whether it is cut off. If this is cancelled,
        the response keeps the text that was shown. Raises ConfigError if no response fits."""
        messages, core, shown = self.messages_with(text), Core(policy, AgentSessions(self.kit)), ""

        def grow(whole: str) -> None:
            nonlocal shown
            show(whole[len(shown) :])
            shown = whole

        options = replace(self.options, hear=lambda reply: grow(reply.message["content"]))
        try:
            if self.continues:
                reply = await core.complete(None, text, options)
            else:
                reply = await core.respond(self.session, messages, [], options, reads_calls=False, whole=True)
        except asyncio.CancelledError:
            await policy.engine.interrupt()
            self.messages = [*messages, {"role": "assistant", "content": shown}] if shown else self.messages
            raise
        grow(self.kit.decode(self.kit.content(reply.turn.completion.token_ids)))
        self.messages = reply.turn.messages
        return reply.finish == "length" and not self.continues


async def serve(
    entry: EngineEntry,
    model: ModelConfig,
    rollout: RolloutConfig,
    device: str,
    *,
    host: str,
    listening: socket.socket,
    name: str,
    source: str,
    admin_key: str | None = None,
) -> str:
    """Serve a Hugging Face model, made from `source`, by an engine of this entry, for requests to `host`, until the
    process gets a signal to end; returns why it ended otherwise. Who has the `admin_key` starts sessions."""
    ended = _signalled(asyncio.Event())
    kit = make_kit(model, rollout)
    policy = await start(entry, model, rollout, device, kit, schemas=True)
    _signalled(ended)  # SGLang has its own handlers
    app = create_app(policy, AgentSessions(kit), model=name, admin_key=admin_key, check=policy.check, host=host)
    stopping, dying = asyncio.create_task(ended.wait()), asyncio.create_task(policy.watch())
    async with serving(app, listening) as address:
        info(f"serving {source} as {name} at {address}/v1, contexts of {kit.limits.context} tokens; Ctrl-C ends it")
        await asyncio.wait([stopping, dying], return_when=asyncio.FIRST_COMPLETED)
    return str(dying.exception()) if dying.done() else ""
