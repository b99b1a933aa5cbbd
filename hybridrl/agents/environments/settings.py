"""What the configuration says about environments and tools, as plain values."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

MULTI_TURN = "actor_rollout_ref.rollout.multi_turn"
AGENT = "actor_rollout_ref.rollout.agent"
ENVIRONMENT = f"{MULTI_TURN}.environment"


@dataclass(frozen=True)
class EnvironmentSettings:
    """Which environment rows run in, unless a row names its own, and the limits of tool calls.

    `environment` is a registered name or path.py:Class; `environment_kwargs` is its configuration, or holds those of
    environments and of built-in tools by name. `tools` are names of built-in tools, in addition to those of the files.
    `agent_path` is a file with a function that rows run in. `libraries` are imported first, for what they register.
    `max_turns` is for rows without their own.

    `max_tool_response_length` is in characters; `tool_timeout` in seconds per call; a network tool is called again
    `tool_retries` times before its failure counts. What then happens is `on_tool_failure`: "message", the policy reads
    it, or "exclude", the episode ends as a fault; by default a network's failure excludes and a local one is read.
    """

    environment: str | None = None
    environment_kwargs: Mapping[str, Any] = field(default_factory=dict)
    tools: tuple[str, ...] = ()
    libraries: tuple[str, ...] = ()
    tool_config_path: str | None = None
    function_tool_path: str | None = None
    interaction_config_path: str | None = None
    agent_loop_config_path: str | None = None
    default_agent_loop: str = "single_turn_agent"
    agent_path: str | None = None
    max_turns: int | None = None
    max_parallel_calls: int = 1
    max_tool_response_length: int = 256
    tool_response_truncate_side: str = "middle"
    tool_timeout: float = 30.0
    tool_retries: int = 2
    on_tool_failure: str | None = None

    @property
    def has_tools(self) -> bool:
        """Whether there are tools."""
        return bool(self.tools or self.tool_config_path or self.function_tool_path)
