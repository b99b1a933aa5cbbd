"""Plug-ins: functions looked up by name. Used if the caller must not import the callee (a higher layer), and by other
distributions, which replace a name or add one by an entry point of the group `hybridrl.plugins`.

    [project.entry-points."hybridrl.plugins"]
    "page" = "my_package.page:write_report"
    "engine.mine" = "my_package.engine:ENTRY"             # rollout.name=mine: a core.rollout.engine.EngineEntry
    "reward_manager.mine" = "my_package.rewards:manager"  # reward.reward_manager.name=mine: as with source=importlib
    "command.mine" = "my_package.command"                 # hybridrl mine: as python -m my_package.command
    "rows.mine" = "my_package.rows:files"                 # data.train_files=mine:TEXT: files("TEXT"), its paths
    "carried.mine" = "my_package.fields:MINE"             # reads=("mine",): a core.carried.Carried
    "fault.mine" = "my_package.faults:MINE"               # a tracking.faults.FaultKind, of mine or mine:429
    "trial.mine" = "my_package.trial:TRIAL"               # a runs.trials.Trial, if another of these names is used
    "doctor.mine" = "my_package.checks:MINE"              # hybridrl doctor mine: a doctor.Command
    "signal.mine" = "my_package.fields:SIGNAL"            # fills it before the advantages: a core.algorithms Signal
    "model.other" = "my_package.models:other"             # other(configuration): a frozen RankModel that a signal names
    "term.mine" = "my_package.losses:TERM"                # terms=("mine",) of a custom loss: a config.catalog.LossTerm
    "vision.mine" = "my_package.models:MINE"              # models of type mine that see: a core.training VisionFamily

This module imports nothing of hybridrl; `load` imports the object of a name.
"""

import pkgutil
from collections.abc import Collection, Iterable
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

GROUP = "hybridrl.plugins"
PLUGINS = {
    "dialogue": "hybridrl.agents.environments.dialogue:Dialogue",
    "episodes": "hybridrl.agents.endpoint.episodes",  # for rows or keys that name environments, tools or agents
    "imports": "hybridrl.compat.verl.names:provide_verl_imports",  # for files that import verl
    "machines": "hybridrl.doctor.cluster:probe_run",  # before a run on several machines
    "page": "hybridrl.report:write_report",  # at the end of a run
    "preflight": "hybridrl.doctor.start:check_run_start",  # checks before a run
    "room": "hybridrl.doctor.start:Room",  # whether the memory is enough for the next part of a run
    "skyrl": "hybridrl.compat.skyrl",
    "verl.agents": "hybridrl.compat.verl.agents",
    "verl.checkpoint": "hybridrl.compat.verl.checkpoint",
    "doctor.migrate": "hybridrl.compat.migrate:MIGRATE",
    "engine.sglang": "hybridrl.core.rollout.sglang.settings:SGLANG",
    "engine.vllm": "hybridrl.core.rollout.vllm.settings:VLLM",
    "trial.episodes": "hybridrl.agents.endpoint.episodes:TRIAL",  # a runs.trials.Trial of a run's rows
    **dict.fromkeys(
        [f"vision.{kind}" for kind in ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")],
        "hybridrl.core.training.vision:GRID",  # models that see, by their type
    ),
    "vision.glm4v": "hybridrl.core.training.vision:INTERPOLATED",
    "translation": "hybridrl.compat.translation:VERL",  # for arguments and keys that are not hybridrl's
}
_loaded: set[str] = set()  # names that this process has used


@cache
def installed() -> dict[str, EntryPoint]:
    """Return the plug-ins of other distributions, by name."""
    return {entry.name: entry for entry in entry_points(group=GROUP)}


def places_by_name() -> dict[str, str]:
    """Return the place of each name's object: another distribution's if there is one, else hybridrl's."""
    return PLUGINS | {name: entry.value for name, entry in installed().items()}


def load(name: str) -> Any:
    """Return the object of a name."""
    _loaded.add(name)
    return pkgutil.resolve_name(places_by_name()[name])


def names(kind: str) -> list[str]:
    """Return the names of a kind: carried, command, doctor, engine, fault, reward_manager, rows, signal, term, trial or
    vision."""
    return [name.removeprefix(f"{kind}.") for name in places_by_name() if name.startswith(f"{kind}.")]


def row_source(entry: str) -> str:
    """Return the plug-in for an entry `scheme:rest` of a list of row files; empty if it needs none."""
    scheme, _, rest = entry.partition(":")
    return f"rows.{scheme}" if rest and scheme in names("rows") else ""


def additions(kind: str, table: Collection[str]) -> dict[str, str]:
    """Return the places of the names of a kind that are not in a table."""
    return {name: places_by_name()[f"{kind}.{name}"] for name in names(kind) if name not in table}


def trials(asked: Iterable[str]) -> list[str]:
    """Return the names of the trials of hybridrl, and of distributions with another name that was `asked` for, or
    loaded by this process. An entry that replaces a name of hybridrl's is not asked for."""
    of_others = {name: entry.dist for name, entry in installed().items() if name not in PLUGINS}
    trials_of = {name: of_others.pop(f"trial.{name}", None) for name in names("trial")}
    using = {None, *map(of_others.get, (*asked, *_loaded))}
    return [name for name, distribution in trials_of.items() if distribution in using]
