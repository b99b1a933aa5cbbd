"""Tools that the policy calls by name, as classes or as plain functions with a docstring, and the environment that runs
the calls of each response and returns their results as messages."""

import asyncio
import functools
import inspect
import json
import logging
import re
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jsonschema
from jsonschema.exceptions import best_match
from transformers.utils import get_json_schema

from hybridrl.agents.environments import (
    CallRecord,
    Environment,
    EpisodeFault,
    Message,
    Response,
    Schema,
    Step,
    ToolCall,
    ToolError,
)
from hybridrl.agents.environments.user_code import (
    ToolResult,
    UserCodeError,
    contained,
    finished,
    metrics_of,
    to_result,
    unreachable,
)
from hybridrl.config import ConfigError
from hybridrl.config.custom_code import own
from hybridrl.config.schema_parts import MultiTurnConfig
from hybridrl.rewards.score import OutOfTime

logger = logging.getLogger(__name__)

ROW_IN_LOG = 300  # characters
SECONDS_BEFORE_RETRY = 0.5  # doubled each time
VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
FUNCTION_TOOL = "_function_tool"  # the attribute of a function that is marked as a tool: its name and schema, if given
_reported: set[tuple[str, type, str, int | None]] = set()  # what `report` has logged in this process


class Tool:
    """A tool of all episodes in this process; `start` returns the state of one episode.

    `start`, `call` and `end` may be plain functions, which run in threads, or coroutines. A `network` tool depends on
    something that can be unreachable: it is called again if it fails, and then its episode is a fault. `on_failure` is
    "message" or "exclude" in place of the configured treatment of failures. A tool that is `limited` ends its calls at
    the time limit itself.
    """

    network: bool = False
    limited: bool = False
    on_failure: str | None = None

    def __init__(self, schema: Schema) -> None:
        self.schema = schema
        self.name: str = schema["function"]["name"]
        parameters = schema["function"].get("parameters") or {"type": "object", "properties": {}}
        self.argument_names = list(parameters.get("properties", {}))
        self._validator = jsonschema.Draft202012Validator({"additionalProperties": False, **_with_null(parameters)})

    async def start(self, row: Mapping[str, Any]) -> Any:
        """Return the state of a new episode of this row."""

    def call(self, state: Any, arguments: dict[str, Any]) -> Any:
        """Return the result: a text, something that is written as JSON, a ToolResult or (result, reward, metrics)."""
        raise NotImplementedError

    async def end(self, state: Any) -> Mapping[str, float]:
        """Release the state of an episode and return metrics of it."""
        return {}

    def invalid(self, arguments: dict[str, Any]) -> str:
        """Return why the arguments do not fit the schema, for the policy; empty if they do."""
        error = best_match(self._validator.iter_errors(arguments))
        if error is None:
            return ""
        place = ".".join(str(part) for part in error.absolute_path)
        return f"{place}: {error.message}" if place else error.message


