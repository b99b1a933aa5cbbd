"""Reads what torch.distributed.checkpoint wrote, without running code that its files name.

torch's own reader unpickles `.metadata` and every value that is not a tensor with `pickle.load`, which calls whatever
the file names. Here the metadata may be built of torch's metadata classes only, and values of plain types only.
"""

import io
import os
import pickle
from pathlib import Path, PosixPath
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, Metadata, filesystem, metadata
from torch.distributed.checkpoint.planner import ReadItem

from hybridrl.checkpoint.tensors import TYPES, reading
from hybridrl.config.model_directory import SHARDS


class ShardReader(FileSystemReader):
    """Reads one directory with our own shards. Raises Unreadable where the metadata is damaged or names anything else
    than metadata."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.directory = directory

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        with reading(self.directory / SHARDS), (self.directory / SHARDS).open("rb") as file:
            found = _MetadataUnpickler(file).load()
            if not isinstance(found, Metadata):
                raise ValueError("it holds no metadata of a checkpoint")
            for place in (found.storage_data or {}).values():
                if os.path.basename(place.relative_path) != place.relative_path:
                    raise ValueError(f"it names a file outside its directory, {place.relative_path!r}")
        found.storage_meta = found.storage_meta or metadata.StorageMeta()
        found.storage_meta.load_id = self.load_id
        return found


class PlainPlanner(DefaultLoadPlanner):
    """Loads values that are not tensors, such as the number of updates, with torch's restricted unpickler."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        plain = io.BytesIO()  # what the base class unpickles, without restriction
        torch.save(torch.load(value, weights_only=True), plain)
        plain.seek(0)
        super().load_bytes(read_item, plain)


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if f"{module}.{name}" not in _BUILT:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which is no part of a checkpoint's metadata")
        return _BUILT[f"{module}.{name}"]


_CLASSES = [
    metadata.BytesStorageMetadata,
    metadata.ChunkStorageMetadata,
    metadata.Metadata,
    metadata.MetadataIndex,
    metadata.StorageMeta,
    metadata.TensorProperties,
    metadata.TensorStorageMetadata,
    metadata._MEM_FORMAT_ENCODING,
    filesystem._StorageInfo,
]
_BUILT = {
    **{f"{built.__module__}.{built.__name__}": built for built in _CLASSES},
    **{str(dtype): dtype for dtype in TYPES},
    "torch.Size": torch.Size,
    "torch.serialization._get_layout": {"torch.strided": torch.strided}.__getitem__,
    "pathlib.PosixPath": PosixPath,
}
