"""Episodes of several turns: environments, tools, and the processes that run them.

Here are environments and tools as a user writes them; this file imports nothing heavy. An episode is a conversation
between the policy and an environment. All methods may be plain functions, which run in threads, or coroutines.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hybridrl.config.schema_parts import AgentConfig, MultiTurnConfig

Message = dict[str, Any]  # {"role": ..., "content": ...}, as a chat template reads it
Schema = dict[str, Any]  # a tool: {"type": "function", "function": {"name", "description", "parameters"}}
MULTI_TURN = "actor_rollout_ref.rollout.multi_turn"
AGENT = "actor_rollout_ref.rollout.agent"
ENVIRONMENT = f"{MULTI_TURN}.environment"
ONLINE = "online"


def schema_of_texts(name: str, description: str, **arguments: str) -> Schema:
    """Return the schema of a tool whose arguments are texts, all required, each with its description."""
    properties = {key: {"type": "string", "description": text} for key, text in arguments.items()}
    parameters = {"type": "object", "properties": properties, "required": [*arguments]}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


class ToolError(Exception):
    """Raise it in a tool for an ordinary failure: the policy reads its text as the tool's result."""


class EpisodeFault(Exception):
    """Raise it where an episode cannot continue and the policy is not the reason, such as a network failure: the
    episode is excluded from training by name, never scored as 0."""


@dataclass(frozen=True)
class ToolCall:
    """One tool call of a response; `error` says why it could not be read, in words for the policy."""

    name: str
    arguments: dict[str, Any]
    id: str = ""
    error: str = ""


@dataclass(frozen=True)
class CallRecord:
    """A tool call and its result, for transcripts and metrics; `outcome` is ok, error, invalid, timeout or skipped."""

    call: ToolCall
    result: str
    seconds: float
    outcome: str
    reward: float | None = None


@dataclass(frozen=True)
class Response:
    """A response of the policy, as an environment sees it.

    `text` is decoded without special tokens and without the calls, which are parsed if the environment has `tools`.
    `turn` counts from 0; `remaining_tokens` is what the episode may still add to its context. After the `last` response
    no other follows, whatever the environment returns.
    """

    text: str
    calls: Sequence[ToolCall] = ()
    token_ids: Sequence[int] = ()
    turn: int = 0
    remaining_tokens: int = 0
    last: bool = False


@dataclass
class Step:
    """An environment's reply to a response: `messages` continue the conversation, `done` ends it.

    `reward` is that of the turn; an episode's reward is their sum, unless no turn has one: then the reward function
    scores it. `replace` is a whole new context, such as a summary, in place of the conversation so far.
    """

    messages: list[Message] = field(default_factory=list)
    reward: float | None = None
    done: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)
    replace: list[Message] | None = None
    calls: Sequence[CallRecord] = ()


class Environment:
    """One episode's environment: constructed with its configuration and the row of the dataset, all columns of it.

    `tools` are the schemas that the chat template shows to the policy.
    """

    tools: Sequence[Schema] = ()

    def __init__(self, config: Mapping[str, Any], row: Mapping[str, Any]) -> None:
        self.config, self.row = config, row

    def reset(self, messages: list[Message]) -> list[Message]:
        """Return the first messages of the conversation, by default those of the row."""
        return messages

    def step(self, response: Response) -> Step:
        """Return what follows a response of the policy."""
        raise NotImplementedError

    def close(self) -> Mapping[str, float]:
        """Release what the episode holds and return its metrics; called once, also after a failure."""
        return {}


def mapping(value: Any) -> Mapping[str, Any]:
    """The value if it is a mapping, else an empty one."""
    return value if isinstance(value, Mapping) else {}


def column(row: Mapping[str, Any], name: str, default: Any = None, config: Mapping[str, Any] | None = None) -> Any:
    """A field of the row: one of its columns, of `extra_info`, or of the ground truth if that has fields; then of the
    configuration."""
    truth = mapping(ground_truth(row))
    for place in (row, mapping(row.get("extra_info")), truth, config or {}):
        if place.get(name) is not None:
            return place[name]
    return default


def ground_truth(row: Mapping[str, Any]) -> Any:
    """The ground truth, under `reward_spec` (SkyRL) or `reward_model` (verl)."""
    for column in ("reward_spec", "reward_model"):
        if isinstance(row.get(column), Mapping):
            return row[column].get("ground_truth")
    return None


def needed(row: Mapping[str, Any], name: str) -> Any:
    """A field as `column` finds it; ValueError names it if there is none."""
    value = column(row, name)
    if value is None:
        columns = ", ".join(row)
        raise ValueError(f"the row has no {name}: it is a column, or a field of extra_info; its columns are {columns}")
    return value


def tools_kwargs(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the arguments of a row for each method of each tool: a column, or a field of extra_info."""
    tools = mapping(row.get("tools_kwargs")) or mapping(mapping(row.get("extra_info")).get("tools_kwargs"))
    return {name: kwargs for name, kwargs in tools.items() if kwargs is not None}  # Parquet has every tool in every row


def interaction_kwargs(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the arguments of a row for its interaction, `name` among them."""
    return mapping(mapping(row.get("extra_info")).get("interaction_kwargs")) or mapping(row.get("interaction_kwargs"))


@dataclass(frozen=True)
class EnvironmentSettings:
    """The environment that rows run in, unless a row names another; `libraries` are imported first, for what they
    register."""

    multi_turn: MultiTurnConfig
    agent: AgentConfig
    libraries: tuple[str, ...] = ()

    @property
    def function(self) -> str | None:
        """The user's function that rows run in: its file, or online for one outside the run."""
        return ONLINE if self.agent.mode == ONLINE else self.agent.path

    @property
    def has_tools(self) -> bool:
        """Whether there are tools."""
        return bool(self.multi_turn.tools or self.multi_turn.tool_config_path or self.multi_turn.function_tool_path)
