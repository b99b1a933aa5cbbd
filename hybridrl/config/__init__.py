"""Configuration: verl's key names, resolved once into typed sections. Imports neither torch nor Ray."""

from typing import TYPE_CHECKING, Any

from hybridrl.config.findings import ConfigError
from hybridrl.config.schema import EvaluationConfig, PPOConfig, SFTConfig, TrainingConfig

if TYPE_CHECKING:
    from hybridrl.config.load import load_ppo_config, load_sft_config

__all__ = [
    "ConfigError", "EvaluationConfig", "PPOConfig", "SFTConfig", "TrainingConfig", "load_ppo_config", "load_sft_config",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Import Hydra only where a configuration is loaded: of a scoring process it would be a third of the start."""
    if name in ("load_ppo_config", "load_sft_config"):
        from hybridrl.config import load

        return getattr(load, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
