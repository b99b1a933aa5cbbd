"""Hostile requests: every fault of one is answered by name, and the endpoint keeps serving."""

import asyncio
import json
from collections.abc import Iterable
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
import tokenizers
from transformers import PreTrainedTokenizerFast

from hybridrl.agents.endpoint import app, core
from hybridrl.agents.endpoint.core import token_bytes
from hybridrl.agents.endpoint.fields import Rules
from hybridrl.agents.endpoint.requests import body_limit
from tests.agents.endpoint.conftest import ADMIN

USER = {"role": "user", "content": "Guess."}
CHAT, TEXT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
FORMS = {
    CHAT: {"messages": [USER]},
    TEXT: {"prompt": "Guess."},
    RESPONSES: {"input": [USER]},
    MESSAGES: {"messages": [USER], "max_tokens": 9},
}
HALF = "\ud83d"  # of a surrogate pair
HALF_ESCAPED = '{"a": "\\ud83d"}'
DEEP = json.loads("[" * 150 + "]" * 150)


def tool(**fields):
    return {"type": "function", "function": {"name": "look", **fields}}


def called(function):
    return [{"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": function}]}]


OF_ALL = [
    ({"stop": ""}, "stop[0]"),
    ({"stop": [""]}, "stop[0]"),
    ({"stop": ["a"] * 65}, "stop"),
    ({"stop": [None]}, "stop[0]"),
    ({"seed": 2**70}, "seed"),
    ({"temperature": 1e9}, "temperature"),
    ({"temperature": "nan"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_k": -5}, "top_k"),
    ({"top_k": 2**40}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"frequency_penalty": 9}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"n": 0}, "n"),
    ({"n": 2}, "n"),
    ({"temperature": -1}, "temperature"),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
    ({"stop_token_ids": [10**6]}, "stop_token_ids"),
    ({"stream_options": 7}, "stream_options"),
    ({"metadata": {"session_id": []}}, "metadata.session_id"),
    ({"metadata": {HALF: "a"}}, "metadata"),
    ({"user": "a" + HALF}, "user"),
    ({"tool_choice": [5]}, "tool_choice"),
    ({"tool_choice": {"type": []}}, "tool_choice"),
    ({"tool_choice": "sometimes"}, "tool_choice"),
    ({"logit_bias": {"5": 1}}, "logit_bias"),
    ({"guided_json": {"type": "object"}}, "guided_json"),
    ({"temprature": 0.5}, "temprature"),
]
OF_ONE = [
    (CHAT, {"messages": [{"role": "user", "content": ["a"]}]}, "messages[0].content"),
    (CHAT, {"messages": [{"role": "user", "content": {"text": 5}}]}, "messages[0].content"),
    (CHAT, {"messages": ["a"]}, "messages[0]"),
    (CHAT, {"messages": [{"role": "robot", "content": "a"}]}, "messages[0].role"),
    (CHAT, {"messages": [{"role": "user", "content": HALF}]}, "messages[0].content"),
    (CHAT, {"messages": called("look")}, "messages[0].tool_calls[0].function"),
    (CHAT, {"messages": called({"name": "", "arguments": "{}"})}, "messages[0].tool_calls[0].function.name"),
    (CHAT, {"messages": called({"name": "look", "arguments": [1]})}, "messages[0].tool_calls[0].function.arguments"),
    (CHAT, {"messages": called({"name": "look", "arguments": "[" * 9999})}, "messages"),
    (CHAT, {"messages": called({"name": "look", "arguments": HALF_ESCAPED})},
     "messages[0].tool_calls[0].function.arguments"),
    (CHAT, {"messages": [{**USER, "reasoning_content": 5}]}, "messages[0].reasoning_content"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
    (CHAT, {"messages": None}, "messages"),
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {"tools": ["look"]}, "tools[0]"),
    (CHAT, {"tools": [{"type": "web_search"}]}, "tools[0].type"),
    (CHAT, {"tool_choice": "sometimes", "tools": [tool()]}, "tool_choice"),
    (CHAT, {"tools": [{"type": "function", "function": "look"}]}, "tools[0].function"),
    (CHAT, {"tools": [tool(name=5)]}, "tools[0].function.name"),
    (CHAT, {"tools": [tool(parameters=[1])]}, "tools[0].function.parameters"),
    (CHAT, {"tools": [tool(description=HALF)]}, "tools[0].function.description"),
    (CHAT, {"chat_template_kwargs": {"unread": 1}}, "chat_template_kwargs"),
    (CHAT, {"chat_template_kwargs": {"messages": "a"}}, "chat_template_kwargs"),
    (CHAT, {"chat_template_kwargs": {"assistant": 1}}, "chat_template_kwargs"),  # a word of the template, no argument
    (CHAT, {"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
    (CHAT, {"response_format": {"type": "json_schema"}}, "response_format"),
    (CHAT, {"response_format": {"type": "xml"}}, "response_format"),
    (CHAT, {"logprobs": True, "top_logprobs": 5}, "top_logprobs"),
    (TEXT, {"prompt": [5, 10**6]}, "prompt"),
    (TEXT, {"prompt": [-1]}, "prompt"),
    (TEXT, {"prompt": [2**70]}, "prompt"),
    (TEXT, {"prompt": [True]}, "prompt"),
    (TEXT, {"prompt": [[5], [6]]}, "prompt"),
    (TEXT, {"prompt": {"a": 1}}, "prompt"),
    (TEXT, {"prompt": []}, "prompt"),
    (TEXT, {"prompt": ""}, "prompt"),
    (TEXT, {"logprobs": -1}, "logprobs"),
    (TEXT, {"echo": True}, "echo"),
    (RESPONSES, {"input": 5}, "input"),
    (RESPONSES, {"input": []}, "input"),
    (RESPONSES, {"input": ["a"]}, "input[0]"),
    (RESPONSES, {"input": [{"type": "function_call", "name": [1], "arguments": "{}"}]}, "input[0].name"),
    (RESPONSES, {"input": [{"type": "function_call_output", "output": 5}]}, "input[0].output"),
    (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content"),
    (RESPONSES, {"text": {"format": {"type": "json_schema", "schema": 5}}}, "text.format.schema"),
    (RESPONSES, {"previous_response_id": "a"}, "previous_response_id"),
    (RESPONSES, {"tools": [{"type": "web_search"}]}, "tools[0]"),
    (MESSAGES, {"messages": [{"role": "user", "content": ["a"]}]}, "messages[0].content[0]"),
    (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "tool_use", "input": 5}]}]},
     "messages[0].content[0].input"),
    (MESSAGES, {"system": [{"type": "image"}]}, "system"),
    (MESSAGES, {"stop_sequences": [""]}, "stop_sequences[0]"),
    (MESSAGES, {"tools": [{"name": "a", "input_schema": "b"}]}, "tools[0].parameters"),
]  # fmt: skip


