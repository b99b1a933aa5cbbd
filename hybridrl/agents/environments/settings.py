"""The sections of the configuration that say which environments, tools and agents rows run in."""

from dataclasses import dataclass

from hybridrl.config.schema_rollout import AgentConfig, MultiTurnConfig

MULTI_TURN = "actor_rollout_ref.rollout.multi_turn"
AGENT = "actor_rollout_ref.rollout.agent"
ENVIRONMENT = f"{MULTI_TURN}.environment"
ONLINE = "online"


@dataclass(frozen=True)
class EnvironmentSettings:
    """The environment that rows run in, unless a row names another; `libraries` are imported first, for what they
    register."""

    multi_turn: MultiTurnConfig
    agent: AgentConfig
    libraries: tuple[str, ...] = ()

    @property
    def function(self) -> str | None:
        """The user's function that rows run in: its file, or online for one outside the run."""
        return ONLINE if self.agent.mode == ONLINE else self.agent.path

    @property
    def has_tools(self) -> bool:
        """Whether there are tools."""
        return bool(self.multi_turn.tools or self.multi_turn.tool_config_path or self.multi_turn.function_tool_path)
