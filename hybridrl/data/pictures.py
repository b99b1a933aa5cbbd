"""Pictures of rows: every form in which a row has them -> RGB.

What the processor of a model makes of these is in processor.py.
"""

import base64
import os
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote

import numpy as np
from PIL import Image, ImageOps

from hybridrl.config.custom_code import attempt
from hybridrl.core.pictures import Preview
from hybridrl.data import Message, from_json

T = TypeVar("T")
R = TypeVar("R")
Encoded = bytes | Path  # a picture as its row has it: the bytes of a file, or a file

PLACE = "<image>"  # in a text
PARTS = ("image", "image_url")
MEDIA = ("videos", "audios")  # verl's columns for content that no model reads here
FIELDS = ("bytes", "image", "image_url", "url", "path")  # an object's first one is the picture
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")  # Pillow runs programs for others, such as PostScript
MOST_PIXELS = 64_000_000
MOST_BYTES = 1 << 30  # a file is read whole
PREVIEW = 192  # pixels of the longer side, at most
CORES = len(os.sched_getaffinity(0))


class PictureFault(ValueError):
    """A picture that cannot be read; the text is the reason."""


# -- a row -> its messages and pictures --------------------------------------------------------------------------------


def multimodal_fault(
    values: Mapping[str, Any], messages: Any, image_key: str = "images", *, sees: bool = False, why: str = ""
) -> str:
    """Describe the content of a row that the model does not read, or return "" if there is none; `why` it does not.

    This is a non-empty column of pictures, videos or sounds, or a message part of any other type than text. A model
    that `sees` reads pictures. The characters "<image>" alone are text, as in verl, which replaces them only if such a
    column is non-empty.
    """
    columns, read = (MEDIA, ("text", *PARTS)) if sees else (dict.fromkeys((image_key, *MEDIA)), ("text",))
    filled = {name: value for name in columns if (value := values.get(name)) is not None}
    content = [f"the column {name}" for name, value in filled.items() if not hasattr(value, "__len__") or len(value)]
    contents = [message.get("content") for message in messages] if isinstance(messages, list) else []
    parts = [part for parts in contents if isinstance(parts, list) for part in parts if isinstance(part, dict)]
    content += [
        f"a part of type {kind}" for kind in sorted({str(part.get("type", "text")) for part in parts} - {*read})
    ]
    why = "videos and sounds are not trained" if sees else why or "only text is supported"
    return f"more than text: {', '.join(content)}; leave such rows out: {why}" if content else ""


def listed(value: Any) -> list[Any]:
    """Return the pictures in a column, which has a list of them, one, or none; a list may be JSON text."""
    decoded = from_json(value) if isinstance(value, str) else None
    value = value if decoded is None else decoded
    if value is None or (isinstance(value, str) and not value):
        return []
    if isinstance(value, Mapping) and not any(item is not None for item in value.values()):
        return []
    several = isinstance(value, list | tuple) or (isinstance(value, np.ndarray) and value.dtype == object)
    return list(value) if several else [value]


def placed(messages: list[Message], column: Sequence[Any], key: str) -> tuple[list[Message], dict[str, Any]]:
    """Return the messages with a part {"type": "image"} in the place of each picture, and the pictures by where the row
    has them, in the order of their places. A part has its picture itself, or takes the next one of the column `key`, as
    does each "<image>" in a text unless the column is empty. ValueError if the numbers of places and pictures differ.
    """
    pictures: dict[str, Any] = {}
    places, changed = 0, []
    for number, message in enumerate(messages):
        content = message.get("content")
        parts: list[dict[str, Any]] = []
        for part in [{"type": "text", "text": content}] if isinstance(content, str) else content or ():
            own = {name: value for name, value in part.items() if name != "type" and value is not None}
            if part.get("type", "text") in PARTS and own:
                pictures[f"part {len(parts) + 1} of message {number + 1}"] = own
                parts.append({"type": "image"})
                continue
            if unread := sorted(own.keys() & {*FIELDS}):
                raise ValueError(
                    f"a part of type text in message {number + 1} has {', '.join(unread)}: give it type image"
                )
            text = str(part.get("text"))
            pieces: list[str | None] = [text]
            if part.get("type", "text") in PARTS:
                pieces = [None]
            elif column:
                pieces = [None if piece == PLACE else piece for piece in re.split(f"({PLACE})", text)]
            for piece in pieces:
                if piece is None:
                    pictures[f"{key}[{places}]"] = column[places] if places < len(column) else None
                    places += 1
                parts += [{"type": "image"}] if piece is None else [{"type": "text", "text": piece}] if piece else []
        texts_only = all(part["type"] == "text" for part in parts)
        changed.append(message if texts_only else {**message, "content": parts})
    if places != len(column):
        raise ValueError(
            f"the messages have places for {places} pictures ({PLACE}, or parts without content), and the column {key} "
            f"has {len(column)}"
        )
    return changed, pictures


