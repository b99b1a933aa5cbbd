"""Fields of a row that environments read, wherever the format of the row has them."""

from collections.abc import Mapping
from typing import Any


def mapping(value: Any) -> Mapping[str, Any]:
    """The value if it is a mapping, else an empty one."""
    return value if isinstance(value, Mapping) else {}


def field(row: Mapping[str, Any], name: str, default: Any = None, config: Mapping[str, Any] | None = None) -> Any:
    """A field of the row: one of its columns, of `extra_info`, or of the ground truth if that has fields; then of the
    configuration."""
    truth = mapping(ground_truth(row))
    for place in (row, mapping(row.get("extra_info")), truth, config or {}):
        if place.get(name) is not None:
            return place[name]
    return default


def ground_truth(row: Mapping[str, Any]) -> Any:
    """The ground truth, under `reward_spec` (SkyRL) or `reward_model` (verl)."""
    for column in ("reward_spec", "reward_model"):
        if isinstance(row.get(column), Mapping):
            return row[column].get("ground_truth")
    return None


def needed(row: Mapping[str, Any], name: str) -> Any:
    """A field as `field` finds it; ValueError names it if there is none."""
    value = field(row, name)
    if value is None:
        columns = ", ".join(row)
        raise ValueError(f"the row has no {name}: it is a column, or a field of extra_info; its columns are {columns}")
    return value


def tools_kwargs(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the arguments of a row for each method of each tool: a column, or a field of extra_info."""
    found = mapping(row.get("tools_kwargs")) or mapping(mapping(row.get("extra_info")).get("tools_kwargs"))
    return {name: kwargs for name, kwargs in found.items() if kwargs is not None}  # Parquet has every tool in every row


def interaction_kwargs(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the arguments of a row for its interaction, `name` among them."""
    return mapping(mapping(row.get("extra_info")).get("interaction_kwargs")) or mapping(row.get("interaction_kwargs"))
