from collections.abc import Callable
from pathlib import Path

import pytest

from hybridrl.config.schema_parts import (
    CustomRewardConfig,
    RewardConfig,
    RewardManagerConfig,
    RewardManagerModuleConfig,
)
from tests.sections import section_of

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
        values = {
            "num_workers": num_workers,
            "timeout": timeout,
            "custom_reward_function": CustomRewardConfig(path, name, reward_kwargs),
            "reward_manager": RewardManagerConfig("register", manager, RewardManagerModuleConfig(None, "custom")),
        }
        return section_of(RewardConfig, "reward", **values | (more or {}))

    return make
