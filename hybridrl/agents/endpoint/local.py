"""A model's files behind the endpoint: an engine in this process, without trainers and without Ray."""

import asyncio
import secrets
import signal
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from fastapi import HTTPException
from transformers import AutoConfig, PreTrainedTokenizerBase

from hybridrl import plugins
from hybridrl.agents.endpoint.app import create_app, serving
from hybridrl.agents.endpoint.core import Core, SamplingOptions
from hybridrl.agents.endpoint.fields import OF_THE_RUN
from hybridrl.agents.endpoint.requests import rejected
from hybridrl.agents.endpoint.sessions import AgentSessions, Session
from hybridrl.agents.environments import Message
from hybridrl.agents.environments.episode_loop import EpisodeLimits, EpisodeTools
from hybridrl.agents.environments.pictures import DIGEST, LIMIT
from hybridrl.agents.environments.user_code import UserCodeError, contained
from hybridrl.config import ConfigError
from hybridrl.config.checks.engine import EPISODE_PICTURES, why_no_pictures
from hybridrl.config.files import resolve_model
from hybridrl.config.schema import ModelConfig, RolloutConfig
from hybridrl.core.carried import Encoded
from hybridrl.core.pictures import PictureStore
from hybridrl.core.rollout import Completion, Request, Sampling
from hybridrl.core.rollout.engine import EngineEntry, RolloutEngine
from hybridrl.data.pictures import PictureFault
from hybridrl.data.processor import PictureReader, load_processor
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
                pixels = {picture.digest: picture.pixels for picture in session.pictures.of_prompt(prompt.carried)}
                return await self.engine.generate(request, *filter(None, [pixels]))
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
    """Return the chat template of a model, and its formats. Contexts have at most LONGEST tokens, unless it is set, and
    EPISODE_PICTURES pictures, if the model and its engine read any."""
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
    reader = _reader(model, rollout, tokenizer, settings.model_type)
    limits = EpisodeLimits(context, context, context, pictures=rollout.limit_images or 0)
    formats = {"format": rollout.multi_turn.format, "model_type": settings.model_type, "reader": reader}
    return EpisodeTools.of(tokenizer, end_tokens(model.path, tokenizer), limits, **formats)


def _reader(
    model: ModelConfig, rollout: RolloutConfig, tokenizer: PreTrainedTokenizerBase, model_type: str
) -> PictureReader | None:
    """Return the reader of the pictures of requests, and set the most of a context; None if none are read. Raises
    ConfigError if a key expects them."""
    limit, arguments = rollout.limit_images, rollout.engine_kwargs.vllm.get("mm_processor_kwargs") or {}
    if limit == 0:
        return None
    try:
        if model_type not in plugins.names("vision"):
            raise ConfigError(f"models of type {model_type} get text only")
        if why := why_no_pictures(rollout.name):
            raise ConfigError(why)
        options = {"trusted": model.trust_remote_code, "key": "rollout.engine_kwargs.vllm.mm_processor_kwargs"}
        processor = load_processor(model.path, tokenizer, arguments, **options)
    except ConfigError as error:
        if limit or arguments:
            raise ConfigError(f"{LIMIT}={limit}: {error}", keys=LIMIT) from error
        rollout.limit_images = 0
        return None
    rollout.limit_images = limit or EPISODE_PICTURES
    return PictureReader(processor, PictureStore())


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
        arguments |= {"load_format": "auto", "skip_tokenizer_init": not (schemas or kit.reader)}
    engine = entry.build(device, model, rollout, 1)
    await engine.connect()
    return Local(engine, rollout, kit)


class TerminalChat:
    """A conversation at a terminal, whose first message has these `images`, as bytes of files. A model without a chat
    template continues each text by itself."""

    def __init__(self, kit: EpisodeTools, max_tokens: int, system: str | None, images: Sequence[bytes] = ()) -> None:
        self.kit, self.system, self.images = kit, [{"role": "system", "content": system}] if system else [], images
        self.options, self.continues = SamplingOptions(max_tokens), kit.tokenizer.chat_template == NO_TEMPLATE
        for option in ["--system"] * bool(system) + ["--image"] * bool(images):
            if self.continues:
                fix = "leave it out, or set model.custom_chat_template"
                raise ConfigError(f"{option}: the model has no chat template, and continues texts", fix=fix)
        if len(images) > (most := kit.limits.pictures):
            fix = "name a model that sees, or set rollout.limit_images"
            raise ConfigError(f"--image: {len(images)} pictures, and the model with its engine reads {most}", fix=fix)
        self.reset()

    def reset(self) -> None:
        """Forget all turns."""
        self.session, self.messages = Session(self.kit), self.system

    def messages_with(self, text: str) -> list[Message]:
        """Return the messages with the user's next one. Raises ConfigError if no response fits after it."""
        pictures = () if self.messages != self.system else self.images
        try:
            shown = [{"type": "image", DIGEST: self.session.pictures.digest(image)} for image in pictures]
            content = [*shown, {"type": "text", "text": text}] if shown else text
            messages = [*self.messages, {"role": "user", "content": content}]
            self.session.prompt_of(text) if self.continues else self.session.prompt_for(messages)
        except PictureFault as fault:
            raise ConfigError(f"--image: {fault}", fix="name another file") from fault
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
                reply = await core.complete(Session(self.kit), text, options)
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
        size = f"{kit.limits.context} tokens" + f" and {kit.limits.pictures} pictures" * bool(kit.reader)
        info(f"serving {source} as {name} at {address}/v1, contexts of {size}; Ctrl-C ends it")
        await asyncio.wait([stopping, dying], return_when=asyncio.FIRST_COMPLETED)
    return str(dying.exception()) if dying.done() else ""
