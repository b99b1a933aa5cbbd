"""Agents that rows run in: from the configuration to what the processes of episodes run them with."""

from collections.abc import Callable
from functools import partial

from hybridrl.config import PPOConfig
from hybridrl.config.custom_code import script_path
from hybridrl.endpoint.agent import Agents
from hybridrl.endpoint.functions import AgentSettings
from hybridrl.environments.episode_loop import Kit
from hybridrl.rewards.load import uses_built_in


def agent_settings(config: PPOConfig) -> AgentSettings | None:
    """Which function of the user's rows run in; ConfigError if there is none of its name. None: none is configured."""
    rollout, agent = config.actor_rollout_ref.rollout, config.actor_rollout_ref.rollout.agent
    if agent.path is None:
        return None
    # With full_determinism turns are sampled once every episode wants one, so none may wait for another to end.
    concurrency = None if rollout.full_determinism else agent.concurrency
    path, needs_reward = str(script_path(agent.path)), uses_built_in(config.reward)
    settings = AgentSettings(path, agent.name, agent.mode, concurrency, agent.turn_discount, needs_reward)
    settings.load()
    return settings


def agent_runner(config: PPOConfig) -> Callable[[Kit], Agents] | None:
    """What makes the runner of agents in a process of episodes."""
    settings = agent_settings(config)
    return settings and partial(Agents, settings)
