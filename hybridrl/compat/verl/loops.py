"""verl's agent loops: classes that run a whole episode themselves, token ids in and token ids out, unchanged.

A row's `agent_name` chooses a loop of the yaml at `agent_loop_config_path`, or one marked by `@register`.
"""

import asyncio
import copy
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
from pydantic import BaseModel, Field

from hybridrl.agents.environments import AGENT, EpisodeFault, Message, episode_loop, mapping
from hybridrl.agents.environments.template import REJECTIONS
from hybridrl.agents.environments.user_code import reward_of
from hybridrl.compat.skyrl import numbers
from hybridrl.compat.verl.names import by_name, get_event_loop
from hybridrl.compat.verl.tools import initialize_tools_from_config, load_interactions, load_verl_class, read_entries
from hybridrl.config import ConfigError
from hybridrl.config.compose import as_section
from hybridrl.config.custom_code import once, own, taken
from hybridrl.core.carried import Encoded, declared, superseded
from hybridrl.core.experience.trajectory import Policy, Trajectory, Turn
from hybridrl.core.rollout import Completion

LOOPS = f"{AGENT}.agent_loop_config_path"


class AgentLoopMetrics(BaseModel, extra="allow"):
    """Seconds of an episode, by what they were spent on."""

    generate_sequences: float = 0.0
    tool_calls: float = 0.0
    compute_score: float = 0.0
    num_preempted: int = -1


class AgentLoopOutput(BaseModel, extra="allow"):
    """A row of an episode: `response_mask` is 1 for sampled ids and 0 for others; log-probs are of all response ids."""

    prompt_ids: list[int]
    response_ids: list[int]
    response_mask: list[int]
    response_logprobs: list[float] | None = None
    multi_modal_data: dict[str, Any] | None = None
    reward_score: Any = None
    num_turns: int = 0
    metrics: AgentLoopMetrics = Field(default_factory=AgentLoopMetrics)
    extra_fields: dict[str, Any] = Field(default_factory=dict)
    routed_experts: Any = None
    carried: dict[str, Any] = Field(default_factory=dict)


class TokenOutput(list):
    """Sampled ids; a list for the loops of early releases, which got one, with the fields that later ones read."""

    def __init__(self, completion: Completion, prompt_ids: Sequence[int] = ()) -> None:
        super().__init__(completion.token_ids.tolist())
        self.context = [*prompt_ids, *self]
        self.token_ids: list[int] = list(self)
        self.log_probs: list[float] = completion.log_probs.tolist()
        self.stop_reason = "length" if completion.truncated else "completed"
        self.carried = completion.carried
        self.routed_experts = self.num_preempted = None  # loops only return the experts, which are carried
        self.extra_fields: dict[str, Any] = {}


class AsyncLLMServerManager:
    """The server that a loop samples from, which is the policy; it keeps what was sampled.

    `dialogue` turns messages into the ids that they add; `tools` and `interactions` are those of the configuration, for
    loops that leave it to their base class.
    """

    tools: Mapping[str, Any] = MappingProxyType({})
    interactions: Mapping[str, Any] = MappingProxyType({})

    def __init__(self, policy: Policy, dialogue: Any = None) -> None:
        self._policy, self.dialogue = policy, dialogue
        self.sampled: list[TokenOutput] = []

    async def generate(
        self, request_id: str, *, prompt_ids: Sequence[int], sampling_params: Mapping[str, Any], **_: Any
    ) -> TokenOutput:
        """Sample a continuation; of the parameters, the token limit and the stop strings may differ per call."""
        limit = sampling_params.get("max_tokens") or sampling_params.get("max_new_tokens")
        stop = sampling_params.get("stop") or ()
        stop = (stop,) if isinstance(stop, str) else tuple(stop)
        prompt_ids = [int(one) for one in prompt_ids]
        output = TokenOutput(await self._policy.generate(Encoded(prompt_ids), max_tokens=limit, stop=stop), prompt_ids)
        for one in self.sampled[-1:]:
            if output.context[: len(one.context)] == one.context:
                one.carried = superseded(one.carried, output.carried)
        self.sampled.append(output)
        return output


class DictConfigWrap:
    """A section of the configuration."""

    def __init__(self, config: Any) -> None:
        self.config = config


