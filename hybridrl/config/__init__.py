"""Configuration: verl's key names, resolved once into typed sections. Knows neither torch nor Ray."""

from hybridrl.config.error import ConfigError
from hybridrl.config.load import load_ppo_config, load_sft_config
from hybridrl.config.schema import PPOConfig
from hybridrl.config.schema_sft import SFTConfig

__all__ = ["ConfigError", "PPOConfig", "SFTConfig", "load_ppo_config", "load_sft_config"]
