"""Responses that clients read while they are sampled: the same as whole ones, in pieces that are never taken back."""

import anthropic
import httpx
import openai
import pytest

from tests.agents.endpoint.conftest import FAILS
from tests.agents.environments.conftest import GENERATION

ASK = {"model": "policy", "messages": [{"role": "user", "content": "What is it?"}]}
# Characters of several tokens each, which are bytes here; and the beginnings of a text that ends a response.
TEXT = "It is \u00fc or \u4f60\u597d \U0001f642, not <st, <stop or so: <sto<stop> more"


async def chunks_of(served, **more) -> list:
    stream = await served.client().chat.completions.create(**ASK, stream=True, **more)
    return [chunk async for chunk in stream]


@pytest.mark.parametrize("stop", [["<stop>"], ["<stop>", "<st,"]])
async def test_a_stream_gives_the_whole_response_as_its_tokens_are_sampled(endpoint, stop):
    async with endpoint([TEXT, TEXT]) as served:
        whole = (await served.client().chat.completions.create(**ASK, stop=stop)).choices[0]
        chunks = await chunks_of(served, stop=stop)
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks]
    assert "".join(pieces) == whole.message.content and len(pieces) > 20
    assert not any("\ufffd" in piece for piece in pieces) and len({chunk.id for chunk in chunks}) == 1
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [*[None] * (len(chunks) - 1), "stop"]


async def test_texts_are_streamed_and_so_are_both_other_forms(endpoint):
    async with endpoint([TEXT] * 3) as served:
        texts = [one async for one in await served.client().completions.create(model="policy", prompt="x", stream=True)]
        stream = await served.client().responses.create(model="policy", input="x", stream=True)
        events = [one async for one in stream]
        client = anthropic.AsyncAnthropic(base_url=served.address, api_key="none", max_retries=0)
        async with client.messages.stream(**ASK, max_tokens=500) as stream:
            pieces = [text async for text in stream.text_stream]
            message = await stream.get_final_message()
    assert "".join(one.choices[0].text for one in texts) == TEXT and len(texts) > 40
    deltas = [one.delta for one in events if one.type == "response.output_text.delta"]
    assert "".join(deltas) == TEXT == events[-1].response.output_text and len(deltas) > 40
    assert [one.sequence_number for one in events] == list(range(len(events)))
    assert "".join(pieces) == TEXT == message.content[0].text and len(pieces) > 40
    assert message.stop_reason == "end_turn" and message.usage.output_tokens > 40


@pytest.mark.parametrize("closed", [False, True], ids=["the policy may think", "the template has ended it"])
async def test_reasoning_comes_as_a_whole_and_never_as_content(endpoint, tokenizer_of, closed):
    template = GENERATION.replace("\n", "\n<think>\n\n</think>\n\n") if closed else GENERATION + "{# </think> #}"
    messages = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    tokenizer = tokenizer_of(messages + template, ("<think>", "</think>"))
    async with endpoint([TEXT if closed else f"<think>one two</think>\n\n{TEXT}"], tokenizer=tokenizer) as served:
        deltas = [chunk.choices[0].delta for chunk in await chunks_of(served)]
    assert "".join(delta.content or "" for delta in deltas) == TEXT and len(deltas) > 40
    reasoning = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
    assert reasoning == ("" if closed else "one two")


async def test_an_error_before_the_first_token_has_its_status_and_a_later_one_ends_the_stream(endpoint):
    async with endpoint([]) as served:
        with pytest.raises(openai.InternalServerError):
            await chunks_of(served)
        served.script.texts = [f"one two{FAILS}"]
        with pytest.raises(openai.APIError, match="RuntimeError: the engine is dead"):
            await chunks_of(served)


async def test_another_model_than_the_one_that_is_served_is_not_found(endpoint):
    async with endpoint(["a"] * 4) as served, httpx.AsyncClient(base_url=f"{served.address}/v1") as http:
        for call, body in (("chat/completions", ASK), ("completions", {"prompt": "x"}), ("responses", {"input": "x"})):
            reply = await http.post(f"/{call}", json=body | {"model": "gpt-4"})
            assert (reply.status_code, reply.json()["error"]["code"]) == (404, "model_not_found")
            assert "`gpt-4` does not exist; this endpoint serves `policy`" in reply.json()["error"]["message"]
        assert (await http.post("/completions", json={"prompt": "x"})).status_code == 200
