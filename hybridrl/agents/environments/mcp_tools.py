"""Tools of MCP servers, where the package `mcp` is installed: entries of a tool yaml with `type: mcp`, as in verl.

The servers' file is that of other clients: {"mcpServers": {name: {"command", "args", "env"} or {"url", "auth_token"}}}.
"""

import asyncio
import contextlib
import importlib
import importlib.util
import json
import os
import shutil
import sys
import threading
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from hybridrl.agents.environments import ToolError
from hybridrl.agents.environments.tools import Tool
from hybridrl.agents.environments.user_code import ToolResult, UserCodeError, contained
from hybridrl.config import ConfigError
from hybridrl.config.custom_code import once

SECONDS_TO_START = 60.0
SECONDS_TO_PRINT = 1.0
SECONDS_TO_RESPOND = 5.0  # for a server to answer a ping after a failed call
# The kernel kills a server with the thread that started it: a process of episodes that is killed closes nothing.
ENDS_WITH_US = "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); os.execvp(sys.argv[1], sys.argv[1:])"


class Connection:
    """A session with a server, from its start to its end, in the thread of `_loop`: one task opens and closes it."""

    def __init__(self, name: str, spec: Mapping[str, Any]) -> None:
        self._name, self._settings = name, spec
        self._printed: list[str] = []  # the last line that the server has printed
        self.session: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._over = asyncio.Event()
        self._task = asyncio.ensure_future(self._keep())

    @property
    def over(self) -> bool:
        """Whether it is closed, or could not be opened."""
        return self._over.is_set()

    def close(self) -> None:
        """End the session, and the server if it is a program."""
        self._over.set()

    async def reason(self, error: BaseException) -> str:
        """Describe an error that ends the connection, with the server's last printed line."""
        if asyncio.current_task() != self._task:
            await asyncio.wait([self._task], timeout=SECONDS_TO_RESPOND)
        return _first(error) + "".join(f"; it printed last: {line:.500}" for line in self._printed)

    async def responds(self) -> bool:
        """Return whether the server responds; it is closed if not."""
        try:
            with contained("the transport"):
                async with asyncio.timeout(SECONDS_TO_RESPOND):
                    await (await asyncio.shield(self.session)).send_ping()
        except UserCodeError:
            self.close()
        return not self.over

    async def _keep(self) -> None:
        client = importlib.import_module("mcp").ClientSession
        try:
            with contained("the transport"):
                async with asyncio.timeout(SECONDS_TO_START) as start:
                    async with _streams(self._settings, self._printed) as streams, client(*streams) as session:
                        await session.initialize()
                        start.reschedule(None)
                        self.session.set_result(session)
                        await self._over.wait()
        except UserCodeError as error:
            if not self.session.done():
                reason = f"MCP server {self._name} does not start: {await self.reason(error.cause)}"
                self.session.set_exception(ConnectionError(reason))
        finally:
            self.close()


class McpServer:
    """A server, with which a session is opened when it is first used, and again after it was lost."""

    def __init__(self, name: str, spec: Mapping[str, Any]) -> None:
        self.name, self._settings = name, spec
        self._connection: Connection | None = None
        self._checks: set[asyncio.Task] = set()

    def tools(self) -> list[dict[str, Any]]:
        """The tools that the server offers, by the names of the protocol."""
        call = asyncio.run_coroutine_threadsafe(self._list(), _loop())
        return call.result(2 * SECONDS_TO_START)

    async def call(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """The result of a tool, by the names of the protocol; ToolError if the server rejects the call, ConnectionError
        if it is lost."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._call(name, arguments), _loop()))

    async def _list(self) -> list[dict[str, Any]]:
        async with asyncio.timeout(SECONDS_TO_START):
            listed = await (await asyncio.shield(self._connected().session)).list_tools()
        return [tool.model_dump(by_alias=True) for tool in listed.tools]

    async def _call(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        connection = self._connected()
        session = await asyncio.shield(connection.session)
        try:
            with contained("the transport"):
                return (await session.call_tool(name, arguments)).model_dump(by_alias=True)
        except asyncio.CancelledError:  # at the time limit: if the server hangs, later calls must not wait for it
            check = asyncio.ensure_future(connection.responds())
            self._checks.add(check)
            check.add_done_callback(self._checks.discard)
            raise
        except UserCodeError as error:  # from the server, or from its transport
            if await connection.responds():
                raise ToolError(f"Error: {_first(error.cause)}") from error
            raise ConnectionError(f"MCP server {self.name}: {await connection.reason(error.cause)}") from error

    def _connected(self) -> Connection:
        if self._connection is None or self._connection.over:
            self._connection = Connection(self.name, self._settings)
        return self._connection


class McpTool(Tool):
    """A tool of an MCP server."""

    network = True

    def __init__(self, server: McpServer, offered: Mapping[str, Any]) -> None:
        function = {"name": offered["name"], "description": offered.get("description") or offered["name"]}
        function["parameters"] = offered.get("inputSchema") or {"type": "object", "properties": {}}
        super().__init__({"type": "function", "function": function})
        self._server = server

    async def call(self, state: None, arguments: dict[str, Any]) -> ToolResult:
        result = await self._server.call(self.name, arguments)
        parts = result.get("content", [])
        pictures = [part.get("data") for part in parts if part.get("type") == "image"]
        text = "\n".join(part.get("text") or f"[{part.get('type')}]" for part in parts if part.get("type") != "image")
        if result.get("isError"):
            raise ToolError(text or "Error")
        return ToolResult(text, images=[f"data:image/png;base64,{data}" for data in pictures])


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
async def _streams(spec: Mapping[str, Any], printed: list[str]) -> AsyncIterator[tuple[Any, Any]]:
    """The two streams of a server that is a program, or at a URL."""
    if "command" in spec:
        stdio = importlib.import_module("mcp.client.stdio")
        environment = {**os.environ, **spec.get("env", {})}
        if shutil.which(spec["command"], path=environment.get("PATH")) is None:
            raise FileNotFoundError(f"there is no program {spec['command']}")
        command = ["-IS", "-c", ENDS_WITH_US, spec["command"], *spec.get("args", [])]
        started = stdio.StdioServerParameters(command=sys.executable, args=command, env=environment)
        async with _passed_on(printed) as stream, stdio.stdio_client(started, stream) as streams:
            yield streams[0], streams[1]
        return
    token = {"Authorization": f"Bearer {spec['auth_token']}"} if spec.get("auth_token") else {}
    http = importlib.import_module("mcp.client.streamable_http")
    async with (
        http.create_mcp_http_client(headers={**token, **spec.get("headers", {})}) as client,
        http.streamable_http_client(spec["url"], http_client=client) as streams,
    ):
        yield streams[0], streams[1]


@contextlib.asynccontextmanager
async def _passed_on(last: list[str]) -> AsyncIterator[TextIO]:
    """A stream whose lines appear on this process's standard error; the last one is kept."""
    reader, writer = os.pipe()

    def read() -> None:
        with open(reader, errors="replace") as lines:
            for line in lines:
                sys.stderr.write(line)
                last[:] = [line.strip()] if line.strip() else last

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    try:
        with open(writer, "w") as stream:
            yield stream
    finally:
        await asyncio.to_thread(thread.join, SECONDS_TO_PRINT)  # a program that the server left may hold the stream


def _first(error: BaseException) -> str:
    """The first exception within groups of them."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"


@once
def _loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True, name="mcp").start()
    return loop