def located(form: Any, folder: Path) -> Encoded:
    """Return the encoded bytes of a picture, or its file, which may not exist; relative paths count from `folder`, then
    from the working directory. Raises PictureFault."""
    while isinstance(form, Mapping):
        fields = {name: value for name, value in form.items() if value is not None and name != "type"}
        if unread := ", ".join(str(name) for name in fields if name not in FIELDS):
            raise PictureFault(f"{unread} is not read here: data.mm_processor_kwargs holds for all pictures")
        form = next((fields[name] for name in FIELDS if name in fields), None)
    if isinstance(form, bytes | bytearray):
        return bytes(form)
    if isinstance(form, Image.Image | np.ndarray):
        return as_png(form)
    if not isinstance(form, str | Path) or form == "":
        raise PictureFault(f"not a picture, but {form!r:.60}")
    return _of_text(str(form), folder)


def of_data_url(text: str) -> bytes:
    """Return the bytes of a picture's file. Raises PictureFault."""
    head, _, body = text.partition(",")
    data = attempt(partial(base64.b64decode, body, validate=True))
    if not re.fullmatch(r"data:image/[\w.+-]+;base64", head, re.IGNORECASE) or isinstance(data, Exception):
        raise PictureFault(f"not data:image/...;base64,... but {text[:60]!r:.60}")
    return data


def with_data_urls(messages: Sequence[Message], pictures: Iterable[Encoded]) -> list[Message]:
    """Return the messages of a row in OpenAI's form, with each picture as a data URL. Raises PictureFault."""
    rest, changed = iter(pictures), []
    for message in messages:
        if isinstance(parts := message.get("content"), list):
            urls = {number: _data_url(next(rest)) for number, part in enumerate(parts) if part.get("type") in PARTS}
            shown = {number: {"type": "image_url", "image_url": {"url": url}} for number, url in urls.items()}
            message = {**message, "content": [shown.get(number, part) for number, part in enumerate(parts)]}
        changed.append(message)
    return changed


def _data_url(encoded: Encoded) -> str:
    data = content(encoded)
    kind = _checked(lambda: Image.open(BytesIO(data), formats=FORMATS).format)
    return f"data:image/{str(kind).lower()};base64,{base64.b64encode(data).decode()}"


def _of_text(text: str, folder: Path) -> Encoded:
    if text[:5].lower() == "data:":
        return of_data_url(text)
    url = re.match(r"([a-z][a-z\d+.-]*)://[^/]*", text, re.IGNORECASE)  # urlsplit raises for some texts
    if url and url[1].lower() != "file":
        fix = "download it, and name the file"
        raise PictureFault(f"{text!r:.80} is not on this machine, and a run does not depend on a network: {fix}")
    text = unquote(text[url.end() :]) if url else text
    near, here = folder / text, Path(text).absolute()
    return here if _is_file(here) and not _is_file(near) else near


def _is_file(path: Path) -> bool:
    return attempt(path.is_file) is True  # a name may be too long, or have a null


def as_stored(value: Any) -> Any:
    """Return a column of a custom dataset, or a tool's picture, with pictures and arrays as PNG, since they are
    serialized. Raises PictureFault."""
    if isinstance(value, Image.Image) or (isinstance(value, np.ndarray) and value.dtype != object and value.ndim > 1):
        return {"bytes": as_png(value)}
    if isinstance(value, Mapping):
        return {name: as_stored(item) for name, item in value.items()}
    if isinstance(value, Path):
        return str(value)
    return [as_stored(item) for item in value] if isinstance(value, list | tuple | np.ndarray) else value


