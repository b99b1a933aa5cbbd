"""The user's functions that are agents: finding them, and calling one in this process or in one of its own.

    async def run(data, *, base_url, api_key, http_client): ...

`data` is the row with its `messages`. The function returns the reward of the episode, rewards by completion id, or None
if it has set them through the endpoint. A plain function runs in a thread; a class is constructed and its `run` called.
Imports nothing heavy, since the process of an agent starts for each episode.
"""

import asyncio
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import httpx

from hybridrl.agents.environments import AGENT
from hybridrl.agents.environments.user_code import UserCodeError, contained, finished
from hybridrl.config.custom_code import load_function
from hybridrl.rewards.program import NoMessage, Program, messages_of
from hybridrl.rewards.score import plain

SECONDS_TO_END = 1.0  # until a process with a closed connection is killed
Agent = Callable[..., Any]


def load_agent(function: str) -> Agent:
    """Return the function of path/to/file.py:name; ConfigError says what is wrong with the file."""
    member = load_function(function, f"{AGENT}.path")
    return member().run if isinstance(member, type) else member


async def call_agent(agent: Agent, data: Mapping[str, Any], base_url: str, api_key: str, timeout: float) -> Any:
    """Call an agent with a client that has its time limit."""
    call = partial(agent, data, base_url=base_url, api_key=api_key)
    options = {"timeout": timeout, "trust_env": False}  # a proxy could not reach this machine's own address
    if inspect.iscoroutinefunction(agent):
        async with httpx.AsyncClient(**options) as client:
            return await finished(partial(call, http_client=client))
    with httpx.Client(**options) as client:
        return await finished(partial(call, http_client=client))


async def run_in_process(function: str, data: Mapping[str, Any], base_url: str, api_key: str, timeout: float) -> Any:
    """Call an agent in a process of its own, which ends when the agent has returned or this is cancelled, with all that
    it has started."""
    variables = {"OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": api_key, "OPENAI_TIMEOUT": f"{timeout:g}"}
    program = Program(__name__, sys.path, env=os.environ | variables)
    try:
        await finished(program.messages.send, (function, data, base_url, api_key, timeout))
        returned, error = await finished(program.messages.receive)
    except UserCodeError as failure:
        if isinstance(failure.cause, NoMessage):
            raise RuntimeError(f"what the agent's process sent is not what it returned ({failure.cause})") from None
        status = await finished(program.kill, SECONDS_TO_END)
        raise RuntimeError(f"the agent's process ended with exit status {status}") from None
    finally:
        program.kill(0)  # ends a thread that still waits for a message
        program.messages.close()
    if error:
        raise RuntimeError(error)
    return returned


def main(descriptor: int, parent: int) -> None:
    """Be the process of one agent: receive its episode, and send what the agent returned, and how it failed."""
    messages = messages_of(descriptor, parent)
    function, *arguments = messages.receive()
    try:
        with contained(function.rpartition(":")[2]):
            returned = asyncio.run(call_agent(load_agent(function), *arguments))
            returned = dict(returned) if isinstance(returned, Mapping) else returned
            reply = plain(returned), ""
    except UserCodeError as error:
        traceback.print_exc()
        reply = None, str(error)
    messages.send(reply)