def client_of(served) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=served.address, timeout=30)


@pytest.fixture
def replies_to(endpoint):
    """Send requests to an endpoint whose policy says 7, with the options of create_app; returns the replies."""

    async def send(requests: Iterable[tuple[str, object]], **options) -> list[httpx.Response]:
        headers = {"Content-Type": "application/json"}
        async with endpoint(lambda prompt: "7", app=options) as served, client_of(served) as http:
            return [await http.post(path, content=json.dumps(body), headers=headers) for path, body in requests]

    return send


async def test_what_no_response_can_have_is_rejected_by_name_in_every_form(replies_to):
    cases = [(path, fields, param) for path in FORMS for fields, param in OF_ALL] + OF_ONE
    replies = await replies_to((path, FORMS[path] | fields) for path, fields, _ in cases)
    wrong = []
    for (path, fields, param), reply in zip(cases, replies, strict=True):
        error = reply.json().get("error") or {"message": ""}
        named = param.partition("[")[0] in error["message"]
        if not named or (reply.status_code, error["type"], error["param"]) != (400, "invalid_request_error", param):
            wrong.append((path, fields, param, reply.status_code, error))
    assert not wrong


async def test_a_field_that_is_null_is_absent(replies_to):
    fields = "stop temperature top_p seed n stream tools tool_choice metadata user logprobs response_format text system"
    nothing = dict.fromkeys((*fields.split(), "unknown", "stream_options"))
    replies = await replies_to((path, nothing | body) for path, body in FORMS.items())
    assert [reply.status_code for reply in replies] == [200] * len(FORMS)


