"""Pictures in requests: every form of the API, histories that are sent again, and whatever else a client may send."""

import asyncio
import base64
import struct
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from io import BytesIO
from random import Random
from typing import Any
from unittest import mock

import anthropic
import httpx
import numpy as np
import openai
import pytest
from PIL import Image

from hybridrl.agents.endpoint.agent import Agents
from hybridrl.agents.endpoint.requests import body_limit
from hybridrl.core.carried import PICTURE_DIGEST, PICTURE_START, Encoded
from hybridrl.core.pictures import Picture, expanded
from hybridrl.core.rollout import Completion
from hybridrl.data.pictures import with_data_urls
from hybridrl.data.processor import PictureReader
from tests.agents.endpoint.conftest import completion_of
from tests.agents.sections import agent_of
from tests.vision_models import noise_picture, reader_that_sees

CHAT, TEXT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
SENT = "send it as a data URL (data:image/png;base64,...)"
NOT_READ = "not a picture of PNG, JPEG, WebP, GIF or BMP"


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> PictureReader:
    return reader_that_sees(tmp_path_factory.mktemp("reader"))


@pytest.fixture
def seeing(endpoint: Callable[..., Any], reader: PictureReader) -> Callable[..., Any]:
    """Serve a script as a model that sees up to four pictures."""

    def serve(texts: Any, **more: Any) -> Any:
        return endpoint(texts, **{"tokenizer": reader.processor.tokenizer, "reader": reader, "pictures": 4} | more)

    return serve


