"""Episodes with pictures: those of rows, environments and tools, in the ids of a context and in its row."""

import asyncio
import base64
from collections.abc import Sequence
from dataclasses import replace
from io import BytesIO
from typing import Any

import numpy as np
import pytest

from hybridrl.agents.environments import Environment, Message, Response, Step
from hybridrl.agents.environments.episode_loop import EpisodeLimits, EpisodeRun, EpisodeTools
from hybridrl.agents.environments.tools import FunctionTool, ToolEnvironment
from hybridrl.agents.environments.user_code import ToolResult, to_result
from hybridrl.compat.verl.stand_ins import ToolResponse
from hybridrl.core.carried import Encoded
from hybridrl.core.experience.trajectory import Trajectory
from hybridrl.core.pictures import Picture
from hybridrl.core.rollout import Completion
from hybridrl.data.pictures import as_png
from hybridrl.data.processor import PictureReader
from tests.agents.sections import multi_turn_of
from tests.vision_models import noise_picture, reader_that_sees

PLACE = "<|vision_start|><|image_pad|><|vision_end|>"
LOOK = {"type": "function", "function": {"name": "look", "description": "Look.", "parameters": {"type": "object"}}}
CALL = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'


@pytest.fixture(scope="module")
def reader(tmp_path_factory) -> PictureReader:
    return reader_that_sees(tmp_path_factory.mktemp("model"))


class Policy:
    """Responds with these texts in turn, and keeps the prompts and the pictures that it was shown."""

    def __init__(self, reader: PictureReader, texts: Sequence[str]) -> None:
        self.tokenizer, self.texts = reader.processor.tokenizer, iter(texts)
        self.prompts: list[Encoded] = []
        self.shown: list[list[Picture]] = []

    def show(self, pictures: Sequence[Picture]) -> None:
        self.shown.append(list(pictures))

    async def generate(self, prompt: Encoded, *, max_tokens: int | None = None, stop: Sequence[str] = ()) -> Completion:
        self.prompts.append(prompt)
        ids = [*self.tokenizer(next(self.texts))["input_ids"], self.tokenizer.eos_token_id]
        return Completion(np.array(ids), np.full(len(ids), -0.5, np.float32), False, 3)


class Album(Environment):
    """Shows what `config` has for each turn; done when it has no more."""

    def step(self, response: Response) -> Step:
        turns = self.config["turns"]
        return Step(turns[response.turn]) if response.turn < len(turns) else Step(done=True)


def part(picture: Any) -> dict[str, Any]:
    return {"type": "image", "image": picture}


def user(*parts: Any) -> Message:
    whole = [{"type": "text", "text": each} if isinstance(each, str) else each for each in parts]
    return {"role": "user", "content": whole}


def run(
    reader: PictureReader,
    environment: Environment,
    messages: Sequence[Message] = ({"role": "user", "content": "Look."},),
    known: Sequence[Picture] = (),
    *,
    sees: bool = True,
    texts: Sequence[str] = ("a", "b", "c", "d"),
    limit: int = 4,
) -> tuple[Trajectory, Policy]:
    policy, tokenizer = Policy(reader, texts), reader.processor.tokenizer
    limits = EpisodeLimits(prompt=600, response=900, context=900, timeout=20, pictures=limit if sees else 0)
    kit = EpisodeTools.of(tokenizer, [tokenizer.eos_token_id], limits, format="hermes", reader=reader if sees else None)
    named = [replace(picture, pixels=None) for picture in known]
    episode = EpisodeRun(kit, policy, environment, pictures=kit.pictures(named))
    return asyncio.run(episode.run(messages)), policy


def text_of(reader: PictureReader, ids: Sequence[int]) -> str:
    """Return ids as text, with one placeholder for each run of them."""
    pad, before = reader.placeholder, [None, *ids]
    return reader.processor.tokenizer.decode(
        [i for i, last in zip(ids, before, strict=False) if i != pad or last != pad]
    )


def places(row: Any) -> list[tuple[int, int]]:
    """Return the digest of each picture of a row with the first of its placeholders."""
    return [*zip(row.carried["picture_digest"].tolist(), row.carried["picture_start"].tolist(), strict=True)]


