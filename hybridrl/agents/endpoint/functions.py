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
from dataclasses import dataclass
from functools import partial
from typing import Any

import httpx

from hybridrl.agents.environments.settings import AGENT
from hybridrl.agents.environments.user_code import UserCodeError, contained, finished
from hybridrl.config.custom_code import load_function
from hybridrl.runtime.guard import end_with_parent

ONLINE = "online"
PROCESS = "from hybridrl.agents.endpoint.functions import main; main()"
Agent = Callable[..., Any]


@dataclass(frozen=True)
class AgentSettings:
    """What rows run in: the function `name` of the file `path`, or with mode online agents outside the run.

    `mode` is inline, in the process of the endpoint, process, one for each episode, or online: the endpoint is then at
    `host` and `port` and gives sessions to who has the `admin_key`. At most `concurrency` agents of one call of the
    driver run at a time in each process that runs episodes (None: all). An episode that gets no reward is a fault if
    `needs_reward`, else the reward function scores it. `forced_tool_choice` is what becomes of a request that requires
    a call: reject, or auto.
    """

    path: str = ""
    name: str = "run"
    mode: str = "inline"
    concurrency: int | None = None
    turn_discount: float = 1.0
    needs_reward: bool = True
    host: str = "127.0.0.1"
    port: int = 0
    admin_key: str | None = None
    forced_tool_choice: str = "reject"

    def load(self) -> Agent:
        """Return the function; ConfigError says what is wrong with the file."""
        member = load_function(f"{self.path}:{self.name}", f"{AGENT}.path")
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


async def run_in_process(
    settings: AgentSettings, data: Mapping[str, Any], base_url: str, api_key: str, timeout: float
) -> Any:
    """Call an agent in a process of its own, which is killed if this is cancelled."""
    variables = {"OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": api_key, "OPENAI_TIMEOUT": f"{timeout:g}"}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", PROCESS),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=os.environ | variables,
    )
    try:
        given = pickle.dumps((settings, data, base_url, api_key, timeout))
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
    settings, *arguments = pickle.load(sys.stdin.buffer)
    result = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what the agent prints goes to the log
    try:
        with contained(settings.name):
            answer = asyncio.run(call_agent(settings.load(), *arguments)), ""
    except UserCodeError as error:
        traceback.print_exc()
        answer = None, str(error)
    with result:
        pickle.dump(answer, result)
