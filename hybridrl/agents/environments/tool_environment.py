"""An environment of tools: reads the calls of each response, runs them and returns their results as messages."""

import asyncio
import json
import logging
import time
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

from hybridrl.agents.environments.environment import (
    CallRecord,
    Environment,
    EpisodeFault,
    Message,
    Response,
    Step,
    ToolCall,
    ToolError,
)
from hybridrl.agents.environments.settings import EnvironmentSettings
from hybridrl.agents.environments.tools import Tool
from hybridrl.agents.environments.user_code import (
    ToolResult,
    UserCodeError,
    contained,
    finished,
    metrics_of,
    to_result,
    unreachable,
)
from hybridrl.rewards.score import OutOfTime

logger = logging.getLogger(__name__)

ROW_IN_LOG = 300  # characters
SECONDS_BEFORE_RETRY = 0.5  # doubled each time
_reported: set[tuple[str, type, str, int | None]] = set()  # what `report` has logged in this process


class ToolEnvironment(Environment):
    """One episode with tools; done when a response calls none."""

    def __init__(self, tools: Sequence[Tool], settings: EnvironmentSettings, row: Mapping[str, Any]) -> None:
        super().__init__({}, row)
        self.tools = [tool.schema for tool in tools]
        self._tools = {tool.name: tool for tool in tools}
        self._settings = settings
        self._states: dict[str, Any] = {}

    async def reset(self, messages: list[Message]) -> list[Message]:
        for name, tool in self._tools.items():
            self._states[name] = await finished(tool.start, self.row, seconds=self._settings.tool_timeout)
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
        records = [*ended, *(self._not_run(call, limited) for call in response.calls[most:])]
        return Step([_message(record) for record in records], metrics=metrics, calls=records)

    async def close(self) -> Mapping[str, float]:
        metrics: dict[str, float] = {}
        for name, state in self._states.items():
            try:
                with contained(name):
                    ended = await finished(self._tools[name].end, state, seconds=self._settings.tool_timeout)
            except UserCodeError as error:
                report(name, error.cause, self.row)
                continue
            metrics |= {f"{name}/{key}": value for key, value in metrics_of(ended, f"the tool {name}").items()}
        self._states = {}
        return metrics

    async def _run(self, call: ToolCall, metrics: dict[str, float]) -> CallRecord:
        """Run a call to its end; only a failure that is to exclude the episode is raised, as EpisodeFault."""
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
        return CallRecord(call, text, time.monotonic() - begin, outcome, result.reward)

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
                    returned = await finished(tool.call, self._states.get(tool.name), arguments, seconds=seconds)
                    return to_result(returned, f"the tool {tool.name}"), "ok"
            except ToolError as error:
                return ToolResult(str(error)), "error"
            except OutOfTime as error:
                cause, outcome, outside = error, "timeout", tool.network
            except UserCodeError as error:
                cause, outcome, outside = error.cause, "error", unreachable(error.cause)
                report(tool.name, cause, self.row)
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


def report(tool: str, error: BaseException, row: Mapping[str, Any]) -> None:
    """Log the traceback of a tool's exception, once per tool and place in the code."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    place = (tool, type(error), frame.filename, frame.lineno)
    if place not in _reported:
        _reported.add(place)
        text = json.dumps(row, default=str)[:ROW_IN_LOG]
        logger.warning(
            "tool %s failed on row %s; further failures at this line are counted", tool, text, exc_info=error
        )


def _message(record: CallRecord) -> Message:
    identity = {"tool_call_id": record.call.id} if record.call.id else {}
    return {"role": "tool", "name": record.call.name, "content": record.result, **identity}
