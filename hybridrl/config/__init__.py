"""Configuration: verl's key names, resolved once into typed sections. Imports neither torch nor Ray."""

from hybridrl.config.findings import ConfigError
from hybridrl.config.load import load_ppo_config, load_sft_config
from hybridrl.config.schema import PPOConfig, SFTConfig

__all__ = ["ConfigError", "PPOConfig", "SFTConfig", "load_ppo_config", "load_sft_config"]
