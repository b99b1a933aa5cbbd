"""A model behind an address of OpenAI's API: chat messages in, texts out. Knows no token ids."""

import asyncio
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import openai

from hybridrl.config import ConfigError
from hybridrl.data.template_arguments import row_arguments
from hybridrl.data.tokenizer import Chat, as_chat
from hybridrl.evaluation.plan import PlannedResponse
from hybridrl.evaluation.samples import Sample
from hybridrl.evaluation.scoring import Rescorer, blank_sample, with_score

KEY_VARIABLE = "OPENAI_API_KEY"
CONNECT_SECONDS, REQUEST_SECONDS, RETRIES = 10.0, 3600.0, 5


@dataclass(frozen=True)
class Endpoint:
    """A model at an address."""

    address: str
    model: str
    concurrency: int

    async def sample(self, client: openai.AsyncOpenAI, chat: Chat, wanted: PlannedResponse) -> Sample:
        """Return the model's response; what fails after some retries is a fault, not an exception. Calls of tools stay
        in its text, as those of a model of files do."""
        sampling, blank = wanted.sampling, blank_sample(wanted)
        beyond: dict[str, Any] = {"top_k": sampling.top_k} if sampling.top_k > 0 else {}  # OpenAI's own fields
        beyond |= {"chat_template_kwargs": dict(chat.arguments)} if chat.arguments else {}
        more: dict[str, Any] = {"extra_body": beyond} if beyond else {}
        more |= {"stop": list(sampling.stop)} if sampling.stop else {}
        more |= {"tools": chat.tools, "tool_choice": "none"} if chat.tools else {}
        try:
            answer = await client.chat.completions.create(
                model=self.model,
                messages=chat.messages,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                max_tokens=sampling.max_tokens,
                seed=wanted.seed,
                **more,
            )
        except openai.OpenAIError as error:
            return _fault(blank, f"raised:{type(error).__name__}", error)
        except ValueError as error:  # JSON was promised
            return _fault(blank, "reply", error)
        return _parsed(blank, answer)


def _parsed(blank: Sample, answer: Any) -> Sample:
    """Return the response in an answer, which may be anything that a server sends with status 200."""
    try:
        choice, message = answer.choices[0], answer.choices[0].message
        text = message.content or ""
        reasoning = getattr(message, "reasoning_content", None) or getattr(message, "reasoning", None)
        tokens = answer.usage.completion_tokens if answer.usage else 0
        if isinstance(text, str):
            finish = "max_tokens" if choice.finish_reason == "length" else "completed"
            conversation = {"reasoning": reasoning} if reasoning else {}
            return replace(blank, response=text, tokens=tokens or 0, finish=finish, conversation=conversation)
    except (AttributeError, IndexError, KeyError, TypeError):
        pass
    return _fault(blank, "reply", f"no choices[0].message in the reply {answer!r}")


def _fault(blank: Sample, fault: str, detail: object) -> Sample:
    return replace(blank, finish="fault", fault=fault, detail=" ".join(str(detail).split())[:300])


def connect(address: str, model: str | None, concurrency: int, key: str = "eval.models") -> Endpoint:
    """Return the endpoint at an address after asking which models it has. Raises ConfigError if it does not respond, or
    has several and none is named."""
    setting = f"{key}={address}"
    try:
        with openai.OpenAI(base_url=address, api_key=_key(), timeout=CONNECT_SECONDS, max_retries=1) as client:
            names = [one.id for one in client.models.list()]
    except openai.APIStatusError as error:
        if model and error.status_code in (404, 405, 501):  # it lists no models
            return Endpoint(address, model, concurrency)
        fix = f"set {KEY_VARIABLE}" if error.status_code in (401, 403) else "check the address, which ends in /v1"
        raise ConfigError(f"{setting}: it answers {address}/models with status {error.status_code}", fix=fix) from error
    except openai.OpenAIError as error:
        fix = "start the server, or check the address, which ends in /v1"
        raise ConfigError(f"{setting}: nothing responds there ({error})", fix=fix) from error
    if model is None and len(names) != 1:
        fix = f"name one: eval.served_model={names[0] if names else 'NAME'}"
        raise ConfigError(f"{setting} has {len(names)} models", fix=fix)
    if model is not None and names and model not in names:
        raise ConfigError(f"eval.served_model={model} is not at {address}", fix=f"choose {' | '.join(names[:8])}")
    return Endpoint(address, model or names[0], concurrency)


async def sample_remotely(
    endpoint: Endpoint,
    missing: Sequence[PlannedResponse],
    rescorer: Rescorer,
    keep: Callable[[Sample], None],
    arguments: Mapping[str, Any],
) -> None:
    """Have responses sampled at an address and scored here, and keep each as soon as it has its score. `arguments` are
    those of the chat template, which the server applies."""
    began, items = time.monotonic(), iter(missing)  # shared: each item is taken once
    client = openai.AsyncOpenAI(base_url=endpoint.address, api_key=_key(), timeout=REQUEST_SECONDS, max_retries=RETRIES)

    async def work() -> None:
        for one in items:
            prompt = one.question.prompt
            chat = Chat(as_chat(prompt.messages), prompt.tools, {**arguments, **row_arguments(prompt.columns, None)})
            sample = await endpoint.sample(client, chat, one)
            sample = replace(sample, seconds=round(time.monotonic() - began, 3))
            if not sample.fault:
                (future,) = rescorer.submit([(prompt, sample)])
                score = await asyncio.wrap_future(future)
                sample = with_score(sample, rescorer.shaping.shaped(score, sample.tokens))
            keep(sample)

    async with client, asyncio.TaskGroup() as tasks:
        for _ in range(endpoint.concurrency):
            tasks.create_task(work())


def _key() -> str:
    return os.environ.get(KEY_VARIABLE) or "none"
