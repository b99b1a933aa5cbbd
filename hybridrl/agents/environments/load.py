"""Selects the environment of a row: built-in ones and tools by name, and those of the user's files."""

import functools
import inspect
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from hybridrl.agents.environments import (
    ENVIRONMENT,
    MULTI_TURN,
    Environment,
    EnvironmentSettings,
    column,
    interaction_kwargs,
    mapping,
    tools_kwargs,
)
from hybridrl.agents.environments.built_in.games import Gsm8kMultiTurn, GuessNumber, Wordle
from hybridrl.agents.environments.built_in.tools import Calculator, Python, Search, SearchQuestions, Sql, TextToSql
from hybridrl.agents.environments.episode_loop import AgentLoop
from hybridrl.agents.environments.function_process import FunctionProcesses
from hybridrl.agents.environments.tools import FUNCTION_TOOL, FunctionTool, Tool, ToolEnvironment, check_schema
from hybridrl.agents.environments.user_code import UserCodeError, contained
from hybridrl.config import ConfigError
from hybridrl.config.custom_code import import_libraries, load_class, load_module, once, own, where
from hybridrl.config.findings import Findings
from hybridrl.plugins import load

EpisodeRow = Mapping[str, Any]
Make = Callable[[], Environment]

TOOLS: dict[str, Callable[..., Tool]] = {  # each takes its configuration, and a schema in place of its own
    "calculator": Calculator,
    "calc_gsm8k_reward": lambda *values, **named: load(VERL).gsm8k_tool(*values, **named),
    "python": Python,
    "search": Search,
    "sql": Sql,
}
ENVIRONMENTS: dict[str, type[Environment]] = {
    "gsm8k_multi_turn": Gsm8kMultiTurn,
    "guess_number": GuessNumber,
    "search": SearchQuestions,
    "text2sql": TextToSql,
    "wordle5": Wordle,
}
SINGLE_RESPONSES = ("aime", "gsm8k", "lcb")  # SkyRL's environments of one turn: the reward function scores them
SINGLE_TURN, TOOL_AGENT = "single_turn_agent", "tool_agent"
VERL, SKYRL = "verl.agents", "skyrl"  # plug-ins
FUNCTIONS = f"{MULTI_TURN}.function_tool_path"


@dataclass(frozen=True)
class Choice:
    """A row's runner: an environment of this name, tools, an agent loop of this name, or a function of a file."""

    kind: Literal["environment", "tools", "agent", "function"]
    name: str


def choice_of(row: EpisodeRow, settings: EnvironmentSettings) -> Choice | None:
    """Return the choice of a row; None: a single response. Loads nothing."""
    agent, named = row.get("agent_name"), row.get("env_class")
    if settings.function and not (agent or named):
        return Choice("function", settings.function)
    named = named or settings.multi_turn.environment
    if named and not agent:
        return None if named in SINGLE_RESPONSES else Choice("environment", str(named))
    default = settings.agent.default_agent_loop
    if default == SINGLE_TURN and (settings.has_tools or settings.multi_turn.interaction_config_path):
        default = TOOL_AGENT  # as verl does where multi_turn.enable is set
    agent = str(agent or default)
    if agent == TOOL_AGENT:
        return Choice("tools", TOOL_AGENT)
    return None if agent == SINGLE_TURN else Choice("agent", agent)


def runs_function(row: EpisodeRow, settings: EnvironmentSettings) -> bool:
    """Whether the row runs in the user's function."""
    choice = choice_of(row, settings)
    return choice is not None and choice.kind == "function"


def environment_of(row: EpisodeRow, settings: EnvironmentSettings) -> Make | AgentLoop | None:
    """Return a factory of the environment of one episode of the row, or the loop that runs it; None: a single response,
    or the user's function.

    ConfigError names the file, class or name that is missing. Files are loaded once per process.
    """
    choice = choice_of(row, settings)
    if choice is None or choice.kind == "function":
        return None
    provide_libraries(settings.libraries)
    if choice.kind == "environment":
        return _named(choice.name, row, settings)
    if choice.kind == "agent":
        loop = replace(load(VERL).agent_loop(choice.name, settings.agent.agent_loop_config_path), row=row)
        if not loop.needs_tools:
            return loop
        _interaction_of(settings, row)  # raises if there is none of the row's name
        interactions = _interactions(settings.multi_turn.interaction_config_path)
        return replace(loop, tools=_selected(settings, row), interactions=interactions)
    return functools.partial(_with_tools, settings, row)


