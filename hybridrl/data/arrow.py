"""Rows of columnar files (parquet, Arrow) as the Python values that were written.

Arrow gives every structure of a column the fields of all others, with null where a row had none. Such a null would be
rendered into prompts, trained on in the arguments of calls, and passed to tools, so fields that are null are left out.
Only a structure that is itself a column keeps all its fields, such as `extra_info`: reward functions read them by name.
A null inside a list, a map or a JSON text was written as such and stays.
"""

import functools
import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.ipc
import pyarrow.parquet
from pyarrow import types

BATCH = 1000  # rows converted to Python values at a time


def read_columns(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file, which is memory-mapped instead of read at once. Raises what pyarrow does."""
    with ExitStack() as stack:
        if path.suffix.lower() == ".arrow":
            batches = stack.enter_context(pyarrow.ipc.open_stream(stack.enter_context(pyarrow.memory_map(str(path)))))
        else:
            batches = _batches(stack.enter_context(pyarrow.parquet.ParquetFile(path, memory_map=True)))
        for batch in batches:
            kinds = {field.name: field.type for field in batch.schema}
            for row in batch.to_pylist(maps_as_pydicts="strict"):
                yield {name: _plain(value, kinds[name], whole=True) for name, value in row.items()}


def _batches(file: pyarrow.parquet.ParquetFile) -> Iterator[pyarrow.RecordBatch]:
    """Yield a file batch by batch, or by row group where a dictionary inside a structure prevents that."""
    batches = file.iter_batches(BATCH)
    try:
        first = next(batches, None)
    except pyarrow.ArrowNotImplementedError:
        for group in range(file.num_row_groups):
            yield from file.read_row_group(group).to_batches(BATCH)
        return
    if first is not None:
        yield first
        yield from batches


def _plain(value: Any, kind: pyarrow.DataType, *, whole: bool = False) -> Any:
    """Return a value of a type without the fields that Arrow added, and JSON texts decoded; the fields of a `whole`
    column stay."""
    if value is None or not _is_nested(kind):
        return value
    if isinstance(kind, pyarrow.BaseExtensionType):
        return json.loads(value) if kind.extension_name == "arrow.json" else _plain(value, kind.storage_type)
    if types.is_struct(kind):
        fields = ((field.name, _plain(value[field.name], field.type)) for field in kind)
        return {name: item for name, item in fields if whole or item is not None}
    if types.is_map(kind):
        return {key: _plain(item, kind.item_type) for key, item in value.items()}
    return [_plain(item, kind.value_type) for item in value]


@functools.cache
def _is_nested(kind: pyarrow.DataType) -> bool:
    """Whether a type holds structures or JSON texts."""
    if isinstance(kind, pyarrow.BaseExtensionType):
        return kind.extension_name == "arrow.json" or _is_nested(kind.storage_type)
    if types.is_map(kind):
        return _is_nested(kind.item_type)
    lists = (types.is_list, types.is_large_list, types.is_fixed_size_list, types.is_list_view, types.is_large_list_view)
    return types.is_struct(kind) or (any(is_list(kind) for is_list in lists) and _is_nested(kind.value_type))