@pytest.mark.parametrize(
    ("content", "kind", "said"),
    [
        (b'{"messages": NaN}', "application/json", "not valid JSON"),
        (b'{"messages": [{"role": "user", "content": "\xff"}]}', "application/json", "not valid JSON"),
        (b'{"messages":' + b"[" * 100_000, "application/json", "not valid JSON"),
        (b'{"messages": [', "application/json", "not valid JSON"),
        (b'"messages"', "application/json", "body"),
        (b"", "application/json", "body"),
        (b'{"messages": [{"role": "user", "content": "a"}]}', "text/plain", "Content-Type: application/json"),
        (b'{"messages": [{"role": "user", "content": "a"}]}', None, "Content-Type: application/json"),
    ],
)  # fmt: skip
async def test_a_body_that_is_no_json_is_rejected(endpoint, content, kind, said):
    async with endpoint(lambda prompt: "7") as served, client_of(served) as http:
        reply = await http.post(CHAT, content=content, headers={"Content-Type": kind} if kind else {})
    assert reply.status_code == 400 and said in reply.json()["error"]["message"]


async def test_tools_that_are_nested_deeply_are_rendered_or_rejected(replies_to):
    (reply,) = await replies_to([(CHAT, {"messages": [USER], "tools": [tool(parameters={"a": DEEP})]})])
    assert reply.status_code in (200, 400)


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_larger_than_a_full_context_is_rejected_and_the_connection_stays_usable(endpoint, chunked):
    limit = body_limit(6000)

    def talk(address: str):
        connection = HTTPConnection(urlsplit(address).netloc, timeout=30)
        content = json.dumps({"messages": [{"role": "user", "content": "a" * limit}]}).encode()
        parts = (content[at : at + 65536] for at in range(0, len(content), 65536))
        connection.request("POST", CHAT, parts if chunked else content, {"Content-Type": "application/json"})
        reply, socket = connection.getresponse(), connection.sock
        error = json.loads(reply.read())
        connection.request("GET", "/health")
        return reply.status, error["error"]["message"], connection.getresponse().status, connection.sock is socket

    async with endpoint(lambda prompt: "7") as served:
        status, message, after, same = await asyncio.to_thread(talk, served.address)
    assert (status, after, same) == (413, 200, True) and str(limit) in message


async def test_a_body_that_is_declared_too_large_is_rejected_before_it_is_sent(endpoint):
    def talk(address: str) -> int:
        connection = HTTPConnection(urlsplit(address).netloc, timeout=10)
        connection.putrequest("POST", CHAT)
        for name, value in (("Content-Type", "application/json"), ("Content-Length", "9" * 12)):
            connection.putheader(name, value)
        connection.endheaders()
        return connection.getresponse().status

    async with endpoint(lambda prompt: "7") as served:
        assert (await asyncio.to_thread(talk, served.address)) == 413


async def test_other_requests_are_answered_while_a_prompt_is_rendered(endpoint):
    async with endpoint(lambda prompt: "7") as served, client_of(served) as http:
        began, dialogue = asyncio.Event(), served.sessions.kit.dialogue
        loop, start, release = asyncio.get_running_loop(), dialogue.start, asyncio.Event()

        def slow(*arguments, **options):
            loop.call_soon_threadsafe(began.set)
            asyncio.run_coroutine_threadsafe(release.wait(), loop).result(20)
            return start(*arguments, **options)

        dialogue.start = slow
        asked = asyncio.create_task(http.post(CHAT, json={"messages": [USER]}))
        await began.wait()
        health = await http.get("/health")
        release.set()
        asked = await asked
    assert (health.status_code, asked.status_code) == (200, 200)


async def test_after_a_failure_of_the_policy_the_connection_stays_usable(endpoint):
    def talk(address: str):
        connection = HTTPConnection(urlsplit(address).netloc, timeout=30)
        found = []
        for _ in range(2):
            connection.request("POST", CHAT, json.dumps({"messages": [USER]}), {"Content-Type": "application/json"})
            reply = connection.getresponse()
            reply.read()
            found.append((reply.status, connection.sock))
        return found

    def respond(prompt: str) -> str:
        if not failed:
            failed.append(True)
            raise RuntimeError("no device")
        return "7"

    failed: list[bool] = []
    async with endpoint(respond) as served:
        (first, socket), (second, same) = await asyncio.to_thread(talk, served.address)
    assert (first, second) == (500, 200) and socket is same


