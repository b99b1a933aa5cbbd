"""Serves an application in this process."""

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import uvicorn
from fastapi import FastAPI

from hybridrl.agents.endpoint.address import bound

BACKLOG = 2048
# Clients close a connection that was idle for 5 s (httpx, and so OpenAI's and Anthropic's): one that the server closes
# at that moment loses the next request.
IDLE_SECONDS = 75


class _Server(uvicorn.Server):
    """A server that leaves the signals to the process that it is part of."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@asynccontextmanager
async def serving(app: FastAPI, listening: socket.socket | None = None) -> AsyncIterator[str]:
    """Serve an application of endpoint/app.py while the context is open, and return its address; by default on a free
    port of this machine alone."""
    listening = listening or bound("127.0.0.1", 0)
    options = {"log_level": "warning", "access_log": False, "lifespan": "off", "timeout_keep_alive": IDLE_SECONDS}
    config = uvicorn.Config(app, backlog=BACKLOG, **options)
    server = _Server(config)
    task = asyncio.create_task(server.serve([listening]))
    try:
        while not server.started and not task.done():
            await asyncio.sleep(0.01)
        if task.done():
            task.result()
        host, port = app.state.host, listening.getsockname()[1]
        yield f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    finally:
        server.should_exit = server.force_exit = True
        await task
