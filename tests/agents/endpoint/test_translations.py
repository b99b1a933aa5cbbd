"""OpenAI's Responses and Anthropic's Messages: the same recorded conversation as a chat's."""

import json

import anthropic
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


async def test_responses_continue_a_tool_loop_as_a_chat_does(endpoint):
    async with endpoint([CALL, "It is a."] * 2) as served:
        expected, session = await chat_of(served), served.sessions.start()
        create = served.client(session).responses.create
        options = {"model": "policy", "tools": [{"type": "function", **TOOL}], "instructions": SYSTEM}
        first = await create(input=QUESTION, **options)
        (call,) = first.output
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "found"}
        items = [{"role": "user", "content": QUESTION}, call.model_dump(exclude_none=True), result]
        second = await create(input=items, **options)
    assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "look", {"word": "a", "times": 2})
    assert (second.output_text, second.status) == ("It is a.", "completed")
    assert session.turns[-1].ids() == expected and session.forks == 0


async def test_a_response_that_is_cut_says_why_and_an_earlier_one_is_not_continued(endpoint):
    async with endpoint(["cut"]) as served:
        create = served.client().responses.create
        cut = await create(model="policy", input="x", max_output_tokens=2)
        with pytest.raises(openai.BadRequestError, match="previous_response_id"):
            await create(model="policy", input="x", previous_response_id="y")
    assert cut.status == "incomplete" and cut.incomplete_details.reason == "max_output_tokens"


def anthropic_messages(served, session):
    client = anthropic.AsyncAnthropic(base_url=served.address, api_key=session.api_key, max_retries=0, timeout=20)
    return client.messages


async def test_messages_continue_a_tool_loop_as_a_chat_does(endpoint):
    schema = {"name": TOOL["name"], "description": TOOL["description"], "input_schema": TOOL["parameters"]}
    async with endpoint([CALL, "It is a."] * 2) as served:
        expected, session = await chat_of(served), served.sessions.start()
        create = anthropic_messages(served, session).create
        options = {"model": "policy", "max_tokens": 500, "system": SYSTEM, "tools": [schema]}
        messages = [{"role": "user", "content": QUESTION}]
        first = await create(messages=messages, **options)
        result = {"type": "tool_result", "tool_use_id": first.content[0].id, "content": "found"}
        messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
        second = await create(messages=messages, **options)
    assert first.stop_reason == "tool_use" and first.content[0].input == {"word": "a", "times": 2}
    assert second.content[0].text == "It is a." and second.stop_reason == "end_turn"
    assert session.turns[-1].ids() == expected and session.forks == 0


async def test_a_stream_of_messages_has_calls_of_tools(endpoint):
    async with endpoint([CALL]) as served:
        options = {"model": "policy", "max_tokens": 500, "messages": [{"role": "user", "content": QUESTION}]}
        options["tools"] = [{"name": "look", "input_schema": TOOL["parameters"]}]
        async with anthropic_messages(served, served.sessions.start()).stream(**options) as stream:
            call = await stream.get_final_message()
    assert call.content[0].input == {"word": "a", "times": 2} and call.stop_reason == "tool_use"


async def test_what_messages_cannot_hold_is_rejected_by_name(endpoint):
    async with endpoint([]) as served:
        image = {"role": "user", "content": [{"type": "image", "source": {}}]}
        messages = anthropic_messages(served, served.sessions.start())
        with pytest.raises(anthropic.BadRequestError, match="image"):
            await messages.create(model="policy", max_tokens=9, messages=[image])
