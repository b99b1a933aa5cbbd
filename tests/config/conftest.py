"""A model and rows that are there, and a configuration of them."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from hybridrl.config import ConfigError, PPOConfig, load_ppo_config


@dataclass
class Loaded:
    config: PPOConfig
    notes: list[str] = field(default_factory=list)
    changed: str = ""


Load = Callable[..., Loaded]


def errors_of(load: Load, *overrides: str, **more: object) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(*overrides, **more)
    return str(caught.value).splitlines()


@pytest.fixture(autouse=True)
def a_machine_without_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def needed(tmp_path: Path) -> list[str]:
    """The keys that every command needs: rows, and a model of 1024 positions."""
    (tmp_path / "train.jsonl").write_text("{}\n")
    (tmp_path / "empty").mkdir()
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({"max_position_embeddings": 1024}))
    (tmp_path / "model" / "model.safetensors").touch()
    return ["data.train_files=train.jsonl", "actor_rollout_ref.model.path=model"]


@pytest.fixture
def load(needed: list[str]) -> Load:
    """Load with further overrides."""

    def run(*overrides: str, **more: object) -> Loaded:
        notes: list[str] = []
        shown: list[str] = []
        config = load_ppo_config([*needed, *overrides], report=notes.append, show=shown.append, **more)
        *information, changed = (text for text in shown if "so the defaults apply" not in text)  # as most tests do
        return Loaded(config, notes + information, changed)

    return run
