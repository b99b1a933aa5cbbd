"""Tools: what the policy calls by name, as classes or as plain functions with a docstring."""

import functools
import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

import jsonschema
from jsonschema.exceptions import best_match
from transformers.utils import get_json_schema

from hybridrl.agents.environments.environment import Schema
from hybridrl.agents.environments.user_code import ToolResult as ToolResult
from hybridrl.agents.environments.user_code import UserCodeError, contained
from hybridrl.agents.environments.user_code import to_result as to_result
from hybridrl.config import ConfigError

VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
FUNCTION_TOOL = "_function_tool"  # the attribute of a function that is marked as a tool: its name and schema, if given


class Tool:
    """A tool of all episodes in this process; what one episode keeps is the state that `start` returns.

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
        """Why the arguments do not fit the schema, in words for the policy; empty if they do."""
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
    found = {key: _with_null(value) for key, value in schema.items()}
    if schema.get("nullable") is True and isinstance(schema.get("type"), str):
        found["type"] = [schema["type"], "null"]
    return found


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

    def mark(function: Callable[..., Any], given: str | None = None) -> Callable[..., Any]:
        plain = schema.model_dump(exclude_none=True) if hasattr(schema, "model_dump") else schema
        setattr(function, FUNCTION_TOOL, (given, plain))
        return function

    return mark(name) if callable(name) else functools.partial(mark, given=name)


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