def _with_null(schema: Any) -> Any:
    """The schema with null among the types where it is `nullable`, as get_json_schema writes optional arguments."""
    if isinstance(schema, list):
        return [_with_null(item) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    converted = {key: _with_null(value) for key, value in schema.items()}
    if schema.get("nullable") is True and isinstance(schema.get("type"), str):
        converted["type"] = [schema["type"], "null"]
    return converted


class FunctionTool(Tool):
    """A function as a tool; `network` is read from an attribute of it. `run` calls it in another process, within the
    time limit, with the arguments as a dict."""

    def __init__(
        self,
        function: Callable[..., Any],
        name: str | None = None,
        schema: Schema | None = None,
        run: Callable[[dict[str, Any]], Any] | None = None,
    ) -> None:
        super().__init__(schema or function_schema(function, name))
        self.network, self.limited = getattr(function, "network", False), run is not None
        self._function, self._run = function, run

    def call(self, state: None, arguments: dict[str, Any]) -> Any:
        return self._run(arguments) if self._run else self._function(**arguments)


def function_tool(name: Any = None, *, schema: Any = None) -> Any:
    """Mark a function as a tool, as in verl: `@function_tool`, or with another name or a schema in place of its own."""

    def mark(function: Callable[..., Any], tool_name: str | None = None) -> Callable[..., Any]:
        plain = schema.model_dump(exclude_none=True) if hasattr(schema, "model_dump") else schema
        setattr(function, FUNCTION_TOOL, (tool_name, plain))
        return function

    return mark(name) if callable(name) else functools.partial(mark, tool_name=name)


def function_schema(function: Callable[..., Any], name: str | None = None) -> Schema:
    """The schema of a function by its annotations and its docstring in Google's style; ConfigError lists all that is
    missing."""
    title, faults = function.__name__, []
    description, arguments = inspect.getdoc(function) or "", []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in VARIADIC:
            faults.append(f"*{parameter.name} cannot be described to a model; name the arguments one by one")
            continue
        arguments.append(parameter.name)
        if parameter.annotation is parameter.empty:
            faults.append(f"argument {parameter.name} has no type annotation")
        if not re.search(rf"^\s*{parameter.name}\s*(\(.*\))?\s*:\s*\S", description.partition("Args:")[2], re.M):
            faults.append(f'argument {parameter.name} is not described under "Args:" in the docstring')
    if not description:
        faults = [f"there is no docstring{', which describes it and ' + ', '.join(arguments) if arguments else ''}"]
    if not faults:
        try:
            with contained(function):  # its annotations are evaluated
                schema = get_json_schema(function)
            schema["function"]["name"] = name or title
            schema["function"].pop("return", None)  # no part of OpenAI's format
            return schema
        except UserCodeError as error:
            faults = [str(error.cause)]
    code = function.__code__
    raise ConfigError(*(f"{code.co_filename}:{code.co_firstlineno}: tool {title}: {fault}" for fault in faults))


def check_schema(schema: Any, place: str) -> None:
    """Raise ConfigError if this is not the schema of a function in OpenAI's format with JSON schema parameters."""
    form = '{"type": "function", "function": {"name", "description", "parameters"}}'
    function = schema.get("function") if isinstance(schema, Mapping) else None
    if not isinstance(function, Mapping) or not function.get("name"):
        raise ConfigError(f"{place}: tool_schema is {schema!r:.80}", fix=f"write {form}")
    parameters = function.get("parameters") or {}
    try:
        jsonschema.Draft202012Validator.check_schema(parameters)
    except jsonschema.SchemaError as error:
        path = ".".join(["parameters", *map(str, error.absolute_path)])
        raise ConfigError(f"{place}: tool_schema of {function['name']}: {path}: {error.message}") from error
    if parameters.get("type", "object") != "object":
        cause = f"{place}: tool_schema of {function['name']}: parameters.type is {parameters['type']}"
        raise ConfigError(cause, fix="write object: arguments have names")


class ToolEnvironment(Environment):
    """One episode with tools; done when a response calls none."""

    def __init__(self, tools: Sequence[Tool], settings: MultiTurnConfig, row: Mapping[str, Any]) -> None:
        super().__init__({}, row)
        self.tools = [tool.schema for tool in tools]
        self._tools = {tool.name: tool for tool in tools}
        self._settings = settings
        self._states: dict[str, Any] = {}

    async def reset(self, messages: list[Message]) -> list[Message]:
        for name, tool in self._tools.items():
            self._states[name] = await finished(tool.start, own(self.row), seconds=self._settings.tool_timeout)
        return messages

    async def step(self, response: Response) -> Step:
        if not response.calls:
            return Step(done=True)
        if response.last:  # nobody would read the results
            return Step(calls=[self._not_run(call, "") for call in response.calls])
        metrics: dict[str, float] = {}
        most = max(self._settings.max_parallel_calls, 1)
        running = [self._run(call, metrics) for call in response.calls[:most]]
        ended = await asyncio.gather(*running, return_exceptions=True)  # a fault must not leave the others running
        for fault in (record for record in ended if isinstance(record, BaseException)):
            raise fault
        limited = f"Error: not run, only {'1 call' if most == 1 else f'{most} calls'} at a time"
        results = [*ended, *((self._not_run(call, limited), ()) for call in response.calls[most:])]
        records = [record for record, _ in results]
        return Step([_message(*result) for result in results], metrics=metrics, calls=records)

    async def close(self) -> Mapping[str, float]:
        metrics: dict[str, float] = {}
        for name, state in self._states.items():
            try:
                with contained(name):
                    ended = await finished(self._tools[name].end, state, seconds=self._settings.tool_timeout)
            except UserCodeError as error:
                log_tool_error(name, error.cause, self.row)
                continue
            metrics |= {f"{name}/{key}": value for key, value in metrics_of(ended, f"the tool {name}").items()}
        self._states = {}
        return metrics

    async def _run(self, call: ToolCall, metrics: dict[str, float]) -> tuple[CallRecord, Sequence[Any]]:
        """Run a call to its end; return its record and pictures. Only a failure that is to exclude the episode is
        raised, as EpisodeFault."""
        begin = time.monotonic()
        result, outcome = ToolResult(self._invalid(call)), "invalid"
        if not result.text:
            result, outcome = await self._outcome(self._tools[call.name], call.arguments)
            for key, value in result.metrics.items():
                name = f"{call.name}/{key}"
                metrics[name] = metrics.get(name, 0.0) + value
        text = truncated(
            result.text, self._settings.max_tool_response_length, self._settings.tool_response_truncate_side
        )
        return CallRecord(call, text, time.monotonic() - begin, outcome, result.reward), result.images

    def _invalid(self, call: ToolCall) -> str:
        if call.error:
            return f"Error: {call.error}"
        if call.name not in self._tools:
            return f"Error: there is no tool {call.name!r}; the tools are {', '.join(self._tools)}"
        tool = self._tools[call.name]
        fault = tool.invalid(call.arguments)
        return f"Error: {fault}; the arguments of {call.name} are {', '.join(tool.argument_names)}" if fault else ""

    async def _outcome(self, tool: Tool, arguments: dict[str, Any]) -> tuple[ToolResult, str]:
        for attempt in range(self._settings.tool_retries + 1):
            if attempt:
                await asyncio.sleep(SECONDS_BEFORE_RETRY * 2 ** (attempt - 1))
            try:
                seconds = None if tool.limited else self._settings.tool_timeout
                with contained(tool, ToolError, EpisodeFault, OutOfTime):
                    returned = await finished(tool.call, self._states.get(tool.name), own(arguments), seconds=seconds)
                    return to_result(returned, f"the tool {tool.name}"), "ok"
            except ToolError as error:
                return ToolResult(str(error)), "error"
            except OutOfTime as error:
                cause, outcome, outside = error, "timeout", tool.network
            except UserCodeError as error:
                cause, outcome, outside = error.cause, "error", unreachable(error.cause)
                log_tool_error(tool.name, cause, self.row)
            if not (tool.network and outside):
                break
        treatment = tool.on_failure or self._settings.on_tool_failure or ("exclude" if outside else "message")
        if treatment == "exclude":
            raise EpisodeFault(f"tool {tool.name} failed {attempt + 1} times: {first_line(cause)}") from cause
        return ToolResult(f"Error: {first_line(cause)}"), outcome

    def _not_run(self, call: ToolCall, text: str) -> CallRecord:
        """Record a call that a limit prevents; one with a name of no tool is not counted as a tool for that."""
        return CallRecord(call, text, 0.0, "invalid" if self._invalid(call) else "skipped")


def truncated(text: str, length: int, side: str) -> str:
    """Cut a text to `length` characters and mark the cut, with verl's marks: `side` is where it is cut."""
    if len(text) <= length:
        return text
    if side == "left":
        return "(truncated)..." + text[len(text) - length :]
    if side == "right":
        return text[:length] + "...(truncated)"
    half = length // 2
    return text[:half] + "...(truncated)..." + text[len(text) - half :]


def first_line(error: BaseException) -> str:
    """The kind of an exception and the first line of its text."""
    if isinstance(error, OutOfTime):
        return str(error)
    return f"{type(error).__name__}: {error}".strip(": \n").partition("\n")[0]


def log_tool_error(tool: str, error: BaseException, row: Mapping[str, Any]) -> None:
    """Log the traceback of a tool's exception, once per tool and place in the code."""
    frames = traceback.extract_tb(error.__traceback__)[-1:]
    place = (tool, type(error), *((frame.filename, frame.lineno) for frame in frames))
    if place not in _reported:
        _reported.add(place)
        text = json.dumps(row, default=str)[:ROW_IN_LOG]
        logger.warning(
            "tool %s failed on row %s; further failures at this line are counted", tool, text, exc_info=error
        )


def _message(record: CallRecord, images: Sequence[Any]) -> Message:
    """Return a result as the policy reads it: its pictures come before its text, as in verl."""
    identity = {"tool_call_id": record.call.id} if record.call.id else {}
    text = [{"type": "text", "text": record.result}] if record.result else []
    content = [*({"type": "image", "image": image} for image in images), *text] if images else record.result
    return {"role": "tool", "name": record.call.name, "content": content, **identity}
