"""Tools, interactions and agent loops that are written for verl, as rows and configurations name them."""

from collections.abc import Mapping
from typing import Any

from hybridrl.agents.environments.tools import Tool
from hybridrl.compat.verl import loops, stand_ins, tool_loop, tools
from hybridrl.compat.verl.loops import agent_loop
from hybridrl.compat.verl.names import provide_verl_imports
from hybridrl.compat.verl.tools import (
    InteractionEnvironment,
    VerlTool,
    is_registered,
    load_interactions,
    load_verl_tools,
)

__all__ = [
    "InteractionEnvironment",
    "agent_loop",
    "gsm8k_tool",
    "is_registered",
    "load_interactions",
    "load_verl_tools",
    "provide_imports",
]


def provide_imports() -> None:
    """Provide what files that are written for verl import from it."""
    for module in (stand_ins, loops, tools, tool_loop):
        provide_verl_imports(module.NAMES)


def gsm8k_tool(config: Mapping[str, Any], schema: Mapping[str, Any] | None = None) -> Tool:
    """Return verl's tool calc_gsm8k_reward, which scores the answer that the policy gives it."""
    return VerlTool(stand_ins.Gsm8kTool(config, stand_ins.as_given(schema)))
