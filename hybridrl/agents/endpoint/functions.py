"""The user's functions that are agents: finding them, and calling one in this process or in one of its own.

    async def run(data, *, base_url, api_key, http_client): ...

`data` is the row with its `messages`. The function returns the reward of the episode, rewards by completion id, or None
if it has set them through the endpoint. A plain function runs in a thread; a class is constructed and its `run` called.
Imports nothing heavy, since the process of an agent starts for each episode.
"""

import asyncio
import inspect
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import httpx

from hybridrl.agents.environments import AGENT
from hybridrl.agents.environments.user_code import UserCodeError, contained, finished
from hybridrl.config.custom_code import load_function
from hybridrl.runtime.guard import end_with_parent

PROCESS = "from hybridrl.agents.endpoint.functions import main; main()"
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
    """Call an agent in a process of its own, which is killed if this is cancelled."""
    variables = {"OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": api_key, "OPENAI_TIMEOUT": f"{timeout:g}"}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", PROCESS),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=os.environ | variables,
    )
    try:
        given = pickle.dumps((function, data, base_url, api_key, timeout))
        written, _ = await process.communicate(given)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        raise RuntimeError(f"the agent's process ended with exit status {process.returncode}")
    returned, error = pickle.loads(written)
    if error:
        raise RuntimeError(error)
    return returned


def main() -> None:
    """Be the process of one agent: read its episode from standard input, and write what the agent returned."""
    end_with_parent(os.getppid(), signal.SIGKILL)
    function, *arguments = pickle.load(sys.stdin.buffer)
    result = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what the agent prints goes to the log
    try:
        with contained(function.rpartition(":")[2]):
            answer = asyncio.run(call_agent(load_agent(function), *arguments)), ""
    except UserCodeError as error:
        traceback.print_exc()
        answer = None, str(error)
    with result:
        pickle.dump(answer, result)