async def test_only_requests_to_this_host_are_answered(endpoint):
    here = ("127.0.0.1:8000", "localhost", "[::1]:1", "127.8.9.1")
    elsewhere = ("10.1.2.3", "evil.example", "127.0.0.1.evil.example", "[oops", "")

    async def statuses(*hosts: str, **options) -> list[int]:
        async with endpoint(lambda prompt: "7", app=options) as served, client_of(served) as http:
            own = f"http://127.0.0.1:{http.base_url.port}"  # the configured name is not an address of this machine
            urls = (f"{own}/health", f"{own}/v1/models")
            return [(await http.get(url, headers={"Host": host})).status_code for host in hosts for url in urls]

    assert await statuses(*here) == [200] * 2 * len(here)
    assert await statuses(*elsewhere) == [403] * 2 * len(elsewhere)
    for configured in ("evil.example", "0.0.0.0"):
        assert await statuses("evil.example", host=configured) == [200] * 2


async def test_keys_may_have_any_characters(endpoint):
    async with endpoint([]) as served, client_of(served) as http:
        keys = {"Authorization": "Bearer schlüssel".encode("latin-1")}
        replies = [await http.post(f"/rl/{name}", json={}, headers=keys) for name in ("start_session", "end_session")]
        found = [*replies, await http.get("/rl/session/%ED%A0%80?turn_discount=nan", headers=keys)]
    assert [reply.status_code for reply in found] == [401, 401, 400]


@pytest.mark.parametrize("reward", ["NaN", "Infinity", "-1e400", "1e300", '"high"', "null", "[1]", str(10**400)])
async def test_a_reward_that_is_no_finite_number_is_rejected_and_not_kept(endpoint, reward):
    async with endpoint(["7"]) as served, client_of(served) as http:
        session = served.sessions.start()
        own = {"Authorization": f"Bearer {session.api_key}", "Content-Type": "application/json"}
        await http.post(CHAT, json={"messages": [USER]}, headers=own)
        reply = await http.post("/rl/set_reward", content=f'{{"reward": {reward}}}', headers=own)
        described = (await http.get(f"/rl/session/{session.id}", headers=own)).json()
    assert reply.status_code == 400 and "reward" in reply.json()["error"]["message"]
    assert described["reward"] is None and described["turns"][0]["reward"] is None


async def test_the_owner_may_set_the_reward_of_a_session_and_end_it(endpoint):
    async with endpoint(["7"]) as served, client_of(served) as http:
        session, other = served.sessions.start(), served.sessions.start()
        admin, keys = ({"Authorization": f"Bearer {key}"} for key in (ADMIN, other.api_key))
        await http.post(CHAT, json={"messages": [USER]}, headers={"Authorization": f"Bearer {session.api_key}"})
        named = {"session_id": session.id}
        stranger = [await http.post("/rl/end_session", json=named, headers=one) for one in (keys, {})]
        assert [reply.status_code for reply in stranger] == [401, 401] and not session.closed
        await http.post("/rl/set_reward", json=named | {"reward": 0.5}, headers=admin)
        ended = await http.post("/rl/end_session", json=named, headers=admin)
        unknown = await http.post("/rl/end_session", json={"session_id": "x"}, headers=admin)
        ended, unknown = ended.json(), unknown.status_code
    assert ended["turns"] == 1 and unknown == 404 and session.closed and session.trajectory().reward == 0.5


async def dead():
    raise RuntimeError("the engine is dead: no memory")


async def hung():
    await asyncio.sleep(60)


@pytest.mark.parametrize(("check", "said"), [(dead, "no memory"), (hung, "")])
async def test_health_asks_the_engine(endpoint, monkeypatch, check, said):
    monkeypatch.setattr(app, "CHECK_SECONDS", 0.1)
    async with endpoint([], app={"check": check}) as served, client_of(served) as http:
        reply = await http.get("/health")
    assert reply.status_code == 503 and said in reply.json()["status"]


async def test_a_hint_without_effect_is_named_in_the_response(replies_to):
    hints = {"store": True, "service_tier": "auto", "prompt_cache_key": ""}
    for reply in await replies_to((path, body | hints) for path, body in FORMS.items()):
        assert reply.json()["warnings"] == ["store has no effect", "service_tier has no effect"]
    for reply in await replies_to((path, body | {"store": False}) for path, body in FORMS.items()):
        assert reply.status_code == 200 and "warnings" not in reply.json()


