"""Tools of an MCP server, which is a program here."""

import asyncio
import json
import sys

import pytest

from hybridrl.config import ConfigError
from hybridrl.environments import EpisodeFault, Response, ToolCall, tool_environment
from hybridrl.environments.load import environment_of, load_tools
from hybridrl.environments.settings import EnvironmentSettings

pytest.importorskip("mcp.server.mcpserver", reason="the package mcp is not installed, or is older than 2")

SERVER = '''
import os
from mcp.server.mcpserver import MCPServer

server = MCPServer("sums")

@server.tool()
def add(a: int, b: int) -> str:
    """Add two numbers."""
    return str(a + b)

@server.tool()
def fail() -> str:
    """Raise."""
    raise ValueError("no luck")

@server.tool()
def leave() -> str:
    """End the server."""
    os._exit(3)

server.run()
'''


@pytest.fixture
def settings(tmp_path):
    (tmp_path / "server.py").write_text(SERVER)
    servers = {"mcpServers": {"sums": {"command": sys.executable, "args": [str(tmp_path / "server.py")]}}}
    (tmp_path / "servers.json").write_text(json.dumps(servers))
    (tmp_path / "tools.yaml").write_text("""
tools:
  - class_name: verl.tools.mcp_search_tool.MCPSearchTool
    config: {type: mcp, rate_limit: 120}
    mcp: {mcp_servers_config_path: ./servers.json, tool_selected_list: [add, fail, leave]}
""")
    return EnvironmentSettings(tool_config_path=str(tmp_path / "tools.yaml"), max_parallel_calls=3)


def test_a_server_is_called_its_errors_are_read_and_a_lost_one_is_opened_again(settings, monkeypatch) -> None:
    monkeypatch.setattr(tool_environment, "SECONDS_BEFORE_RETRY", 0.01)

    async def step(*calls):
        environment = environment_of({}, settings)()
        await environment.reset([])
        return [(record.outcome, record.result) for record in (await environment.step(Response("", calls))).calls]

    both = asyncio.run(step(ToolCall("add", {"a": 2, "b": 3}), ToolCall("fail", {}), ToolCall("add", {"a": "x"})))
    assert both[0] == ("ok", "5")
    assert both[1][0] == "error" and "fail" in both[1][1]
    assert both[2][0] == "invalid"
    with pytest.raises(EpisodeFault, match="tool leave failed 3 times: ConnectionError: MCP server sums"):
        asyncio.run(step(ToolCall("leave", {})))
    assert asyncio.run(step(ToolCall("add", {"a": 1, "b": 1}))) == [("ok", "2")]


@pytest.mark.parametrize(
    ("file", "old", "new", "said"),
    [
        ("tools.yaml", "[add, fail, leave]", "[mul]", "there is no tool mul; the servers offer add, fail, leave"),
        ("tools.yaml", "servers.json", "none.json", "none.json: FileNotFoundError"),
        ("servers.json", '"mcpServers"', '"servers"', "KeyError: 'mcpServers'; write"),
        ("servers.json", sys.executable, "/nowhere/python", "MCP server sums does not start: FileNotFoundError"),
    ],
)
def test_what_is_missing_is_rejected_by_name(settings, tmp_path, file, old, new, said) -> None:
    (tmp_path / file).write_text((tmp_path / file).read_text().replace(old, new))
    with pytest.raises(ConfigError) as raised:
        load_tools(settings)
    assert said in str(raised.value)