class AgentLoopBase:
    """The base class of verl's agent loops, with the constructor and the helpers of all its releases."""

    _class_initialized = False  # which classes of early releases set
    enable_continuous_token = True  # which classes of 0.9 read
    needs_tools = False  # and interactions, of the configuration

    def __init__(
        self,
        trainer_config: DictConfigWrap,
        server_manager: AsyncLLMServerManager,
        tokenizer: Any,
        processor: Any = None,
        dataset_cls: Any = None,
        dataset_config: DictConfigWrap | None = None,
        data_config: DictConfigWrap | None = None,
        **kwargs: Any,
    ) -> None:
        self.config = trainer_config.config
        given = {"config": self.config, "tokenizer": tokenizer, "processor": processor, **kwargs}
        self.init_class(**taken(self.init_class, given))
        self.rollout_config = self.config.actor_rollout_ref.rollout
        self.server_manager, self.tokenizer, self.processor = server_manager, tokenizer, processor
        section = data_config or dataset_config
        self.dataset_cls, self.dataset_config = dataset_cls, section.config if section else self.config.data
        self.data_config = self.dataset_config
        self.apply_chat_template_kwargs = dict(self.dataset_config.get("apply_chat_template_kwargs") or {})
        self.loop = get_event_loop()

    @classmethod
    def init_class(cls, config: Any, tokenizer: Any, **kwargs: Any) -> None:
        """Prepare what all episodes share; classes of early releases define it."""

    @functools.cached_property
    def system_prompt(self) -> list[int]:
        """The ids with which the template begins without any message, such as its default system message."""
        try:
            return self.tokenizer.apply_chat_template(
                [], add_generation_prompt=False, **self.apply_chat_template_kwargs
            )
        except REJECTIONS:  # by templates that need a message
            return []

    async def process_vision_info(self, messages: list[Message]) -> dict[str, Any]:
        """The images and videos of the messages: none."""
        return {}

    process_multi_modal_info = process_vision_info

    async def apply_chat_template(
        self,
        messages: list[Message],
        tools: list[Any] | None = None,
        images: Any = None,
        videos: Any = None,
        remove_system_prompt: bool = False,
        **_: Any,
    ) -> list[int]:
        """The ids of the messages with the generation prompt."""
        options = {"tools": tools, "add_generation_prompt": True, **self.apply_chat_template_kwargs}
        ids = await asyncio.to_thread(self.tokenizer.apply_chat_template, messages, **options)
        return ids[len(self.system_prompt) :] if remove_system_prompt else ids

    async def ct_build_initial_tokens(self, messages: list[Message], tools: Any = None, **_: Any) -> list[int]:
        """The ids with which the conversation begins."""
        return await self.apply_chat_template(messages, tools)

    async def ct_merge_assistant_token(
        self,
        runtime_token_ids: list[int],
        assistant_token_ids: list[int],
        response_mask: list[int],
        response_logprobs: list[float] | None = None,
        assistant_logprobs: list[float] | None = None,
    ) -> tuple[Any, list[int], list[float] | None]:
        """Append what was sampled to the ids, the mask and the log-probs."""
        mask = [*response_mask, *[1] * len(assistant_token_ids)]
        log_probs = None if response_logprobs is None else [*response_logprobs, *(assistant_logprobs or [])]
        return SimpleNamespace(token_ids=[*runtime_token_ids, *assistant_token_ids]), mask, log_probs

    async def ct_merge_non_assistant_msg(
        self,
        previous_messages: list[Message],
        updated_messages: list[Message],
        runtime_token_ids: list[int],
        response_mask: list[int],
        response_logprobs: list[float] | None = None,
        tools: Any = None,
    ) -> tuple[Any, list[int], list[float] | None]:
        """Append the ids of new messages, which are not trained on."""
        new, called = updated_messages[len(previous_messages) :], bool(previous_messages[-1].get("tool_calls"))
        turn = len(response_mask) - "".join(map(str, response_mask)).rfind("0") - 1  # sampled last
        sampled = runtime_token_ids[-turn:] if turn else runtime_token_ids
        options = {"ended": True, "called": called, "tools": tools or ()}
        delta = await asyncio.to_thread(self.server_manager.dialogue.delta, new, sampled, **options)
        kept = len(runtime_token_ids) - delta.dropped
        mask = response_mask[: len(response_mask) - delta.dropped] + [0] * len(delta.ids)
        if response_logprobs is not None:
            response_logprobs = response_logprobs[: len(response_logprobs) - delta.dropped] + [0.0] * len(delta.ids)
        return SimpleNamespace(token_ids=[*runtime_token_ids[:kept], *delta.ids]), mask, response_logprobs

    def _assert_mm_supported(self, has_multi_modal: bool) -> None: ...

    def _get_mm_processor_kwargs(self, audio_data: Any = None) -> dict[str, Any]:
        return {}

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> Any:
        """Run an episode of the row in `kwargs`."""
        raise NotImplementedError


