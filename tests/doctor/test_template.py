"""`doctor template` says whether a model's chat template serves several turns, and shows a conversation by its mask."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.agents.environments.conftest import CALLS
from tests.data import stand_ins

Doctor = Callable[..., tuple[int, str]]


@pytest.fixture
def template(tmp_path: Path) -> Callable[[str], str]:
    def write(text: str) -> str:
        (tmp_path / "template.jinja").write_text(text)
        return str(tmp_path / "template.jinja")

    return write


def test_an_exact_template_is_described(doctor, model, template):
    status, output = doctor("template", str(model), "--template", template(CALLS))
    assert status == 0
    lines = ("user turns   exact", "tools        exact", "reasoning    kept", "stop tokens  <|im_end|>")
    for line in (*lines, "tool calls   hermes, which reads the template's '<tool_call>"):
        assert line in output
    call = '<tool_call>{"name": "lookup", "arguments": {"word": "mask"}}</tool_call><|im_end|>'
    assert f"<|im_start|>assistant\n\u27e6{call}\u27e7\n<|im_start|>tool\n0: observed" in output


def test_a_tokenizer_that_drops_spaces_is_not_called_exact(doctor, tmp_path):
    make = stand_ins.of_words_without_spaces
    place = stand_ins.write(tmp_path / "a", make, "PreTrainedTokenizerFast", "llama", chat_template=CALLS)
    status, output = doctor("template", str(place))
    assert status == 1 and "drops spaces ('What is a mask?' becomes 'Whatisamask?')" in output
    assert "exact" not in output


def test_a_template_that_differs_fails(doctor, model, template):
    counting = CALLS.replace("m.role", "m.role + (messages | length) | string")
    status, output = doctor("template", str(model), "--template", template(counting))
    assert status == 1 and "user turns   the row has" in output


def test_a_format_that_does_not_read_the_templates_calls_is_shown(doctor, model, template):
    _, output = doctor("template", str(model), "--format", "pythonic", "--template", template(CALLS))
    assert "tool calls   pythonic, which does not read the template's" in output


def test_a_template_without_tools_shows_a_conversation_of_users(doctor, model, template):
    plain = CALLS.replace("for m in messages", "for m in messages if m.role != 'tool'")
    status, output = doctor("template", str(model), "--template", template(plain), "--format", "hermes")
    assert status == 1 and "user turns   exact" in output
    assert "leaves out messages of the role tool" in output
    assert "\u27e6It marks sampled tokens.<|im_end|>\u27e7\n<|im_start|>user\nThanks.<|im_end|>" in output


def test_a_model_that_is_missing_is_named(doctor, tmp_path):
    status, output = doctor("template", str(tmp_path / "none"))
    assert status == 1 and "there is no such directory" in output
