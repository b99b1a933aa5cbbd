"""A policy of scripted texts behind the endpoint, which the official clients talk to over a socket."""

import asyncio
import runpy
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from openai import AsyncOpenAI
from transformers import AutoTokenizer, Qwen2Tokenizer

from hybridrl.agents.endpoint.app import create_app, serving
from hybridrl.agents.endpoint.core import SamplingOptions
from hybridrl.agents.endpoint.sessions import AgentSessions, Session
from hybridrl.agents.environments.episode_loop import EpisodeLimits, EpisodeTools
from hybridrl.core.carried import Encoded
from hybridrl.core.rollout import Completion
from tests.agents.environments import conftest as environments

ADMIN, FAILS = "admin", "<fails>"  # the end of a text after which the policy cannot be sampled from any more
RECIPE = Path(__file__).parents[3] / "recipes" / "quickstart"

tokenizer, tokenizer_of = environments.tokenizer, environments.tokenizer_of


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The quickstart's untrained model and its tokenizer."""
    recipe, directory = runpy.run_path(str(RECIPE / "make_data.py")), tmp_path_factory.mktemp("tiny")
    tokenizer = recipe["build_tokenizer"]()
    tokenizer.save_pretrained(directory)
    recipe["build_model"](tokenizer, seed=0).save_pretrained(directory)
    return directory


@pytest.fixture
def with_template(tiny: Path, tmp_path: Path) -> Callable[[str | None], Path]:
    """Make this model with another chat template; None: without one."""

    def make(template: str | None) -> Path:
        model = shutil.copytree(tiny, tmp_path / "model")
        tokenizer = AutoTokenizer.from_pretrained(model)
        tokenizer.chat_template = template
        for file in model.glob("chat_template*"):
            file.unlink()
        tokenizer.save_pretrained(model)
        return model

    return make


def completion_of(tokenizer: Qwen2Tokenizer, text: str, most: int | None = None) -> Completion:
    """A response with this text, with log-probs that differ by token."""
    ids = np.array([*tokenizer(text)["input_ids"], tokenizer.eos_token_id])[:most]
    log_probs = np.linspace(-0.5, -0.1, len(ids), dtype=np.float32)
    return Completion(ids, log_probs, bool(ids[-1] != tokenizer.eos_token_id), 3)


class Script:
    """Responds with the texts in turn, or with what a function makes of the prompt; keeps what was asked."""

    def __init__(self, tokenizer: Qwen2Tokenizer, texts: Any) -> None:
        self.tokenizer, self.texts = tokenizer, texts
        self.prompts: list[list[int]] = []
        self.wanted: list[SamplingOptions] = []
        self.carried: dict[str, np.ndarray] = {}  # by each response
        self.cancelled = 0

    async def __call__(self, session: Session, prompt: Encoded, wanted: SamplingOptions) -> Completion:
        self.prompts.append(prompt.ids)
        self.wanted.append(wanted)
        try:
            text = self.texts(self.tokenizer.decode(prompt.ids)) if callable(self.texts) else self.texts.pop(0)
            text = await text if asyncio.iscoroutine(text) else text
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        completion = completion_of(self.tokenizer, text, wanted.max_tokens)
        for token in completion.token_ids.tolist():
            if wanted.hear:
                wanted.hear([token])
                await asyncio.sleep(0)
        if text.endswith(FAILS):
            raise RuntimeError("the engine is dead")
        return replace(completion, carried=self.carried)


@pytest.fixture
def kit_of(tokenizer: Qwen2Tokenizer) -> Callable[..., EpisodeTools]:
    """Make what the sessions of an endpoint share, with these limits."""

    def make(
        prompt: int = 2000,
        response: int = 4000,
        context: int = 6000,
        *,
        tokenizer: Any = tokenizer,
        reader: Any = None,
        **limits: Any,
    ) -> EpisodeTools:
        bounds = EpisodeLimits(prompt, response, context, **limits)
        return EpisodeTools.of(tokenizer, [tokenizer.eos_token_id], bounds, format="hermes", reader=reader)

    return make


class Served:
    """An endpoint on a socket: its address, its sessions, the script behind it, and clients for it."""

    def __init__(self, address: str, sessions: AgentSessions, script: Script) -> None:
        self.address, self.sessions, self.script = address, sessions, script

    def client(self, session: Session | None = None, **options: Any) -> AsyncOpenAI:
        key = session.api_key if session else "none"
        return AsyncOpenAI(base_url=f"{self.address}/v1", api_key=key, **{"max_retries": 0, "timeout": 20} | options)


@pytest.fixture
def endpoint(tokenizer: Qwen2Tokenizer, kit_of: Callable[..., EpisodeTools]) -> Callable[..., Any]:
    """Serve a script: `async with endpoint(texts) as served`."""

    @asynccontextmanager
    async def serve(
        texts: Any, *, clock: Any = None, timeout: float = 3600, app: Any = MappingProxyType({}), **limits: Any
    ) -> AsyncIterator[Served]:
        sessions = AgentSessions(kit_of(**limits), timeout, **({"clock": clock} if clock else {}))
        script = Script(limits.get("tokenizer", tokenizer), texts)
        async with serving(create_app(script, sessions, admin_key=ADMIN, **app)) as address:
            yield Served(address, sessions, script)

    return serve
