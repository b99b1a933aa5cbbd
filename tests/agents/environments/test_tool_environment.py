"""Calls of tools: whose fault a failure is, limits of time, number and length, and what an episode keeps."""

import asyncio
import http.server
import logging
import threading
import time
import urllib.request

import pytest

from hybridrl.agents.environments import EpisodeFault, Response, ToolCall, ToolError
from hybridrl.agents.environments.tools import FunctionTool, Tool, ToolEnvironment, truncated
from hybridrl.agents.environments.user_code import ToolResult
from tests.agents.sections import multi_turn_of


def schema(name: str, **types: str) -> dict:
    properties = {argument: {"type": kind} for argument, kind in types.items()}
    parameters = {"type": "object", "properties": properties, "required": [*types]}
    return {"type": "function", "function": {"name": name, "description": name, "parameters": parameters}}


def tool(function, network: bool = False, **types: str) -> FunctionTool:
    made = FunctionTool(function, schema=schema(function.__name__, **types))
    made.network = network
    return made


def step(tools, *calls, **settings):
    """The step of an episode's only response, which has these calls."""

    async def run():
        environment = ToolEnvironment(tools, multi_turn_of(**{"max_parallel_calls": 8, **settings}), {"row": 1})
        await environment.reset([])
        made = [call if isinstance(call, ToolCall) else ToolCall(*call) for call in calls]
        return await environment.step(Response("", made))

    return asyncio.run(run())


def outcome(tools, *calls, **settings):
    record = step(tools, *calls, **settings).calls[0]
    return record.outcome, record.result


def double(x):
    return 2 * x


def test_a_call_is_answered_by_a_tool_message_and_a_response_without_one_ends_the_episode() -> None:
    first = step([tool(double, x="integer")], ToolCall("double", {"x": 4}, id="c1"))
    assert first.messages == [{"role": "tool", "name": "double", "content": "8", "tool_call_id": "c1"}]
    assert (first.done, first.reward, first.calls[0].outcome) == (False, None, "ok")
    assert step([tool(double, x="integer")]).done


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (("triple", {"x": 1}), "Error: there is no tool 'triple'; the tools are double"),
        (("double", {}), "Error: 'x' is a required property; the arguments of double are x"),
        (("double", {"x": "4"}), "Error: x: '4' is not of type 'integer'; the arguments of double are x"),
        (("double", {"x": 1, "y": 2}), "('y' was unexpected); the arguments of double are x"),
        (ToolCall("double", {}, error="the arguments are not JSON"), "Error: the arguments are not JSON"),
    ],
)
def test_a_mistake_of_the_policy_is_a_message_that_names_it(call, said) -> None:
    kind, text = outcome([tool(double, x="integer")], call)
    assert kind == "invalid"
    assert said in text


def test_calls_run_at_once_up_to_the_limit_and_the_others_are_answered() -> None:
    at_once = threading.Barrier(3)

    def wait(x):
        at_once.wait(30)
        return x

    made = step([tool(wait, x="integer")], *[("wait", {"x": x}) for x in range(5)], max_parallel_calls=3)
    assert [record.outcome for record in made.calls] == ["ok"] * 3 + ["skipped"] * 2
    assert made.messages[4]["content"] == "Error: not run, only 3 calls at a time"


def test_an_exception_is_its_first_line_and_its_traceback_is_logged_once(caplog) -> None:
    def broken(x):
        raise KeyError(f"no key {x}\nand more")

    def leaves():
        raise SystemExit(3)

    def locked():
        raise ToolError("the door is locked")

    with caplog.at_level(logging.WARNING):
        texts = [outcome([tool(broken, x="integer")], ("broken", {"x": x})) for x in range(3)]
    assert texts[2][0] == "error"
    assert texts[2][1].startswith("Error: KeyError: 'no key 2")
    assert "Traceback" in caplog.text
    assert len(caplog.records) == 1
    assert '{"row": 1}' in caplog.text
    assert outcome([tool(leaves)], ("leaves", {})) == ("error", "Error: RuntimeError: SystemExit: 3")
    assert outcome([tool(locked)], ("locked", {})) == ("error", "the door is locked"), "raised on purpose"


async def sleeps():
    await asyncio.sleep(30)


@pytest.mark.parametrize("function", [lambda: time.sleep(30), sleeps], ids=["plain", "coroutine"])
def test_a_tool_that_does_not_end_is_left_at_the_time_limit(function) -> None:
    function.__name__ = "sleeps"
    begin = time.monotonic()
    ended = outcome([tool(function)], ("sleeps", {}), tool_timeout=0.2)
    assert ended == ("timeout", "Error: time limit of 0.2 s reached")
    assert time.monotonic() - begin < 5


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (b"\xff\xfe\x00", "the tool returned 3 bytes that are not text"),
        (object(), "the tool returned a object, which is not text"),
        ("x" * 10_000_000, "x" * 25 + "...(truncated)..." + "x" * 25),
    ],
    ids=["bytes", "object", "10 MB"],
)
def test_results_that_are_no_text_or_too_long_are_handled(value, said) -> None:
    def give():
        return value

    assert outcome([tool(give)], ("give", {}), max_tool_response_length=50)[1] == said


