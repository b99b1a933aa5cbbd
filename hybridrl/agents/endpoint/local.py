"""A model's files behind the endpoint: an engine in this process, without trainers and without Ray."""

import asyncio
import secrets
import signal
import socket
import time
from functools import partial

from transformers import AutoConfig

from hybridrl.agents.endpoint.app import create_app, serving
from hybridrl.agents.endpoint.core import SamplingOptions
from hybridrl.agents.endpoint.fields import OF_THE_RUN
from hybridrl.agents.endpoint.requests import rejected
from hybridrl.agents.endpoint.sessions import AgentSessions, Session
from hybridrl.agents.environments.episode_loop import EpisodeLimits, EpisodeTools
from hybridrl.agents.environments.user_code import UserCodeError, contained
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
                request = Request(0, 0, prompt.ids, seed, sampling, hear=hear, carried=prompt.carried)
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
    settings = AutoConfig.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
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
    # By default the engine expects a trainer's weights, and has no tokenizer; schemas of responses need one.
    for arguments in vars(rollout.engine_kwargs).values():
        arguments |= {"load_format": "auto", "skip_tokenizer_init": False}
    engine = entry.build(device, model, rollout, 1)
    await engine.connect()
    _signalled(ended)  # SGLang has its own handlers
    policy = Local(engine, rollout, kit)
    app = create_app(policy, AgentSessions(kit), model=name, admin_key=admin_key, check=policy.check, host=host)
    stopping, dying = asyncio.create_task(ended.wait()), asyncio.create_task(policy.watch())
    async with serving(app, listening) as address:
        info(f"serving {source} as {name} at {address}/v1, contexts of {kit.limits.context} tokens; Ctrl-C ends it")
        await asyncio.wait([stopping, dying], return_when=asyncio.FIRST_COMPLETED)
    return str(dying.exception()) if dying.done() else ""