_registered: dict[str, type] = {}


def register(name: str) -> Callable[[type], type]:
    """Register a class as the loop of this `agent_name`."""

    def decorate(cls: type) -> type:
        _registered[name] = cls
        return cls

    return decorate


@dataclass(frozen=True)
class VerlLoop(episode_loop.AgentLoop):
    """A loop class with its arguments, for the episodes of one row."""

    cls: type
    kwargs: Mapping[str, Any]
    row: Mapping[str, Any] = field(default_factory=dict)
    tools: Mapping[str, Any] = field(default_factory=dict)  # of the configuration, for a class that needs them
    interactions: Mapping[str, Any] = field(default_factory=dict)  # likewise

    @property
    def needs_tools(self) -> bool:
        """Whether the class has the configuration's tools and interactions."""
        return getattr(self.cls, "needs_tools", False)

    @property
    def reads_configured_format(self) -> bool:
        return getattr(self.cls, "reads_configured_format", bool)()

    @staticmethod
    def trajectory(rows: Sequence[AgentLoopOutput], versions: np.ndarray, tokenizer: Any) -> Trajectory:
        """Return the rows as turns: what has mask 1 was sampled. If the rows have other tokens than were sampled, each
        counts as sampled with the oldest of `versions`.

        EpisodeFault if nothing was sampled, or its log-probs are unknown.
        """
        turns: list[Turn] = []
        count = sum(map(sum, (row.response_mask for row in rows)))
        left = versions if len(versions) == count else np.full(count, min(versions, default=0))
        for row in rows:
            observed, position = row.prompt_ids, 0
            for sampled, run in groupby(row.response_mask):
                ids = row.response_ids[position : position + (length := len(list(run)))]
                if sampled and row.response_logprobs is None:
                    raise EpisodeFault(
                        "the agent loop returned no response_logprobs, and ids that the policy did not sample"
                    )
                if sampled:
                    log_probs = np.array(row.response_logprobs[position : position + length], np.float32)
                    fresh = bool(turns) and position == 0
                    version, left = left[:length], left[length:]
                    tokens = np.array(ids, np.int64)
                    turns.append(Turn(observed, tokens, log_probs, version, "stop", fresh, carried=row.carried))
                observed, position = ids if not sampled else [], position + length
        if not turns:
            raise EpisodeFault("the agent loop returned no sampled ids")
        last = rows[-1]
        turns[-1] = replace(turns[-1], reward=last.reward_score)
        text = tokenizer.decode(last.response_ids, skip_special_tokens=True)
        metrics = numbers(last.metrics.model_dump(), "the agent loop")
        return Trajectory(turns, "completed", (), text, last.reward_score, metrics)

    async def run(
        self,
        policy: Policy,
        messages: list[Message],
        tokenizer: Any,
        config: Mapping[str, Any],
        sampling_params: Mapping[str, Any],
        dialogue: Any = None,
        call_parser: Callable[[], Any] | None = None,
    ) -> list[AgentLoopOutput]:
        """Run an episode and return its rows; EpisodeFault if ids, mask and log-probs are not of the same length.

        `config` is the configuration of the run or evaluation, by verl's names; `call_parser` returns the parser of its
        format of calls, for parsers of the loop where that is auto. What raises in the loop is raised here.
        """
        section, server = _section(config), AsyncLLMServerManager(policy, dialogue)
        server.tools, server.interactions = self.tools, self.interactions
        data, copied, kwargs = DictConfigWrap(section.data), copy.copy(tokenizer), own(self.kwargs)
        # A list of ids, as it was when these loops were written.
        copied.apply_chat_template = functools.partial(tokenizer.apply_chat_template, return_dict=False)
        copied.call_parser = call_parser
        given = {"processor": None, "dataset_cls": None, "dataset_config": data, "data_config": data, **kwargs}
        given |= {"trainer_config": DictConfigWrap(section), "server_manager": server, "tokenizer": copied}
        loop = self.cls(**taken(self.cls, given))
        fields = {**_as_dataset_item(self.row), "raw_prompt": messages, "messages": messages}
        returned = await loop.run(**taken(loop.run, {**fields, "sampling_params": dict(sampling_params)}))
        outputs = returned if isinstance(returned, list) else [returned]
        rows = [_checked(output, server.sampled if len(outputs) == 1 else []) for output in outputs]
        for row in rows:
            row.reward_score = reward_of(row.reward_score, self.cls)
            row.carried = _carried_by(row, server.sampled)  # whatever the loop returned
        return rows


