"""The endpoint over a socket, with OpenAI's own client."""

import asyncio
import json

import httpx
import numpy as np
import openai
import pytest

from hybridrl.core.rollout.engine import RejectedRequest
from tests.agents.endpoint.conftest import ADMIN
from tests.agents.environments.conftest import CALLS

QUESTION = [{"role": "user", "content": "Guess."}]
TOOL = {"type": "function", "function": {"name": "look", "description": "Look.", "parameters": {"type": "object"}}}
CALL = '<tool_call>{"name": "look", "arguments": {"word": "a"}}</tool_call>'


def ask(client, messages=QUESTION, **options):
    return client.chat.completions.create(model="policy", messages=messages, **options)


async def test_a_chat_is_answered_with_usage_and_reason(endpoint):
    async with endpoint(["<think>\nhm\n</think>\n\n7"]) as served:
        answer = await ask(served.client())
    (choice,) = answer.choices
    assert (choice.message.content, choice.message.reasoning_content, choice.finish_reason) == ("7", "hm", "stop")
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens > 20
    assert answer.id.startswith("chatcmpl-") and answer.object == "chat.completion"


async def test_clients_and_rewards_read_tags_that_are_special_tokens(endpoint, tokenizer_of):
    tagged = tokenizer_of(CALLS + "{# <answer> </answer> #}")
    async with endpoint(["<answer>7</answer>"], tokenizer=tagged) as served:
        answer = await ask(served.client(session := served.sessions.start()))
    assert answer.choices[0].message.content == session.trajectory().text == "<answer>7</answer>"


async def test_what_the_client_wants_of_sampling_reaches_the_policy(endpoint, tokenizer):
    async with endpoint(["abcdef", "one END two"]) as served:
        short = await ask(
            served.client(), max_completion_tokens=3, temperature=0.5, top_p=0.9, seed=7, extra_body={"top_k": 5}
        )
        stopped, (wanted, _) = await ask(served.client(), stop="END", max_tokens=100), served.script.wanted
    assert (short.choices[0].message.content, short.choices[0].finish_reason) == ("abc", "length")
    assert (wanted.max_tokens, wanted.temperature, wanted.top_p, wanted.top_k, wanted.seed) == (3, 0.5, 0.9, 5, 7)
    assert stopped.choices[0].message.content == "one "


async def test_a_tool_loop_continues_the_sampled_ids(endpoint, tokenizer):
    async with endpoint([CALL, "It is a."]) as served:
        session = served.sessions.start()
        client = served.client(session)
        first = (await ask(client, tools=[TOOL])).choices[0]
        (call,) = first.message.tool_calls
        result = {"role": "tool", "tool_call_id": call.id, "content": "found a"}
        history = [*QUESTION, first.message.model_dump(exclude_none=True), result]
        second, (_, after) = (await ask(client, history, tools=[TOOL])).choices[0], served.script.prompts
    assert first.finish_reason == "tool_calls" and first.message.content is None
    assert call.function.name == "look" and json.loads(call.function.arguments) == {"word": "a"}
    assert second.message.content == "It is a." and second.finish_reason == "stop"
    assert after[: len(session.turns[0].ids())] == session.turns[0].ids() and session.forks == 0
    (row,) = session.trajectory().rows()
    assert tokenizer.decode(row.response_ids[row.mask]) == f"{CALL}<|im_end|>It is a.<|im_end|>"


async def test_without_tool_choice_or_a_readable_call_the_text_is_left(endpoint):
    async with endpoint([CALL, "<tool_call>{oops</tool_call>"]) as served:
        none = await ask(served.client(), tools=[TOOL], tool_choice="none")
        broken = await ask(served.client(), tools=[TOOL])
    assert (none.choices[0].message.content, none.choices[0].message.tool_calls) == (CALL, None)
    assert broken.choices[0].message.content == "<tool_call>{oops</tool_call>"


async def test_a_stream_has_the_whole_response_and_then_the_usage(endpoint):
    async with endpoint([CALL, CALL]) as served:
        options = {"tools": [TOOL], "stream": True}
        (chunk,) = [chunk async for chunk in await ask(served.client(), **options)]
        options |= {"stream_options": {"include_usage": True}}
        _, used = [chunk async for chunk in await ask(served.client(), **options)]
    (call,) = chunk.choices[0].delta.tool_calls
    assert chunk.choices[0].finish_reason == "tool_calls" and (call.index, call.function.name) == (0, "look")
    assert not used.choices and used.usage.completion_tokens > 10


