"""A tensor that lies in a file, and is mapped from there into memory rather than read. Knows no file format."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from mmap import ACCESS_COPY, ALLOCATIONGRANULARITY, mmap
from pathlib import Path

import torch
from torch import Tensor

from hybridrl.checkpoint.tensors import Part

# Of a tensor, mapped at once: what is mapped counts as memory of the process, though the kernel can take it back.
MAPPED_BYTES = 16 << 20


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
        """Some consecutive elements, mapped. Only where the tensor is contiguous."""
        begin = self.begin + (self.first + first) * self.dtype.itemsize
        size = count * self.dtype.itemsize
        return replace(self, begin=begin, bytes=size, shape=torch.Size([count]), stride=(1,), first=0).mapped()

    def parts(self, offsets: Sequence[int]) -> Iterator[Part]:
        """What lies at these offsets of a larger tensor: itself, or so many rows at a time as are mapped at once."""
        row = self.shape[1:].numel()
        contiguous = self.stride == torch.empty(self.shape, device="meta").stride()
        if not contiguous or self.shape.numel() * self.dtype.itemsize <= MAPPED_BYTES:
            yield offsets, self.mapped()
            return
        rows = max(MAPPED_BYTES // (row * self.dtype.itemsize), 1)
        for first in range(0, self.shape[0], rows):
            count = min(rows, self.shape[0] - first)
            yield [offsets[0] + first, *offsets[1:]], self.elements(first * row, count * row).view(-1, *self.shape[1:])


class Memory(mmap):
    def seekable(self) -> bool:  # zipfile asks; Python 3.13 has it
        return True


def map_bytes(file: Path, begin: int, size: int, access: int) -> tuple[Memory, int]:
    """Some bytes of a file, and where they begin in what is mapped."""
    prefix = begin % ALLOCATIONGRANULARITY
    with file.open("rb") as opened:
        return Memory(opened.fileno(), prefix + size, offset=begin - prefix, access=access), prefix