def agent_loop(name: str, path: str | None) -> VerlLoop:
    """The loop of this `agent_name`; ConfigError lists those that there are."""
    loops = {**{known: VerlLoop(cls, {}) for known, cls in _registered.items()}, **(_load(path) if path else {})}
    if name not in loops:
        known = f"it has {', '.join(loops)}" if loops else f"set {LOOPS} to a yaml of loops"
        raise ConfigError(f"agent_name={name}: there is no such agent loop", fix=known, keys=LOOPS)
    return loops[name]


@once
def _load(path: str) -> dict[str, VerlLoop]:
    loops = {}
    for index, entry in enumerate(read_entries(path, LOOPS, "agent_loops")):
        place = f"{LOOPS}={path}: [{index}]"
        if not entry.get("name") or not entry.get("_target_"):
            raise ConfigError(f"{place} has no name or no _target_", fix="write - name: ... and _target_: module.Class")
        cls = load_verl_class(str(entry["_target_"]), place, path, "verl.experimental.agent_loop")
        if not inspect.iscoroutinefunction(getattr(cls, "run", None)):
            raise ConfigError(f"{place}: {cls.__name__} has no async method run", fix="inherit from AgentLoopBase")
        kwargs = {key: value for key, value in entry.items() if key not in ("name", "_target_")}
        loops[str(entry["name"])] = VerlLoop(cls, kwargs)
    return loops


def _section(config: Mapping[str, Any]) -> Any:
    """The configuration as loops read it, with the lengths where verl derives them."""
    section = as_section(dict(config))
    rollout, data = section.actor_rollout_ref.rollout, section.data
    for name, source in (("prompt_length", "max_prompt_length"), ("response_length", "max_response_length")):
        if name not in rollout:
            rollout[name] = data[source]
    return section


def _as_dataset_item(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row with the fields that verl's dataset adds."""
    extra = mapping(row.get("extra_info"))
    added = {name: extra.get(name) or {} for name in ("tools_kwargs", "interaction_kwargs")}
    return {"index": extra.get("index", 0), **added, **row}


def _carried_by(row: AgentLoopOutput, sampled: Sequence[TokenOutput]) -> dict[str, np.ndarray]:
    """The fields with the join "last" of the engine's outputs that have the row's tokens, as far as both go; others are
    left out, since a loop may cut and mask what was sampled."""
    ids = [*row.prompt_ids, *row.response_ids]
    same = [one.carried for one in sampled if one.context[: len(ids)] == ids[: len(one.context)]]
    return {name: value for carried in same for name, value in carried.items() if declared(name).join == "last"}


def _checked(output: Any, sampled: Sequence[TokenOutput]) -> AgentLoopOutput:
    """The output if it is a row; missing log-probs are filled from `sampled`, where its ids are those."""
    row = AgentLoopOutput.model_validate(output.model_dump() if isinstance(output, BaseModel) else output)
    lengths = {"response_mask": len(row.response_mask)}
    if row.response_logprobs is not None:
        lengths["response_logprobs"] = len(row.response_logprobs)
    for name, length in lengths.items():
        if length != len(row.response_ids):
            raise EpisodeFault(f"the agent loop returned {len(row.response_ids)} response_ids and {length} {name}")
    if row.response_logprobs is None:
        ids = [one for output in sampled for one in output.token_ids]
        trained = [one for one, mask in zip(row.response_ids, row.response_mask, strict=True) if mask]
        if trained == ids[: len(trained)]:
            values = iter([value for output in sampled for value in output.log_probs])
            row.response_logprobs = [next(values) if mask else 0.0 for mask in row.response_mask]
    return row


_AGENT_LOOP = by_name(AgentLoopBase, AgentLoopMetrics, AgentLoopOutput, AsyncLLMServerManager, DictConfigWrap)
_AGENT_LOOP |= by_name(TokenOutput, register)
NAMES: dict[str, dict[str, Callable[..., Any] | None]] = {
    "verl.experimental.agent_loop": _AGENT_LOOP,
    "verl.experimental.agent_loop.agent_loop": _AGENT_LOOP,
    "verl.tools.tool_registry": by_name(initialize_tools_from_config),
    "verl.tools.utils.tool_registry": by_name(initialize_tools_from_config),
    "verl.interactions.utils.interaction_registry": {"initialize_interactions_from_config": load_interactions},
    "verl.workers.rollout.llm_server": {"LLMServerClient": AsyncLLMServerManager},
    "verl.workers.rollout.replica": by_name(TokenOutput),
}
