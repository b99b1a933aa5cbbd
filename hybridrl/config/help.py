"""The keys as a person reads them: name, shipped value, and the comment that stands above each in conf/*.yaml."""

import textwrap
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

import yaml

from hybridrl.config.compose import CONF, SHIPPED, shipped
from hybridrl.config.names import value_keys
from hybridrl.config.read import MISSING, show
from hybridrl.config.schema import PPOConfig
from hybridrl.config.schema_sft import SFTConfig

COLUMN = 46  # where meanings begin


def explain_keys(config_name: str, first: tuple[str, ...], width: int) -> str:
    """Every key of a shipped configuration with value and meaning, section by section; some of them `first`."""
    values, meanings = shipped(config_name).values, key_meanings(CONF / f"{config_name}.yaml")
    lines = ["keys to begin with:"]
    lines += [_entry(key, value_of(values, key), meanings[key], width) for key in first]
    for section, keys in groupby(meanings, key=lambda key: key.rpartition(".")[0]):
        lines.append(f"\n{section or 'beside the sections'}:")
        lines += [_entry(key.rpartition(".")[2], value_of(values, key), meanings[key], width) for key in keys]
    return "\n".join(lines)


def changed_values(config: PPOConfig | SFTConfig) -> str:
    """The keys that differ from the shipped values, a line a section; what merely follows another key is left out."""
    values, usually = asdict(config), shipped(SHIPPED[type(config)])
    changed: dict[str, list[str]] = {}
    for key in value_keys(type(config)):
        value, followed = value_of(values, key), usually.follows.get(key)
        usual = value_of(values, followed) if followed else value_of(usually.values, key)
        if value != usual and value != (usual or []):
            section, _, name = key.partition(".")
            changed.setdefault(section, []).append(f"{name}={show(value)}" if name else show(value))
    return "\n".join(f"  {section}: {', '.join(items)}" for section, items in changed.items())


def value_of(values: dict[str, Any], key: str) -> Any:
    """The value at a full key in nested values."""
    for name in key.split("."):
        values = values[name]
    return values


def _entry(name: str, value: Any, meaning: str, width: int) -> str:
    head = f"  {name} " + ("(must be set)" if value == MISSING else f"= {show(value)}")
    lines = textwrap.wrap(meaning, max(width - COLUMN, 20), break_on_hyphens=False)
    if len(head) < COLUMN - 1:
        lines = [head.ljust(COLUMN) + lines[0], *(" " * COLUMN + line for line in lines[1:])]
    else:
        lines = [head, *(" " * COLUMN + line for line in lines)]
    return "\n".join(lines)


def key_meanings(file: Path, package: str = "") -> dict[str, str]:
    """The comment above every key of a configuration file and of those it lists, by full key, in their order."""
    found: dict[str, str] = {}
    for item in yaml.safe_load(file.read_text(encoding="utf-8")).get("defaults", ["_self_"]):
        if item == "_self_":
            found |= _comments(file, package)
        elif isinstance(item, str):
            found |= key_meanings(file.parent / f"{item}.yaml", package)
        else:
            ((group, name),) = item.items()
            folder, _, place = group.removeprefix("/").partition("@")
            inner = ".".join(part for part in (package, place or folder) if part)
            found |= key_meanings(CONF / folder / f"{name}.yaml", inner)
    return found


def _comments(file: Path, package: str) -> dict[str, str]:
    """The comment above each key of one file that is given a value there."""
    found: dict[str, str] = {}
    comment: list[str] = []
    parents = [package] if package else []
    depth = len(parents)
    for line in file.read_text(encoding="utf-8").splitlines():
        text = line.strip()
        if text.startswith("#"):
            comment.append(text.removeprefix("#").strip())
            continue
        key, colon, value = text.partition(":")
        level = (len(line) - len(line.lstrip())) // 2
        parents = [*parents[: depth + level], key]
        if colon and value and not key.startswith("-"):
            found[".".join(parents)] = " ".join(comment)
        comment = []
    return found
