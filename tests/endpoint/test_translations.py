"""OpenAI's Responses and Anthropic's Messages: the same recorded conversation as a chat's."""

import asyncio
import json

import httpx
import openai
import pytest

TOOL = {"name": "look", "description": "Look.", "parameters": {"type": "object"}}
SYSTEM, QUESTION = "Be brief.", "Guess."
CALL = '<think>hm</think><tool_call>{"name": "look", "arguments": {"word": "a", "times": 2}}</tool_call>'


async def chat_of(served):
    """The prompt and the recorded conversation, as chat completions have them."""
    session = served.sessions.start()
    client = served.client(session)
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}]
    options = {"model": "policy", "tools": [{"type": "function", "function": TOOL}]}
    first = (await client.chat.completions.create(messages=messages, **options)).choices[0].message
    result = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "found"}
    history = [*messages, first.model_dump(exclude_none=True), result]
    await client.chat.completions.create(messages=history, **options)
    return session.turns[-1].ids()


def test_responses_continue_a_tool_loop_as_a_chat_does(endpoint):
    async def run():
        async with endpoint([CALL, "It is a."] * 2) as served:
            expected, session = await chat_of(served), served.sessions.start()
            create = served.client(session).responses.create
            options = {"model": "policy", "tools": [{"type": "function", **TOOL}], "instructions": SYSTEM}
            first = await create(input=QUESTION, **options)
            (call,) = first.output
            result = {"type": "function_call_output", "call_id": call.call_id, "output": "found"}
            items = [{"role": "user", "content": QUESTION}, call.model_dump(exclude_none=True), result]
            return expected, session, call, await create(input=items, **options)

    expected, session, call, second = asyncio.run(run())
    assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "look", {"word": "a", "times": 2})
    assert (second.output_text, second.status) == ("It is a.", "completed")
    assert session.turns[-1].ids() == expected and session.forks == 0


def test_a_stream_of_responses_ends_with_the_whole_response(endpoint):
    async def run():
        async with endpoint(["one two", "cut"]) as served:
            client = served.client()
            stream = await client.responses.create(model="policy", input="x", stream=True)
            events = [one async for one in stream]
            cut = await client.responses.create(model="policy", input="x", max_output_tokens=2)
            with pytest.raises(openai.BadRequestError, match="previous_response_id"):
                await client.responses.create(model="policy", input="x", previous_response_id="y")
            return events, cut

    events, cut = asyncio.run(run())
    assert "".join(one.delta for one in events if one.type == "response.output_text.delta") == "one two"
    assert events[-1].type == "response.completed" and events[-1].response.output_text == "one two"
    assert cut.status == "incomplete" and cut.incomplete_details.reason == "max_output_tokens"


async def post(served, session, body, **options):
    headers = {"x-api-key": session.api_key, "anthropic-version": "2023-06-01"}
    async with httpx.AsyncClient(base_url=served.address, headers=headers, timeout=20) as http:
        return await http.post("/v1/messages", json={"model": "policy", "max_tokens": 500, **body}, **options)


def test_messages_continue_a_tool_loop_as_a_chat_does(endpoint):
    schema = {"name": TOOL["name"], "description": TOOL["description"], "input_schema": TOOL["parameters"]}

    async def run():
        async with endpoint([CALL, "It is a."] * 2) as served:
            expected, session = await chat_of(served), served.sessions.start()
            body = {"system": SYSTEM, "tools": [schema], "messages": [{"role": "user", "content": QUESTION}]}
            first = (await post(served, session, body)).json()
            result = {"type": "tool_result", "tool_use_id": first["content"][0]["id"], "content": "found"}
            body["messages"] += [
                {"role": "assistant", "content": first["content"]},
                {"role": "user", "content": [result]},
            ]
            return expected, session, first, (await post(served, session, body)).json()

    expected, session, first, second = asyncio.run(run())
    assert first["stop_reason"] == "tool_use" and first["content"][0]["input"] == {"word": "a", "times": 2}
    assert second["content"] == [{"type": "text", "text": "It is a."}] and second["stop_reason"] == "end_turn"
    assert session.turns[-1].ids() == expected and session.forks == 0


def test_a_stream_of_messages_and_its_errors_have_anthropics_form(endpoint):
    async def run():
        async with endpoint(["one two"]) as served:
            session, body = served.sessions.start(), {"messages": [{"role": "user", "content": QUESTION}]}
            stream = (await post(served, session, body | {"stream": True})).text
            image = {"role": "user", "content": [{"type": "image", "source": {}}]}
            return stream, await post(served, session, {"messages": [image]})

    stream, rejected = asyncio.run(run())
    names = [line.removeprefix("event: ") for line in stream.splitlines() if line.startswith("event")]
    blocks = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert names == ["message_start", *blocks, "message_delta", "message_stop"] and "one two" in stream
    assert rejected.status_code == 400 and rejected.json()["type"] == "error"
    assert (
        rejected.json()["error"]["type"] == "invalid_request_error" and "image" in rejected.json()["error"]["message"]
    )
