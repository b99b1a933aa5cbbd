"""Proofs that two sets of tensors are the same: what was written and what was read, or two saved models."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor

from hybridrl.checkpoint.manifest import MANIFEST, faults
from hybridrl.checkpoint.read import open_tensors, stored_tensors
from hybridrl.checkpoint.stored import Stored
from hybridrl.checkpoint.tensors import Tensors
from hybridrl.checkpoint.write import one_thread
from hybridrl.model_merger.source import CheckFailed, Source, type_names

# Compares a directory that was written with what it was made of, and says what it found. Raises CheckFailed.
Check = Callable[[Source, Path], str]

# By their width: floating-point numbers are compared as such of their bits.
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def check_damage(source: Source) -> str:
    """Refuse files that are not as they were saved, where their checksums were saved too."""
    step, wrong = source.directory.absolute().parent, source.tensors.faults()
    with_manifest = (step / MANIFEST).is_file()
    if with_manifest:
        wrong += faults(step, f"{source.directory.name}/")
    if wrong:
        raise CheckFailed(f"{source.directory} is damaged: {'; '.join(wrong[:3])}; merge another step")
    return f"files as {MANIFEST} has them" if with_manifest else f"without {MANIFEST}"


@one_thread()
def check_tensors(source: Source, directory: Path) -> str:
    """Read back what was written, and once more what it was made of."""
    written = stored_tensors(directory)
    told = {name: (stored.shape, stored.dtype) for name, stored in written.items()}
    if told != {name: (tensor.shape, tensor.dtype) for name, tensor in source.meta.items()}:
        raise CheckFailed("other tensors were written than were to be")
    wrong = [name for name in tracked(source.names, "checking") if not _is_written(source, name, written[name])]
    if wrong:
        raise CheckFailed(f"{len(wrong)} tensors were written otherwise than they were read: {', '.join(wrong[:3])}")
    for name, first in source.tied.items():
        if name in source.tensors.meta and not _same_values(source.tensors, name, first):
            raise CheckFailed(f"{name} is saved with other values than {first}, to which the configuration ties it")
    return f"{len(written)} of {len(written)} equal bit for bit"


def compare(source: Source, directory: Path) -> str:
    """Hold a saved model against another, rounded to the other's types. Returns what was found, in words."""
    other = open_tensors(directory)
    missing = [name for name in source.names if name not in other.meta]
    more = [name for name in other.meta if name not in source.names and name not in source.tied]
    wrong = [f"{name} is missing there" for name in missing] + [f"{name} is only there" for name in more]
    for name in tracked([name for name in source.names if name in other.meta], "comparing"):
        theirs = other.read(name)
        ours = source.tensors.read(name).to(theirs.dtype)
        if ours.shape != theirs.shape:
            wrong.append(f"{name} is {list(ours.shape)} here and {list(theirs.shape)} there")
        elif not _same(ours, theirs):
            wrong.append(f"{name} differs by up to {float((ours.double() - theirs.double()).abs().max()):.2g}")
    if wrong:
        more = f"; and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise CheckFailed(f"{source.directory} and {directory} differ: {'; '.join(wrong[:3])}{more}")
    return f"{len(source.names)} tensors equal bit for bit, in {type_names(other.meta)}"


def tracked(names: Sequence[str], work: str) -> Iterable[str]:
    """The names, with a bar on a terminal that says how far it is."""
    console = Console(stderr=True)
    return track(names, work, console=console, transient=True, disable=not console.is_terminal)


def _is_written(source: Source, name: str, written: Stored) -> bool:
    for first, piece in source.tensors.pieces(name):
        if not _same(source.rounded(name, piece).reshape(-1), written.elements(first, piece.numel())):
            return False
    return True


def _same_values(tensors: Tensors, one: str, other: str) -> bool:
    """Piece by piece where they are cut alike, as two tensors of one shape are."""
    pairs = zip(tensors.pieces(one), tensors.pieces(other), strict=False)
    if all(first == second and _same(piece, twin) for (first, piece), (second, twin) in pairs):
        return True
    return _same(tensors.read(one), tensors.read(other))


def _same(one: Tensor, other: Tensor) -> bool:
    """Bit for bit: NaN equals itself, and 0 is not -0."""
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    return torch.equal(*(tensor.contiguous().reshape(-1).view(INTEGERS[one.itemsize]) for tensor in (one, other)))