def _named(name: str, row: EpisodeRow, settings: EnvironmentSettings) -> Make:
    """Return a factory of an environment, by its name or path.py:Class. An installed skyrl_gym's come first."""
    turns = settings.multi_turn.max_assistant_turns
    config = own(_config(name, settings.multi_turn.environment_kwargs))
    if ":" in name:
        cls = environment_class(name)
        if hasattr(cls, "reset"):
            return functools.partial(cls, config, row)
        return functools.partial(load(SKYRL).of_class, cls, config, row, turns)
    if name in (skyrl := load(SKYRL)).environment_names():
        return functools.partial(skyrl.make, name, config, row, turns)
    if name in ENVIRONMENTS:
        limited = {} if turns is None else {"max_turns": turns}
        return functools.partial(ENVIRONMENTS[name], {**limited, **config}, row)
    fix = f"choose {', '.join(ENVIRONMENTS)}, write path.py:Class, or install skyrl-gym for SkyRL's"
    raise ConfigError(f"{ENVIRONMENT}={name}: there is no environment of this name", fix=fix, keys=ENVIRONMENT)


def _config(name: str, kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
    """The section of this name, else all but the sections of other names."""
    others = {*ENVIRONMENTS, *TOOLS, *SINGLE_RESPONSES, *load(SKYRL).environment_names()}
    return mapping(kwargs[name]) if name in kwargs else {key: kwargs[key] for key in kwargs if key not in others}


@once
def environment_class(name: str) -> type:
    """The class of path.py:Class; ConfigError if it is not an environment."""
    cls = load_class(*name.rsplit(":", 1), key=ENVIRONMENT)
    unwritten = getattr(cls, "step", None) in (None, Environment.step)
    if unwritten or not (hasattr(cls, "reset") or hasattr(cls, "init")):
        fix = "inherit from hybridrl.environments.Environment and define step(response)"
        raise ConfigError(f"{ENVIRONMENT}={name}: {cls.__name__} has no method step", fix=fix, keys=ENVIRONMENT)
    return cls


def _with_tools(settings: EnvironmentSettings, row: EpisodeRow) -> Environment:
    _check_names(tools_kwargs(row), "tools_kwargs", load_tools(settings))
    environment = ToolEnvironment([*_selected(settings, row).values()], settings.multi_turn, row)
    interaction = _interaction_of(settings, row)
    return environment if interaction is None else load(VERL).InteractionEnvironment(interaction, environment, row)


def _selected(settings: EnvironmentSettings, row: EpisodeRow) -> Mapping[str, Tool]:
    """The tools that a row selects, by default all; ConfigError if there is none of a name."""
    tools, selection = load_tools(settings), column(row, "tool_selection")
    if selection is None:
        return tools
    _check_names(selection, "tool_selection", tools)
    return {name: tools[name] for name in selection}


def _check_names(names: Iterable[str], key: str, tools: Mapping[str, Tool]) -> None:
    for name in names:
        if name not in tools:
            raise ConfigError(f"{key}: there is no tool {name}", fix=f"the tools are {', '.join(tools) or 'none'}")


def _interaction_of(settings: EnvironmentSettings, row: EpisodeRow) -> Any:
    """The interaction that a row names, if any are configured; ConfigError if there is none of the name."""
    file = settings.multi_turn.interaction_config_path
    name, interactions = interaction_kwargs(row).get("name"), _interactions(file)
    if not file or name is None:
        return None
    if name not in interactions:
        cause = f"interaction_kwargs.name={name}: {file} has no such interaction"
        raise ConfigError(cause, fix=f"it has {', '.join(interactions)}")
    return interactions[name]


def load_tools(settings: EnvironmentSettings) -> Mapping[str, Tool]:
    """All tools that the settings name, by name; ConfigError lists all that is wrong with them."""
    provide_libraries(settings.libraries)
    multi_turn = settings.multi_turn
    configs = {name: mapping(multi_turn.environment_kwargs.get(name)) for name in multi_turn.tools}
    functions = (multi_turn.function_tool_path, settings.libraries, multi_turn.tool_timeout)
    return _tools(json.dumps(configs), multi_turn.tool_config_path, *functions)


@once
def _tools(
    built_in: str, classes: str | None, functions: str | None, libraries: tuple[str, ...], seconds: float
) -> Mapping[str, Tool]:
    findings, tools = Findings(), []
    for name, config in json.loads(built_in).items():
        if name in TOOLS:
            tools.append(TOOLS[name](config))
        else:
            findings.error("input", f"there is no built-in tool {name}", f"choose {', '.join(TOOLS)}")
    with findings.gathered():
        tools += load(VERL).load_verl_tools(classes, TOOLS) if classes else []
    with findings.gathered():
        tools += function_tools(functions, libraries, seconds) if functions else []
    by_name = {tool.name: tool for tool in tools}
    for name in (name for name in by_name if sum(tool.name == name for tool in tools) > 1):
        findings.error(
            "input", f"two tools are named {name}", "rename one", keys=(FUNCTIONS, f"{MULTI_TURN}.tool_config_path")
        )
    findings.close()
    return by_name


def function_tools(path: str, libraries: tuple[str, ...] = (), seconds: float = 30.0) -> list[Tool]:
    """The functions of a file that are marked by @function_tool; all its public functions if none is. Plain ones run in
    processes that import the file, and are killed if a call takes more than `seconds`."""
    members = vars(module := load_module(path, FUNCTIONS))
    processes = FunctionProcesses(path, libraries, seconds)
    names = {member: key for key, member in reversed(members.items()) if inspect.isfunction(member)}
    functions = [member for member in members.values() if inspect.isfunction(member)]
    marked = [function for function in functions if hasattr(function, FUNCTION_TOOL)]
    own = [function for function in functions if function.__module__ == module.__name__ and function.__name__[0] != "_"]
    findings, tools = Findings(), []
    for function in dict.fromkeys(marked or own):
        name, schema = getattr(function, FUNCTION_TOOL, (None, None))
        with findings.gathered():
            if schema is not None:
                check_schema(schema, f"{FUNCTIONS}={path}: {function.__name__}")
            in_process = functools.partial(processes.call, names[function])
            run = None if inspect.iscoroutinefunction(function) else in_process
            tools.append(FunctionTool(function, name, schema, run))
    if not functions:
        findings.error("input", "there is no function in the file", "write one", keys=FUNCTIONS, value=path)
    findings.close()
    return tools


@once
def _interactions(path: str | None) -> dict[str, Any]:
    return load(VERL).load_interactions(path) if path else {}


@once
def provide_libraries(libraries: tuple[str, ...]) -> None:
    """Provide what custom files import: verl's names, and what the libraries register; once per process."""
    load(VERL).provide_imports()
    import_libraries(list(libraries))


def load_files(settings: EnvironmentSettings, findings: Findings) -> None:
    """Load the files that keys name, whatever the rows are; once per process."""
    provide_libraries(settings.libraries)
    with findings.gathered():
        load_tools(settings)
    with findings.gathered():
        _interactions(settings.multi_turn.interaction_config_path)
    if ":" in (name := settings.multi_turn.environment or ""):
        with findings.gathered():
            environment_class(name)


def check_environments(settings: EnvironmentSettings, rows: Iterable[EpisodeRow]) -> list[Environment | AgentLoop]:
    """Load all files, and return the environment or loop of the first row of each kind; ConfigError lists all that is
    wrong."""
    findings, seen, runners = Findings(), set(), []
    load_files(settings, findings)
    for number, row in enumerate(rows):
        choice = choice_of(row, settings)
        interaction = interaction_kwargs(row).get("name")
        kind = (choice, *tools_kwargs(row), str(column(row, "tool_selection")), interaction)
        if choice is None or kind in seen or (findings.errors and choice.kind == "tools"):
            continue
        seen.add(kind)
        with findings.gathered():
            runners.append(_try_row(number, row, choice, settings))
    findings.close()
    return [runner for runner in runners if runner is not None]


def _try_row(
    number: int, row: EpisodeRow, choice: Choice, settings: EnvironmentSettings
) -> Environment | AgentLoop | None:
    try:
        with contained(choice.name, ConfigError):
            make = environment_of(row, settings)
            return make if make is None or isinstance(make, AgentLoop) else make()
    except ConfigError as error:
        raise ConfigError(*(f"row {number}: {line}" for line in error.lines)) from error
    except UserCodeError as error:
        reason = where(error.cause, choice.name.rpartition(":")[0])
        raise ConfigError(f"row {number}: environment {choice.name} fails: {reason}") from error
