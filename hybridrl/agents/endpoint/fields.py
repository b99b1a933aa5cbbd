"""The fields of a request that all forms share, each with its bounds, and the treatment of every other field.

A field either has its effect, or is in `HINTS` and answered with a warning, or is rejected by name: a request never has
another result than the client reads out of it. One within a field, such as a part of a message, is in none of the
lists: it has its effect or is answered with a warning, unless `REASONS` has it.
"""

import difflib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Self

from pydantic import BeforeValidator, Field, PrivateAttr

from hybridrl.agents.endpoint.core import SamplingOptions
from hybridrl.agents.endpoint.requests import F, Member, Name, rejected, unread, validated
from hybridrl.agents.environments import AGENT, Message, Schema

INT64 = 2**63
# Values of other fields that ask for nothing: what their documentation has as default. Empty ones never ask for
# anything; false and 0 may, such as a budget of 0.
DEFAULTS = {
    "modalities": ["text"],
    "truncation": "disabled",
    "best_of": 1,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "add_generation_prompt": True,
    "parallel_tool_calls": True,
    "include_reasoning": True,
    "length_penalty": 1,
    "stream_interval": 1,
    "top_logprobs": 0,
    "priority": 0,
    **dict.fromkeys(("echo", "store", "background", "add_special_tokens", "continue_final_message"), False),
    **dict.fromkeys(("include_stop_str_in_output", "use_beam_search", "enable_response_messages"), False),
    **dict.fromkeys(("return_tokens_as_token_ids", "return_prompt_text", "return_token_offsets"), False),
}
# Switches that are on if they are left out, and no fields: for any other, false asks for nothing.
OFF_ASKS = {"enable_thinking", "thinking", "reasoning"}
# What responses have within their fields, here or elsewhere: a client that sends one back asks for nothing by it.
SENT_BACK = {
    *("id", "type", "index", "status", "logprobs", "annotations", "citations"),
    *("thinking", "signature", "data", "summary", "encrypted_content"),
}
REASONS = {
    "logit_bias": "it changes what is sampled",
    "audio": "the policy writes text only",
    "functions": "write them as tools",
    "function_call": "write it as tool_calls, or as tool_choice",
    "echo": "only what is sampled is returned",
    "top_logprobs": "only the sampled token has a log-prob",
    **dict.fromkeys(("guided_json", "structured_outputs"), "write the schema as response_format"),
    "enable_thinking": "write it in chat_template_kwargs",
    "chat_template": "the template is that of the model",
    "continue_final_message": "a response is a message of its own; /v1/completions continues a text",
    "prompt_logprobs": "only /v1/completions of a served model has them",
    "previous_response_id": "responses are not stored; send the whole conversation as input",
}
COMMON_HINTS = {
    *("store", "service_tier", "parallel_tool_calls", "safety_identifier", "prompt_cache_key", "cache_salt"),
    *("prompt_cache_retention", "prompt_cache_options", "verbosity", "reasoning_effort", "request_id"),
    *("priority", "stream_interval"),
}
# In training these are the run's, since log-probs are needed of what is sampled from; the others are rejected there.
OF_THE_RUN = (
    *("temperature", "top_p", "top_k", "min_p", "seed"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)
SERVED_ONLY = ("stop_token_ids", "min_tokens", "ignore_eos")
FORCED_KEY = f"{AGENT}.forced_tool_choice"
AUTO, NONE, FORCED = "auto", "none", "forced"
CHOICES = {"auto": AUTO, "none": NONE, **dict.fromkeys(("required", "any", "function", "tool"), FORCED)}


@dataclass(frozen=True)
class Rules:
    """The use of an endpoint: one that `trains` samples as the run does, and is never constrained; a tool
    choice that forces a call is then rejected, or with `forced_as_auto` read as auto."""

    trains: bool = False
    forced_as_auto: bool = False


SERVED = Rules()


def as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


StopText = Annotated[str, Field(min_length=1, max_length=1000)]
Stops = Annotated[list[StopText], Field(max_length=64), BeforeValidator(as_list)]
Token = Annotated[int, Field(ge=0, lt=2**31, strict=True)]


class StreamOptions(Member):
    """The options of a stream: whether a last chunk has the usage."""

    include_usage: bool = False


class Named(Member):
    """A function that is named."""

    name: str = ""


class ToolChoice(Named):
    """The calls that a response may have; in chats the function is one level deeper."""

    type: Any = ""
    function: Named = Named()


class Sampled(Member):
    """The fields that all forms share. `HINTS` are further ones that have no effect and are accepted."""

    HINTS: ClassVar[set[str]] = COMMON_HINTS
    DEFAULTS: ClassVar[dict[str, Any]] = DEFAULTS
    SCHEMA: ClassVar[str] = ""  # the field with the format of a response
    # A stream's growing texts, the number of the event with their pieces, and the end.
    TEXTS: ClassVar[tuple[str, ...]] = ("content",)
    TEXT: ClassVar[int] = 0
    END: ClassVar[str] = ""

    model: str = ""
    n: int = 1
    stop: Stops = Field([])
    stop_token_ids: list[Token] = Field([], max_length=64)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, lt=2**31)
    min_p: float | None = Field(None, ge=0, le=1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, ge=0.01, le=100)
    seed: int | None = Field(None, ge=-INT64, lt=INT64)
    max_tokens: int | None = Field(None, gt=0)
    min_tokens: int = Field(0, ge=0)
    ignore_eos: bool = False
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    return_token_ids: bool = False
    user: str = ""
    metadata: dict[str, Any] = Field({})
    tool_choice: Any = AUTO

    _unread: dict[str, Any] = PrivateAttr(default_factory=dict)  # fields within those that `read` validated, by place
    _read_picture: Callable[[bytes], int] | None = PrivateAttr(None)

    def seen_by(self, read_picture: Callable[[bytes], int] | None) -> Self:
        """Return the request, whose pictures are read and named by this function; None: it may have none."""
        self._read_picture = read_picture
        return self

    def read(self, kind: type[F], value: Any, where: str) -> F:
        """Return the object at `where`; stores those of its fields without an effect, for the warnings."""
        fields = validated(kind, value, where, self._read_picture)
        self._unread |= unread(fields, f"{where}.")
        return fields

    def _chosen(self) -> ToolChoice:
        choice = self.tool_choice if isinstance(self.tool_choice, dict) else {"type": self.tool_choice}
        return self.read(ToolChoice, choice, "tool_choice")

    def choice(self) -> str:
        """Return whether calls of tools are read (AUTO), left in the text (NONE), or required (FORCED)."""
        kind = self._chosen().type
        if not isinstance(kind, str) or kind not in CHOICES:
            raise rejected(400, "tool_choice: choose auto or none", param="tool_choice")
        return CHOICES[kind]

    def session_id(self) -> str:
        """Return the session that the metadata name, "" if none."""
        name = self.metadata.get("session_id", "")
        if not isinstance(name, str):
            raise rejected(400, "metadata.session_id: a session is named by a text", param="metadata.session_id")
        return name

    def wanted(self, rules: Rules) -> SamplingOptions:
        """Return how a response is sampled; rejects what no response can have."""
        if self.n != 1:
            raise rejected(400, f"n={self.n} is not supported: send one request per response", param="n")
        schema = self.schema_wanted()
        if rules.trains:
            served = {name: getattr(self, name) for name in SERVED_ONLY}
            if name := next((name for name, value in served.items() if value), None):
                raise rejected(400, f"{name} is not supported while the policy is trained", param=name)
            if schema is not None:
                what = "the policy that is trained is not constrained; ask for the format in the prompt"
                raise rejected(400, f"{self.SCHEMA}: {what}", param=self.SCHEMA)
            return SamplingOptions(self.max_tokens, tuple(self.stop))
        forced = self.choice() == FORCED
        if forced:
            chosen = self._chosen()
            schema = call_schema(self.schemas(), chosen.function.name or chosen.name or None)  # None: any of them
        names = {*OF_THE_RUN, *SERVED_ONLY, "max_tokens"} - {"stop_token_ids"}
        options = {name: getattr(self, name) for name in names} | {"json_schema": schema, "forced": forced}
        return SamplingOptions(stop=tuple(self.stop), stop_ids=tuple(self.stop_token_ids), **options)

    def schemas(self) -> list[Schema]:
        """Return the tools as chat templates read them."""
        return []

    def events(self, body: dict[str, Any], piece: Message) -> list[dict[str, Any]]:
        """Return a body as the events of a stream, of which one has a piece of its text, and others whole items."""
        raise NotImplementedError

    def schema_wanted(self) -> str | None:
        """Return the JSON schema that a response must match, as text."""
        return None

    def _asks_for_nothing(self, name: str, value: Any, *, inside: bool) -> bool:
        """Return whether a field that nothing reads has no effect anywhere with this value."""
        if name in self.DEFAULTS:
            return bool(value == self.DEFAULTS[name])
        off = value is False and name not in OFF_ASKS
        return off or value in ("", [], {}) or (inside and not value)

    def warnings(self, rules: Rules) -> list[str]:
        """Return which fields have no effect; rejects those that would change the result."""
        run = [name for name in OF_THE_RUN if rules.trains and name in self.model_fields_set]
        warnings = [f"{name} has no effect: the run's sampling is used" for name in run]
        if self.choice() == FORCED and rules.trains:
            if not rules.forced_as_auto:
                what = f"the policy that is trained is not constrained; choose auto, or set {FORCED_KEY}=auto"
                raise rejected(400, f"tool_choice: {what}", param="tool_choice")
            warnings.append("tool_choice is read as auto: calls are parsed, and none is enforced")
        enforced = {"strict"} if self.choice() == FORCED and not rules.trains else set()
        others: dict[str, str] = {}  # places, of each kind the first
        for place, value in [*unread(self), *self._unread.items()]:
            name, inside = place.rpartition(".")[2], "." in place
            if self._asks_for_nothing(name, value, inside=inside):
                continue
            if inside and name in SENT_BACK | enforced:
                continue
            if name in REASONS if inside else name not in self.HINTS:
                near = difflib.get_close_matches(name, type(self).model_fields, n=1, cutoff=0.8)
                unknown = f"the endpoint has no such field; leave it out{f', or write {near[0]}' if near else ''}"
                reason = REASONS.get(name, unknown)
                raise rejected(400, f"{place} is not supported: {reason}", param=place)
            others.setdefault(re.sub(r"\d+", "", place), place)
        return warnings + [f"{place} has no effect" for place in others.values()]


