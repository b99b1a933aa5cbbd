"""Every form in which rows have pictures, and what each becomes in RGB."""

import base64
import os
from collections.abc import Callable
from io import BytesIO
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from hybridrl.data.pictures import (
    PictureFault,
    as_png,
    as_stored,
    content,
    decoded,
    in_threads,
    listed,
    located,
    placed,
    preview,
    to_rgb,
)
from tests.vision_models import noise_picture

NOISE = noise_picture(5, 4)


def encoded(picture: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = BytesIO()
    picture.save(file, kind, **options)
    return file.getvalue()


PNG = encoded(NOISE)


def fault(call: Callable[[], Any]) -> str:
    with pytest.raises(PictureFault) as error:
        call()
    return str(error.value)


def pixel(picture: Image.Image, **options: Any) -> tuple[int, int, int]:
    """The first pixel of a picture that was a PNG file."""
    return decoded(encoded(picture, **options)).getpixel((0, 0))


def of_values(values: Any, kind: Any) -> Image.Image:
    return Image.fromarray(np.array(values, dtype=kind))


# -- forms -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "form",
    [
        PNG,
        {"bytes": PNG, "path": "a name only.jpg"},
        {"bytes": PNG},
        {"path": "there.png", "bytes": None},
        "there.png",
        "elsewhere.png",
        "FILE_URL",
        "data:image/png;base64," + base64.b64encode(PNG).decode(),
        NOISE,
        np.asarray(NOISE),
        {"image": {"bytes": PNG}},
        {"type": "image", "image": "there.png"},
        {"type": "image_url", "image_url": {"url": "FILE_URL"}},
        {"image_url": "there.png"},
    ],
    ids=lambda form: str(form)[:40],
)
def test_each_form_is_the_same_picture(form, tmp_path, monkeypatch):
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "there.png").write_bytes(PNG)
    (tmp_path / "rows" / "a b.png").write_bytes(PNG)
    (tmp_path / "elsewhere.png").write_bytes(PNG)
    monkeypatch.chdir(tmp_path)
    if "FILE_URL" in str(form):
        url = (tmp_path / "rows" / "a b.png").as_uri()
        form = url if isinstance(form, str) else {"type": "image_url", "image_url": {"url": url}}
    assert np.array_equal(decoded(content(located(form, tmp_path / "rows"))), NOISE)


def test_a_path_is_relative_to_the_file_of_the_row_first(tmp_path, monkeypatch):
    (tmp_path / "a.png").write_bytes(PNG)
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "a.png").write_bytes(encoded(noise_picture(7, 7)))
    monkeypatch.chdir(tmp_path)
    assert decoded(content(located("a.png", tmp_path / "rows"))).size == (7, 7)