def part(**fields):
    return {"type": "text", "text": "Guess.", **fields}


LOOK = {"name": "look", "parameters": {"type": "object"}}
CACHED = {"cache_control": {"type": "ephemeral"}}
TOLD = {"role": "assistant", "content": [{"type": "output_text", "text": "7", "annotations": [], "logprobs": []}]}
INSIDE = [
    (CHAT, {"messages": [{**USER, "name": "Ann"}, {**USER, "name": "Bob"}]}, ["messages[0].name"]),
    (CHAT, {"messages": [{"role": "user", "content": [part(), part(**CACHED)]}]},
     ["messages[0].content[1].cache_control"]),
    (CHAT, {"messages": [{**USER, "type": "text"}]}, []),
    (CHAT, {"messages": [{"role": "assistant", "content": "7", "refusal": "No."}, USER]}, ["messages[0].refusal"]),
    (CHAT, {"messages": [*called({"name": "look", "arguments": "{}", "parsed": {"a": 1}}), USER]},
     ["messages[0].tool_calls[0].function.parsed"]),
    (CHAT, {"tools": [tool(strict=True)]}, ["tools[0].function.strict"]),
    (CHAT, {"tools": [tool()], "tool_choice": {"type": "auto", "mode": "any"}}, ["tool_choice.mode"]),
    (CHAT, {"stream_options": {"include_obfuscation": True}}, ["stream_options.include_obfuscation"]),
    (CHAT, {"response_format": {"type": "json_schema", "json_schema": {
        "name": "a", "description": "A.", "strict": True, "schema": {"type": "object"}}}},
     ["response_format.json_schema.description"]),
    (CHAT, {"parallel_tool_calls": False}, ["parallel_tool_calls"]),
    (CHAT, {"parallel_tool_calls": True, "tools": [tool(strict=False)]}, []),
    (TEXT, {"stream_options": {"continuous_usage_stats": True}}, ["stream_options.continuous_usage_stats"]),
    (RESPONSES, {"tools": [{"type": "function", "strict": True} | LOOK]}, ["tools[0].strict"]),
    (RESPONSES, {"input": [{**USER, "phase": "commentary"}]}, ["input[0].phase"]),
    (RESPONSES, {"input": [{"role": "user", "content": [part(prompt_cache_breakpoint=True)]}]},
     ["input[0].content[0].prompt_cache_breakpoint"]),
    (RESPONSES, {"input": [USER, {"type": "message", "id": "msg_1", "status": "completed", **TOLD}, USER]}, []),
    (RESPONSES, {"text": {"verbosity": "low"}}, ["text.verbosity"]),
    (MESSAGES, {"tools": [{"name": "look", "input_schema": {}, "strict": True, **CACHED}]},
     ["tools[0].strict", "tools[0].cache_control"]),
    (MESSAGES, {"system": [part(**CACHED)], "messages": [{"role": "user", "content": [part(**CACHED)]}]},
     ["system[0].cache_control", "messages[0].content[0].cache_control"]),
    (MESSAGES, {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
     ["tool_choice.disable_parallel_tool_use"]),
    (MESSAGES, {"output_config": {"effort": "low"}}, ["output_config.effort"]),
]  # fmt: skip


async def test_a_field_within_another_without_effect_is_named_in_the_response(replies_to):
    replies = await replies_to((path, FORMS[path] | fields) for path, fields, _ in INSIDE)
    for (path, fields, places), reply in zip(INSIDE, (reply.json() for reply in replies), strict=True):
        assert reply.get("warnings", []) == [f"{place} has no effect" for place in places], (path, fields, reply)
        assert not reply.get("error"), (path, fields, reply)


@pytest.mark.parametrize(("name", "value"), [("audio", {"id": "1"}), ("function_call", {"name": "look"})])
async def test_a_field_of_a_message_that_changes_what_was_said_is_rejected(replies_to, name, value):
    messages = [{"role": "assistant", "content": None, name: value}, USER]
    (reply,) = await replies_to([(CHAT, {"messages": messages})])
    error = reply.json()["error"]
    assert error["param"] == f"messages[0].{name}" and error["param"] in error["message"]


async def test_where_a_call_is_enforced_strict_is(replies_to):
    body = {"messages": [USER], "tools": [tool(strict=True)], "tool_choice": "required"}
    (served,) = await replies_to([(CHAT, body)])
    assert "warnings" not in served.json()
    (trained,) = await replies_to([(CHAT, body)], rules=Rules(trains=True, forced_as_auto=True))
    hint = trained.json()["warnings"]
    assert hint[0].startswith("tool_choice is read as auto") and hint[1:] == ["tools[0].function.strict has no effect"]


async def test_what_has_no_effect_is_not_shown_to_the_policy(endpoint):
    async with endpoint(lambda prompt: "7") as served, client_of(served) as http:
        for tools in ([tool(strict=True, title="Look")], [tool()]):
            await http.post(CHAT, json={"messages": [USER], "tools": tools})
        first, second = served.script.prompts
    assert first == second


@pytest.mark.parametrize(
    ("result", "read"),
    [
        ({"content": "no file"}, "no file"),
        ({"content": "no file", "is_error": False}, "no file"),
        ({"content": "no file", "is_error": True}, "Error: no file"),
        ({"content": [part(text="no"), part(text=" file")], "is_error": True}, "Error: no file"),
        ({"content": "Error: no file", "is_error": True}, "Error: no file"),
        ({"is_error": True}, "Error"),
    ],
)
async def test_the_result_of_a_tool_that_failed_is_read_as_an_error(endpoint, tokenizer, result, read):
    call = {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "look", "input": {}}]}
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", **result}]}
    async with endpoint(["7"]) as served, client_of(served) as http:
        reply = await http.post(MESSAGES, json={"messages": [USER, call, result], "max_tokens": 9})
        reply, prompt = reply.json(), tokenizer.decode(served.script.prompts[0])
    assert f"<|im_start|>tool\n{read}<|im_end|>" in prompt and "warnings" not in reply


