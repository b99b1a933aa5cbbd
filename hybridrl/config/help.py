"""The keys as a person reads them: name, default, and the comment that stands above each in conf/*.yaml."""

from pathlib import Path
from typing import Any

import yaml


def explain_keys(conf: Path, config_name: str) -> str:
    """Every key of a configuration with its default and meaning, section by section."""
    lines: list[str] = []
    for package, file in _files(conf, conf / f"{config_name}.yaml", ""):
        entries = _entries(file)
        if entries:
            lines.append(f"\n{package or config_name}")
        for key, default, meaning in entries:
            lines.append(f"  {key} = {default}")
            lines.append(f"      {meaning}")
    return "\n".join(lines).strip()


def _files(conf: Path, file: Path, package: str) -> list[tuple[str, Path]]:
    """The YAML files behind a configuration with the section each one fills, in the order of the defaults lists."""
    found = [(package, file)]
    for item in yaml.safe_load(file.read_text()).get("defaults", []):
        if item == "_self_":
            continue
        if isinstance(item, str):
            found = [(package, file.parent / f"{item}.yaml"), *found]
            continue
        (group, name), *_ = item.items()
        folder, _, place = group.lstrip("/").partition("@")
        inner = ".".join(part for part in (package, place or folder) if part)
        found += _files(conf, conf / folder / f"{name}.yaml", inner)
    return found


def _entries(file: Path) -> list[tuple[str, Any, str]]:
    """Key (with its parents in this file), default as written, and the comment above it."""
    found, comment, parents = [], [], []
    in_defaults = False
    for line in file.read_text().splitlines():
        text, indent = line.strip(), len(line) - len(line.lstrip())
        if text.startswith("#"):
            comment.append(text.lstrip("# "))
            continue
        if not text:
            comment = []
            continue
        if indent == 0:
            in_defaults = text == "defaults:"
        if in_defaults:
            comment = []
            continue
        key, _, default = text.partition(":")
        parents = [*parents[: indent // 2], key]
        if default.strip():
            found.append((".".join(parents), default.strip(), " ".join(comment)))
            comment = []
    return found
