"""Let files of tools, interactions and agent loops `import verl...` where verl is not installed.

The tools of verl that need a service run on the built-in ones here, under verl's names.
"""

import asyncio
import json
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, create_model

from hybridrl.agents.environments import Message, Schema, schema_of_texts
from hybridrl.agents.environments.built_in.tools import Searcher, run_python
from hybridrl.agents.environments.tools import function_tool
from hybridrl.compat.verl.names import by_name
from hybridrl.rewards.scorers.short_answers import score_gsm8k


def _open(name: str, /, **fields: Any) -> Any:
    """Make a class of verl's schemas, each field with its type and default; fields that are not listed are kept."""
    return create_model(name, __config__=ConfigDict(extra="allow"), __module__=__name__, **fields)


OpenAIFunctionPropertySchema = _open(
    "OpenAIFunctionPropertySchema", type=(Any, None), description=(str | None, None), enum=(list[Any] | None, None)
)
OpenAIFunctionParametersSchema = _open(
    "OpenAIFunctionParametersSchema",
    type=(str, "object"),
    properties=(dict[str, OpenAIFunctionPropertySchema], {}),
    required=(list[str], []),
)
OpenAIFunctionSchema = _open(
    "OpenAIFunctionSchema",
    name=(str, ...),
    description=(str, ""),
    parameters=(OpenAIFunctionParametersSchema, OpenAIFunctionParametersSchema()),
    strict=(bool, False),
)
OpenAIFunctionToolSchema = _open(
    "OpenAIFunctionToolSchema", type=(str, "function"), function=(OpenAIFunctionSchema, ...)
)
OpenAIFunctionParsedSchema = _open("OpenAIFunctionParsedSchema", name=(str, ...), arguments=(str, ...))
OpenAIFunctionCallSchema = _open("OpenAIFunctionCallSchema", name=(str, ...), arguments=(dict[str, Any], {}))
OpenAIFunctionToolCall = _open(
    "OpenAIFunctionToolCall",
    id=(str, ...),
    type=(Literal["function"], "function"),
    function=(OpenAIFunctionCallSchema, ...),
)


class ToolResponse(BaseModel, extra="allow"):
    """The response of a tool."""

    text: str | None = None
    image: list[Any] | None = None
    video: list[Any] | None = None

    def is_empty(self) -> bool:
        """Whether it has neither text nor media."""
        return not (self.text or self.image or self.video)

    def is_text_only(self) -> bool:
        """Whether it has a text and nothing else."""
        return bool(self.text) and not (self.image or self.video)


class BaseTool:
    """The base class of verl's tools: an instance per process, and per episode an instance id."""

    tool_schema: Any = None

    def __init__(self, config: dict[str, Any], tool_schema: Any = None) -> None:
        self.config = config
        self.tool_schema = tool_schema or self.get_openai_tool_schema()
        if self.tool_schema is None:
            raise ValueError("the tool has no schema: give tool_schema in the yaml, or define get_openai_tool_schema")
        self.name = self.tool_schema.function.name

    def get_openai_tool_schema(self) -> Any:
        """Return the schema, by default the yaml's."""
        return self.tool_schema

    async def create(self, instance_id: str | None = None, **_: Any) -> tuple[str, ToolResponse]:
        """Begin an episode and return its id."""
        return instance_id or str(uuid.uuid4()), ToolResponse()

    async def execute(self, instance_id: str, parameters: dict[str, Any], **_: Any) -> Any:
        """Run a call and return its response, reward and metrics."""
        return ToolResponse(text="done"), 0.0, {}

    async def calc_reward(self, instance_id: str, **_: Any) -> float:
        """Return the reward of the episode so far."""
        return 0.0

    async def release(self, instance_id: str, **_: Any) -> None:
        """End the episode."""


class Gsm8kTool(BaseTool):
    """verl's example: the policy submits answers to a question of GSM8K and reads whether they are right.

    A submission that does not improve on the last costs 0.05; `calc_reward` is that of the last one.
    """

    def __init__(self, config: dict[str, Any], tool_schema: Any = None) -> None:
        super().__init__(config, tool_schema)
        self._truths: dict[str, str] = {}
        self._rewards: dict[str, float] = {}

    def get_openai_tool_schema(self) -> Any:
        checks = "Check an answer: 1.0 if it is correct, else 0.0."
        return as_given(schema_of_texts("calc_gsm8k_reward", checks, answer="The answer."))

    async def create(self, instance_id: str | None = None, ground_truth: Any = None, **options: Any) -> Any:
        identity = instance_id or str(uuid.uuid4())
        truth = options.get("create_kwargs", {}).get("ground_truth") if ground_truth is None else ground_truth
        self._truths[identity], self._rewards[identity] = str(truth), 0.0
        return identity, ToolResponse()

    async def execute(self, instance_id: str, parameters: dict[str, Any], **_: Any) -> Any:
        answer = str(parameters.get("answer", ""))
        marked = answer if answer.startswith("#### ") else f"#### {answer}"
        reward = score_gsm8k(marked, self._truths[instance_id], method="flexible")
        gain = 0.0 if reward > self._rewards[instance_id] else -0.05
        self._rewards[instance_id] = reward
        return ToolResponse(text=f"Current parsed {answer=} {reward=}"), gain, {}

    async def calc_reward(self, instance_id: str, **_: Any) -> float:
        return self._rewards[instance_id]

    async def release(self, instance_id: str, **_: Any) -> None:
        del self._truths[instance_id], self._rewards[instance_id]