def as_png(picture: Image.Image | np.ndarray) -> bytes:
    """Return a picture, or an array [height, width, 3] uint8, as the bytes of a PNG file. Raises PictureFault."""
    if isinstance(picture, np.ndarray):
        if picture.dtype != np.uint8 or picture.ndim != 3 or picture.shape[-1] != 3 or not picture.size:
            shape = f"an array {[*picture.shape]} of {picture.dtype}"
            raise PictureFault(f"{shape}, and [height, width, 3] of uint8 is read")
        picture = Image.fromarray(picture)
    file = BytesIO()
    _checked(partial(_rgb_of_one_frame, picture)).save(file, "PNG", compress_level=1)
    return file.getvalue()


# -- encoded bytes -> RGB ----------------------------------------------------------------------------------------------


def content(encoded: Encoded) -> bytes:
    """Return the bytes of a file of a picture. Raises PictureFault."""
    if isinstance(encoded, bytes):
        return encoded
    if not _is_file(encoded):
        raise PictureFault(f"there is no file {str(encoded)!r:.200}")
    if (size := _checked(encoded.stat).st_size) > MOST_BYTES:
        raise PictureFault(f"its file has {size:,} bytes, and at most {MOST_BYTES:,} are read")
    return _checked(encoded.read_bytes)


def decoded(data: bytes) -> Image.Image:
    """Return the picture of a file's bytes in RGB, as `to_rgb` does. Raises PictureFault with Pillow's words."""

    def decode() -> Image.Image:
        with Image.open(BytesIO(data), formats=FORMATS) as picture:
            return _rgb_of_one_frame(picture)

    if not data:
        raise PictureFault("0 bytes")
    return _checked(decode)


def size_of(data: bytes) -> tuple[int, int]:
    """Return width and height in a file's bytes, without decoding it. Raises PictureFault."""
    return _checked(lambda: Image.open(BytesIO(data), formats=FORMATS).size)


def preview(picture: Image.Image) -> Preview:
    """Return the preview of a picture in RGB, which shrinks to it. Raises PictureFault."""
    (width, height), file = picture.size, BytesIO()

    def shrink() -> None:
        picture.thumbnail((PREVIEW, PREVIEW))
        picture.save(file, "JPEG", comment=b"")  # a comment of a GIF may be too long for a JPEG

    _checked(shrink)
    return Preview(width, height, file.getvalue())


def _checked(call: Callable[[], T]) -> T:
    """Return the result, or raise any error as a fault: Pillow's decoders have errors of many types."""
    result = attempt(call)
    if isinstance(result, PictureFault):
        raise result
    if isinstance(result, Exception):
        unknown = type(result).__name__ == "UnidentifiedImageError"  # its text has the address of an object
        reason = "not a picture of PNG, JPEG, WebP, GIF or BMP" if unknown else str(result) or type(result).__name__
        raise PictureFault(reason) from result
    return result


def _rgb_of_one_frame(picture: Image.Image) -> Image.Image:
    width, height = picture.size
    if not 0 < width * height <= MOST_PIXELS:
        raise PictureFault(f"{width} x {height} pixels, and 1 to {MOST_PIXELS // 10**6} million are read")
    if (frames := getattr(picture, "n_frames", 1)) > 1:
        raise PictureFault(f"{frames} frames: videos are not trained; leave such rows out")
    return to_rgb(picture)


def to_rgb(picture: Image.Image) -> Image.Image:
    """Return a picture as it is seen: turned as its EXIF data say, and what is transparent on white."""
    picture = ImageOps.exif_transpose(picture)
    if picture.mode.startswith("I"):  # 16 bits of grey, all of which but 0 to 255 `convert` would make white
        values = np.asarray(picture)
        grey = np.where(values == picture.info.get("transparency"), 65535, values.clip(0, 65535)) / 257
        return Image.fromarray(np.rint(grey).astype(np.uint8)).convert("RGB")
    if picture.mode == "F":
        raise PictureFault("its numbers are fractions of an unknown range")
    if picture.has_transparency_data:  # `convert` would show the colour behind it
        picture = picture.convert("RGBA")
        picture = Image.alpha_composite(Image.new("RGBA", picture.size, "white"), picture)
    return picture.convert("RGB")


def in_threads(work: Callable[[T], R], items: Iterable[T], count: int = CORES) -> Iterator[R]:
    """Yield the results in the order of the items, a few of which are worked on ahead."""
    waiting: deque[Any] = deque()
    with ThreadPoolExecutor(count) as threads:
        for item in items:
            waiting.append(threads.submit(work, item))
            if len(waiting) > 4 * count:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
