"""A model's files behind the endpoint: an engine in this process, without trainers and without Ray."""

import asyncio
import secrets
import signal

from transformers import AutoConfig

from hybridrl.config import ConfigError
from hybridrl.config.schema import ModelConfig, RolloutConfig
from hybridrl.data.tokenizer import end_tokens, load_tokenizer
from hybridrl.endpoint.app import create_app
from hybridrl.endpoint.core import Wanted
from hybridrl.endpoint.server import serving
from hybridrl.endpoint.sessions import Session, Sessions
from hybridrl.environments.episode_loop import Kit, Limits
from hybridrl.rollout import Completion, Request, Sampling
from hybridrl.rollout.engine import ENGINES, RolloutEngine
from hybridrl.tracking.console import info

LONGEST = 32768  # tokens of a context, unless rollout.max_model_len is set


class Local:
    """Samples as each request wants, by default as `rollout` says."""

    def __init__(self, engine: RolloutEngine, rollout: RolloutConfig, kit: Kit) -> None:
        self.engine, self.rollout, self.kit = engine, rollout, kit

    async def __call__(self, session: Session, ids: list[int], wanted: Wanted) -> Completion:
        rollout, seed = self.rollout, secrets.randbits(31) if wanted.seed is None else wanted.seed
        sampling = Sampling(
            max_tokens=wanted.max_tokens or 1,
            stop_ids=tuple(sorted(self.kit.end_ids)),
            temperature=rollout.temperature if wanted.temperature is None else wanted.temperature,
            top_p=wanted.top_p or rollout.top_p,
            top_k=wanted.top_k or rollout.top_k,
            repetition_penalty=rollout.repetition_penalty,
            stop=(*rollout.stop, *wanted.stop),
        )
        return await self.engine.generate(Request(0, 0, ids, seed, sampling))


def longest_context(model: ModelConfig) -> int:
    """Return the tokens that the model's contexts may have, at most LONGEST."""
    config = AutoConfig.from_pretrained(model.path, trust_remote_code=model.trust_remote_code).get_text_config()
    return min(getattr(config, "max_position_embeddings", None) or LONGEST, LONGEST)


def make_kit(model: ModelConfig, rollout: RolloutConfig, context: int) -> Kit:
    """Return the chat template of a model, and its formats."""
    tokenizer = load_tokenizer(
        model.path,
        tokenizer_path=model.tokenizer_path,
        trust_remote_code=model.trust_remote_code,
        custom_chat_template=model.custom_chat_template,
    )
    model_type = AutoConfig.from_pretrained(model.path, trust_remote_code=model.trust_remote_code).model_type
    limits, format = Limits(context, context, context), rollout.multi_turn.format
    return Kit.of(tokenizer, end_tokens(model.path, tokenizer), limits, format=format, model_type=model_type)


async def serve(
    model: ModelConfig,
    rollout: RolloutConfig,
    device: str,
    *,
    host: str,
    port: int,
    name: str,
    source: str,
) -> None:
    """Serve a Hugging Face model, made from `source`, until the process gets a signal to end; ConfigError if the port
    cannot be used."""
    ended, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, ended.set)
    context = rollout.max_model_len = rollout.max_model_len or longest_context(model)
    kit = make_kit(model, rollout, context)
    # The engine's own default is weights that a trainer sends.
    rollout.engine_kwargs.vllm["load_format"] = "auto"
    engine = ENGINES[rollout.name].build(device, model, rollout, 1)
    await engine.connect()
    admin = secrets.token_urlsafe(16)
    app = create_app(Local(engine, rollout, kit), Sessions(kit), model=name, admin_key=admin)
    try:
        async with serving(app, host, port) as address:
            info(f"serving {source} as {name} at {address}/v1, contexts of {context} tokens; Ctrl-C ends it")
            info(f"admin key of /rl/start_session: {admin}")
            await ended.wait()
    except OSError as error:
        raise ConfigError(f"port={port}: {host}:{port} cannot be used ({error.strerror})", fix="set port=0") from error
