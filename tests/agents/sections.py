"""Sections of the configuration with the shipped values, and some of one's choice."""

from typing import Any

from hybridrl.agents.environments import EnvironmentSettings
from hybridrl.config.compose import shipped
from hybridrl.config.schema_parts import AgentConfig, MultiTurnConfig
from hybridrl.config.values import hints, value_of


def agent_of(**keys: Any) -> AgentConfig:
    values = value_of(shipped("ppo_trainer").values, "actor_rollout_ref.rollout.agent")
    return AgentConfig(**values | keys)


def multi_turn_of(**keys: Any) -> MultiTurnConfig:
    values = value_of(shipped("ppo_trainer").values, "actor_rollout_ref.rollout.multi_turn")
    return MultiTurnConfig(**values | keys)


def environments_of(*, libraries: tuple[str, ...] = (), **keys: Any) -> EnvironmentSettings:
    agent = {name: keys.pop(name) for name in [*keys] if name in hints(AgentConfig)}
    return EnvironmentSettings(multi_turn_of(**keys), agent_of(**agent), libraries)