class SandboxFusionTool(BaseTool):
    """verl's Python tool, which runs in the built-in sandbox: no service is contacted."""

    def __init__(self, config: dict[str, Any], tool_schema: Any = None) -> None:
        super().__init__(config, tool_schema)
        self.default_timeout = config.get("default_timeout", 30)
        self.default_language = config.get("default_language", "python")
        self.execution_pool = _Pool()

    def get_openai_tool_schema(self) -> Any:
        runs = "Run Python code and read what it prints."
        return as_given(schema_of_texts("code_interpreter", runs, code="The code."))

    async def execute(self, instance_id: str, parameters: dict[str, Any], **_: Any) -> Any:
        code, timeout = str(parameters.get("code", "")), parameters.get("timeout", self.default_timeout)
        language = parameters.get("language", self.default_language)
        text = await self.execution_pool.execute.remote(self.execute_code, instance_id, code, timeout, language)
        return ToolResponse(text=text), None, None

    def execute_code(self, instance_id: str, code: str, timeout: float = 30, language: str = "python") -> str:
        """Run the code and return what it printed."""
        if language != "python":
            return f"Error: only python can be run, not {language}"
        return run_python(code, float(timeout))


class _Pool:
    """Has the calls of a Ray actor, `pool.execute.remote(function, ...)`, and runs them in a thread."""

    def __init__(self) -> None:
        self.execute = self

    def remote(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return asyncio.to_thread(function, *arguments)


class SearchTool(BaseTool):
    """verl's search tool: a client of a retriever in Search-R1's protocol."""

    def __init__(self, config: dict[str, Any], tool_schema: Any = None) -> None:
        super().__init__(config, tool_schema)
        url = config.get("retrieval_service_url") or "http://127.0.0.1:8000/retrieve"
        self._searcher = Searcher(url, config.get("topk", 3), config.get("timeout", 30))

    def get_openai_tool_schema(self) -> Any:
        schema = schema_of_texts("search", "Search passages.", query_list="The queries.")
        schema["function"]["parameters"]["properties"]["query_list"] |= {"type": "array", "items": {"type": "string"}}
        return as_given(schema)

    async def execute(self, instance_id: str, parameters: dict[str, Any], **_: Any) -> Any:
        queries = parameters.get("query_list")
        if not isinstance(queries, list) or not queries:
            return ToolResponse(text=json.dumps({"result": "Error: query_list must be a list of queries"})), 0.0, {}
        texts = await asyncio.to_thread(self._searcher.texts, [str(query) for query in queries])
        return ToolResponse(text=json.dumps({"result": "\n---\n".join(texts)}, ensure_ascii=False)), 0.0, {}


class BaseInteraction:
    """The base class of verl's interactions: a user whose messages answer the policy's responses."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.name = config.get("name", "interaction_agent")

    async def start_interaction(self, instance_id: str | None = None, **_: Any) -> str:
        """Begin an episode and return its id."""
        return instance_id or str(uuid.uuid4())

    async def generate_response(self, instance_id: str, messages: list[Message], **_: Any) -> Any:
        """Return whether the episode ends, the next message, the score of the turn, and anything else."""
        return False, "Your current result seems acceptable.", 0.8, {}

    async def calculate_score(self, *_: Any, **__: Any) -> float:
        """Return the score so far."""
        return 0.0

    async def finalize_interaction(self, *_: Any, **__: Any) -> None:
        """End the episode."""


class Gsm8kInteraction(BaseInteraction):
    """verl's example: says whether the answer is right until it is."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self._truths: dict[str, str] = {}

    async def start_interaction(self, instance_id: str | None = None, ground_truth: Any = None, **_: Any) -> str:
        identity = instance_id or str(uuid.uuid4())
        self._truths[identity] = str(ground_truth)
        return identity

    async def generate_response(self, instance_id: str, messages: list[Message], **_: Any) -> Any:
        said = next((message["content"] for message in reversed(messages) if message["role"] == "assistant"), "")
        score = score_gsm8k(str(said), self._truths[instance_id])
        if score == 1.0:
            return True, "Your response is correct!", score, {}
        return False, "Your response is incorrect! You need to reflect on your answer and try again.", score, {}

    async def finalize_interaction(self, instance_id: str, **_: Any) -> None:
        del self._truths[instance_id]


def as_given(schema: Schema | None) -> Any:
    """Return a schema of plain values as an object; None stays None."""
    return None if schema is None else OpenAIFunctionToolSchema.model_validate(schema)


@contextmanager
def simple_timer(name: str, timings: dict[str, float]) -> Iterator[None]:
    """Add the seconds of the block to `timings[name]`."""
    begin = time.monotonic()
    try:
        yield
    finally:
        timings[name] = timings.get(name, 0.0) + time.monotonic() - begin


NAMES: dict[str, dict[str, Callable[..., Any] | None]] = {
    "verl.tools.base_tool": by_name(BaseTool, OpenAIFunctionToolSchema, ToolResponse),
    "verl.tools.schemas": by_name(
        OpenAIFunctionPropertySchema,
        OpenAIFunctionParametersSchema,
        OpenAIFunctionSchema,
        OpenAIFunctionToolSchema,
        OpenAIFunctionParsedSchema,
        OpenAIFunctionCallSchema,
        OpenAIFunctionToolCall,
        ToolResponse,
    ),
    "verl.tools.function_tool": by_name(function_tool),
    "verl.tools.gsm8k_tool": by_name(Gsm8kTool),
    "verl.tools.sandbox_fusion_tools": by_name(SandboxFusionTool),
    "verl.tools.search_tool": by_name(SearchTool),
    "verl.interactions.base": by_name(BaseInteraction),
    "verl.interactions.gsm8k_interaction": by_name(Gsm8kInteraction),
    "verl.utils.profiler": {"simple_timer": simple_timer, "marked_timer": simple_timer},
    "verl.utils.debug": {"simple_timer": simple_timer, "marked_timer": simple_timer},
}
