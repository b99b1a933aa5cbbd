"""Tool calls are read in the model's format, and what cannot be read is a call with an error."""

import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from hybridrl.config.findings import ConfigError
from hybridrl.environments import calls
from hybridrl.environments.calls import call_parser
from hybridrl.environments.dialogue import Dialogue
from tests.environments.conftest import CALLS, PLAIN

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
}
TWO = {
    "hermes": f"{WRITTEN['hermes']}\n{WRITTEN['hermes']}",
    "qwen3_coder": f"{WRITTEN['qwen3_coder']}\n{WRITTEN['qwen3_coder']}",
    "json": f"{WRITTEN['json']}; {WRITTEN['json']}",
    "pythonic": '[add(a=1, b="x"), add(a=1, b="x")]',
    "gpt-oss": f"{WRITTEN['gpt-oss']}<|call|><|start|>assistant{WRITTEN['gpt-oss']}",
}
BROKEN = {
    "hermes": ['<tool_call>{"name": "add", "arguments": {"a": 1,}}</tool_call>', "<tool_call>add</tool_call>",
               '<tool_call>{"name": "add"}</tool_call>', '<tool_call>{"name": "add", "arguments": "1"}</tool_call>',
               '<tool_call>[]</tool_call>', '<tool_call>{"name": "add", "argum'],
    "qwen3_coder": ["<tool_call>add(1)</tool_call>"],
    "json": ['{"name": "add", "parameters": {"a": 1', '{"name": 3, "parameters": {}}'],
    "pythonic": ["[add(1)]", "[add(a=b)]", "[add(a=1", "[add(a=1) + 2]"],
    "gpt-oss": [' to=functions.add<|channel|>commentary<|message|>{"a": 1', " to=functions.add"],
}  # fmt: skip
NONE = ["The sum is 2.", '{"answer": 3}', "the interval [f(0), 1]", "", "a list: [1, 2]"]


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
def test_a_call_is_read_with_the_content_before_it(format: str) -> None:
    content, (call,) = parse(format, f"I add.\n{WRITTEN[format]}")
    assert content.strip() == "I add."
    assert (call.name, call.arguments, call.error, call.id) == ("add", {"a": 1, "b": "x"}, "", "call00000")


@pytest.mark.parametrize("format", TWO)
def test_further_calls_have_other_ids(format: str) -> None:
    _, found = parse(format, TWO[format])
    assert [(call.arguments, call.id) for call in found] == [
        ({"a": 1, "b": "x"}, "call00000"),
        ({"a": 1, "b": "x"}, "call00001"),
    ]


@pytest.mark.parametrize(("format", "text"), [(format, text) for format, texts in BROKEN.items() for text in texts])
def test_a_broken_call_is_a_call_with_an_error(format: str, text: str) -> None:
    _, (call,) = parse(format, text)
    assert call.error
    assert call.arguments == {}


@pytest.mark.parametrize("format", WRITTEN)
@pytest.mark.parametrize("text", NONE)
def test_an_answer_has_no_calls(format: str, text: str) -> None:
    assert parse(format, text) == (text, [])


def test_a_call_within_the_reasoning_is_none() -> None:
    text = f"<think>maybe {WRITTEN['hermes']}</think>No."
    assert parse("hermes", text) == (text, [])


def test_an_argument_may_hold_the_end_of_reasoning() -> None:
    text = '<think></think><tool_call>{"name": "add", "arguments": {"b": "</think>"}}</tool_call>'
    assert parse("hermes", text)[1][0].arguments == {"b": "</think>"}


def test_auto_is_the_format_that_the_template_writes(dialogue_of: MakeDialogue) -> None:
    assert call_parser("auto", "qwen2", dialogue_of(CALLS)).format == "hermes"
    bare = CALLS.replace("<tool_call>", "").replace("'</tool_call>'", "''")
    assert call_parser("auto", "llama", dialogue_of(bare)).format == "json"


def test_auto_is_rejected_with_the_formats_where_the_template_writes_no_calls(
    dialogue_of: MakeDialogue, monkeypatch: pytest.MonkeyPatch
) -> None:
    vllm = SimpleNamespace(names=lambda: ["mistral"])
    monkeypatch.setattr(calls.importlib, "import_module", lambda name: vllm)
    with pytest.raises(ConfigError, match=r"multi_turn.format=auto .* writes no calls.* one of .*hermes.*mistral"):
        call_parser("auto", "qwen2", dialogue_of(PLAIN))
    with pytest.raises(ConfigError, match=r"multi_turn.format=hermse: unknown; set it to one of auto, .*hermes"):
        call_parser("hermse", "qwen2", dialogue_of(CALLS))


def test_the_usual_formats_do_not_import_vllm() -> None:
    code = (
        "import sys; from hybridrl.environments import calls; calls.call_parser('json', '', None); print(*sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "hybridrl.environments.calls" in result.stdout.split()
    assert "vllm" not in result.stdout.split()


@pytest.mark.slow
def test_the_formats_of_vllm_are_read_and_their_broken_calls_reported(dialogue_of: MakeDialogue) -> None:
    glm = (
        "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content }}{% for c in m.tool_calls or [] %}"
        "{{ '<tool_call>' + c.function.name }}{% for k, v in c.function.arguments.items() %}"
        "{{ '\n<arg_key>' + k + '</arg_key>\n<arg_value>' + v + '</arg_value>' }}{% endfor %}{{ '\n</tool_call>' }}"
        "{% endfor %}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
    )
    parser = call_parser("auto", "glm4_moe", dialogue_of(glm))
    assert parser.format == "glm45"
    written = "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>"
    for _ in range(2):  # a parser keeps no state
        content, (call,) = parser(f"I add.{written}", TOOLS)
        assert (content.strip(), call.name, call.arguments) == ("I add.", "add", {"a": 1})
        _, (broken,) = parser("<tool_call>\n\n</tool_call>", TOOLS)
        assert "cannot be read" in broken.error
        assert parser("No.", TOOLS) == ("No.", [])
    with pytest.raises(ConfigError, match=r"multi_turn.format=mistral: .*; set actor_rollout_ref"):
        call_parser("mistral", "mistral", dialogue_of(CALLS))
    with pytest.raises(ConfigError, match=r"multi_turn.format=hermse: unknown; set it to one of auto, .*mistral"):
        call_parser("hermse", "qwen2", dialogue_of(CALLS))
