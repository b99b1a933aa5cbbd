"""A saved model that is read tensor by tensor. Does not know in which form it was saved."""

import operator
import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from zipfile import BadZipFile

import torch
from safetensors import SafetensorError
from torch import Tensor

from hybridrl.config import ConfigError

# Types under their names in safetensors files.
TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}

# What readers raise on bytes that are not as they were written, or not there.
UNREADABLE = (
    AssertionError,
    AttributeError,
    BadZipFile,
    EOFError,
    ImportError,
    LookupError,
    MemoryError,  # of a length that is not as it was written
    OSError,
    OverflowError,
    RuntimeError,
    SafetensorError,
    TypeError,
    ValueError,
    pickle.UnpicklingError,
)


class Unreadable(ConfigError):
    """A file of a saved model is missing or damaged."""


# A part of a tensor: where it begins in each dimension, and what is there.
Part = tuple[Sequence[int], Tensor]


@dataclass(frozen=True)
class Tensors:
    """Names, shapes and types are at hand in `meta`, as tensors of the meta device; `parts` reads a tensor as it lies
    in the files, each element once. `form` says in words how they are saved; `faults` counts checksums again, where
    files have any, and names those that are damaged."""

    form: str
    meta: dict[str, Tensor]
    parts: Callable[[str], Iterable[Part]]
    faults: Callable[[], list[str]] = list

    def read(self, name: str) -> Tensor:
        """A tensor whole, and one's own. Raises Unreadable where a part lacks or is damaged."""
        whole = torch.empty_like(self.meta[name], device="cpu")
        for offsets, part in self._complete(name):
            region = whole
            for dim, (offset, size) in enumerate(zip(offsets, part.shape, strict=True)):
                region = region.narrow(dim, offset, size)
            region.copy_(part)
        return whole

    def pieces(self, name: str) -> Iterator[tuple[int, Tensor]]:
        """A tensor in pieces of consecutive elements, each with the number of the first: its parts, where it was cut by
        rows, or all of it. Raises Unreadable where a part lacks or is damaged."""
        whole = self.meta[name]
        for offsets, part in self._complete(name):
            if part.shape[1:] != whole.shape[1:]:
                yield 0, self.read(name)
                return
            yield sum(map(operator.mul, offsets, whole.stride())), part

    def _complete(self, name: str) -> Iterator[Part]:
        whole, held = self.meta[name], 0
        for offsets, part in self.parts(name):
            ends = list(map(operator.add, offsets, part.shape))
            if part.dim() != whole.dim() or any(map(operator.gt, ends, whole.shape)):
                raise Unreadable(f"{name} cannot be read: part {list(part.shape)} at {list(offsets)} is not of it")
            held += part.numel()
            yield offsets, part
        if held != whole.numel():
            raise Unreadable(f"{name} cannot be read: of its {whole.numel()} elements {held} were saved")


def blank(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@contextmanager
def reading(place: Path) -> Iterator[None]:
    """Says in one sentence which file or directory could not be read, and why."""
    try:
        yield
    except ConfigError:
        raise
    except UNREADABLE as error:
        reason = str(error).split("\n")[0] or type(error).__name__
        raise Unreadable(f"{place} cannot be read: {reason}") from error
