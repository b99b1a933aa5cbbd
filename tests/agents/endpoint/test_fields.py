"""Every field of a request that OpenAI, Anthropic or vLLM documents is applied, named in `warnings`, rejected by its
name, or is one that changes no response anywhere."""

import asyncio
import copy
import json
from typing import Any

import httpx
import pytest

from hybridrl.agents.endpoint.fields import Rules

CHAT, TEXT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
USER = {"role": "user", "content": "What is 3+4?"}
BODIES = {
    CHAT: {"messages": [USER]},
    TEXT: {"prompt": "What is 3+4?"},
    RESPONSES: {"input": "What is 3+4?"},
    MESSAGES: {"messages": [USER], "max_tokens": 100},
}
OF_OPENAI = {
    CHAT: """
    audio frequency_penalty function_call functions logit_bias logprobs max_completion_tokens max_tokens
    messages metadata modalities model moderation n parallel_tool_calls prediction presence_penalty
    prompt_cache_key prompt_cache_options prompt_cache_retention reasoning_effort response_format
    safety_identifier seed service_tier stop store stream stream_options temperature tool_choice tools
    top_logprobs top_p user verbosity web_search_options
    """,
    TEXT: """
    best_of echo frequency_penalty logit_bias logprobs max_tokens model n presence_penalty prompt seed stop
    stream stream_options suffix temperature top_p user
    """,
    RESPONSES: """
    background context_management conversation include input instructions max_output_tokens max_tool_calls
    metadata model moderation parallel_tool_calls previous_response_id prompt prompt_cache_key
    prompt_cache_options prompt_cache_retention reasoning safety_identifier service_tier store stream
    stream_options temperature text tool_choice tools top_logprobs top_p truncation user
    """,
    MESSAGES: """
    cache_control container context_management inference_geo max_tokens messages metadata model output_config
    service_tier speed stop_sequences stream system temperature thinking tool_choice tools top_k top_p
    """,
}
OF_VLLM = {
    CHAT: """
    add_generation_prompt add_special_tokens allowed_token_ids bad_words cache_salt chat_template
    chat_template_kwargs continue_final_message documents echo guided_choice guided_decoding_backend
    guided_grammar guided_json guided_regex guided_whitespace_pattern ignore_eos include_reasoning
    include_stop_str_in_output kv_transfer_params length_penalty logprob_token_ids media_io_kwargs min_p
    min_tokens mm_processor_kwargs priority prompt_logprobs repetition_detection repetition_penalty request_id
    return_prompt_text return_token_ids return_token_offsets return_tokens_as_token_ids skip_special_tokens
    spaces_between_special_tokens stop_token_ids stream_interval structured_outputs thinking_token_budget top_k
    truncate_prompt_tokens truncation_side use_beam_search vllm_xargs enable_thinking
    """,
    TEXT: """
    add_special_tokens allowed_token_ids bad_words cache_salt ignore_eos include_stop_str_in_output
    length_penalty min_p min_tokens priority prompt_embeds prompt_logprobs repetition_penalty request_id
    response_format return_token_ids return_tokens_as_token_ids skip_special_tokens
    spaces_between_special_tokens stop_token_ids structured_outputs thinking_token_budget top_k
    truncate_prompt_tokens use_beam_search
    """,
    RESPONSES: """
    cache_salt chat_template_kwargs frequency_penalty ignore_eos include_reasoning include_stop_str_in_output
    logit_bias min_p presence_penalty priority repetition_penalty request_id seed skip_special_tokens stop
    stop_token_ids structured_outputs top_k
    """,
    MESSAGES: "cache_salt chat_template_kwargs",
}
DOCUMENTED = {route: {*OF_OPENAI[route].split(), *OF_VLLM[route].split()} for route in BODIES}

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
FLAT = {"type": "function", "name": "look", "parameters": {"type": "object"}}
SCHEMA = {"type": "json_schema", "schema": {"type": "object"}}
# Values that ask for something, of the fields for which "x" does not.
VALUES: dict[str, Any] = {
    **dict.fromkeys(("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty"), 0.5),
    **dict.fromkeys(("max_tokens", "max_completion_tokens", "max_output_tokens", "top_k", "seed", "min_tokens"), 3),
    **dict.fromkeys(("repetition_penalty", "length_penalty"), 1.5),
    **dict.fromkeys(
        ("ignore_eos", "stream", "return_token_ids", "echo", "store", "background", "use_beam_search"), True
    ),
    **dict.fromkeys(("continue_final_message", "include_stop_str_in_output", "return_prompt_text"), True),
    **dict.fromkeys(("return_token_offsets", "return_tokens_as_token_ids"), True),
    **dict.fromkeys(("parallel_tool_calls", "include_reasoning", "add_generation_prompt"), False),
    **dict.fromkeys(("skip_special_tokens", "spaces_between_special_tokens"), False),
    **dict.fromkeys(("prompt_logprobs", "thinking_token_budget", "max_tool_calls"), 0),
    **dict.fromkeys(("priority", "best_of", "n", "stream_interval", "top_logprobs", "truncate_prompt_tokens"), 2),
    **{name: {"a": "b"} for name in ("reasoning", "thinking", "moderation", "audio", "prediction", "metadata")},
    "model": "policy",
    "messages": [USER, {"role": "assistant", "content": "7"}, USER],
    "stop_token_ids": [5],
    "stop_sequences": ["x"],
    "logit_bias": {"5": 1},
    "response_format": {"type": "json_object"},
    "text": {"format": SCHEMA},
    "output_config": {"format": SCHEMA},
    "chat_template_kwargs": {"style": "brief"},
    "include": ["message.output_text.logprobs"],
}
OF_ROUTE: dict[tuple[str, str], Any] = {
    (CHAT, "logprobs"): True,
    (TEXT, "logprobs"): 1,
    (CHAT, "tools"): [TOOL],
    (RESPONSES, "tools"): [FLAT],
    (MESSAGES, "tools"): [{"name": "look", "input_schema": {"type": "object"}}],
    (CHAT, "add_special_tokens"): True,
    (TEXT, "add_special_tokens"): False,
    (MESSAGES, "tool_choice"): {"type": "none"},
    (CHAT, "stream_options"): {"include_usage": True},
    (TEXT, "stream_options"): {"include_usage": True},
    (RESPONSES, "stream_options"): {"include_obfuscation": True},
}
NO_RESULT = {"model", "user", "metadata"}
WARNED = {
    *("parallel_tool_calls", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "service_tier"),
    *("safety_identifier", "store", "verbosity", "reasoning_effort", "cache_salt", "request_id", "priority"),
    *("stream_interval", "prediction", "include", "reasoning", "thinking", "context_management", "cache_control"),
    *("inference_geo", "speed"),
}
OF_THE_RUN = {
    *("temperature", "top_p", "top_k", "min_p", "seed"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
}
FORMATS = {(CHAT, "response_format"), (RESPONSES, "text"), (MESSAGES, "output_config")}
SERVED_ONLY = {"stop_token_ids", "min_tokens", "ignore_eos"}
APPLIED = {
    *(OF_THE_RUN | SERVED_ONLY),
    *("max_tokens", "max_completion_tokens", "max_output_tokens", "stop", "stop_sequences", "stream", "stream_options"),
    *("logprobs", "messages", "prompt", "input", "instructions", "system", "tools", "tool_choice", "text"),
    *("output_config", "return_token_ids"),
}


def expected(route: str, name: str, *, trains: bool) -> str:
    if (route, name) == (RESPONSES, "prompt") or (route, name) == (TEXT, "response_format"):  # other things
        return "rejected"
    if trains and ((route, name) in FORMATS or name in SERVED_ONLY):
        return "rejected"
    if name == "prompt_logprobs":
        return "applied" if route == TEXT and not trains else "rejected"
    if (route, name) == (RESPONSES, "context_management"):
        return "rejected"
    if (trains and name in OF_THE_RUN) or (route, name) == (RESPONSES, "stream_options"):
        return "warned"
    applied = name in APPLIED or (route, name) in {*FORMATS, (CHAT, "chat_template_kwargs")}
    return "applied" if applied else "warned" if name in WARNED else "no result" if name in NO_RESULT else "rejected"


def value_of(route: str, name: str) -> Any:
    if name == "tool_choice":
        return OF_ROUTE.get((route, name), "none")
    return OF_ROUTE.get((route, name), VALUES.get(name, "x"))


class Client:
    """Sends requests to one route, and returns replies with what shows their effect."""

    def __init__(self, served: Any, http: httpx.AsyncClient, route: str) -> None:
        self.script, self.http, self.route = served.script, http, route

    async def answer(self, body: dict[str, Any]) -> tuple[httpx.Response, dict[str, Any], Any]:
        """Return the response, its JSON, and what was sampled and returned but for names and times."""
        asked = len(self.script.wanted)
        reply = await self.http.post(self.route, json=body)
        found = reply.json() if "json" in reply.headers["Content-Type"] else {}
        shown = {name: value for name, value in found.items() if not name.startswith("created")}
        text = json.dumps(shown).replace(found.get("id", "-"), "") if found else reply.text.count("\n")
        return reply, found, (self.script.wanted[asked:], self.script.prompts[asked:], text)

    async def outcome(self, name: str) -> str:
        base = BODIES[self.route] | ({"stream": True} if name == "stream_options" and self.route != RESPONSES else {})
        base |= {"tools": value_of(self.route, "tools")} if name == "tool_choice" else {}
        reply, found, seen = await self.answer(base | {name: value_of(self.route, name)})
        _, _, without = await self.answer(base)
        if reply.status_code == 400:
            assert (found["error"]["param"] or "").startswith(name), (name, found)
            return "rejected"
        assert reply.status_code == 200, (name, reply.text)
        if any(one.startswith(name) for one in found.get("warnings", ())):
            return "warned"
        return "applied" if seen != without else "no result"


@pytest.fixture
def tokenizer(tokenizer):
    """A tokenizer whose chat template has an argument."""
    styled = copy.copy(tokenizer)
    styled.chat_template += "{{ style }}"
    return styled


@pytest.mark.parametrize("trains", [False, True], ids=["served", "trained"])
@pytest.mark.parametrize("route", BODIES)
def test_every_documented_field_is_applied_or_named(endpoint, route, trains):
    call = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'

    async def run() -> dict[str, str]:
        async with (
            endpoint(lambda prompt: call, app={"rules": Rules(trains=trains)}) as served,
            httpx.AsyncClient(base_url=served.address, timeout=30) as http,
        ):
            client = Client(served, http, route)
            return {name: await client.outcome(name) for name in sorted(DOCUMENTED[route])}

    wanted = {name: expected(route, name, trains=trains) for name in DOCUMENTED[route]}
    assert asyncio.run(run()) == wanted


async def test_false_and_0_ask_for_something_unless_they_are_the_documented_default(endpoint):
    default = {"echo": False, "priority": 0, "store": False, "best_of": 1, "length_penalty": 1.0, "top_logprobs": 0}
    default |= {"separate_reasoning": False, "include_reasoning": True, "add_special_tokens": False}
    default |= {"stream_interval": 1, "bad_words": []}
    asks = {"enable_thinking": False, "prompt_logprobs": 0, "frequency_penality": 0, "include_reasoning": False}
    async with endpoint(lambda prompt: "7") as served, httpx.AsyncClient(base_url=served.address) as http:
        plain = (await http.post(CHAT, json=BODIES[CHAT] | default)).json()
        replies = {name: await http.post(CHAT, json=BODIES[CHAT] | {name: value}) for name, value in asks.items()}
        messages = {name: reply.json()["error"]["message"] for name, reply in replies.items()}
    assert "warnings" not in plain and plain["choices"][0]["message"]["content"] == "7"
    assert messages["enable_thinking"] == "enable_thinking is not supported: write it in chat_template_kwargs"
    assert messages["prompt_logprobs"].startswith("prompt_logprobs is not supported: only /v1/completions")
    assert messages["frequency_penality"].endswith("leave it out, or write frequency_penalty")
    assert messages["include_reasoning"].startswith("include_reasoning is not supported")


async def test_a_stream_has_the_warnings_of_its_request(endpoint):
    async with endpoint(lambda prompt: "7") as served, httpx.AsyncClient(base_url=served.address) as http:
        reply = await http.post(CHAT, json=BODIES[CHAT] | {"stream": True, "verbosity": "low"})
    assert '"warnings":["verbosity has no effect"]' in reply.text
