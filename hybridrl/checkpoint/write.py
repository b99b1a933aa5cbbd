"""Safetensors files, filled in place: first the header, which needs names, shapes and types alone, then each piece of a
tensor where it belongs, as it comes. Beside the piece no memory is taken.

A file is a number of eight bytes, a JSON header of that many bytes, and the tensors' bytes without gaps.
"""

import json
import struct
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from torch import Tensor
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from hybridrl.checkpoint.disk import reserve, start_writing
from hybridrl.checkpoint.tensors import TYPES

SHARD_BYTES = 5 << 30
# Rounded at once, so that it stays in the processor's cache.
ROUNDED_BYTES = 1 << 20
# Written at once, straight from memory. Linux looks for memory in one piece for each write: for 1 GB that took 0.2 s of
# processor time with these, 0.9 s with 1 MiB where memory was fragmented, and 1.5 s with 16 MiB where it was not.
WRITE_BYTES = 128 << 10
# From here on the disk works beside us: 2 GB were on it after 0.6 s, against 0.9 s where all was left for the end.
WAITING_BYTES = 64 << 20


@contextmanager
def one_thread() -> Iterator[None]:
    """Computing on one thread: for pieces of a few MiB, waking others and waiting for them doubled the time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@one_thread()
def write_shards(
    directory: Path, meta: dict[str, Tensor], pieces: Iterable[tuple[str, int, Tensor]], limit: int = SHARD_BYTES
) -> dict[str, str]:
    """Write tensors to safetensors files of at most `limit` bytes, and an index where there are several. They come
    whole or in pieces, in any order: a name, the number of the first element, and it with those that follow, which are
    rounded to the type to be written. `meta` has names in the order of the files, shapes and types. Returns each one's
    file. Raises OSError before anything is written where the disk has no room."""
    shards = shard_names({name: tensor.nbytes for name, tensor in meta.items()}, limit)
    with ExitStack() as stack:
        files = {}
        for shard in dict.fromkeys(shards.values()):
            held = {name: tensor for name, tensor in meta.items() if shards[name] == shard}
            files[shard] = stack.enter_context(_File(directory / shard, held))
        for name, first, piece in pieces:
            files[shards[name]].write(name, first, piece)
    wrong = [name for file in files.values() for name, lacking in file.lacking.items() if lacking]
    assert not wrong, f"{len(wrong)} tensors were not written, or some of them twice: {', '.join(wrong[:3])}"
    if len(files) > 1:
        index = {"metadata": {"total_size": sum(tensor.nbytes for tensor in meta.values())}, "weight_map": shards}
        (directory / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(index, indent=2))
    return shards


def shard_names(sizes: dict[str, int], limit: int) -> dict[str, str]:
    """The file that each tensor goes to, in order: files of at most `limit` bytes, one tensor at least."""
    number, used, shards = 0, 0, {}
    for name, size in sizes.items():
        if used and used + size > limit:
            number, used = number + 1, 0
        used += size
        shards[name] = number
    if number == 0:
        return {name: SAFE_WEIGHTS_NAME for name in shards}
    return {name: f"model-{shard + 1:05}-of-{number + 1:05}.safetensors" for name, shard in shards.items()}


class _File:
    """One file, with room for all of it on the disk from the start."""

    def __init__(self, path: Path, meta: dict[str, Tensor]) -> None:
        header, self.begins, size = _header(meta)
        self.meta, self.lacking = meta, {name: tensor.numel() for name, tensor in meta.items()}
        self.waiting = (0, 0)  # where lies what the disk has not been told to take yet
        self.file = path.open("wb")
        reserve(self.file, size)
        self.file.write(header)

    def __enter__(self) -> "_File":
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def write(self, name: str, first: int, piece: Tensor) -> None:
        dtype = self.meta[name].dtype
        place = self.begins[name] + first * dtype.itemsize
        self.file.seek(place)
        for part in piece.contiguous().reshape(-1).split(ROUNDED_BYTES // dtype.itemsize):
            content = memoryview(part.to(dtype).view(torch.uint8).numpy())
            for begin in range(0, len(content), WRITE_BYTES):
                self.file.write(content[begin : begin + WRITE_BYTES])
            self._hand_over(place, place + len(content))
            place += len(content)
        self.lacking[name] -= piece.numel()

    def _hand_over(self, begin: int, end: int) -> None:
        """Have the disk take what was written, as soon as there is enough of it."""
        low, high = self.waiting
        low, high = (min(low, begin), max(high, end)) if high else (begin, end)
        if high - low >= WAITING_BYTES:
            start_writing(self.file, low, high - low)
            low = high = 0
        self.waiting = (low, high)


def _header(meta: dict[str, Tensor]) -> tuple[bytes, dict[str, int], int]:
    """The file's beginning, at which byte of the file each tensor begins, and how many bytes it has in all."""
    header: dict[str, dict[str, object]] = {"__metadata__": {"format": "pt"}}
    begins, end = {}, 0
    # The widest types first, so that each tensor begins at a multiple of its type's width.
    for name, tensor in sorted(meta.items(), key=lambda item: -item[1].itemsize):
        begins[name], end = end, end + tensor.nbytes
        header[name] = {"dtype": TYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begins[name], end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    before = 8 + len(text)
    return struct.pack("<Q", len(text)) + text, {name: before + begin for name, begin in begins.items()}, before + end
