"""Sections of the configuration with the shipped values, and some of one's choice."""

from typing import Any

from hybridrl.agents.environments import EnvironmentSettings
from hybridrl.config.schema_parts import AgentConfig, MultiTurnConfig
from hybridrl.config.values import hints
from tests.sections import section_of


def agent_of(**keys: Any) -> AgentConfig:
    return section_of(AgentConfig, "actor_rollout_ref.rollout.agent", **keys)


def multi_turn_of(**keys: Any) -> MultiTurnConfig:
    return section_of(MultiTurnConfig, "actor_rollout_ref.rollout.multi_turn", **keys)


def environments_of(*, libraries: tuple[str, ...] = (), **keys: Any) -> EnvironmentSettings:
    agent = {name: keys.pop(name) for name in [*keys] if name in hints(AgentConfig)}
    return EnvironmentSettings(multi_turn_of(**keys), agent_of(**agent), libraries)
