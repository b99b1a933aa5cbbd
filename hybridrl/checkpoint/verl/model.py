"""The model in a checkpoint of verl's FSDP workers, which is one file a rank: put together without those ranks.

FSDP2 saves DTensors, FSDP1 DTensors or ShardedTensors; where the ranks hold whole tensors, the first one's are taken.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hybridrl.checkpoint.pickles import Record, is_damaged, load
from hybridrl.checkpoint.stored import Stored
from hybridrl.checkpoint.tensors import Part, Tensors, Unreadable, blank, reading
from hybridrl.config import ConfigError
from hybridrl.config.model_directory import VERL_SHARDS

SETTINGS = "fsdp_config.json"
MODEL, OPTIMIZER, EXTRA = "model", "optim", "extra_state"  # kinds of files


def holds_verl(directory: Path, kind: str = MODEL) -> bool:
    return any(True for _ in directory.glob(VERL_SHARDS.replace(MODEL, kind)))


class RankFiles:
    """The files of one kind, one a rank. Raises Unreadable where a rank's is missing or cannot be read."""

    def __init__(self, directory: Path, kind: str) -> None:
        ranks = _world_size(directory)
        self.paths = [directory / f"{kind}_world_size_{ranks}_rank_{rank}.pt" for rank in range(ranks)]
        if missing := [path.name for path in self.paths if not path.is_file()]:
            raise Unreadable(f"{directory}: {', '.join(missing[:3])} of {ranks} ranks is missing; copy it there")
        self.values = [load(path) for path in self.paths]

    def faults(self) -> list[str]:
        """Files of which the checksums, which torch.save writes, are not those of their content."""
        return [f"{path.name}: changed since it was written" for path in self.paths if is_damaged(path)]


def read_verl_model(directory: Path) -> Tensors:
    """The model's tensors. Raises Unreadable where a file is missing or damaged, ConfigError where it holds something
    else."""
    files = RankFiles(directory, MODEL)
    with reading(files.paths[0]):
        meta = {name: described(value, directory / name) for name, value in files.values[0].items()}

    def parts(name: str) -> Iterator[Part]:
        with reading(directory / name):
            yield from parts_of([rank.get(name) for rank in files.values])

    return Tensors(f"of verl, {len(files.paths)} ranks", meta, parts, files.faults)


def described(value: Any, place: Path) -> Tensor:
    """Shape and type of the whole tensor of which this is one rank's part."""
    if isinstance(value, Stored):
        return blank(value.shape, value.dtype)
    if not isinstance(value, Record) or _kind(value) not in ("DTensor", "ShardedTensor"):
        raise ConfigError(f"{place} is neither a tensor nor a DTensor or ShardedTensor, but {_kind(value)}")
    return blank(torch.Size(value.arguments[2]), value.arguments[1])


def parts_of(held: list[Any]) -> Iterator[Part]:
    """The parts of a tensor of which each rank holds one, or a replica of one, or all."""
    if isinstance(held[0], Stored):
        yield from held[0].parts([0] * len(held[0].shape))
    elif _kind(held[0]) == "DTensor":
        yield from _dtensor_parts(held)
    else:
        yield from _sharded_tensor_parts(held)


def _dtensor_parts(held: list[Any]) -> Iterator[Part]:
    """Parts in the order of the ranks. verl's ranks lie row by row in a mesh whose last dimension is the sharded one,
    so the first ones hold all and the others repeat them."""
    placements = held[0].fields["_spec"].fields["placements"]
    kinds = [_kind(placement) for placement in placements if _kind(placement) != "Replicate"]
    if kinds not in ([], ["Shard"]):
        raise ValueError(f"it is placed as {' and '.join(kinds)} (tensor parallel), which is not supported")
    dims = [placement.fields["dim"] for placement in placements if _kind(placement) == "Shard"]
    shape = held[0].arguments[2]
    offsets = [0] * len(shape)
    for value in held:
        local = value.fields["_local_tensor"]
        yield from local.parts(tuple(offsets))
        for dim in dims:
            offsets[dim] += local.shape[dim]
        if all(offsets[dim] >= shape[dim] for dim in dims):
            return


def _sharded_tensor_parts(held: list[Any]) -> Iterator[Part]:
    """Parts of all ranks, once each."""
    seen = set()
    for value in held:
        for shard in value.state[0]:
            offsets = shard.fields["metadata"].fields["shard_offsets"]
            if tuple(offsets) not in seen:
                seen.add(tuple(offsets))
                yield from shard.fields["tensor"].parts(offsets)


def _kind(value: object) -> str:
    return type(value).__name__


def _world_size(directory: Path) -> int:
    """As written down, or as the files' names have it where verl wrote no settings yet."""
    if (directory / SETTINGS).is_file():
        with reading(directory / SETTINGS):
            return int(json.loads((directory / SETTINGS).read_text())["world_size"])
    names = [path.name for path in directory.glob(VERL_SHARDS)]
    sizes = {int(number) for name in names for number in re.findall(r"world_size_(\d+)_rank_\d+\.pt$", name)}
    if len(sizes) != 1:
        raise ConfigError(f"{directory} has files of several runs, of {sorted(sizes)} ranks; leave those of one there")
    return sizes.pop()
