"""Tools of an MCP server, which is a program here."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import psutil
import pytest

from hybridrl.agents.environments import EpisodeFault, Response, ToolCall, mcp_tools
from hybridrl.agents.environments.load import load_tools
from hybridrl.config import ConfigError
from hybridrl.required import required
from tests.agents.environments.conftest import made
from tests.agents.sections import environments_of

pytest.importorskip("mcp.server.mcpserver", reason="the package mcp is not installed, or is older than 2")

SERVER = '''
import os, time
from mcp.server.mcpserver import MCPServer
from mcp.shared.exceptions import MCPError

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
    os.write(2, b"the database is locked\\n\\n")
    os._exit(3)

@server.tool()
def reject(code: int) -> str:
    """Return an error of the protocol."""
    raise MCPError(code, "no such thing")

@server.tool()
async def hang() -> str:
    """Block the server."""
    time.sleep(60)

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
    mcp: {mcp_servers_config_path: ./servers.json, tool_selected_list: [add, fail, leave, reject, hang]}
""")
    return environments_of(tool_config_path=str(tmp_path / "tools.yaml"), max_parallel_calls=3)


def servers(settings) -> list[psutil.Process]:
    """The processes of the server that this process has started."""
    path = os.path.dirname(settings.multi_turn.tool_config_path)
    return [one for one in psutil.Process().children(recursive=True) if any(path in part for part in one.cmdline())]


async def outcomes(settings, *calls) -> list[tuple[str, str]]:
    environment = made({}, settings)
    await environment.reset([])
    return [(record.outcome, record.result) for record in (await environment.step(Response("", calls))).calls]


async def test_an_error_of_the_protocol_is_read_by_the_policy_and_the_server_stays(settings) -> None:
    codes = [-32602, -32601, -32000, -32001, 7]
    found = [await outcomes(settings, ToolCall("reject", {"code": code})) for code in codes]
    assert found == [[("error", "Error: MCPError: no such thing")]] * len(codes)
    assert len(servers(settings)) == 1


async def test_after_a_server_has_hung_the_next_call_has_a_new_one_and_the_old_is_gone(settings, monkeypatch) -> None:
    monkeypatch.setattr(mcp_tools, "SECONDS_TO_RESPOND", 0.2)
    settings = replace(settings, multi_turn=replace(settings.multi_turn, tool_timeout=2))
    once = replace(settings, multi_turn=replace(settings.multi_turn, on_tool_failure="message", tool_retries=0))

    assert await outcomes(settings, ToolCall("add", {"a": 1, "b": 1})) == [("ok", "2")]
    first = servers(settings)
    assert (await outcomes(once, ToolCall("hang", {})))[0][0] == "timeout"
    found = await outcomes(settings, ToolCall("add", {"a": 1, "b": 2}))
    assert found == [("ok", "3")]
    assert psutil.wait_procs(first, timeout=20)[1] == []
    assert len(servers(settings)) == 1


def test_a_server_ends_with_the_process_that_started_it(settings) -> None:
    code = (
        "import sys, time; from hybridrl.agents.environments.mcp_tools import load_mcp_tools; "
        "load_mcp_tools({'mcp': {'mcp_servers_config_path': './servers.json'}}, 'tools[0]', sys.argv[1]); "
        "print(1, flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", code, settings.multi_turn.tool_config_path]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        required(process.stdout).readline()
        (server,) = psutil.Process(process.pid).children()
        server.suspend()  # so that it cannot see the end of its input
        process.kill()
    assert psutil.wait_procs([server], timeout=20)[1] == []


async def test_a_server_is_called_its_errors_are_read_and_a_lost_one_is_opened_again(settings, retries_soon) -> None:
    calls = (ToolCall("add", {"a": 2, "b": 3}), ToolCall("fail", {}), ToolCall("add", {"a": "x"}))
    added, failed, invalid = await outcomes(settings, *calls)
    assert added == ("ok", "5") and invalid[0] == "invalid"
    assert failed[0] == "error" and "fail" in failed[1]
    failure = "tool leave failed 3 times: ConnectionError: MCP server sums: .*; it printed last: the database is locked"
    with pytest.raises(EpisodeFault, match=failure):
        await outcomes(settings, ToolCall("leave", {}))
    assert await outcomes(settings, ToolCall("add", {"a": 1, "b": 1})) == [("ok", "2")]


@pytest.mark.parametrize(
    ("file", "old", "new", "said"),
    [
        (
            "tools.yaml",
            "[add, fail, leave, reject, hang]",
            "[mul]",
            "there is no tool mul; the servers offer add, fail",
        ),
        ("tools.yaml", "servers.json", "none.json", "none.json: FileNotFoundError"),
        ("servers.json", '"mcpServers"', '"servers"', "KeyError: 'mcpServers'; write"),
        ("server.py", "import os", "import nothing", "printed last: ModuleNotFoundError: No module named 'no"),
        ("servers.json", sys.executable, "/nowhere/python", "MCP server sums does not start: FileNotFoundError"),
    ],
)
def test_what_is_missing_is_rejected_by_name(settings, tmp_path, file, old, new, said) -> None:
    (tmp_path / file).write_text((tmp_path / file).read_text().replace(old, new))
    with pytest.raises(ConfigError) as raised:
        load_tools(settings)
    assert said in str(raised.value)
