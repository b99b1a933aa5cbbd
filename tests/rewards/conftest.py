from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from hybridrl.config.schema_parts import (
    CustomRewardConfig,
    OverlongBufferConfig,
    RewardConfig,
    RewardKwargsConfig,
    RewardManagerConfig,
    RewardManagerModuleConfig,
    SandboxConfig,
)

WriteReward = Callable[..., RewardConfig]


@pytest.fixture
def reward_config(tmp_path: Path) -> WriteReward:
    """Make a RewardConfig for a reward file with the given source, or for the built-in scorers; `more` are its keys."""

    def make(
        source: str | None = None,
        *,
        path: str | None = None,
        name: str = "compute_score",
        num_workers: int = 1,
        timeout: float = 20,
        manager: str = "naive",
        more: dict[str, object] | None = None,
        **reward_kwargs: object,
    ) -> RewardConfig:
        if source is not None:
            file = tmp_path / "my_reward.py"
            file.write_text(source)
            path = path or str(file)
        settings = RewardConfig(
            num_workers=num_workers,
            timeout=timeout,
            memory_mb=None,
            retries=0,
            on_error="exclude",
            max_fault_rate=0.5,
            max_fault_steps=3,
            add_environment_reward=False,
            functions={},
            weights={},
            scale=1.0,
            clip_range=[],
            max_concurrent=1,
            max_rpm=None,
            max_tpm=None,
            estimated_tokens_per_request=2000,
            custom_reward_function=CustomRewardConfig(path, name, reward_kwargs),
            reward_manager=RewardManagerConfig("register", manager, RewardManagerModuleConfig(None, "custom")),
            sandbox_fusion=SandboxConfig(None, 1024),
            reward_kwargs=RewardKwargsConfig(512, OverlongBufferConfig(False, 4096, 1.0, False)),
        )
        return replace(settings, **(more or {}))

    return make