@pytest.mark.parametrize(
    ("side", "cut"),
    [("left", "(truncated)...6789"), ("right", "0123...(truncated)"), ("middle", "01...(truncated)...89")],
)
def test_a_text_is_cut_at_the_configured_side(side, cut) -> None:
    assert truncated("0123456789", 4, side) == cut
    assert truncated("0123", 4, side) == "0123"


def unavailable(statuses):
    """The URL of a server that answers with these statuses, one per request."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(statuses.pop(0))
            self.end_headers()
            self.wfile.write(b"fine")

        def log_message(self, *_): ...

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_port}"


def test_a_network_tool_is_called_again_and_then_its_episode_is_a_fault(retries_soon) -> None:
    def fetch(url):
        return urllib.request.urlopen(url, timeout=5).read()

    one = tool(fetch, network=True, url="string")
    assert outcome([one], ("fetch", {"url": unavailable([503, 500, 200])})) == ("ok", "fine")
    with pytest.raises(EpisodeFault, match=r"tool fetch failed 3 times: URLError: .*refused"):
        outcome([one], ("fetch", {"url": "http://127.0.0.1:9"}))
    read = outcome([one], ("fetch", {"url": unavailable([500] * 3)}), on_tool_failure="message")
    assert read == ("error", "Error: HTTPError: HTTP Error 500: Internal Server Error")
    absent = outcome([one], ("fetch", {"url": unavailable([404])}))
    assert absent == ("error", "Error: HTTPError: HTTP Error 404: Not Found")


def test_a_network_tool_beyond_its_time_limit_excludes_the_episode_and_a_local_one_does_not(retries_soon) -> None:
    with pytest.raises(EpisodeFault, match=r"failed 3 times: time limit of 0\.05 s reached"):
        outcome([tool(sleeps, network=True)], ("sleeps", {}), tool_timeout=0.05)
    with pytest.raises(EpisodeFault, match="failed 1 times"):
        outcome([tool(sleeps)], ("sleeps", {}), tool_timeout=0.05, on_tool_failure="exclude")


class Counter(Tool):
    def __init__(self) -> None:
        super().__init__(schema("count"))
        self.ended = 0

    def start(self, row):
        return {"count": row["first"]}

    def call(self, state, arguments):
        state["count"] += 1
        return str(state["count"]), 0.5, {"calls": 1}

    def end(self, state):
        self.ended += 1
        return {"reward": float(state["count"])}


async def test_state_lasts_for_an_episode_and_is_its_own() -> None:
    counter = Counter()

    async def episode(first: int):
        environment = ToolEnvironment([counter], multi_turn_of(), {"first": first})
        await environment.reset([])
        steps = [await environment.step(Response("", [ToolCall("count", {})])) for _ in range(2)]
        return [made.messages[0]["content"] for made in steps], steps[0], await environment.close()

    (first, made, metrics), (second, _, _) = await asyncio.gather(episode(10), episode(20))
    assert (first, second) == (["11", "12"], ["21", "22"])
    assert (made.calls[0].reward, made.metrics) == (0.5, {"count/calls": 1.0})
    assert (metrics, counter.ended) == ({"count/reward": 12.0}, 2)


@pytest.mark.parametrize("reward", [float("nan"), "good", 1e40])
def test_a_reward_of_a_tool_that_is_no_finite_number_is_a_fault_with_its_name(reward) -> None:
    def rated():
        return "text", reward

    with pytest.raises(EpisodeFault, match="the reward of the tool rated is not a finite number: it returned"):
        outcome([tool(rated)], ("rated", {}))


def test_metrics_of_tools_that_are_no_numbers_are_left_out() -> None:
    def measured():
        return ToolResult("text", metrics={"page": "x", "hits": 2})

    made = step([tool(measured)], ("measured", {}), ("measured", {}))
    assert made.metrics == {"measured/hits": 4.0}


async def test_calls_of_the_last_response_are_not_run() -> None:
    environment = ToolEnvironment([tool(double, x="integer")], multi_turn_of(), {})
    last = await environment.step(Response("", [ToolCall("double", {"x": 4})], last=True))
    assert (last.messages, last.done, last.calls[0].outcome) == ([], False, "skipped")


def test_a_call_that_a_limit_prevents_is_invalid_if_no_tool_could_have_run_it() -> None:
    calls = [ToolCall("double", {"x": 4}), ToolCall("triple", {"x": 4}), ToolCall("", {}, error="it cannot be read")]

    async def outcomes(calls, **response):
        environment = ToolEnvironment([tool(double, x="integer")], multi_turn_of(max_parallel_calls=1), {})
        await environment.reset([])
        return [record.outcome for record in (await environment.step(Response("", calls, **response))).calls]

    assert asyncio.run(outcomes(calls, last=True)) == ["skipped", "invalid", "invalid"]
    assert asyncio.run(outcomes([calls[0], *calls])) == ["ok", "skipped", "invalid", "invalid"]
