"""verl's files of tools and interactions, yaml and classes unchanged, whether or not verl is installed; and its parsers
of tool calls, each of which reads a format of calls.py. Files may register their own."""

import asyncio
import importlib
import importlib.util
import inspect
import json
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from hybridrl.agents.environments import (
    MULTI_TURN,
    Environment,
    Message,
    Response,
    Schema,
    Step,
    interaction_kwargs,
    mapping,
    tools_kwargs,
)
from hybridrl.agents.environments.calls import call_parser, named_parser
from hybridrl.agents.environments.dialogue import Dialogue
from hybridrl.agents.environments.mcp_tools import load_mcp_tools
from hybridrl.agents.environments.tools import Tool, ToolEnvironment, check_schema
from hybridrl.agents.environments.user_code import ToolResult, UserCodeError, contained, finished, reward_of, to_result
from hybridrl.compat.skyrl import numbers
from hybridrl.compat.verl.names import by_name
from hybridrl.config import ConfigError
from hybridrl.config.custom_code import load_class, taken, where
from hybridrl.required import required

TOOLS = f"{MULTI_TURN}.tool_config_path"
INTERACTIONS = f"{MULTI_TURN}.interaction_config_path"


class VerlTool(Tool):
    """An instance of a verl tool class. Its state lasts from the start of an episode to its end, whatever the number of
    calls; `calc_reward` becomes the metric `reward`, and the row's `tools_kwargs` reach each method."""

    def __init__(self, tool: Any, network: bool = False) -> None:
        super().__init__(as_schema(tool.tool_schema))
        self.network = network
        self.tool = tool

    async def start(self, row: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        kwargs = tools_kwargs(row).get(self.name) or {}
        create = kwargs.get("create_kwargs") or {}
        identity = str(uuid.uuid4())
        created = await accepted(self.tool.create, identity, **{**create, "create_kwargs": create})
        return (created[0] if isinstance(created, tuple) else created) or identity, kwargs

    async def call(self, state: tuple[str, dict[str, Any]], arguments: dict[str, Any]) -> ToolResult:
        identity, kwargs = state
        named = kwargs.get("execute_kwargs") or {}
        if "parameters" in inspect.signature(self.tool.execute).parameters:
            returned = await accepted(self.tool.execute, identity, arguments, **named)
        else:  # some recipes name the arguments instead
            returned = await accepted(self.tool.execute, identity, **{**named, **arguments})
        return to_result(returned, self.tool)

    async def end(self, state: tuple[str, dict[str, Any]]) -> Mapping[str, float]:
        identity, kwargs = state
        try:
            reward = await accepted(self.tool.calc_reward, identity, **(kwargs.get("calc_reward_kwargs") or {}))
            return numbers({"reward": reward}, self.tool)
        finally:
            await accepted(self.tool.release, identity, **(kwargs.get("release_kwargs") or {}))


async def accepted(function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Call a method with those of the named arguments that it accepts, and await it."""
    return await finished(partial(function, *arguments, **taken(function, named)))


def as_schema(schema: Any) -> Schema:
    """A schema object, whether of verl's or of this module's classes, as plain values."""
    if isinstance(schema, Mapping):
        return dict(schema)
    return schema.model_dump(exclude_unset=True, exclude_none=True)


def load_verl_tools(path: str, built_in: Mapping[str, Callable[..., Tool]]) -> list[Tool]:
    """The tools of a yaml in verl's format, whose class may be a built-in name; ConfigError lists what is wrong."""
    tools: list[Tool] = []
    faults: list[Any] = []
    for index, entry in enumerate(read_entries(path, TOOLS, "tools")):
        place = f"{TOOLS}={path}: tools[{index}]"
        try:
            is_mcp = mapping(entry.get("config")).get("type") == "mcp"
            tools += load_mcp_tools(entry, place, path) if is_mcp else [_load_tool(entry, place, path, built_in)]
        except ConfigError as error:
            faults += error.findings
    if faults:
        raise ConfigError(*faults)
    return tools


def initialize_tools_from_config(path: str) -> list[Any]:
    """The instances of verl's tool classes in a yaml, as verl's function of this name returns them."""
    return [tool.tool for tool in load_verl_tools(path, {}) if isinstance(tool, VerlTool)]


def _load_tool(entry: Mapping[str, Any], place: str, path: str, built_in: Mapping[str, Callable[..., Tool]]) -> Tool:
    name, config = str(entry.get("class_name") or ""), dict(entry.get("config") or {})
    if not name:
        raise ConfigError(f"{place} has no class_name", fix="write class_name: module.Class")
    schema = entry.get("tool_schema")
    if schema is not None:
        check_schema(schema, place)
    make = built_in.get(name) or load_verl_class(name, place, path, "verl.tools")
    with constructed(f"{place}: {name}(config, tool_schema)", path):
        if name in built_in or issubclass(make, Tool):
            return make(config) if schema is None else make(config, schema)
        tool: Any = make(config=config, tool_schema=None if schema is None else _schema_class().model_validate(schema))
    missing = [method for method in ("create", "execute", "release", "tool_schema") if not hasattr(tool, method)]
    if missing:
        raise ConfigError(
            f"{place}: {name} has no {', '.join(missing)}", fix="inherit from verl.tools.base_tool.BaseTool"
        )
    check_schema(as_schema(tool.tool_schema), place)
    return VerlTool(tool, bool(config.get("network")))


@contextmanager
def constructed(what: str, path: str) -> Iterator[None]:
    """Raise ConfigError for whatever the user's constructor raises, with its line in the file."""
    try:
        with contained(what):
            yield
    except UserCodeError as error:
        raise ConfigError(f"{what} fails: {where(error.cause, path)}") from error


def _schema_class() -> Any:
    """verl's own class where verl is installed: its tools may use attributes that the stand-in does not have."""
    return importlib.import_module("verl.tools.schemas").OpenAIFunctionToolSchema


def read_entries(path: str, key: str, section: str) -> list[Mapping[str, Any]]:
    """The list under `section` in a yaml file, or the list that it is; ConfigError names key and file."""
    if not Path(path).is_file():
        raise ConfigError(f"{key}={path}: there is no such file", keys=key)
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ConfigError(f"{key}={path} is not YAML: {' '.join(str(error).split())}", keys=key) from error
    entries = content.get(section) if isinstance(content, Mapping) else content
    if not isinstance(entries, list) or not all(isinstance(entry, Mapping) for entry in entries):
        raise ConfigError(f"{key}={path} has no list {section}", fix=f"write {section}: and below it - class_name: ...")
    return entries


def load_verl_class(name: str, place: str, path: str, package: str) -> type:
    """The class `module.Class` or `path.py:Class`; modules are also searched in the working directory and next to the
    yaml at `path`. One that imports from its own package (`from .base_tool import`) is loaded as part of `package`."""
    if ":" in name:
        return load_class(*name.rsplit(":", 1), key=place)
    module_name, _, class_name = name.rpartition(".")
    for directory in (str(Path.cwd()), str(Path(path).absolute().parent)):
        if directory not in sys.path:
            sys.path.append(directory)
    try:
        with contained(name):
            module = importlib.import_module(module_name)
    except UserCodeError as error:
        if "no known parent package" not in str(error.cause):
            fix = "write module.Class with a module that can be imported here, or path.py:Class"
            reason = where(error.cause, path)
            raise ConfigError(f"{place}: class_name {name} does not import: {reason}", fix=fix) from error
        spec = _within(module_name, package)
        module = importlib.util.module_from_spec(spec)
        sys.modules[module.__name__] = sys.modules[module_name] = module
        spec.loader.exec_module(module)
    cls = getattr(module, class_name, None)
    if not isinstance(cls, type):
        names = [other for other, member in vars(module).items() if isinstance(member, type)]
        raise ConfigError(
            f"{place}: {module_name} has no class {class_name}", fix=f"it has {', '.join(names) or 'none'}"
        )
    return cls


def _within(module_name: str, package: str) -> Any:
    spec = required(importlib.util.find_spec(module_name))
    return importlib.util.spec_from_file_location(f"{package}.{module_name.rpartition('.')[2]}", spec.origin)


class InteractionEnvironment(Environment):
    """A verl interaction answers the responses that call no tool; calls go to the tools, if there are any."""

    def __init__(self, interaction: Any, tools: ToolEnvironment, row: Mapping[str, Any]) -> None:
        super().__init__({}, row)
        self.tools = tools.tools
        self._interaction, self._tools = interaction, tools
        self._kwargs = dict(interaction_kwargs(row))
        self._identity = str(uuid.uuid4())
        self._messages: list[Message] = []

    async def reset(self, messages: list[Message]) -> list[Message]:
        await self._tools.reset(messages)
        started = await accepted(self._interaction.start_interaction, self._identity, **self._kwargs)
        self._identity = started or self._identity
        self._messages = list(messages)
        return messages

    async def step(self, response: Response) -> Step:
        self._messages.append({"role": "assistant", "content": response.text})
        if response.calls:
            step = await self._tools.step(response)
            self._messages += step.messages
            return step
        said = await accepted(self._interaction.generate_response, self._identity, self._messages, **self._kwargs)
        done, text, score, values = said
        messages = [] if done else [{"role": "user", "content": text}]
        self._messages += messages
        return Step(messages, reward_of(score, self._interaction), bool(done), numbers(values, self._interaction))

    async def close(self) -> Mapping[str, float]:
        try:
            return await self._tools.close()
        finally:
            await finalize_interaction(self._interaction, self._identity, self._kwargs)


async def finalize_interaction(interaction: Any, identity: str, kwargs: Mapping[str, Any]) -> None:
    """End the interaction of an episode: the base class of verl takes no id here, other classes do."""
    parameters = inspect.signature(method := interaction.finalize_interaction).parameters.values()
    takes_identity = any(argument.kind not in (argument.KEYWORD_ONLY, argument.VAR_KEYWORD) for argument in parameters)
    await accepted(method, *([identity] if takes_identity else []), **kwargs)


def load_interactions(path: str) -> dict[str, Any]:
    """The interactions of a yaml in verl's format, by name; ConfigError lists what is wrong with it."""
    interactions: dict[str, Any] = {}
    for index, entry in enumerate(read_entries(path, INTERACTIONS, "interaction")):
        place = f"{INTERACTIONS}={path}: interaction[{index}]"
        cls = load_verl_class(str(entry.get("class_name") or ""), place, path, "verl.interactions")
        name = str(entry.get("name") or cls.__name__.removesuffix("Interaction").lower())
        with constructed(f"{place}: {cls.__name__}(config)", path):
            interaction = cls(config={"name": name, **(entry.get("config") or {})})
        if not hasattr(interaction, "generate_response"):
            raise ConfigError(f"{place}: {cls.__name__} has no generate_response", fix="inherit from BaseInteraction")
        if name in interactions:
            raise ConfigError(f"{place}: a second interaction is named {name}", fix="give each its name")
        interactions[name] = interaction
    return interactions


class FunctionCall(BaseModel, extra="allow"):
    """A call whose arguments are JSON text."""

    name: str
    arguments: str
    tool_call_id: str | None = None


class ToolParser:
    """The base class of parsers, and of the formats that are read here. Unreadable calls are left out."""

    format: str | None = None
    stop_token_ids: Sequence[int] = ()  # these end a response here already

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    @classmethod
    def register(cls, name: str) -> Callable[[type], type]:
        """Register a class as the parser of this name. Raises TypeError for one that reads no calls."""

        def decorate(parser: type) -> type:
            reads = getattr(parser, "extract_tool_calls", None) not in (None, ToolParser.extract_tool_calls)
            if not reads and getattr(parser, "format", None) is None:
                raise TypeError(f"{parser.__name__}, the parser {name}, defines no extract_tool_calls")
            _parsers[name] = parser
            return parser

        return decorate

    @classmethod
    def get_tool_parser(cls, name: str, tokenizer: Any) -> "ToolParser":
        """Return a registered parser, else that of a format. Raises ConfigError for a name that is neither."""
        if name in _parsers:
            return _parsers[name](tokenizer)
        parser = ToolParser(tokenizer)
        if name == "auto":
            # In an episode the tokenizer has what auto stands for (AgentLoop.run); a script may have one of its own.
            template = Dialogue(tokenizer, [tokenizer.eos_token_id])
            configured = getattr(tokenizer, "call_parser", None) or partial(call_parser, name, "", template)
            name = configured().format
        parser.format = named_parser(name, tokenizer).format
        return parser

    async def extract_tool_calls(
        self, responses_ids: Sequence[int], tools: Sequence[Any] | None = None
    ) -> tuple[str, list[FunctionCall]]:
        """Return the content before the first call, and the calls."""
        ids = [*responses_ids]
        if ids and ids[-1] == self.tokenizer.eos_token_id:
            ids.pop()
        text = await asyncio.to_thread(self.tokenizer.decode, ids, skip_special_tokens=False)
        content, calls = named_parser(required(self.format), self.tokenizer)(
            text, [as_schema(tool) for tool in tools or ()]
        )
        read = [call for call in calls if not call.error]
        return content, [
            FunctionCall(
                name=call.name, arguments=json.dumps(call.arguments, ensure_ascii=False), tool_call_id=call.id or None
            )
            for call in read
        ]


_parsers: dict[str, Callable[[Any], ToolParser]] = {}  # by the names that files register


class HermesToolParser(ToolParser):
    """Calls as JSON in <tool_call> tags."""

    format = "hermes"


class GptOssToolParser(ToolParser):
    """Calls in Harmony's format."""

    format = "gpt-oss"


class Qwen3XMLToolParser(ToolParser):
    """Calls in tags of functions and parameters."""

    format = "qwen3_coder"


def is_registered(name: str) -> bool:
    """Whether a file that has been loaded registers a parser of this name."""
    return name in _parsers


_PARSERS = by_name(FunctionCall, ToolParser, HermesToolParser, GptOssToolParser, Qwen3XMLToolParser)
NAMES = {"verl.experimental.agent_loop.tool_parser": _PARSERS}
