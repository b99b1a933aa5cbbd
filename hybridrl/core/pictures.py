"""Pictures between data, engines and training ranks. A picture is known by the digest of its pixels: everything that
travels with a row or a request names it, and the pixels are stored once per machine.

    row -> load: its size, and from that its tokens -> draw: pixels, digest -> PictureStore
                                                                                    |
        Request.carried, Turn.carried, Batch.carried: digest and start      handles by digest
                                                                                    |
                                                        rollout servers and training ranks, once per call
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from threading import Lock
from types import MappingProxyType
from typing import Any, Protocol, TypeVar
from weakref import WeakValueDictionary

import numpy as np

from hybridrl.core.carried import PICTURE_DIGEST, PICTURE_START, Encoded

Pixels = Mapping[str, np.ndarray]  # what a model's processor makes of one picture, such as pixel_values and its grid
PLACEHOLDERS = ("image_token_id", "video_token_id")  # settings of models that see
NO_PIXELS: Mapping[int, Pixels] = MappingProxyType({})


@dataclass(frozen=True)
class PixelRule:
    """The change of stored values to a model's inputs, (value * scale - mean) / std for each channel, as a processor
    states it. Engines and training ranks apply it to the same stored values."""

    scale: float = 1.0
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)


@dataclass(frozen=True)
class Preview:
    """A picture for people: its size, and a small JPEG of it."""

    width: int
    height: int
    jpeg: bytes


class WithPictures(Protocol):
    """A prompt, as far as this file reads it."""

    @property
    def pictures(self) -> Sequence["Picture"]: ...


T = TypeVar("T", bound=WithPictures)


@dataclass(frozen=True, eq=False)
class Picture:
    """A picture as the models of a run read it. Its pixels are freed with the last prompt that holds it."""

    digest: int  # int64, of the pixels
    tokens: int  # placeholders that it has in a prompt
    pixels: Any  # what the store's `put` returned for them
    preview: Preview | None = None
    size: int = 0  # bytes of its pixels


def without_pixels(picture: Picture) -> Picture:
    """Return the picture by its name alone."""
    return replace(picture, pixels=None)


class PictureStore:
    """The pictures of the prompts that are in use. `put` stores pixels, once per machine for all processes, and returns
    their handle."""

    def __init__(self, put: Callable[[Pixels], Any] = dict) -> None:
        self._put = put
        self._held: WeakValueDictionary[int, Picture] = WeakValueDictionary()
        self._adding = Lock()  # else two threads would store equal pictures twice

    def add(self, pixels: Pixels, tokens: int, preview: Preview | None = None) -> Picture:
        """Return the picture with these pixels, which are stored unless they already are."""
        digest = digest_of(pixels)
        with self._adding:
            if (picture := self._held.get(digest)) is None:
                size = sum(array.nbytes for array in pixels.values())
                self._held[digest] = picture = Picture(digest, tokens, self._put(pixels), preview, size)
        return picture

    def handles(self, digests: Iterable[int]) -> dict[int, Any]:
        """Return the handles of the pixels of these pictures; KeyError if no prompt holds one of them."""
        return {digest: self._held[digest].pixels for digest in {*digests}}


def in_parts(prompts: Iterable[T], limit: int = 4 << 30) -> Iterator[list[T]]:
    """Yield prompts in parts, each of which ends once its `pictures` have `limit` bytes of pixels."""
    part, size = [], 0
    for prompt in prompts:
        part.append(prompt)
        size += sum(picture.size for picture in prompt.pictures)
        if size >= limit:
            yield part
            part, size = [], 0
    if part:
        yield part


def picture_metrics(of_prompts: Sequence[Sequence[Picture]], further: Iterable[Picture] = ()) -> dict[str, float]:
    """Return number and tokens of pictures, as means over prompts, and the size of what is stored for these and for
    `further` pictures; {} without any."""
    pictures = list(chain.from_iterable(of_prompts))
    stored = {*pictures, *further}
    if not stored:
        return {}
    return {
        "pictures/per_prompt": len(pictures) / len(of_prompts),
        "pictures/tokens": sum(picture.tokens for picture in pictures) / len(of_prompts),
        "pictures/gb": sum(picture.size for picture in stored) / (1 << 30),
    }


def placeholder_ids(settings: Any) -> list[int]:
    """Return the ids of pictures, the first one, and of videos, which a model with these settings never samples; empty
    for a model of text."""
    names = PLACEHOLDERS if getattr(settings, "vision_config", None) else ()
    return [number for name in names if (number := getattr(settings, name, None)) is not None]


def tokens_of(pixels: Pixels, merged: int) -> int:
    """Return the tokens of a picture, a grid of patches; `merged` x `merged` of these are a token."""
    return int(pixels["image_grid_thw"].prod()) // merged**2


def digest_of(pixels: Pixels) -> int:
    """Return 64 bits that depend on the names, shapes, types and values of these arrays."""
    digest = hashlib.blake2b(digest_size=8)
    for name, array in sorted(pixels.items()):
        digest.update(f"{name} {array.dtype.str} {array.shape} ".encode())
        digest.update(np.ascontiguousarray(array).data)
    return int.from_bytes(digest.digest(), "little", signed=True)


def expanded(ids: Sequence[int], placeholder: int, pictures: Sequence[Picture]) -> Encoded:
    """Return a prompt whose ids have one placeholder per picture, with as many as each has tokens, and the fields that
    name the pictures. Raises ValueError if the numbers of placeholders and pictures differ."""
    ones = np.asarray(ids, dtype=np.int64)
    places = np.flatnonzero(ones == placeholder)
    if len(places) != len(pictures):
        raise ValueError(f"the prompt has places for {len(places)} pictures, and {len(pictures)} pictures")
    if not pictures:
        return Encoded(list(ids))
    repeats, tokens = np.ones(len(ones), dtype=np.int64), np.array([picture.tokens for picture in pictures])
    repeats[places] = tokens
    starts = (repeats.cumsum() - repeats)[places].astype(np.int32)
    digests = np.array([picture.digest for picture in pictures], dtype=np.int64)
    return Encoded(ones.repeat(repeats).tolist(), {PICTURE_DIGEST: digests, PICTURE_START: starts})
