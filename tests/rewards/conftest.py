from collections.abc import Callable
from pathlib import Path

import pytest

from hybridrl.config.schema import (
    CustomRewardConfig,
    OverlongBufferConfig,
    RewardConfig,
    RewardKwargsConfig,
    RewardManagerConfig,
)

WriteReward = Callable[..., RewardConfig]


@pytest.fixture
def reward_config(tmp_path: Path) -> WriteReward:
    """Make a RewardConfig for a reward file with the given source, or for the built-in scorers."""

    def make(
        source: str | None = None,
        *,
        path: str | None = None,
        name: str = "compute_score",
        num_workers: int = 1,
        timeout: float = 20,
        **reward_kwargs: object,
    ) -> RewardConfig:
        if source is not None:
            file = tmp_path / "my_reward.py"
            file.write_text(source)
            path = path or str(file)
        return RewardConfig(
            num_workers=num_workers,
            timeout=timeout,
            on_error="exclude",
            max_fault_rate=0.5,
            max_fault_steps=3,
            custom_reward_function=CustomRewardConfig(path, name, reward_kwargs),
            reward_manager=RewardManagerConfig("naive"),
            reward_kwargs=RewardKwargsConfig(512, OverlongBufferConfig(False, 4096, 1.0, False)),
        )

    return make
