"""Tools as a user writes them: see `hybridrl.agents.environments.tools`."""

from hybridrl.agents.environments.tools import Tool

__all__ = ["Tool"]
