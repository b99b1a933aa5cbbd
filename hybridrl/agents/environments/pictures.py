"""The pictures of a conversation. Environments, tools and agents send them as parts of messages; from then on a part
names its picture by digest, and the ids of the context have the picture's placeholders.

The pixels of a new picture go to the driver once, before the first turn whose prompt names it.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from hybridrl.agents.environments import EpisodeFault, Message
from hybridrl.core.carried import PICTURE_DIGEST, Encoded, Fields
from hybridrl.core.pictures import Picture, expanded, without_pixels
from hybridrl.data.pictures import PARTS, PictureFault, content, located
from hybridrl.data.processor import PictureReader
from hybridrl.required import required

LIMIT = "actor_rollout_ref.rollout.limit_images"
NUMBERS = "add_vision_id"  # an argument of templates that number the pictures of a prompt
DIGEST = "digest"  # the field of a part that names a picture
E = TypeVar("E", bound=Encoded)


class ConversationPictures:
    """The pictures of an episode or a session, at most `limit` in a context. `reader` reads new ones; None: the model
    reads no pictures. `row_pictures` are those of the row, whose pixels the driver has."""

    def __init__(self, reader: PictureReader | None, limit: int = 0, row_pictures: Sequence[Picture] = ()) -> None:
        self.reader, self.limit = reader if limit else None, limit
        self._named = {picture.digest: picture for picture in row_pictures}
        self._row_pictures = row_pictures
        self._read: dict[bytes, int] = {}  # digests by those of the encoded pictures

    def of_row(self, messages: Sequence[Message]) -> list[Message]:
        """Return the messages of a row with the names of its pictures."""
        pictures = iter(self._row_pictures)
        return [_changed(message, lambda _: {"type": "image", DIGEST: next(pictures).digest}) for message in messages]

    def read(self, messages: Sequence[Message]) -> list[Message]:
        """Return messages whose pictures are read, and named. A tool's picture that cannot be read is an error for the
        policy; raises PictureFault for any other."""
        return [self._readable(message) for message in messages]

    def expanded(self, encoded: E, messages: Sequence[Message]) -> E:
        """Return ids with the placeholders of all pictures in the messages that they are of. Raises EpisodeFault if the
        chat template has not written one for each."""
        if self.reader is None:
            return encoded
        pictures = [self._named[part[DIGEST]] for part in picture_parts(messages)]
        try:
            whole = expanded(encoded.ids, self.reader.placeholder, pictures)
        except ValueError as error:
            roles = ", ".join(sorted({message["role"] for message in messages if next(picture_parts([message]), None)}))
            raise EpisodeFault(
                f"the chat template does not show the pictures of messages of {roles}: {error}"
            ) from error
        return replace(encoded, ids=whole.ids, carried={**encoded.carried, **whole.carried})

    def too_many(self, messages: Sequence[Message]) -> bool:
        """Whether a context with these messages has more pictures than an engine takes."""
        return sum(1 for _ in picture_parts(messages)) > self.limit

    def of_prompt(self, prompt: Fields) -> list[Picture]:
        """Return the pictures of a prompt, each only once."""
        digests = prompt[PICTURE_DIGEST].tolist() if PICTURE_DIGEST in prompt else []
        return [self._named[digest] for digest in dict.fromkeys(digests)]

    def new(self, prompt: Fields) -> list[Picture]:
        """Return the pictures of a prompt whose pixels the driver does not have, each only once."""
        pictures = self.of_prompt(prompt)
        for picture in pictures:
            self._named[picture.digest] = without_pixels(picture)
        return [picture for picture in pictures if picture.pixels is not None]

    def digest(self, encoded: bytes) -> int:
        """Return the name of the picture in a file's bytes, which is read if it is new. Raises PictureFault."""
        key = hashlib.blake2b(encoded, digest_size=16).digest()
        if key not in self._read:
            picture = required(self.reader).shown(encoded)
            self._named.setdefault(picture.digest, picture)
            self._read[key] = picture.digest
        return self._read[key]

    def _readable(self, message: Message) -> Message:
        try:
            return _changed(message, self._part)
        except PictureFault as fault:
            if message["role"] != "tool":
                raise
            error = f"Error: the tool returned a picture, and it cannot be read: {fault}"
            return {**message, "content": error}

    def _part(self, part: dict[str, Any]) -> dict[str, Any]:
        """Return the part of a picture with its name."""
        if self.reader is None:
            raise PictureFault(f"the model reads no pictures ({LIMIT}={self.limit})")
        digest = part.get(DIGEST)
        if digest is None:
            digest = self.digest(content(located(part, Path())))
        if not isinstance(digest, int) or digest not in self._named:
            raise PictureFault(f"there is no picture {digest!r:.40} in this conversation")
        return {"type": "image", DIGEST: digest}


def picture_parts(messages: Iterable[Message]) -> Iterator[dict[str, Any]]:
    """Yield the parts of messages that are pictures."""
    for message in messages:
        parts = message.get("content")
        yield from (part for part in parts if _is_picture(part)) if isinstance(parts, list) else ()


def _is_picture(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") in PARTS


def _changed(message: Message, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Message:
    """Return the message with other parts in the place of its pictures."""
    parts = message.get("content")
    if not isinstance(parts, list) or not any(map(_is_picture, parts)):
        return message
    return {**message, "content": [change(part) if _is_picture(part) else part for part in parts]}
