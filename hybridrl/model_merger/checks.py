"""Proofs that two sets of tensors are the same: what was written and what was read, or two saved models."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor

from hybridrl.checkpoint.manifest import MANIFEST, faults
from hybridrl.checkpoint.read import open_tensors, read_safetensors
from hybridrl.model_merger.source import CheckFailed, Source, type_names


def check_damage(source: Source) -> None:
    """Refuse files that are not as they were written, where their checksums were written too."""
    step, wrong = source.directory.absolute().parent, source.tensors.faults()
    if (step / MANIFEST).is_file():
        wrong += [fault for fault in faults(step) if fault.startswith((MANIFEST, f"{source.directory.name}/"))]
    if wrong:
        raise CheckFailed(f"{source.directory} is damaged: {'; '.join(wrong[:3])}; merge another step")


def check_tensors(source: Source, directory: Path, dtype: torch.dtype | None) -> str:
    """Read back what was written, and once more what it was made of. Returns what was found, in words."""
    written = read_safetensors(directory)
    if set(written.meta) != set(source.names):
        raise CheckFailed(f"{directory}: other tensors were written than were to be")
    wrong = [
        name for name in tracked(source.names, "checking") if not _same(source.read(name, dtype), written.read(name))
    ]
    if wrong:
        raise CheckFailed(f"{len(wrong)} tensors were written otherwise than they were read: {', '.join(wrong[:3])}")
    for name, first in source.tied.items():
        if name in source.tensors.meta and not _same(source.read(name, None), source.read(first, None)):
            raise CheckFailed(f"{name} is saved with other values than {first}, to which the configuration ties it")
    return f"{len(source.names)} of {len(source.names)} equal bit for bit"


def compare(source: Source, directory: Path) -> str:
    """Hold a saved model against another, rounded to the other's types. Returns what was found, in words."""
    other = open_tensors(directory)
    missing = [name for name in source.names if name not in other.meta]
    more = [name for name in other.meta if name not in source.names and name not in source.tied]
    wrong = [f"{name} is missing there" for name in missing] + [f"{name} is only there" for name in more]
    for name in tracked([name for name in source.names if name in other.meta], "comparing"):
        theirs = other.read(name)
        ours = source.read(name, theirs.dtype)
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


def _same(one: Tensor, other: Tensor) -> bool:
    """Bit for bit: NaN equals itself, and 0 is not -0."""
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    return torch.equal(*(tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other)))