class JsonSchema(Named):
    """A JSON schema of responses, which match it whether it is `strict` or not."""

    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool = False


class Format(JsonSchema):
    """The format of a response: text, or JSON of a schema."""

    type: str
    json_schema: JsonSchema = JsonSchema()

    def schema_text(self, field: str) -> str | None:
        """Return the JSON schema, which OpenAI's chats have one level deeper; None for text."""
        if self.type == "text":
            return None
        inner = self.json_schema.schema_
        schema = {"type": "object"} if self.type == "json_object" else self.schema_ if inner is None else inner
        if self.type not in ("json_object", "json_schema") or schema is None:
            raise rejected(400, f"{field}: a format is text, json_object, or json_schema with its schema", param=field)
        return json.dumps(schema)


class ToolFunction(Member):
    """A tool as chat templates read it."""

    name: Name
    description: str = ""
    parameters: dict[str, Any] = Field({})


def tool_schema(function: Mapping[str, Any], where: str, read: Callable[..., Any]) -> Schema:
    """Return a tool as chat templates read it, with the fields in the client's order."""
    read(ToolFunction, function, where)
    fields = {name: value for name, value in function.items() if value and name in ToolFunction.model_fields}
    return {"type": "function", "function": fields}


def call_schema(tools: Sequence[Schema], name: str | None) -> str:
    """Return the JSON schema of a call of one of the tools, or of the named one."""
    functions = [tool["function"] for tool in tools if name is None or tool["function"]["name"] == name]
    if not functions:
        raise rejected(400, "tool_choice: there is no such tool", param="tool_choice")
    calls, definitions = [], {}
    for function in functions:
        parameters = {"type": "object"} | function.get("parameters", {})
        if isinstance(parameters.get("$defs"), dict):  # references are from the root
            definitions |= parameters.pop("$defs")
        properties = {"name": {"const": function["name"]}, "arguments": parameters}
        calls.append({"type": "object", "properties": properties, "required": ["name", "arguments"]})
    return json.dumps({"anyOf": calls} | ({"$defs": definitions} if definitions else {}))