async def test_log_probs_are_those_of_the_sampled_tokens(endpoint):
    async with endpoint(["ab", "ab"]) as served:
        chat = await ask(served.client(), logprobs=True, extra_body={"return_token_ids": True})
        text = await served.client().completions.create(model="policy", prompt="x", logprobs=0)
    tokens = chat.choices[0].logprobs.content
    assert [one.token for one in tokens] == ["a", "b", "<|im_end|>"] == text.choices[0].logprobs.tokens
    assert [one.logprob for one in tokens] == pytest.approx([-0.5, -0.3, -0.1])
    assert len(chat.choices[0].token_ids) == 3 and len(chat.prompt_token_ids) == chat.usage.prompt_tokens


async def test_log_probs_of_a_prompt_are_those_of_each_token_and_of_the_likeliest_in_its_place(endpoint, tokenizer):
    ids = tokenizer("ab")["input_ids"]
    scored = np.array([[[0, 0, 0]] * 2, [[ids[1], -2.5, 9], [ids[0], -0.5, 1]]])
    async with endpoint(["x", "x"]) as served, httpx.AsyncClient(base_url=served.address) as http:
        served.script.carried = {"prompt_log_probs": scored}
        body = {"prompt": ids, "max_tokens": 1, "prompt_logprobs": 1}
        (choice,) = (await http.post("/v1/completions", json=body)).json()["choices"]
        stream = await http.post("/v1/completions", json=body | {"stream": True})
        unknown = await http.post("/v1/completions", json=body | {"prompt": [*ids, len(tokenizer)]})
        plain = await http.post("/v1/completions", json={"prompt": [*ids, len(tokenizer)]})
    own, best = ({"logprob": -2.5, "rank": 9, "decoded_token": "b"}, {"logprob": -0.5, "rank": 1, "decoded_token": "a"})
    assert choice["prompt_logprobs"] == [None, {str(ids[1]): own, str(ids[0]): best}]
    assert served.script.wanted[0].prompt_log_probs == 1
    assert stream.status_code == 400 and "not in a stream" in stream.text
    assert (unknown.status_code, plain.status_code) == (200, 400)  # whether the model has it, the engine decides


async def test_texts_and_token_ids_are_continued(endpoint, tokenizer):
    async with endpoint(["b", "c"]) as served:
        one = await served.client().completions.create(model="policy", prompt="a")
        ids = tokenizer("a")["input_ids"]
        other, prompts = await served.client().completions.create(model="policy", prompt=ids), served.script.prompts
    assert (one.choices[0].text, other.choices[0].text) == ("b", "c") and prompts[0] == prompts[1]


async def test_a_context_that_is_full_has_openais_code(endpoint):
    async with endpoint(["7"], context=100) as served:
        with pytest.raises(openai.BadRequestError) as error:
            await ask(served.client(), [{"role": "user", "content": "x" * 200}])
        assert error.value.code == "context_length_exceeded"


@pytest.mark.parametrize(
    ("failure", "expected", "said"),
    [
        (IndexError("no text is left"), openai.InternalServerError, "IndexError"),
        (RejectedRequest("the prompt has the token id 99999"), openai.BadRequestError, "token id 99999"),
    ],
    ids=["a failing policy is the server's error", "a request that the engine rejects is the client's"],
)
async def test_a_response_that_cannot_be_sampled_is_an_error_with_the_cause(endpoint, failure, expected, said):
    def fail(prompt):
        raise failure

    async with endpoint(fail) as served:
        with pytest.raises(expected, match=said):
            await ask(served.client())


async def test_requests_belong_to_the_session_that_they_name(endpoint):
    async with endpoint(lambda prompt: "7") as served:
        session, plain = served.sessions.start(), served.client()
        admin = plain.with_options(api_key=ADMIN)
        await ask(served.client(session))
        named = {"X-Session-ID": session.id}, {"session_id": session.id}, session.id
        for name, value in zip(("extra_headers", "metadata", "user"), named, strict=True):
            await ask(admin, **{name: value})
            with pytest.raises(openai.AuthenticationError):
                await ask(plain, **{name: value})
        await ask(plain, user="somebody")
        with pytest.raises(openai.NotFoundError):
            await ask(admin, extra_headers={"X-Session-ID": "unknown"})
        with pytest.raises(openai.AuthenticationError):
            await ask(plain.with_options(api_key="sk-sess-unknown"))
        unrecorded = served.sessions.unrecorded
    assert (len(session.turns), unrecorded) == (4, 1)