@pytest.mark.parametrize(
    ("form", "reason"),
    [
        ("http://a.example/b.png", "download it, and name the file"),
        ("HTTPS://a.example/b.png", "a run does not depend on a network"),
        ("s3://bucket/b.png", "is not on this machine"),
        ("http://[::1", "is not on this machine"),
        ("http://a\u2100b/c.png", "is not on this machine"),
        ("file://[a/b.png", "there is no file '/b.png'"),
        ("a/b://c.png", "/a/b:/c.png'"),
        ("missing.png", "/missing.png'"),
        (".", "there is no file '/"),
        ("a\0b", "there is no file"),
        ("x" * 5000, "there is no file"),
        ("data:image/png,abc", "not data:image/...;base64,..."),
        ("data:text/plain;base64,aGk=", "not data:image/...;base64,..."),
        ("data:image/png;base64,a*b", "not data:image/...;base64,..."),
        ({"image": "a.png", "min_pixels": 3}, "min_pixels is not read here: data.mm_processor_kwargs holds for all"),
        ({"bytes": PNG, "resized_height": 3, "max_pixels": 4}, "resized_height, max_pixels is not read here"),
        ("", "not a picture, but ''"),
        (None, "not a picture, but None"),
        ({}, "not a picture, but None"),
        (7, "not a picture, but 7"),
        ([PNG], "not a picture, but [b"),
        (np.zeros((4, 5), np.uint8), "an array [4, 5] of uint8, and [height, width, 3] of uint8 is read"),
        (np.zeros((4, 5, 3), np.float32), "an array [4, 5, 3] of float32"),
        (np.zeros((0, 5, 3), np.uint8), "an array [0, 5, 3] of uint8"),
        (Image.new("F", (2, 2)), "fractions of an unknown range"),
        (Image.new("RGB", (0, 2)), "0 x 2 pixels, and 1 to 64 million are read"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_is_no_picture_on_this_machine_is_rejected_with_the_reason(form, reason, tmp_path):
    assert reason in fault(lambda: content(located(form, tmp_path)))


def test_a_file_too_large_for_memory_is_rejected_before_it_is_read(tmp_path):
    (file := tmp_path / "a.png").touch()
    os.truncate(file, (1 << 30) + 1)  # without blocks on the disk
    assert fault(lambda: content(file)) == "its file has 1,073,741,825 bytes, and at most 1,073,741,824 are read"


def test_what_is_no_regular_file_is_never_opened(tmp_path):
    """A pipe without a writer would block its reader."""
    os.mkfifo(tmp_path / "a.png")
    (tmp_path / "b.png").symlink_to("/dev/zero")
    for name in ("a.png", "b.png"):
        assert "there is no file" in fault(lambda name=name: content(located(name, tmp_path)))


def test_of_objects_within_objects_there_may_be_any_number(tmp_path):
    form: Any = PNG
    for _ in range(10_000):
        form = {"image": form}
    assert located(form, tmp_path) == PNG


@pytest.mark.parametrize(
    ("value", "pictures"),
    [
        (None, []),
        ("", []),
        ([], []),
        ("[]", []),
        ({"bytes": None, "path": None}, []),
        ("a.png", ["a.png"]),
        ('["a.png", "b.png"]', ["a.png", "b.png"]),
        (np.array(["a.png", None], dtype=object), ["a.png", None]),
        ({"bytes": b"x"}, [{"bytes": b"x"}]),
    ],
)
def test_a_column_has_none_one_or_several(value, pictures):
    assert listed(value) == pictures


def test_pictures_of_a_custom_dataset_become_png(tmp_path):
    column = np.array([NOISE, None], dtype=object)
    first, second = as_stored(column)
    assert second is None and np.array_equal(decoded(located(first, tmp_path)), NOISE)
    (part,) = as_stored([{"role": "user", "content": [{"type": "image", "image": np.asarray(NOISE)}]}])[0]["content"]
    assert np.array_equal(decoded(located(part, tmp_path)), NOISE)
    assert as_stored("a text") == "a text"


# -- places ------------------------------------------------------------------------------------------------------------


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def shape(messages: list[dict[str, Any]]) -> list[Any]:
    """The parts of each message: texts, and None for a picture."""
    return [
        message["content"] if isinstance(message["content"], str) else [part.get("text") for part in message["content"]]
        for message in messages
    ]


def test_places_in_texts_and_parts_take_the_pictures_of_the_column_in_order():
    chat = [*user("<image>a<image>"), *user([{"type": "image"}, {"type": "text", "text": "b <image>"}])]
    messages, pictures = placed(chat, ["p", "q", "r", "s"], "images")
    assert shape(messages) == [[None, "a", None], [None, "b ", None]]
    assert pictures == {"images[0]": "p", "images[1]": "q", "images[2]": "r", "images[3]": "s"}


def test_a_part_with_its_own_picture_takes_none_of_the_column():
    chat = user(
        [{"type": "image", "image": "own"}, {"type": "image"}, {"type": "image_url", "image_url": {"url": "u"}}]
    )
    messages, pictures = placed(chat, ["p"], "pics")
    assert shape(messages) == [[None, None, None]]
    assert list(pictures.values()) == [{"image": "own"}, "p", {"image_url": {"url": "u"}}]
    assert list(pictures) == ["part 1 of message 1", "pics[0]", "part 3 of message 1"]


def test_without_a_column_the_characters_are_text():
    assert placed(user("what does <image> mean?"), [], "images") == (user("what does <image> mean?"), {})
    for text in ("<image>?", "<image>"):
        assert placed(user(text), [], "images") == (user(text), {})
        parts = [{"type": "text", "text": text}, {"type": "image", "image": "own"}]
        assert shape(placed(user(parts), [], "images")[0]) == [[text, None]]


@pytest.mark.parametrize(("content", "column"), [("<image>", ["p", "q"]), ("<image><image>", ["p"]), ("none", ["p"])])
def test_another_number_of_places_than_pictures_is_rejected_with_both(content, column):
    with pytest.raises(ValueError, match=f"places for {content.count('<image>')} pictures .* images has {len(column)}"):
        placed(user(content), column, "images")


@given(st.lists(st.lists(st.sampled_from(["a", "<image>", "own", "taken"]), min_size=1), max_size=4))
def test_whatever_the_order_each_place_gets_its_picture(drawn):
    def part(kind: str, place: str) -> dict[str, Any]:
        kinds = {"own": {"type": "image", "image": place}, "taken": {"type": "image"}}
        return kinds.get(kind, {"type": "text", "text": kind})

    names = [[f"{number} {at}" for at in range(len(kinds))] for number, kinds in enumerate(drawn)]
    chat = [
        {"role": "user", "content": [part(kind, name) for kind, name in zip(kinds, places, strict=True)]}
        for kinds, places in zip(drawn, names, strict=True)
    ]
    every = [pair for kinds, places in zip(drawn, names, strict=True) for pair in zip(kinds, places, strict=True)]
    column = [name for kind, name in every if kind in ("<image>", "taken")]
    _, pictures = placed(chat, column, "images") if column else placed(chat, [], "images")
    expected = [name for kind, name in every if kind != "a"]
    assert [form["image"] if isinstance(form, dict) else form for form in pictures.values()] == expected


# -- RGB ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("picture", "options", "expected"),
    [
        (Image.new("1", (1, 1), 1), {}, (255, 255, 255)),
        (Image.new("L", (1, 1), 77), {}, (77, 77, 77)),
        (Image.new("L", (1, 1), 77), {"transparency": 77}, (255, 255, 255)),
        (Image.new("LA", (1, 1), (100, 0)), {}, (255, 255, 255)),
        (Image.new("LA", (1, 1), (100, 255)), {}, (100, 100, 100)),
        (Image.new("LA", (1, 1), (0, 51)), {}, (204, 204, 204)),  # a fifth of black on white
        (Image.new("RGB", (1, 1), (1, 2, 3)), {}, (1, 2, 3)),
        (Image.new("RGB", (1, 1), (1, 2, 3)), {"transparency": (1, 2, 3)}, (255, 255, 255)),
        (Image.new("RGBA", (1, 1), (10, 20, 30, 0)), {}, (255, 255, 255)),
        (Image.new("RGBA", (1, 1), (10, 20, 30, 255)), {}, (10, 20, 30)),
        (Image.new("RGB", (1, 1), (10, 20, 30)).convert("P", palette=Image.Palette.ADAPTIVE), {}, (10, 20, 30)),
        (Image.new("P", (1, 1), 0), {"transparency": 0}, (255, 255, 255)),
        (of_values([[65535]], np.uint16), {}, (255, 255, 255)),
        (of_values([[300]], np.uint16), {}, (1, 1, 1)),
        (of_values([[25700]], np.uint16), {}, (100, 100, 100)),
        (of_values([[25700]], np.uint16), {"transparency": 25700}, (255, 255, 255)),
    ],
    ids=lambda value: value.mode if isinstance(value, Image.Image) else str(value),
)
def test_a_pixel_of_each_mode(picture, options, expected):
    assert pixel(picture, **options) == expected


@pytest.mark.parametrize(
    ("picture", "expected"),
    [
        (Image.new("CMYK", (1, 1), (255, 0, 0, 0)), (0, 255, 255)),
        (of_values([[-5]], np.int32), (0, 0, 0)),
        (of_values([[25700]], np.int32), (100, 100, 100)),
        (of_values([[70000]], np.int32), (255, 255, 255)),
    ],
)
def test_a_pixel_of_modes_that_no_png_has(picture, expected):
    assert to_rgb(picture).getpixel((0, 0)) == expected


def test_a_picture_is_turned_as_its_exif_data_say():
    exif = Image.Exif()
    exif[0x0112] = 6  # its first column is the top of the picture
    file = encoded(of_values([[[255, 0, 0], [0, 255, 0]]], np.uint8), exif=exif)
    turned = decoded(file)
    assert turned.size == (1, 2)
    assert [turned.getpixel((0, row)) for row in range(2)] == [(255, 0, 0), (0, 255, 0)]


# -- files -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_these_formats_are_read(kind):
    assert decoded(encoded(noise_picture(33, 9), kind)).size == (33, 9)


FRAMES = {"save_all": True, "append_images": [noise_picture(5, 4, 1)]}


@pytest.mark.parametrize(
    ("file", "reason"),
    [
        (b"", "0 bytes"),
        (b"no picture", "not a picture of PNG, JPEG, WebP, GIF or BMP"),
        (encoded(NOISE, "TIFF"), "not a picture of PNG, JPEG, WebP, GIF or BMP"),
        (encoded(NOISE, "EPS"), "not a picture of PNG, JPEG, WebP, GIF or BMP"),
        (encoded(noise_picture(64, 64))[:500], "truncated"),
        (encoded(noise_picture(64, 64), "JPEG")[:900], "truncated"),
        *((encoded(NOISE, kind, **FRAMES), "2 frames: videos are not trained") for kind in ("GIF", "WEBP", "PNG")),
        (encoded(Image.new("1", (8001, 8000))), "8001 x 8000 pixels, and 1 to 64 million are read"),
        (encoded(Image.new("1", (20000, 10000))), "200000000 pixels"),  # Pillow's own limit
    ],
    ids=range(11),
)
def test_a_file_that_cannot_be_read_whole_is_rejected_with_the_reason(file, reason):
    assert reason in fault(lambda: decoded(file))


def test_pictures_of_several_frames_are_rejected_in_custom_datasets_too():
    with Image.open(BytesIO(encoded(NOISE, "GIF", **FRAMES))) as picture:
        assert "2 frames" in fault(lambda: as_png(picture))


@given(st.binary(max_size=300), st.integers(0, len(PNG)))
def test_no_file_is_a_crash(junk, at):
    for file in (junk, PNG[:at] + junk, PNG[:at] + junk + PNG[at + len(junk) :]):
        try:
            decoded(file)
        except PictureFault as error:
            assert str(error)


def test_threads_keep_the_order():
    assert list(in_threads(lambda number: number * 2, range(100), count=3)) == list(range(0, 200, 2))


# -- previews ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "small"),
    [((400, 100), (192, 48)), ((40, 384), (20, 192)), ((5, 4), (5, 4)), ((3000, 1), (192, 1))],
)
def test_a_preview_is_a_jpeg_of_at_most_192_pixels_a_side(size, small):
    shown = preview(Image.new("RGB", size, (200, 0, 0)))
    assert (shown.width, shown.height) == size
    with Image.open(BytesIO(shown.jpeg)) as picture:
        assert picture.format == "JPEG" and picture.size == small
        assert abs(picture.getpixel((0, 0))[0] - 200) < 8


def test_a_comment_that_no_jpeg_can_have_costs_no_preview():
    picture = decoded(encoded(NOISE, "GIF", comment=b"x" * 70_000))
    assert len(preview(picture).jpeg) < 2000


def test_a_part_of_type_text_with_a_picture_is_named():
    chat = user([{"type": "text", "text": "What?", "image": None}, {"type": "text", "text": "this", "image": "a.png"}])
    with pytest.raises(ValueError, match="a part of type text in message 1 has image: give it type image"):
        placed(chat, [], "images")
    assert placed(user([chat[0]["content"][0]]), [], "images")[1] == {}
