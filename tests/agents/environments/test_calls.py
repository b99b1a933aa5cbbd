"""Tool calls are read in the model's format, and what cannot be read is a call with an error."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridrl.agents.environments import calls
from hybridrl.agents.environments.calls import call_parser
from hybridrl.agents.environments.dialogue import Dialogue
from hybridrl.config.findings import ConfigError
from tests.agents.environments.conftest import CALLS, PLAIN

MakeDialogue = Callable[[str], Dialogue]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add.",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}},
        },
    }
]
# One call add(a=1, b="x") and two calls, in each format.
WRITTEN = {
    "hermes": '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "x"}}\n</tool_call>',
    "qwen3_coder": "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\nx\n</parameter>\n"
    "</function>\n</tool_call>",
    "json": '{"name": "add", "parameters": {"a": 1, "b": "x"}}',
    "pythonic": '[add(a=1, b="x")]',
    "gpt-oss": ' to=functions.add<|channel|>commentary json<|message|>{"a": 1, "b": "x"}',
    "mistral": '[TOOL_CALLS]add[ARGS]{"a": 1, "b": "x"}',
    "deepseek_v3": "<\uff5ctool\u2581calls\u2581begin\uff5c><\uff5ctool\u2581call\u2581begin\uff5c>function"
    '<\uff5ctool\u2581sep\uff5c>add\n```json\n{"a": 1, "b": "x"}\n```<\uff5ctool\u2581call\u2581end\uff5c>',
    "deepseek_v31": "<\uff5ctool\u2581calls\u2581begin\uff5c><\uff5ctool\u2581call\u2581begin\uff5c>add"
    '<\uff5ctool\u2581sep\uff5c>{"a": 1, "b": "x"}<\uff5ctool\u2581call\u2581end\uff5c>',
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>"
    '{"a": 1, "b": "x"}<|tool_call_end|>',
    "glm45": "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<arg_key>b</arg_key>\n"
    "<arg_value>x</arg_value>\n</tool_call>",
}
TWO = {format: f"{text}\n{text}" for format, text in WRITTEN.items()} | {
    "json": f"{WRITTEN['json']}; {WRITTEN['json']}",
    "pythonic": '[add(a=1, b="x"), add(a=1, b="x")]',
    "gpt-oss": f"{WRITTEN['gpt-oss']}<|call|><|start|>assistant{WRITTEN['gpt-oss']}",
    "mistral": '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1, "b": "x"}}, '
    '{"name": "add", "arguments": {"a": 1, "b": "x"}}]',
}
BROKEN = {
    "hermes": ['<tool_call>{"name": "add", "arguments": {"a": 1,}}</tool_call>', "<tool_call>add</tool_call>",
               '<tool_call>{"name": "add", "arguments": "1"}</tool_call>',
               '<tool_call>[]</tool_call>', '<tool_call>{"name": "add", "argum', "<tool_call>" + "[" * 100_000,
               '<tool_call>{"name": "add", "args": {"a": 1}}</tool_call>',
               '<tool_call>{"name": "add", "arguments": {"a": 1}} 2</tool_call>',
               '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>',
               '<tool_call>{"name": "add", "arguments": {"b": "\\ud800"}}</tool_call>',
               '<tool_call>{"name": "add", "arguments": {"a": ' + "[" * 80 + "]" * 80 + "}}</tool_call>"],
    "qwen3_coder": ["<tool_call>add(1)</tool_call>",
                    "<tool_call><function=add><parameter=a>1</function></tool_call>",
                    "<tool_call><function=add><parameter=a>1<parameter=b>2</parameter></function></tool_call>",
                    "<tool_call><function=add>1</function></tool_call>",
                    "<tool_call><function=add><parameter=b><parameter=q></parameter><parameter=a></parameter></parameter>"
                    "</function></tool_call>",
                    "<tool_call><function=add><parameter=b>x</parameter></function></tool_call></parameter>"],
    "mistral": ["[TOOL_CALLS]", '[TOOL_CALLS]add[ARGS]{"a": 1'],
    "deepseek_v3": ["<\uff5ctool\u2581call\u2581begin\uff5c>add"],
    "kimi_k2": ["<|tool_call_begin|>functions.add:0"],
    "glm45": ["<tool_call>\n\n</tool_call>", "<tool_call>add\n<arg_key>a</arg_key>"],
    "json": ['{"name": "add", "parameters": {"a": 1', '{"name": 3, "parameters": {}}'],
    "pythonic": ["[add(1)]", "[add(a=b)]", "[add(a=1", "[add(a=1) + 2]", "[add(a=1e999)]", "[add(a=1j)]",
                 "[add(b='x)]", "[add(a=" + "[" * 100_000],
    "gpt-oss": [' to=functions.add<|channel|>commentary<|message|>{"a": 1', " to=functions.add"],
}  # fmt: skip
NONE = ["The sum is 2.", '{"answer": 3}', "the interval [f(0), 1]", "", "a list: [1, 2]",
        '{"name": "Paris", "population": 2}', '[{"name": "Paris"}, {"name": "Rome"}]', "[sin(x), cos(x)]",
        '{"name": "conv", "parameters": 9408}', '{"type": "point", "id": 1,}', "[" * 100_000,
        "<|channel|>final<|message|>I used to=functions.add there."]  # fmt: skip


@pytest.fixture
def dialogue_of(tokenizer_of: Callable[..., Any]) -> MakeDialogue:
    """Make the dialogue of a template."""

    def make(template: str) -> Dialogue:
        tokenizer = tokenizer_of(template)
        return Dialogue(tokenizer, [tokenizer.eos_token_id])

    return make


def parse(format: str, text: str) -> tuple[str, list]:
    return call_parser(format, "", SimpleNamespace())(text, TOOLS)


@pytest.mark.parametrize("format", WRITTEN)
def test_a_call_is_read_with_the_content_before_it(format):
    content, (call,) = parse(format, f"I add.\n{WRITTEN[format]}")
    assert content.strip() == "I add."
    assert (call.name, call.arguments, call.error, call.id) == ("add", {"a": 1, "b": "x"}, "", "call00000")


@pytest.mark.parametrize("format", TWO)
def test_further_calls_have_other_ids(format):
    _, found = parse(format, TWO[format])
    assert [call.id for call in found] == ["call00000", "call00001"]
    assert [call.arguments for call in found] == [{"a": 1, "b": "x"}] * 2


@pytest.mark.parametrize(("format", "text"), [(format, text) for format, texts in BROKEN.items() for text in texts])
def test_a_broken_call_is_a_call_with_an_error(format, text):
    _, (call,) = parse(format, text)
    assert call.error
    assert call.arguments == {}


@pytest.mark.parametrize("format", WRITTEN)
@pytest.mark.parametrize("text", NONE)
def test_an_answer_has_no_calls(format, text):
    assert parse(format, text) == (text, [])


def test_a_call_within_the_reasoning_is_none():
    text = f"<think>maybe {WRITTEN['hermes']}</think>No."
    assert parse("hermes", text) == (text, [])


@pytest.mark.parametrize("format", WRITTEN)
@pytest.mark.parametrize("before", ["", "<think></think>", "<think>add?</think>I add.\n"])
def test_an_argument_may_hold_the_end_of_reasoning(format, before):
    (call,) = parse(format, before + "a</think>b".join(re.split(r"\bx\b", WRITTEN[format])))[1]
    assert call.arguments == {"a": 1, "b": "a</think>b"}


@pytest.mark.parametrize(
    ("format", "text", "arguments"),
    [
        ("hermes", '<tool_call>{"name": "now", "arguments": {"x": "end with </tool_call> please"}}</tool_call>',
         {"x": "end with </tool_call> please"}),
        ("qwen3_coder", "<tool_call><function=now><parameter=x>\n<r>\n  <tool_call>1</tool_call>\n</r>\n</parameter>"
         "</function></tool_call>", {"x": "<r>\n  <tool_call>1</tool_call>\n</r>"}),
        ("hermes", '<tool_call>{"name": "now", "arguments": ""}</tool_call>', {}),
        ("hermes", '<tool_call>{"name": "now", "arguments": null}</tool_call>', {}),
        ("hermes", '<tool_call>{"name": "now"}</tool_call>', {}),
        ("hermes", '<tool_call>[{"name": "now", "arguments": {}}]</tool_call>', {}),
        ("hermes", '<tool_call>{"type": "function", "function": {"name": "now", "arguments": "{}"}}</tool_call>', {}),
        ("qwen3_coder", "<tool_call>\n<function=now>\n</function>\n</tool_call>", {}),
        ("json", '{"parameters": {}, "name": "now"}', {}),
        ("json", '{"name": "now", "parameters": null}', {}),
        ("json", '{"name": "now"}', {}),
        ("pythonic", "[now()]", {}),
        ("pythonic", "<|tool_call_start|>[now(x=[true, null, {'a': -1}],)]<|tool_call_end|> see [1]",
         {"x": [True, None, {"a": -1}]}),
        ("pythonic", '[now(x="\\ud83d\\ude00", class_=")]\\"")]', {"x": "\U0001f600", "class_": ')]"'}),
        ("gpt-oss", " to=functions.now<|channel|>commentary<|message|><|call|>", {}),
        ("mistral", "[TOOL_CALLS]now{}", {}),
        ("mistral", "[TOOL_CALLS]now[CALL_ID]a1B2c3[ARGS]{}</s>", {}),
        ("glm45", "<tool_call>now</tool_call>", {}),
    ],
)  # fmt: skip
def test_other_ways_to_write_a_right_call_are_read(format, text, arguments):
    tools = [{"type": "function", "function": {"name": "now"}}]
    (call,) = call_parser(format, "", SimpleNamespace())(text, tools)[1]
    assert (call.name, call.arguments, call.error) == ("now", arguments, "")


@pytest.mark.parametrize(
    ("kind", "written", "value"),
    [
        ({"type": "integer"}, "1", 1),
        ({"type": "boolean"}, "True", True),
        ({"type": ["string", "null"]}, "5", "5"),
        ({"type": ["string", "null"]}, "null", None),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "5", 5),
        ({"type": "integer", "nullable": True}, "None", None),
        ({"type": "string"}, "null", "null"),
        ({}, "5", "5"),
        ({"type": "integer"}, "[" * 100_000, "[" * 100_000),
    ],
)
@pytest.mark.parametrize("format", ["qwen3_coder", "glm45"])
def test_a_value_between_tags_has_the_type_of_its_argument(format, kind, written, value):
    function = {"name": "add", "parameters": {"type": "object", "properties": {"a": kind, "b": {"type": "string"}}}}
    text = WRITTEN[format].replace("1", written, 1)
    (call,) = call_parser(format, "", SimpleNamespace())(text, [{"type": "function", "function": function}])[1]
    assert (call.arguments.get("a"), call.error) == (value, "")


TAGS = ["<tool_call>", "</tool_call>", "<function=add>", "</function>", "<parameter=q>", "</parameter>", "<|call|>",
        "[TOOL_CALLS]", "<|message|>", "to=functions.add", "<arg_value>", "</arg_value>", "</think>", "\n", " ",
        '"', "'", "\\", "}", "]", ")", ",", "[add(", '{"name": "add", "parameters": {}}', "<|tool_call_end|>",
        "<\uff5ctool\u2581call\u2581end\uff5c>", "```"]  # fmt: skip
PIECES = st.lists(st.sampled_from(TAGS) | st.text(max_size=4), max_size=12).map("".join)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**30), 10**30)
    | st.floats(allow_nan=False, allow_infinity=False)
    | PIECES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(PIECES, inner, max_size=3),
    max_leaves=6,
)
NAMES = st.from_regex(r"[a-z]\w{0,8}", fullmatch=True)


def written_as(format: str, name: str, arguments: dict[str, Any]) -> str:
    """The call as models write it; JSON where the value of an argument is no text."""
    text = json.dumps(arguments, ensure_ascii=len(name) % 2 == 0)
    if format in ("qwen3_coder", "glm45"):
        values = {key: value if isinstance(value, str) else json.dumps(value) for key, value in arguments.items()}
        if format == "glm45":
            pairs = (f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in values.items())
            return f"<tool_call>{name}\n{''.join(pairs)}</tool_call>"
        body = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
        return f"<tool_call>\n<function={name}>\n{body}</function>\n</tool_call>"
    if format == "pythonic":
        return f"[{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})]"
    shape = WRITTEN[format].replace("add", name)
    return shape.replace('{"a": 1, "b": "x"}', text)


def schemas_of(name: str, arguments: dict[str, Any]) -> list[dict[str, Any]]:
    kinds = {key: {"type": "string" if isinstance(value, str) else "object"} for key, value in arguments.items()}
    return [{"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": kinds}}}]


@pytest.mark.parametrize("format", WRITTEN)
@given(name=NAMES, arguments=st.dictionaries(NAMES, VALUES, max_size=4), before=st.sampled_from(["", "I add.\n"]))
def test_any_arguments_are_read_as_they_were_written(format, name, arguments, before):
    tools, text = schemas_of(name, arguments), before + written_as(format, name, arguments)
    calls = call_parser(format, "", SimpleNamespace())(text, tools)[1]
    tags = ("<parameter=", "</parameter>", "<arg_key>", "</arg_value>")
    if format in ("qwen3_coder", "glm45") and any(tag in json.dumps(arguments) for tag in tags):
        for call in calls[:1]:  # never runs with other values; the schema rejects unknown arguments
            unknown = call.arguments.keys() - arguments.keys()
            assert call.error or unknown or (call.name, call.arguments) == (name, arguments)
        return
    assert [(call.name, call.arguments, call.error) for call in calls] == [(name, arguments, "")]


@pytest.mark.parametrize("format", WRITTEN)
@given(text=st.lists(st.sampled_from([*TAGS, *WRITTEN.values()]) | st.text(max_size=4), max_size=12).map("".join))
def test_no_text_raises(format, text):
    for call in parse(format, text)[1]:
        json.dumps(call.arguments, allow_nan=False).encode()


@pytest.mark.parametrize("format", WRITTEN)
def test_long_texts_are_read_in_a_time_in_proportion(format):
    for piece in [*TAGS, *BROKEN.get(format, [])[:2], '{"name":', '{"name": "add", "parameters":', "[add(b='", "\n[a(",
                  "<parameter=a>", "<tool_call><function=add>", " to=functions.add ", "<tool_call>[1,"]:  # fmt: skip
        assert len(parse(format, piece * (300_000 // len(piece)))[1]) <= 8 * 128 + 1


def test_auto_is_the_format_that_the_template_writes(dialogue_of):
    assert call_parser("auto", "qwen2", dialogue_of(CALLS)).format == "hermes"
    bare = CALLS.replace("<tool_call>", "").replace("'</tool_call>'", "''")
    assert call_parser("auto", "llama", dialogue_of(bare)).format == "json"


def test_auto_is_rejected_with_the_formats_where_the_template_writes_no_calls(dialogue_of, monkeypatch):
    vllm = SimpleNamespace(parser_names=lambda: ["mistral"])
    monkeypatch.setitem(sys.modules, calls.VLLM, vllm)
    with pytest.raises(ConfigError, match=r"multi_turn.format=auto .* writes no calls.* one of .*hermes.*mistral"):
        call_parser("auto", "qwen2", dialogue_of(PLAIN))
    with pytest.raises(ConfigError, match=r"multi_turn.format=hermse: unknown; set it to one of auto, .*hermes"):
        call_parser("hermse", "qwen2", dialogue_of(CALLS))


def test_the_usual_formats_do_not_import_vllm():
    code = "import sys; from hybridrl.agents.environments import calls; calls.call_parser('json', '', None)"
    code += "; print(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "hybridrl.agents.environments.calls" in result.stdout.split()
    assert "vllm" not in result.stdout.split()


@pytest.mark.slow
def test_the_formats_of_vllm_are_read_and_their_broken_calls_reported(dialogue_of):
    glm = (
        "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content }}{% for c in m.tool_calls or [] %}"
        "{{ '<tool_call>' + c.function.name }}{% for k, v in c.function.arguments.items() %}"
        "{{ '\n<arg_key>' + k + '</arg_key>\n<arg_value>' + v + '</arg_value>' }}{% endfor %}{{ '\n</tool_call>' }}"
        "{% endfor %}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
    )
    assert call_parser("auto", "glm4_moe", dialogue_of(glm)).format == "glm45"  # read here
    parser = call_parser("glm47", "glm4_moe", dialogue_of(glm))
    written = "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>"
    for _ in range(2):  # a parser keeps no state
        content, (call,) = parser(f"I add.{written}", TOOLS)
        assert (content.strip(), call.name, call.arguments) == ("I add.", "add", {"a": 1})
        _, (broken,) = parser("<tool_call>\n\n</tool_call>", TOOLS)
        assert "cannot be read" in broken.error
        assert parser("No.", TOOLS) == ("No.", [])
        for hostile in ("<tool_call>" * 1000, "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>" + "[" * 100_000):
            assert all(call.error for call in parser(hostile, TOOLS)[1])
    with pytest.raises(ConfigError, match=r"multi_turn.format=jamba: .*; set actor_rollout_ref"):
        call_parser("jamba", "jamba", dialogue_of(CALLS))
    with pytest.raises(ConfigError, match=r"multi_turn.format=hermse: unknown; set it to one of auto, .*mistral"):
        call_parser("hermse", "qwen2", dialogue_of(CALLS))