async def test_the_life_of_a_session_from_outside(endpoint):
    async with endpoint(["7", "8"]) as served, httpx.AsyncClient(base_url=served.address) as http:
        assert (await http.post("/rl/start_session", json={})).status_code == 401
        admin = {"Authorization": f"Bearer {ADMIN}"}
        session = (await http.post("/rl/start_session", json={"task_id": "t"}, headers=admin)).json()
        own = {"Authorization": f"Bearer {session['api_key']}"}
        assert (await http.post("/rl/set_reward", json={"reward": 1}, headers=own)).status_code == 404
        client = openai.AsyncOpenAI(base_url=f"{served.address}/v1", api_key=session["api_key"], max_retries=0)
        first = await ask(client)
        history = [*QUESTION, {"role": "assistant", "content": "7"}, *QUESTION]
        await ask(client, history)
        await http.post("/rl/set_reward", json={"reward": 0.5, "completion_id": first.id}, headers=own)
        await http.post("/rl/set_reward", json={"reward": 1}, headers=own)
        assert (await http.post("/rl/end_session", headers=own)).json()["turns"] == 2
        late = await http.post("/rl/set_reward", json={"reward": 2}, headers=own)
        with pytest.raises(openai.ConflictError):
            await ask(client)
        place = f"/rl/session/{session['session_id']}"
        assert (await http.get(place)).status_code == 401
        described, health = (await http.get(place, headers=own)).json(), (await http.get("/health")).json()
    assert late.status_code == 409 and late.json()["error"]["code"] == "session_closed"
    assert described["reward"] == 1.5 and described["task_id"] == "t" and described["forks"] == 0
    assert [turn["reward"] for turn in described["turns"]] == [0.5, 1.0]
    assert described["turns"][1]["parent"] == described["turns"][0]["id"]
    (row,) = described["rows"]
    assert sum(row["rewards"]) == 1.5 and sum(row["mask"]) == 4
    assert health["sessions"] == 0


async def test_a_session_that_is_not_used_is_closed_and_later_forgotten(endpoint):
    now = [0.0]
    async with endpoint(["7", "8"], clock=lambda: now[0], timeout=60) as served:
        session = served.sessions.start()
        now[0] = 59
        await ask(served.client(session))
        now[0] = 120
        with pytest.raises(openai.ConflictError, match="not used for 60 s"):
            await ask(served.client(session))
        now[0] = 300
        served.sessions.start()
        assert session.id not in served.sessions.by_id


async def test_a_client_that_disconnects_has_its_response_cancelled_and_not_recorded(endpoint):
    async def slow():
        await asyncio.sleep(20)

    async with endpoint(lambda prompt: slow()) as served:
        session = served.sessions.start()
        with pytest.raises(openai.APITimeoutError):
            await ask(served.client(session, timeout=0.3))
        async with asyncio.timeout(20):
            while not served.script.cancelled:
                await asyncio.sleep(0.02)
    assert served.script.cancelled == 1 and not session.turns


async def test_64_sessions_at_once_stay_apart(endpoint, tokenizer):
    async def reply(prompt):
        await asyncio.sleep(0.01)
        return prompt.split("<|im_end|>")[0][-3:]  # the number that the session asks about

    async def agent(served, number):
        session = served.sessions.start()
        client, messages = served.client(session), [{"role": "user", "content": f"{number:03}"}]
        for _ in range(3):
            answer = await ask(client, messages)
            messages += [{"role": "assistant", "content": answer.choices[0].message.content}, *QUESTION]
        return session

    async with endpoint(reply) as served:
        sessions = await asyncio.gather(*(agent(served, number) for number in range(64)))
    for number, session in enumerate(sessions):
        (row,) = session.trajectory().rows()
        assert tokenizer.decode(row.response_ids[row.mask]) == f"{number:03}<|im_end|>" * 3 and session.forks == 0


async def test_the_model_and_its_context_are_listed(endpoint):
    async with endpoint([]) as served:
        (model,) = [model async for model in await served.client().models.list()]
    assert (model.id, model.max_model_len) == ("policy", 6000)


@pytest.mark.slow
async def test_a_connection_that_is_idle_for_as_long_as_clients_keep_one_is_not_closed(endpoint):
    async with endpoint([]) as served:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(served.address.rpartition(":")[2]))
        answers = []
        for pause in (0, 5.5):
            await asyncio.sleep(pause)
            writer.write(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            answers.append((await reader.read(4096))[:15])
        writer.close()
        assert answers == [b"HTTP/1.1 200 OK"] * 2
