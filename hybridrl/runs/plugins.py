"""Functions that the core and a run call by name, since what has them is built on top of a run.

Another distribution fills a name, or adds one, by an entry point of the group `hybridrl.plugins`:

    [project.entry-points."hybridrl.plugins"]
    page = "my_package.page:write_report"

This module imports nothing of hybridrl, and what a name stands for is imported by `load`.
"""

import pkgutil
from functools import cache
from importlib.metadata import entry_points
from typing import Any

GROUP = "hybridrl.plugins"
PLUGINS = {
    "dialogue": "hybridrl.agents.environments.dialogue:Dialogue",
    "episodes": "hybridrl.agents.endpoint.episodes",  # of rows or keys that name environments, tools or agents
    "imports": "hybridrl.compat.verl.names:provide_verl_imports",  # for files that import verl
    "preflight": "hybridrl.doctor.start:check_run_start",  # checks before a run
    "skyrl": "hybridrl.compat.skyrl.environments",
    "verl.agents": "hybridrl.compat.verl.agents",
    "verl.checkpoint": "hybridrl.compat.verl.checkpoint",
    "migrate": "hybridrl.compat.migrate:main",
}


@cache
def installed() -> dict[str, str]:
    """Return the plug-ins of other distributions, by name."""
    return {entry.name: entry.value for entry in entry_points(group=GROUP)}


def load(name: str) -> Any:
    """Return what a name stands for: another distribution's, or hybridrl's own."""
    return pkgutil.resolve_name(installed().get(name) or PLUGINS[name])