def runs_of(reader: PictureReader, ids: Sequence[int]) -> list[tuple[int, int]]:
    """Return first place and length of each run of placeholders."""
    at = np.flatnonzero(np.array([*ids]) == reader.placeholder)
    starts = [int(i) for n, i in enumerate(at) if n == 0 or at[n - 1] != i - 1]
    return [
        (start, sum(start <= i < (following or 10**6) for i in at))
        for start, following in zip(starts, [*starts[1:], 0], strict=True)
    ]


def test_pictures_of_row_and_environment_have_their_places_in_one_row_and_are_sent_once(reader):
    first, second = reader.shown(as_png(noise_picture(64, 64, 1))), noise_picture(33, 120, 2)
    turns = [[user(part(second), "And this?")], [user("Again:", part(second))]]
    trajectory, policy = run(reader, Album({"turns": turns}, {}), [user({"type": "image"}, "What?")], [first])
    assert (trajectory.stop, trajectory.fault) == ("completed", None), trajectory.detail
    (row,) = trajectory.rows()
    ids = [*row.prompt_ids, *row.response_ids.tolist()]
    assert text_of(reader, ids) == (
        f"<|im_start|>user\n{PLACE}What?<|im_end|>\n<|im_start|>assistant\na<|im_end|>\n"
        f"<|im_start|>user\n{PLACE}And this?<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n"
        f"<|im_start|>user\nAgain:{PLACE}<|im_end|>\n<|im_start|>assistant\nc<|im_end|>"
    )
    ((sent,),) = policy.shown  # neither the row's, nor one of an earlier turn
    assert set(sent.pixels) == {"pixel_values", "image_grid_thw"}
    assert [digest for digest, _ in places(row)] == [first.digest, sent.digest, sent.digest]
    assert runs_of(reader, ids) == [(start, tokens) for (_, start), tokens in zip(places(row), [4, 4, 4], strict=True)]
    last = policy.prompts[-1]
    assert last.carried["picture_start"].tolist() == [start for _, start in places(row)]
    assert last.ids == ids[: len(last.ids)]
    named = {"type": "image", "digest": sent.digest}
    assert trajectory.messages[2] == user(named, "And this?")


@pytest.mark.parametrize("form", ["PIL", "bytes", "path", "url", "array", "text"])
def test_an_environment_sends_pictures_in_any_form(reader, tmp_path, form):
    picture = noise_picture(40, 50, 3)
    file = BytesIO()
    picture.save(file, "PNG")
    (tmp_path / "picture.png").write_bytes(file.getvalue())
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    forms = {"PIL": picture, "bytes": file.getvalue(), "path": tmp_path / "picture.png", "array": np.asarray(picture)}
    forms |= {"text": str(tmp_path / "picture.png")}
    sent = {"type": "image_url", "image_url": {"url": url}} if form == "url" else part(forms[form])
    trajectory, policy = run(reader, Album({"turns": [[user(sent)]]}, {}))
    assert trajectory.stop == "completed", trajectory.detail
    assert [picture.digest for picture in policy.shown[0]] == [reader.shown(as_png(picture)).digest]


def test_an_environment_may_change_which_pictures_the_first_messages_have(reader):
    pictures = [reader.shown(as_png(noise_picture(32, 32, seed))) for seed in (4, 5)]

    class Second(Album):
        def reset(self, messages: list[Message]) -> list[Message]:
            return [{**messages[0], "content": messages[0]["content"][1:]}]

    row = [user({"type": "image"}, {"type": "image"}, "Which?")]
    trajectory, _ = run(reader, Second({"turns": []}, {}), row, pictures)
    assert [digest for digest, _ in places(trajectory.rows()[0])] == [pictures[1].digest]


def test_a_new_context_has_pictures_of_its_own(reader):
    class Fresh(Album):
        def step(self, response: Response) -> Step:
            fresh = [user("Only", part(noise_picture(32, 32, response.turn)))]
            return Step(replace=fresh) if response.turn < 2 else Step(done=True)

    trajectory, policy = run(reader, Fresh({}, {}))
    rows = trajectory.rows()
    assert [len(row.carried.get("picture_digest", ())) for row in rows] == [0, 1, 1]
    assert [len(shown) for shown in policy.shown] == [1, 1]
    assert places(rows[1])[0][1] == places(rows[2])[0][1] == runs_of(reader, rows[2].prompt_ids)[0][0]


def test_a_text_with_a_placeholder_is_no_picture(reader):
    trajectory, policy = run(reader, Album({"turns": [[user(f"{PLACE}", part(noise_picture(32, 32)))]]}, {}))
    assert trajectory.stop == "completed", trajectory.detail
    assert len(runs_of(reader, policy.prompts[-1].ids)) == 1
    assert policy.tokenizer.decode(policy.prompts[-1].ids).count("<|image_pad|>") == 2


