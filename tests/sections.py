"""Sections of the configuration with the shipped values, and some of one's choice; and the least that a run needs."""

import json
from collections.abc import Mapping
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, TypeVar

from hybridrl.config.compose import shipped
from hybridrl.config.teachers import TeacherConfig
from hybridrl.config.values import hints, value_of

S = TypeVar("S")


def section_of(kind: type[S], key: str, config: str = "ppo_trainer", **values: Any) -> S:
    """Make the section of a key with the values of a shipped configuration, but for these."""
    return _made(kind, value_of(shipped(config).values, key) | values)


def teacher_of(**values: Any) -> TeacherConfig:
    """Make the section of a teacher; keys without a value are null."""
    return TeacherConfig(**dict.fromkeys(hints(TeacherConfig)) | values)


def keys_of_run(directory: Path) -> list[str]:
    """Write a row and a model without weights into a directory; return the keys of a command that trains it on CPU."""
    (directory / "train.jsonl").write_text("{}\n")
    (directory / "config.json").write_text(json.dumps({"max_position_embeddings": 4096}))
    (directory / "model.safetensors").touch()
    files = [f"data.train_files={directory}/train.jsonl", f"actor_rollout_ref.model.path={directory}"]
    return [*files, "trainer.device=cpu"]


def _made(kind: type[S], values: Mapping[str, Any]) -> S:
    return kind(**{name: _value(hint, values[name]) for name, hint in hints(kind).items()})


def _value(hint: Any, value: Any) -> Any:
    if is_dataclass(hint) and isinstance(value, Mapping):
        return _made(hint, value)
    is_list = str(hint).startswith(("list[", "typing.Annotated[list["))
    return value if not is_list or isinstance(value, (list, tuple)) else [] if value in (None, "???") else [value]