def encoded(picture: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    file = BytesIO()
    picture.save(file, form, **options)
    return file.getvalue()


def url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def part(address: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": address}}


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def ids_of(reader: PictureReader, messages: list[dict[str, Any]], *pictures: Image.Image) -> list[int]:
    """Return the ids that the model's own processor makes of a conversation."""
    written = reader.processor.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return reader.processor(text=[written], images=list(pictures), add_special_tokens=False)["input_ids"][0]


FIRST, SECOND = noise_picture(75, 41, 1), noise_picture(33, 120, 2)
SHOWN = [
    {"role": "user", "content": [text("Look: "), {"type": "image"}, text("What?")]},
    {"role": "assistant", "content": "I look."},
    {"role": "tool", "content": [{"type": "image"}, text("found")]},
]


def chat_body(first: str, second: str) -> dict[str, Any]:
    looked = {"role": "tool", "tool_call_id": "1", "content": [part(second), text("found")]}
    shown = {"type": "image_url", "image_url": first}  # as a text, as older clients have it
    return {"messages": [user(text("Look: "), shown, text("What?")), SHOWN[1], looked]}


def responses_body(first: str, second: str) -> dict[str, Any]:
    shown = {"type": "input_image", "image_url": first, "detail": "auto"}
    looked = [{"type": "input_image", "image_url": second}, {"type": "input_text", "text": "found"}]
    parts = [{"type": "input_text", "text": "Look: "}, shown, {"type": "input_text", "text": "What?"}]
    output = {"type": "function_call_output", "call_id": "1", "output": looked}
    return {"input": [{"role": "user", "content": parts}, SHOWN[1], output]}


def messages_body(first: str, second: str) -> dict[str, Any]:
    blocks = [
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": one.partition(",")[2]}}
        for one in (first, second)
    ]
    looked = {"type": "tool_result", "tool_use_id": "1", "content": [blocks[1], text("found")]}
    return {"messages": [user(text("Look: "), blocks[0], text("What?")), SHOWN[1], user(looked)], "max_tokens": 9}


BODIES = {CHAT: chat_body, RESPONSES: responses_body, MESSAGES: messages_body}


@pytest.mark.parametrize("route", BODIES)
async def test_every_form_becomes_the_prompt_that_the_models_processor_makes(seeing, reader, route):
    body = BODIES[route](url(encoded(FIRST)), url(encoded(SECOND)))
    async with seeing(["yes"], pictures=2) as served:
        session = served.sessions.start()
        headers = {"Authorization": f"Bearer {session.api_key}"}
        async with httpx.AsyncClient(base_url=served.address, headers=headers) as http:
            reply = await http.post(route, json=body)
    assert reply.status_code == 200, reply.text
    (prompt,), expected = served.script.prompts, ids_of(reader, SHOWN, FIRST, SECOND)
    assert prompt == expected
    (row,) = session.trajectory().rows()
    starts = [at for at, token in enumerate(expected) if token == reader.placeholder and expected[at - 1] != token]
    assert row.carried[PICTURE_START].tolist() == starts
    digests = [reader.shown(encoded(picture)).digest for picture in (FIRST, SECOND)]
    assert row.carried[PICTURE_DIGEST].tolist() == digests
    assert session.turns[0].messages[2]["content"] == [{"type": "image", "digest": digests[1]}, text("found")]
    warned = {RESPONSES: ["input[0].content[1].detail has no effect"]}.get(route)
    assert reply.json().get("warnings") == warned


async def test_a_history_of_six_turns_continues_its_ids_and_reads_each_of_four_pictures_once(seeing, reader):
    pictures = {0: noise_picture(64, 64, 1), 1: noise_picture(40, 90, 2), 3: noise_picture(32, 32, 3), 5: FIRST}
    urls = {turn: url(encoded(picture)) for turn, picture in pictures.items()}
    messages, shown = [], []
    with mock.patch.object(reader, "shown", wraps=reader.shown) as read:
        async with seeing([str(turn) for turn in range(6)]) as served:
            session = served.sessions.start()
            create = served.client(session).chat.completions.create
            for turn in range(6):
                new = [part(urls[turn])] if turn in urls else []
                messages.append(user(*new, text(f"turn {turn}")))
                shown.append(user(*([{"type": "image"}] if new else []), text(f"turn {turn}")))
                answer = (await create(model="policy", messages=messages)).choices[0].message
                messages.append(answer.model_dump(exclude_none=True))
                shown.append({"role": "assistant", "content": answer.content})
    assert read.call_count == 4 and session.forks == 0
    assert served.script.prompts[-1] == ids_of(reader, shown[:-1], *pictures.values())
    (row,) = session.trajectory().rows()
    assert len(row.carried[PICTURE_DIGEST]) == 4
    whole = np.array([*row.prompt_ids, *row.response_ids])
    assert (whole[row.carried[PICTURE_START]] == reader.placeholder).all()
    assert not row.mask[whole[len(row.prompt_ids) :] == reader.placeholder].any()


async def test_another_picture_in_the_same_text_is_another_conversation(seeing):
    async with seeing(["one", "two", "three"]) as served:
        session = served.sessions.start()
        create = served.client(session).chat.completions.create
        for picture, expected in ((FIRST, 0), (noise_picture(75, 41, 9), 1)):
            answer = {"role": "assistant", "content": "one"}
            first = user(part(url(encoded(picture))), text("What?"))
            if not expected:
                await create(model="policy", messages=[first])
            await create(model="policy", messages=[first, answer, user(text("And?"))])
            assert session.forks == expected
    assert session.turns[1].parent is session.turns[0] and session.turns[2].parent is None


async def test_both_continuations_of_a_turn_have_its_picture_in_their_rows(seeing, reader):
    first, second = (user(part(url(encoded(picture)))) for picture in (FIRST, SECOND))
    async with seeing(["one", "two", "three"]) as served:
        session = served.sessions.start()
        create = served.client(session).chat.completions.create
        for more in ([], [second], [user(text("And?")), second]):
            history = [{"role": "assistant", "content": "one"}, *more] if more else []
            await create(model="policy", messages=[first, *history])
    rows, digests = session.trajectory().rows(), [reader.shown(encoded(each)).digest for each in (FIRST, SECOND)]
    assert len(rows) == 2
    for row in rows:
        assert row.carried[PICTURE_DIGEST].tolist() == digests
        whole = np.array([*row.prompt_ids, *row.response_ids])
        marked = np.flatnonzero(whole == reader.placeholder)
        starts = [at for at in marked.tolist() if at - 1 not in marked]
        assert row.carried[PICTURE_START].tolist() == starts


async def test_pictures_that_a_template_numbers_are_those_of_one_prompt(endpoint, reader):
    tokenizer = deepcopy(reader.processor.tokenizer)
    tokenizer.chat_template += "{% if add_vision_id %}{% endif %}"
    first, options = user(part(url(encoded(FIRST)))), {"extra_body": {"chat_template_kwargs": {"add_vision_id": True}}}
    async with endpoint(["one"], tokenizer=tokenizer, reader=reader, pictures=4) as served:
        create = served.client(served.sessions.start()).chat.completions.create
        await create(model="policy", messages=[first], **options)
        with pytest.raises(openai.BadRequestError, match="add_vision_id numbers the pictures of one prompt"):
            answer = {"role": "assistant", "content": "one"}
            await create(model="policy", messages=[first, answer, user(text("And?"))], **options)


def bomb(width: int, height: int) -> bytes:
    """Return a PNG file of a few hundred bytes whose header has this size."""
    header = struct.pack(">2I5B", width, height, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(b"\0" * 9999)), (b"IEND", b""))
    written = (struct.pack(">I", len(d)) + n + d + struct.pack(">I", zlib.crc32(n + d)) for n, d in chunks)
    return b"\x89PNG\r\n\x1a\n" + b"".join(written)


def hostile(reader: PictureReader) -> list[tuple[Any, str, str]]:
    """Return contents that no model reads, the place that the error names, and a part of its text."""
    good, frames = encoded(FIRST), [noise_picture(8, 8, seed) for seed in (1, 2)]
    known = reader.shown(good).digest
    alone = [
        (part(url(bomb(30_000, 30_000))), "Image size (900000000 pixels) exceeds limit"),
        (part(url(bomb(9_000, 9_000))), "9000 x 9000 pixels, and 1 to 64 million are read"),
        (part(url(good[: len(good) // 2])), "truncated"),
        (part(url(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n")), NOT_READ),
        (part(url(b"This is a picture.")), NOT_READ),
        (part(url(b"")), "0 bytes"),
        (part("data:image/png;base64,"), "0 bytes"),
        (part("data:image/png;base64,@@@@"), "not data:image/...;base64,..."),
        (part("data:image/png,abc"), "not data:image/...;base64,..."),
        (part(url(good, "text/html")), "not data:image/...;base64,..."),
        (part(url(good, "image/png;charset=x")), "not data:image/...;base64,..."),
        (part(url(encoded(frames[0], "GIF", save_all=True, append_images=frames[1:]))), "2 frames"),
        (part(url(encoded(noise_picture(400, 1)))), "400 x 1 pixels"),
        (part(url(b"\0" * (8 * 2**20 + 1))), "the picture's file has 8,388,609 bytes, and at most 8,388,608 are read"),
        (part("http://127.0.0.1:9/a.png"), SENT),
        (part("https://example.com/a.png"), SENT),
        (part("file:///etc/passwd"), SENT),
        (part("/etc/passwd"), SENT),
        (part("a.png"), SENT),
        (part(""), SENT),
        (part(None), SENT),
        ({"type": "image_url"}, SENT),
        ({"type": "input_image", "file_id": "file-1"}, SENT),
        ({"type": "image", "digest": known}, SENT),
        ({"type": "image", "digest": known, "image": url(good)}, SENT),
        ({"type": "image", "path": "/etc/passwd", "bytes": "abc", "_digest": known}, SENT),
        ({"type": "image", "source": {"type": "url", "url": "https://example.com/a.png"}}, SENT),
        ({"type": "image", "source": {"type": "file", "file_id": "file-1"}}, SENT),
        ({"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "@"}}, "not data:image/"),
    ]
    cases: list[tuple[Any, str, str]] = [([text("a"), one], "messages[0].content[1]", why) for one, why in alone]
    fine = part(url(good))
    return [
        *cases,
        ([fine, [fine]], "messages[0].content[1]", "valid dictionary"),
        ([fine, None], "messages[0].content[1]", "valid dictionary"),
        ([fine, "a"], "messages[0].content[1]", "valid dictionary"),
        ([[fine]], "messages[0].content", "text only"),
        ([fine, {"type": "video_url", "video_url": {"url": "a"}}], "messages[0].content[1].type", "not 'video_url'"),
        ([fine, {"type": "text", "text": [fine]}], "messages[0].content[1].text", "valid string"),
        ([part([url(good)])], "messages[0].content[0].image_url.url", "valid string"),
        ([{"type": "image_url", "image_url": [1]}], "messages[0].content[0].image_url", "valid dictionary"),
        ([{"type": "image", "source": "a"}], "messages[0].content[0].source", "valid dictionary"),
        ([fine] * 100, "messages", "a context has at most 4 pictures (actor_rollout_ref.rollout.limit_images)"),
    ]


async def test_hostile_pictures_are_rejected_by_their_place_and_the_session_continues(seeing, reader):
    good = user(part(url(encoded(FIRST))), text("What?"))
    async with seeing(["one", "two"]) as served:
        session = served.sessions.start()
        headers = {"Authorization": f"Bearer {session.api_key}"}
        async with httpx.AsyncClient(base_url=served.address, headers=headers, timeout=60) as http:

            async def ask(*messages: Any) -> httpx.Response:
                return await http.post(CHAT, json={"messages": messages})

            assert (await ask(good)).status_code == 200
            for content, place, why in hostile(reader):
                reply = await ask({"role": "user", "content": content})
                error = reply.json()["error"]
                assert (reply.status_code, error["param"]) == (400, place), (str(content)[:200], reply.text)
                assert why in error["message"], reply.text
            refused = await ask(good, {"role": "assistant", "content": [part(url(encoded(FIRST)))]})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "messages[1].content")
            reply = await ask(good, {"role": "assistant", "content": "one"}, user(text("And?")))
            assert reply.status_code == 200, reply.text
    assert [turn.parent for turn in session.turns] == [None, session.turns[0]] and session.forks == 0


@pytest.mark.parametrize("where", ["message", "result"])
async def test_blocks_of_messages_are_rejected_by_their_place(seeing, where):
    bad = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "bm90aGluZw=="}}
    result = {"type": "tool_result", "tool_use_id": "1", "content": [text("a"), bad]}
    async with seeing([]) as served:
        client = anthropic.AsyncAnthropic(base_url=served.address, api_key="none", max_retries=0, timeout=20)
        with pytest.raises(anthropic.BadRequestError) as failure:
            content = [text("a"), bad if where == "message" else result]
            await client.messages.create(model="policy", max_tokens=9, messages=[{"role": "user", "content": content}])
    place = {"message": "messages[0].content[1]", "result": "messages[0].content[1].content[1]"}[where]
    assert f"{place}: Value error, {NOT_READ}" in str(failure.value)


async def test_a_failed_result_with_a_picture_begins_as_those_of_environments_do(seeing, reader):
    body = messages_body(url(encoded(FIRST)), url(encoded(SECOND)))
    body["messages"][2]["content"][0]["is_error"] = True
    async with seeing(["yes"]) as served, httpx.AsyncClient(base_url=served.address) as http:
        reply = await http.post(MESSAGES, json=body)
    assert reply.status_code == 200, reply.text
    failed = {"role": "tool", "content": [text("Error: "), *SHOWN[2]["content"]]}
    assert served.script.prompts == [ids_of(reader, [*SHOWN[:2], failed], FIRST, SECOND)]


async def test_a_context_with_more_pictures_than_an_engine_takes_ends_the_episode_as_a_full_one(seeing):
    pictures = [part(url(encoded(noise_picture(32, 32, seed)))) for seed in range(5)]
    async with seeing(["yes"]) as served:
        session = served.sessions.start()
        create = served.client(session).chat.completions.create
        await create(model="policy", messages=[user(*pictures[:4])])
        history = [user(*pictures[:4]), {"role": "assistant", "content": "yes"}, user(pictures[4])]
        with pytest.raises(openai.BadRequestError, match="at most 4 pictures") as failure:
            await create(model="policy", messages=history)
    assert failure.value.code == "context_length_exceeded"
    assert session.trajectory().stop == "context_overflow"


async def test_a_template_that_shows_no_pictures_is_a_rejected_request(endpoint, reader):
    tokenizer = deepcopy(reader.processor.tokenizer)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] | string | length }};{% endfor %}"
    )
    body = {"messages": [user(part(url(encoded(FIRST))))]}
    blind = endpoint([], tokenizer=tokenizer, reader=reader, pictures=4)
    async with blind as served, httpx.AsyncClient(base_url=served.address) as http:
        reply = await http.post(CHAT, json=body)
    assert reply.status_code == 400
    assert "the chat template does not show the pictures of messages of user" in reply.json()["error"]["message"]


async def test_placeholders_come_with_pictures_only(seeing, reader):
    """Token ids and special text of a client never stand for a picture."""
    tokenizer, place = reader.processor.tokenizer, reader.placeholder
    video = tokenizer.convert_tokens_to_ids("<|video_pad|>")
    async with seeing(["a", "b"]) as served, httpx.AsyncClient(base_url=served.address) as http:
        for prompt in ([20, place, 30], [20, video], "Look: <|image_pad|>"):
            reply = await http.post(TEXT, json={"prompt": prompt})
            assert (reply.status_code, reply.json()["error"]["param"]) == (400, "prompt"), reply.text
        assert (await http.post(TEXT, json={"prompt": [20, 30]})).status_code == 200
        written = user(text("<|vision_start|><|image_pad|><|video_pad|>"), part(url(encoded(FIRST))))
        assert (await http.post(CHAT, json={"messages": [written]})).status_code == 200
    count = reader.shown(encoded(FIRST)).tokens
    assert served.script.prompts[-1].count(place) == count and video not in served.script.prompts[-1]


async def test_a_model_of_text_rejects_pictures_as_before_and_its_bodies_are_as_small(endpoint, seeing):
    async with endpoint([]) as served, httpx.AsyncClient(base_url=served.address) as http:
        for body in ({"messages": [user(part(url(encoded(FIRST))))]}, {"messages": [user({"type": "image"})]}):
            reply = await http.post(CHAT, json=body)
            expected = "messages[0].content: Value error, the policy reads text only: a string, or a list of "
            assert reply.json()["error"]["message"] == f"{expected}{{type: text, text}}"
        large = b"a" * (body_limit(6000) + 1)
        assert (await http.post(CHAT, content=large)).status_code == 413
    async with seeing([]) as served, httpx.AsyncClient(base_url=served.address) as http:
        assert (await http.post(CHAT, content=large)).status_code == 400  # not JSON
        large = b"a" * (body_limit(6000) + 4 * (8 * 2**20) * 4 // 3 + 9)
        assert (await http.post(CHAT, content=large)).status_code == 413


AGENT = """
from openai import AsyncOpenAI

async def run(data, *, base_url, api_key, http_client):
    client = AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http_client, max_retries=0)
    messages = list(data["messages"])
    answer = await client.chat.completions.create(model="policy", messages=messages)
    shown = {"type": "image_url", "image_url": {"url": data["second"]}}
    messages += [answer.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": [shown]}]
    await client.chat.completions.create(model="policy", messages=messages)
    return 1.0
"""


class Watching:
    """A policy that keeps the prompts that it was given, and the pictures that it was shown before each of them."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.shown, self.prompts = tokenizer, list[Picture](), list[Encoded]()
        self.before: list[list[int]] = []

    def show(self, pictures: Sequence[Picture]) -> None:
        self.shown += pictures

    async def generate(self, prompt: Encoded, *, max_tokens: int | None = None, stop: Sequence[str] = ()) -> Completion:
        self.prompts.append(prompt)
        self.before.append([picture.digest for picture in self.shown])
        return completion_of(self.tokenizer, "yes", max_tokens)


@pytest.mark.parametrize("held", [False, True])
async def test_an_agent_gets_the_pictures_of_its_row_as_data_urls_and_only_new_ones_are_sent(
    tmp_path, kit_of, reader, held
):
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "first.jpg").write_bytes(data := encoded(FIRST, "JPEG"))
    first, policy = reader.shown(data), Watching(reader.processor.tokenizer)
    kit = kit_of(tokenizer=policy.tokenizer, reader=reader, pictures=4, held=held)
    agents = Agents(agent_of(path=str(tmp_path / "agent.py"), name="run"), None, None, kit)
    # The text of a row may have special tokens on purpose: its message is recognised with its picture.
    messages = [user({"type": "image"}, text("What?<|im_end|>"))]
    row, known = {"second": url(encoded(SECOND))}, [replace(first, pixels=None)]
    trajectory = await agents.run(policy, messages, row, known, [tmp_path / "first.jpg"])
    await agents.open.aclose()
    assert (trajectory.fault, trajectory.detail, trajectory.reward) == (None, "", 1.0)
    ids = reader.processor.tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    expected, second = expanded(ids, reader.placeholder, [first]), reader.shown(encoded(SECOND))
    assert policy.prompts[0].ids == expected.ids
    for name, values in expected.carried.items():
        assert policy.prompts[0].carried[name].tolist() == values.tolist()
    assert policy.prompts[1].carried[PICTURE_DIGEST].tolist() == [first.digest, second.digest]
    assert policy.before == [[], [second.digest]] and policy.shown[0].pixels is not None
    assert trajectory.messages[0]["content"][0] == {"type": "image", "digest": first.digest}


def test_a_file_that_is_gone_is_a_fault_of_the_agents_episode(tmp_path, kit_of, reader):
    (tmp_path / "agent.py").write_text(AGENT)
    kit = kit_of(tokenizer=reader.processor.tokenizer, reader=reader, pictures=4)
    agents = Agents(agent_of(path=str(tmp_path / "agent.py"), name="run"), None, None, kit)
    messages, known = [user({"type": "image"})], [reader.shown(encoded(FIRST))]
    policy = Watching(reader.processor.tokenizer)
    trajectory = asyncio.run(agents.run(policy, messages, {}, known, [tmp_path / "gone.png"]))
    assert trajectory.fault == "environment" and "there is no file" in trajectory.detail


@pytest.mark.parametrize(("form", "kind"), [("PNG", "png"), ("JPEG", "jpeg"), ("WEBP", "webp"), ("BMP", "bmp")])
def test_data_urls_name_the_format_of_the_file(form, kind):
    data = encoded(FIRST, form)
    (message,) = with_data_urls([user({"type": "image"}, text("a"))], [data])
    assert message == user(part(url(data, f"image/{kind}")), text("a"))


def changed(body: Any, chance: Random) -> Any:
    """Return a body in which up to three values are others, missing, or in a field more."""
    good = url(encoded(FIRST))
    others = [None, "", 5, [], {}, [None], good, "http://a/b.png", {"url": good}, {"url": None}, 2**70, "tool", "image"]
    others += [part(good), [part(good)], {"type": "image", "digest": 5}, {"type": "base64", "data": "aa"}, text("a")]
    fields = ("image_url", "source", "digest", "text", "type", "content", "image", "bytes", "path", "role", "detail")
    body = deepcopy(body)
    for _ in range(chance.randint(1, 3)):
        inner = [body]
        for one in inner:
            found = one.values() if isinstance(one, dict) else one
            inner += [value for value in found if isinstance(value, dict | list) and value]
        place, other = chance.choice(inner), deepcopy(chance.choice(others))
        if isinstance(place, list):
            place[chance.randrange(len(place))] = other
        else:
            place[chance.choice([*place, chance.choice(fields)])] = other
    return body


async def test_changed_requests_are_answered_or_rejected_and_never_fail(seeing):
    chance, statuses = Random(0), Counter[int]()
    async with seeing(lambda _: "yes") as served, httpx.AsyncClient(base_url=served.address, timeout=60) as http:
        for number in range(150):
            route = [*BODIES][number % 3]
            body = changed(BODIES[route](url(encoded(FIRST)), url(encoded(SECOND))), chance)
            reply = await http.post(route, json=body)
            statuses[reply.status_code] += 1
            assert reply.status_code in (200, 400), f"{body!s:.2000} {reply.text}"
    assert min(statuses.values()) > 15
