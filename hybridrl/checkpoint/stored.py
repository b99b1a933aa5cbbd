"""A tensor that lies in a file, of which little is in memory at a time. Knows no file format."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from mmap import ACCESS_COPY, ALLOCATIONGRANULARITY, mmap
from pathlib import Path

import torch
from torch import Tensor

from hybridrl.checkpoint.tensors import Part

# Of a tensor, at once. Reading into memory that is used again and again takes half the processor time of mapping the
# file, and from the disk the kernel then reads far ahead.
READ_BYTES = 4 << 20


@dataclass(frozen=True)
class Stored:
    """A tensor in a file: its storage begins at byte `begin`, and in it the tensor at element `first`."""

    file: Path
    begin: int
    bytes: int
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    first: int

    def mapped(self) -> Tensor:
        """The tensor, mapped from the file into memory. Copy it before computing: it may lie at an address that is no
        multiple of its width."""
        if not self.bytes:
            return torch.empty(self.shape, dtype=self.dtype)
        memory, begin = map_bytes(self.file, self.begin, self.bytes, ACCESS_COPY)
        content = torch.frombuffer(memory, dtype=torch.uint8, offset=begin).view(self.dtype)
        return content.as_strided(self.shape, self.stride, self.first)

    def elements(self, first: int, count: int) -> Tensor:
        """Some consecutive elements, read. Only where the tensor is contiguous. Raises ValueError where the file ends
        before them."""
        found = torch.empty(count, dtype=self.dtype)
        with self.file.open("rb", buffering=0) as file:
            file.seek(self.begin + (self.first + first) * self.dtype.itemsize)
            read = file.readinto(memoryview(found.view(torch.uint8).numpy()))
        if read != found.nbytes:
            raise ValueError(f"it ends {found.nbytes - read} bytes too early")
        return found

    def parts(self, offsets: Sequence[int]) -> Iterator[Part]:
        """What lies at these offsets of a larger tensor: a few rows at a time, each time one's own."""
        if self.stride != torch.empty(self.shape, device="meta").stride():
            yield offsets, self.mapped().clone()
            return
        if not self.shape:
            yield offsets, self.elements(0, 1).view(self.shape)
            return
        row = self.shape[1:].numel()
        rows = max(READ_BYTES // max(row * self.dtype.itemsize, 1), 1)
        for first in range(0, max(self.shape[0], 1), rows):
            count = min(rows, self.shape[0] - first)
            part = self.elements(first * row, count * row).view(count, *self.shape[1:])
            yield [offsets[0] + first, *offsets[1:]], part


class Memory(mmap):
    def seekable(self) -> bool:  # zipfile asks; Python 3.13 has it
        return True


def map_bytes(file: Path, begin: int, size: int, access: int) -> tuple[Memory, int]:
    """Some bytes of a file, and where they begin in what is mapped."""
    prefix = begin % ALLOCATIONGRANULARITY
    with file.open("rb") as opened:
        return Memory(opened.fileno(), prefix + size, offset=begin - prefix, access=access), prefix
