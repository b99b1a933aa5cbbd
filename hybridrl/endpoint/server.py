"""Serves an application in this process."""

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import uvicorn
from fastapi import FastAPI

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
async def serving(app: FastAPI, host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[str]:
    """Serve an application while the context is open, and return its address; port 0 is a free one."""
    listening = socket.create_server((host, port), backlog=BACKLOG)
    config = uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off", timeout_keep_alive=IDLE_SECONDS)
    server = _Server(config)
    task = asyncio.create_task(server.serve([listening]))
    try:
        while not server.started and not task.done():
            await asyncio.sleep(0.01)
        if task.done():
            task.result()
        yield f"http://{host}:{listening.getsockname()[1]}"
    finally:
        server.should_exit = server.force_exit = True
        await task
