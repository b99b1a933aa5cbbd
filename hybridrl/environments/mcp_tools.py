"""Tools of MCP servers, where the package `mcp` is installed: entries of a tool yaml with `type: mcp`, as in verl.

The servers' file is that of other clients: {"mcpServers": {name: {"command", "args", "env"} or {"url", "auth_token"}}}.
"""

import asyncio
import concurrent.futures
import contextlib
import functools
import importlib
import importlib.util
import json
import os
import threading
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

from hybridrl.config import ConfigError
from hybridrl.environments.environment import ToolError
from hybridrl.environments.tools import Tool

SECONDS_TO_START = 60.0


class McpServer:
    """A connection to a server, opened when it is first used, and again after it was lost.

    All connections of a process live in one thread: whoever opened one must also close it.
    """

    def __init__(self, name: str, spec: Mapping[str, Any]) -> None:
        self.name, self._spec = name, spec
        self._session: concurrent.futures.Future[Any] | None = None
        self._lock = threading.Lock()

    def tools(self) -> list[dict[str, Any]]:
        """The tools that the server offers, by the names of the protocol."""
        call = asyncio.run_coroutine_threadsafe(self._list(), _loop())
        return call.result(SECONDS_TO_START)

    async def call(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """The result of a tool, by the names of the protocol; ConnectionError if the server is lost."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._call(name, arguments), _loop()))

    async def _list(self) -> list[dict[str, Any]]:
        listed = await (await self._opened()).list_tools()
        return [tool.model_dump(by_alias=True) for tool in listed.tools]

    async def _call(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        session = await self._opened()
        try:
            return (await session.call_tool(name, arguments)).model_dump(by_alias=True)
        except Exception as error:  # whatever its transport raises
            self._session = None
            raise ConnectionError(f"MCP server {self.name}: {type(error).__name__}: {error}") from error

    async def _opened(self) -> Any:
        with self._lock:
            if self._session is None:
                self._session = concurrent.futures.Future()
                self._keeper = asyncio.ensure_future(self._keep(self._session))
            session = self._session
        return await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(session)), SECONDS_TO_START)

    async def _keep(self, opened: concurrent.futures.Future[Any]) -> None:
        try:
            async with (
                _streams(self._spec) as streams,
                importlib.import_module("mcp").ClientSession(*streams) as session,
            ):
                await session.initialize()
                opened.set_result(session)
                await asyncio.Event().wait()
        except Exception as error:  # whatever its transport raises
            self._session = None
            if not opened.done():
                opened.set_exception(ConnectionError(f"MCP server {self.name} does not start: {_cause(error)}"))


class McpTool(Tool):
    """A tool of an MCP server."""

    network = True

    def __init__(self, server: McpServer, offered: Mapping[str, Any]) -> None:
        function = {"name": offered["name"], "description": offered.get("description") or offered["name"]}
        function["parameters"] = offered.get("inputSchema") or {"type": "object", "properties": {}}
        super().__init__({"type": "function", "function": function})
        self._server = server

    async def call(self, state: None, arguments: dict[str, Any]) -> str:
        result = await self._server.call(self.name, arguments)
        parts = [part.get("text") or f"[{part.get('type')}]" for part in result.get("content", [])]
        if result.get("isError"):
            raise ToolError("\n".join(parts) or "Error")
        return "\n".join(parts)


def load_mcp_tools(entry: Mapping[str, Any], place: str, path: str) -> list[Tool]:
    """The tools of an entry of a tool yaml; ConfigError names the file, server or tool that is missing."""
    if importlib.util.find_spec("mcp") is None:
        raise ConfigError(f"{place}: the package mcp is not installed", fix="pip install mcp")
    section = entry.get("mcp") or {}
    file = Path(path).parent / str(section.get("mcp_servers_config_path"))
    file = file if file.is_file() else Path(str(section.get("mcp_servers_config_path")))
    try:
        servers = json.loads(file.read_text(encoding="utf-8"))["mcpServers"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        cause = f"{place}: mcp_servers_config_path={file}: {type(error).__name__}: {error}"
        raise ConfigError(cause, fix='write {"mcpServers": {name: {"command": ..., "args": [...]}}}') from error
    tools: list[Tool] = []
    for name, spec in servers.items():
        try:
            server = McpServer(name, spec)
            tools += [McpTool(server, offered) for offered in server.tools()]
        except (ConnectionError, TimeoutError) as error:
            raise ConfigError(
                f"{place}: {error}", fix=f"start the server as {file} says, and see what it prints"
            ) from error
    selected = section.get("tool_selected_list") or [tool.name for tool in tools]
    missing = [name for name in selected if name not in {tool.name for tool in tools}]
    if missing:
        fix = f"the servers offer {', '.join(tool.name for tool in tools)}"
        raise ConfigError(f"{place}: tool_selected_list: there is no tool {missing[0]}", fix=fix)
    return [tool for tool in tools if tool.name in selected]


@contextlib.asynccontextmanager
async def _streams(spec: Mapping[str, Any]) -> AsyncIterator[tuple[Any, Any]]:
    """The two streams of a server that is a program, or at a URL."""
    if "command" in spec:
        stdio = importlib.import_module("mcp.client.stdio")
        environment = {**os.environ, **spec.get("env", {})}
        started = stdio.StdioServerParameters(command=spec["command"], args=spec.get("args", []), env=environment)
        async with stdio.stdio_client(started) as streams:
            yield streams[0], streams[1]
        return
    token = {"Authorization": f"Bearer {spec['auth_token']}"} if spec.get("auth_token") else {}
    http = importlib.import_module("mcp.client.streamable_http")
    async with (
        http.create_mcp_http_client(headers={**token, **spec.get("headers", {})}) as client,
        http.streamable_http_client(spec["url"], http_client=client) as streams,
    ):
        yield streams[0], streams[1]


def _cause(error: BaseException) -> str:
    """The first exception within groups of them."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True, name="mcp").start()
    return loop