def test_more_pictures_than_a_context_may_have_end_the_episode(reader):
    turns = [[user(part(noise_picture(32, 32, seed)))] for seed in range(3)]
    trajectory, _ = run(reader, Album({"turns": turns}, {}), limit=2)
    assert (trajectory.stop, len(trajectory.turns)) == ("context_overflow", 3)


def test_first_messages_with_more_pictures_than_a_context_may_have_are_a_fault_with_the_key(reader):
    class Many(Album):
        def reset(self, messages: list[Message]) -> list[Message]:
            return [user(*[part(noise_picture(8, 8))] * 3)]

    trajectory, _ = run(reader, Many({"turns": []}, {}), limit=2)
    assert trajectory.fault == "environment"
    assert "a context of 2 pictures (actor_rollout_ref.rollout.limit_images)" in trajectory.detail


@pytest.mark.parametrize(
    ("sent", "cause"),
    [
        (b"%!PS-Adobe-3.0", "not a picture of PNG, JPEG, WebP, GIF or BMP"),
        ("/nowhere/at/all.png", "there is no file"),
        (np.zeros((4, 4)), "[height, width, 3] of uint8 is read"),
        (None, "not a picture, but "),
        ("https://example.com/a.png", "download it, and name the file"),
    ],
)
def test_a_picture_that_cannot_be_read_is_a_fault_of_an_environment_and_a_text_of_a_tool(reader, sent, cause):
    trajectory, _ = run(reader, Album({"turns": [[user(part(sent))]]}, {}))
    assert trajectory.fault == "environment" and cause in trajectory.detail
    tool = FunctionTool(lambda: ToolResult("seen", images=[sent]), "look", LOOK)
    trajectory, _ = run(reader, ToolEnvironment([tool], multi_turn_of(), {}), texts=[CALL, "b"])
    assert trajectory.stop == "completed", trajectory.detail
    assert cause in trajectory.messages[2]["content"]


@pytest.mark.parametrize("digest", [5, "5", [5]])
def test_a_picture_of_another_conversation_is_a_fault(reader, digest):
    other = {"type": "image", "digest": digest}
    trajectory, _ = run(reader, Album({"turns": [[user(other)]]}, {}))
    assert trajectory.fault == "environment", trajectory
    assert f"there is no picture {digest!r} in this conversation" in trajectory.detail


def test_results_of_tools_have_their_pictures_before_their_text(reader):
    tool = FunctionTool(lambda: ToolResult("seen", images=[noise_picture(32, 64)]), "look", LOOK)
    trajectory, policy = run(reader, ToolEnvironment([tool], multi_turn_of(), {}), texts=[CALL, "b"])
    (row,) = trajectory.rows()
    assert f"<|im_start|>tool\n{PLACE}seen<|im_end|>" in text_of(reader, row.response_ids.tolist())
    named, text = trajectory.messages[2]["content"]
    assert (text, named) == ({"type": "text", "text": "seen"}, {"type": "image", "digest": places(row)[0][0]})
    assert [len(shown) for shown in policy.shown] == [1]


def test_a_model_that_reads_none_reads_why(reader):
    tool = FunctionTool(lambda: noise_picture(32, 64), "look", LOOK)
    trajectory, policy = run(reader, ToolEnvironment([tool], multi_turn_of(), {}), texts=[CALL, "b"], sees=False)
    assert trajectory.stop == "completed"
    assert "the model reads no pictures (actor_rollout_ref.rollout.limit_images=0)" in trajectory.messages[2]["content"]
    assert not policy.shown


@pytest.mark.parametrize("returned", ["PIL", "ToolResult", "ToolResponse", "with a reward"])
def test_a_tool_returns_pictures_in_any_form(returned):
    picture = noise_picture(8, 8)
    forms = {
        "PIL": picture,
        "ToolResult": ToolResult(images=[picture]),
        "ToolResponse": ToolResponse(image=[picture]),
        "with a reward": (ToolResponse(text="", image=[picture]), 1.0, {}),
    }
    result = to_result(forms[returned])
    assert (result.text, result.reward) == ("", 1.0 if returned == "with a reward" else None)
    assert result.images == [{"bytes": as_png(picture)}]