async def test_sampling_that_is_the_runs_is_named_and_what_would_change_a_response_rejected(replies_to):
    training = {"rules": Rules(trains=True)}
    named = [(path, body | {"temperature": 0.5, "seed": 1}) for path, body in FORMS.items()]
    for reply in await replies_to(named, **training):
        assert [text.split()[0] for text in reply.json()["warnings"]] == ["temperature", "seed"]
    for name, value in {"stop_token_ids": [5], "min_tokens": 3, "ignore_eos": True}.items():
        for reply in await replies_to(((path, body | {name: value}) for path, body in FORMS.items()), **training):
            assert (reply.status_code, reply.json()["error"]["param"]) == (400, name)
    formats = {
        CHAT: {"response_format": {"type": "json_object"}},
        RESPONSES: {"text": {"format": {"type": "json_schema", "schema": {}}}},
        MESSAGES: {"output_config": {"format": {"type": "json_schema", "schema": {}}}},
    }
    replies = await replies_to(((path, FORMS[path] | fields) for path, fields in formats.items()), **training)
    for fields, reply in zip(formats.values(), replies, strict=True):
        error = reply.json()["error"]
        assert error["param"].startswith(next(iter(fields))) and "ask for the format in the prompt" in error["message"]


async def test_a_forced_tool_choice_is_rejected_by_its_key_or_read_as_a_hint(replies_to):
    forms = {
        CHAT: ("required", [{"type": "function", "function": LOOK}]),
        RESPONSES: ({"type": "function", "name": "look"}, [{"type": "function"} | LOOK]),
        MESSAGES: ({"type": "any"}, [{"name": "look", "input_schema": {"type": "object"}}]),
    }
    forced = [(path, FORMS[path] | {"tools": tools, "tool_choice": choice}) for path, (choice, tools) in forms.items()]
    for reply in await replies_to(forced, rules=Rules(trains=True)):
        error = reply.json()["error"]
        assert error["param"] == "tool_choice" and "agent.forced_tool_choice=auto" in error["message"]
    for reply in await replies_to(forced, rules=Rules(trains=True, forced_as_auto=True)):
        assert reply.status_code == 200 and "tool_choice is read as auto" in reply.json()["warnings"][0]
    without = [(path, FORMS[path] | {"tool_choice": choice}) for path, (choice, _) in forms.items()]
    assert [one.json()["error"]["param"] for one in await replies_to(without)] == ["tool_choice"] * len(forms)


