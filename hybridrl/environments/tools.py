"""The base class of custom tools: see `hybridrl.agents.environments.tools`."""

from hybridrl.agents.environments.tools import Tool

__all__ = ["Tool"]
