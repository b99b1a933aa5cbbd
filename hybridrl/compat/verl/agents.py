"""Tools, interactions and agent loops that are written for verl, as rows and configurations name them; and verl's
ToolAgentLoop, for classes that inherit from it: its states, its handlers and the data that they change.

Other rows with tools run in `tool_agent`, which has more limits and metrics (`agents/environments/tools.py`).
"""

import asyncio
import functools
import inspect
import json
import logging
from collections.abc import Mapping
from enum import Enum
from typing import Any
from uuid import uuid4

from hybridrl.agents.environments import EpisodeFault, Message, interaction_kwargs, mapping, tools_kwargs
from hybridrl.agents.environments.tools import Tool, first_line, truncated
from hybridrl.agents.environments.user_code import UserCodeError, contained, finished, to_result, unreachable
from hybridrl.compat.verl import loops, stand_ins, tools
from hybridrl.compat.verl.loops import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput, agent_loop
from hybridrl.compat.verl.names import by_name, provide_verl_imports
from hybridrl.compat.verl.stand_ins import ToolResponse, simple_timer
from hybridrl.compat.verl.tools import (
    FunctionCall,
    InteractionEnvironment,
    ToolParser,
    VerlTool,
    accepted,
    finalize_interaction,
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

logger = logging.getLogger(__name__)


class AgentState(Enum):
    """The handler that an episode calls next."""

    PENDING = "pending"
    GENERATING = "generating"
    PROCESSING_TOOLS = "processing_tools"
    INTERACTING = "interacting"
    TERMINATED = "terminated"


class AgentData:
    """An episode in progress: `prompt_ids` are all ids so far, `response_mask` and `response_logprobs` are of those
    after the prompt."""

    def __init__(
        self,
        messages: list[Message],
        image_data: Any = None,
        video_data: Any = None,
        audio_data: Any = None,
        mm_processor_kwargs: Any = None,
        metrics: dict[str, Any] | None = None,
        request_id: str = "",
        tools_kwargs: Mapping[str, Any] | None = None,
        interaction: Any = None,
        interaction_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self.messages, self.request_id = messages, request_id
        self.image_data, self.video_data, self.audio_data = image_data, video_data, audio_data
        self.mm_processor_kwargs = mm_processor_kwargs or {}
        self.metrics = {} if metrics is None else metrics
        self.tools_kwargs, self.interaction_kwargs = dict(tools_kwargs or {}), dict(interaction_kwargs or {})
        self.interaction = interaction
        self.prompt_ids: list[int] = []
        self.response_ids: list[int] = []
        self.response_mask: list[int] = []
        self.response_logprobs: list[float] = []
        self.turn_scores: list[float] = []
        self.tool_rewards: list[float] = []
        self.user_turns = self.assistant_turns = 0
        self.tool_calls: list[FunctionCall] = []
        self.routed_experts: Any = None
        self.extra_fields: dict[str, Any] = {}


class ToolAgentLoop(AgentLoopBase):
    """The base class of loops with tools; each handler returns the next state. `tools` are those of the configuration
    that the row selects, by name: instances of verl's classes, or of Tool."""

    needs_tools = True  # and interactions, of the configuration

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        settings = self.rollout_config.multi_turn
        self.max_user_turns, self.max_assistant_turns = settings.max_user_turns, settings.max_assistant_turns
        self.max_parallel_calls, self.tool_timeout = settings.max_parallel_calls, settings.tool_timeout
        self.max_tool_response_length = settings.max_tool_response_length
        self.tool_response_truncate_side = settings.tool_response_truncate_side
        self.prompt_length = self.rollout_config.prompt_length
        self.response_length = self.rollout_config.response_length
        selected: Mapping[str, Tool] = self.server_manager.tools
        self.tools = {name: tool.tool if isinstance(tool, VerlTool) else tool for name, tool in selected.items()}
        self.tool_schemas = [tool.schema for tool in selected.values()]
        self.interaction_config_file = settings.interaction_config_path
        self.interaction_map: Mapping[str, Any] = self.server_manager.interactions

    @functools.cached_property
    def tool_parser(self) -> ToolParser:
        """The parser of the configured format, made once it is used: a class may set its own."""
        return ToolParser.get_tool_parser(self.rollout_config.multi_turn.format, self.tokenizer)

    @functools.cached_property
    def tool_parser_name(self) -> str:
        """The name of the format of calls."""
        return self.tool_parser.format or self.rollout_config.multi_turn.format

    @functools.cached_property
    def turn_separator(self) -> list[int]:
        """The ids that the template writes between the end of a response and the next message."""
        message = [{"role": "user", "content": "x"}]
        ids = self.tokenizer.apply_chat_template(message, add_generation_prompt=True, **self.apply_chat_template_kwargs)
        alone, end = ids[len(self.system_prompt) :], [self.tokenizer.eos_token_id]
        added = self.server_manager.dialogue.delta(message, end, ended=True, called=False).ids
        return added[: -len(alone)] if added[-len(alone) :] == alone else []

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        """Run an episode of the row in `kwargs`."""
        messages, talk = [*kwargs["raw_prompt"]], interaction_kwargs(kwargs)
        interaction = self.interaction_map.get(talk.get("name"))
        named = {"metrics": {}, "request_id": uuid4().hex, "tools_kwargs": tools_kwargs(kwargs)}
        data = AgentData(messages, **named, interaction=interaction, interaction_kwargs=talk)
        if interaction is not None:
            await accepted(interaction.start_interaction, data.request_id, **data.interaction_kwargs)
        state = AgentState.PENDING
        try:
            while state != AgentState.TERMINATED:
                state = await self._handle(state, data, sampling_params)
        finally:
            if interaction is not None:
                await finalize_interaction(interaction, data.request_id, data.interaction_kwargs)
        return self._output(data)

    async def _handle(self, state: AgentState, agent_data: AgentData, sampling_params: dict[str, Any]) -> AgentState:
        if state == AgentState.PENDING:
            return await self._handle_pending_state(agent_data, sampling_params)
        if state == AgentState.GENERATING:
            return await self._handle_generating_state(agent_data, sampling_params)
        if state == AgentState.PROCESSING_TOOLS:
            return await self._handle_processing_tools_state(agent_data)
        return await self._handle_interacting_state(agent_data)

    def _output(self, agent_data: AgentData) -> AgentLoopOutput:
        count, most = len(agent_data.response_mask), self.response_length
        start = len(agent_data.prompt_ids) - count
        metrics = {name: value for name, value in agent_data.metrics.items() if isinstance(value, int | float)}
        return AgentLoopOutput(
            prompt_ids=agent_data.prompt_ids[:start],
            response_ids=agent_data.prompt_ids[start:][:most],
            response_mask=agent_data.response_mask[:most],
            response_logprobs=agent_data.response_logprobs[:most] or None,
            num_turns=agent_data.user_turns + agent_data.assistant_turns + 1,
            metrics=AgentLoopMetrics.model_validate(metrics),
            extra_fields={
                **agent_data.extra_fields,
                "turn_scores": agent_data.turn_scores,
                "tool_rewards": agent_data.tool_rewards,
            },
        )

    async def _handle_pending_state(self, agent_data: AgentData, sampling_params: dict[str, Any]) -> AgentState:
        agent_data.prompt_ids = await self.ct_build_initial_tokens(agent_data.messages, self.tool_schemas or None)
        return AgentState.GENERATING

    async def _handle_generating_state(
        self, agent_data: AgentData, sampling_params: dict[str, Any], ignore_termination: bool = False
    ) -> AgentState:
        """Sample a response. The row's length and the numbers of turns end the episode, but with `ignore_termination`
        the length does not."""
        left = self.response_length - len(agent_data.response_mask)
        limited = sampling_params if ignore_termination else {"max_tokens": max(left, 1), **sampling_params}
        with simple_timer("generate_sequences", agent_data.metrics):
            output = await self.server_manager.generate(
                agent_data.request_id, prompt_ids=agent_data.prompt_ids, sampling_params=limited
            )
        agent_data.assistant_turns += 1
        agent_data.response_ids = output.token_ids
        agent_data.prompt_ids = [*agent_data.prompt_ids, *output.token_ids]
        agent_data.response_mask += [1] * len(output.token_ids)
        agent_data.response_logprobs += output.log_probs
        if not ignore_termination and len(agent_data.response_mask) >= self.response_length:
            return AgentState.TERMINATED
        if self.max_assistant_turns and agent_data.assistant_turns >= self.max_assistant_turns:
            return AgentState.TERMINATED
        if self.max_user_turns and agent_data.user_turns >= self.max_user_turns:
            return AgentState.TERMINATED
        ids = agent_data.response_ids
        _, agent_data.tool_calls = await self.tool_parser.extract_tool_calls(ids, self.tool_schemas)
        if self.interaction_map:  # it reads the whole response, with its calls, as in verl
            content = await asyncio.to_thread(self.tokenizer.decode, ids, skip_special_tokens=True)
            agent_data.messages.append({"role": "assistant", "content": content})
        if agent_data.tool_calls:
            return AgentState.PROCESSING_TOOLS
        return AgentState.TERMINATED if agent_data.interaction is None else AgentState.INTERACTING

    async def _handle_processing_tools_state(self, agent_data: AgentData) -> AgentState:
        calls = agent_data.tool_calls[: self.max_parallel_calls]
        with simple_timer("tool_calls", agent_data.metrics):
            running = (self._call_tool(call, agent_data.tools_kwargs, agent_data) for call in calls)
            results = await asyncio.gather(*running)
        messages: list[Message] = []
        for call, (response, reward, _) in zip(calls, results, strict=True):
            identity = {"tool_call_id": call.tool_call_id} if call.tool_call_id else {}
            messages.append({"role": "tool", "name": call.name, "content": response.text or "", **identity})
            agent_data.tool_rewards += [] if reward is None else [reward]
        return await self._add(agent_data, messages)

    async def _handle_interacting_state(self, agent_data: AgentData) -> AgentState:
        done, text, score, fields = await accepted(
            agent_data.interaction.generate_response,
            agent_data.request_id,
            agent_data.messages,
            **agent_data.interaction_kwargs,
        )
        agent_data.turn_scores += [] if score is None else [score]
        agent_data.extra_fields |= mapping(fields)
        if done:
            return AgentState.TERMINATED
        return await self._add(agent_data, [{"role": "user", "content": text}])

    async def _add(self, agent_data: AgentData, messages: list[Message]) -> AgentState:
        """Append messages that were not sampled; the episode ends if they do not fit."""
        said = {"role": "assistant", "content": "", "tool_calls": [{}] if messages[0]["role"] == "tool" else []}
        merged, mask, log_probs = await self.ct_merge_non_assistant_msg(
            [said],
            [said, *messages],
            agent_data.prompt_ids,
            agent_data.response_mask,
            agent_data.response_logprobs,
            tools=self.tool_schemas,
        )
        if len(mask) >= self.response_length:
            return AgentState.TERMINATED
        agent_data.messages += messages
        agent_data.prompt_ids, agent_data.response_mask = merged.token_ids, mask
        agent_data.response_logprobs = log_probs or []
        agent_data.user_turns += 1
        return AgentState.GENERATING

    async def _call_tool(
        self, tool_call: FunctionCall, tools_kwargs: Mapping[str, Any], agent_data: AgentData | None = None
    ) -> tuple[ToolResponse, float | None, dict[str, Any]]:
        """Create the tool, call and release it; return its result, its reward and its metrics. What goes wrong is a
        text for the policy; EpisodeFault if nobody is at the other end."""
        named = mapping(tools_kwargs.get(tool_call.name))
        execute = {**mapping(named.get("execute_kwargs")), "agent_data": agent_data}
        row = {"tools_kwargs": {tool_call.name: {**named, "execute_kwargs": execute}}}
        try:
            with contained(tool_call.name, EpisodeFault):
                named_tool = self.tools[tool_call.name]
                tool = named_tool if isinstance(named_tool, Tool) else VerlTool(named_tool)
                arguments, seconds = (
                    json.loads(tool_call.arguments or "{}"),
                    None if tool.limited else self.tool_timeout,
                )
                state = await finished(tool.start, row)
                try:
                    result = to_result(await finished(tool.call, state, arguments, seconds=seconds), tool.name)
                finally:
                    await finished(tool.end, state)
        except UserCodeError as failure:
            error = failure.cause
            if unreachable(error):
                raise EpisodeFault(f"tool {tool_call.name} failed: {first_line(error)}") from error
            logger.warning("tool %s failed", tool_call.name, exc_info=error)
            return ToolResponse(text=f"Error when executing tool: {first_line(error)}"), 0.0, {}
        if result.images:
            cause = "Error: the tool returned a picture, and an agent loop reads text alone"
            return ToolResponse(text=cause), result.reward, dict(result.metrics)
        text = truncated(result.text, self.max_tool_response_length, self.tool_response_truncate_side)
        return ToolResponse(text=text), result.reward, dict(result.metrics)

    @classmethod
    def reads_configured_format(cls) -> bool:
        """Whether a loop is certain to read calls in the configured format: a constructor or a handler that a class
        defines itself may read them by another parser."""
        names = ("__init__", "init_class", "run", "tool_parser", "_handle_generating_state")
        return all(inspect.getattr_static(cls, name) is inspect.getattr_static(ToolAgentLoop, name) for name in names)


_TOOL_LOOP = by_name(AgentData, AgentState, FunctionCall, ToolAgentLoop, ToolParser)
NAMES = {
    "verl.experimental.agent_loop.tool_agent_loop": _TOOL_LOOP,
    "verl.experimental.agent_loop": by_name(ToolAgentLoop),
}


def provide_imports() -> None:
    """Provide the imports of files that are written for verl."""
    for names in (stand_ins.NAMES, loops.NAMES, tools.NAMES, NAMES):
        provide_verl_imports(names)


def gsm8k_tool(config: Mapping[str, Any], schema: Mapping[str, Any] | None = None) -> Tool:
    """Return verl's tool calc_gsm8k_reward: it scores an answer of the policy."""
    return VerlTool(stand_ins.Gsm8kTool(config, stand_ins.as_given(schema)))