async def test_where_a_model_is_served_a_forced_call_is_enforced_by_its_schema(endpoint):
    word = {"type": "object", "properties": {"word": {"$ref": "#/$defs/w"}}, "$defs": {}}
    look = {"name": "look", "parameters": word}
    other = {"type": "function", "function": {"name": "other"}}

    body = {"messages": [USER], "tools": [{"type": "function", "function": look}, other]}
    named, text = {"type": "function", "function": {"name": "look"}}, '{"name": "look", "arguments": {"word": "a"}}'
    async with endpoint(lambda prompt: text) as served, client_of(served) as http:
        reply = await http.post(CHAT, json=body | {"tool_choice": "required"})
        await http.post(CHAT, json=body | {"tool_choice": named})
    choice = reply.json()["choices"][0]
    schema, of_one = (json.loads(wanted.json_schema) for wanted in served.script.wanted)
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
    (call,) = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "look", "arguments": '{"word": "a"}'} and len(schema["anyOf"]) == 2
    assert [one["properties"]["name"] for one in of_one["anyOf"]] == [{"const": "look"}]


async def test_bytes_of_tokens_are_those_of_the_text(endpoint):
    case = Path(__file__).parents[4] / "shared" / "cases" / "endpoint_bytes.txt"
    text = case.read_text() if case.exists() else "né 🙂 ok"
    async with endpoint([text]) as served, client_of(served) as http:
        choice = (await http.post(CHAT, json={"messages": [USER], "logprobs": True})).json()["choices"][0]
    tokens = choice["logprobs"]["content"]
    decoded = bytes(byte for token in tokens[:-1] for byte in token["bytes"]).decode()
    assert decoded == text == choice["message"]["content"]


def test_bytes_of_tokens_are_those_of_the_text_with_a_vocabulary_of_pieces_too():
    pieces = ["<unk>", "\u2581", "n", "\u00e9", "\u2581ok", "\u0120", "\u010a", "</s>"]
    vocab = {piece: number for number, piece in enumerate([*pieces, *(f"<0x{byte:02X}>" for byte in range(256))])}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    steps = [tokenizers.decoders.Replace("\u2581", " "), tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse()]
    backend.decoder = tokenizers.decoders.Sequence(steps)
    backend.add_special_tokens(["</s>"])
    written = token_bytes(PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token="</s>"))
    smile = [f"<0x{byte:02X}>" for byte in "\U0001f642".encode()]
    spelled = ["n", "\u00e9", "\u2581", *smile, "\u2581ok", "\u0120"]
    assert b"".join(written(vocab[piece]) for piece in spelled).decode() == "n\u00e9 \U0001f642 ok\u0120"
    assert written(vocab["\u00e9"]) == b"\xc3\xa9" and written(vocab["</s>"]) == b"</s>"


@pytest.mark.parametrize("arguments", ['{"a": NaN}', '{"a": 1e999}', '{"a": "\\ud83d"}'])
async def test_calls_with_values_that_json_cannot_hold_are_answered(endpoint, arguments):
    text = f'<tool_call>{{"name": "look", "arguments": {arguments}}}</tool_call>'
    async with endpoint(lambda prompt: text) as served, client_of(served) as http:
        chat = {"messages": [USER], "tools": [tool()]}
        tools = [{"name": "look", "input_schema": {"type": "object"}}]
        found = [
            await http.post(CHAT, json=chat),
            await http.post(CHAT, json=chat | {"stream": True}),
            await http.post(MESSAGES, json=FORMS[MESSAGES] | {"tools": tools}),
        ]
    assert [reply.status_code for reply in found] == [200] * 3


async def test_requests_of_one_session_are_prepared_in_the_order_in_which_they_arrive(endpoint):
    async with endpoint(lambda prompt: "7") as served, client_of(served) as http:
        session, start, running, most = served.sessions.start(), served.sessions.kit.dialogue.start, [0], [0]

        def counted(*arguments, **options):
            running[0] += 1
            most[0] = max(most[0], running[0])
            ids = start(*arguments, **options)
            running[0] -= 1
            return ids

        served.sessions.kit.dialogue.start = counted
        keys = {"Authorization": f"Bearer {session.api_key}"}
        await asyncio.gather(*(http.post(CHAT, json={"messages": [USER]}, headers=keys) for _ in range(8)))
        assert (most[0], len(session.turns)) == (1, 8) and core.ENCODERS > 1
