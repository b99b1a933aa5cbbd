import copy
from collections.abc import Callable

import pytest
from tokenizers.processors import TemplateProcessing
from transformers import Qwen2Tokenizer

from hybridrl.config import PPOConfig, load_ppo_config
from hybridrl.config.findings import Finding, Findings
from hybridrl.data.prompts import Prompt
from hybridrl.doctor.template import check_template

from .conftest import CHAT_TEMPLATE

USER = {"role": "user", "content": "What is 1 + 1?"}
Found = Callable[..., dict[str, Finding]]
# Without the model's own directory no generation config names further ends.
MISTRAL = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]"
    "{% else %} {{ m.content }}<|im_end|>{% endif %}{% endfor %}"
)
THINKING = CHAT_TEMPLATE.replace(
    "m.role + '\\n'", "m.role + '\\n' + ('<think></think>' if m.role == 'assistant' else '')"
)


def rows(*chats: list[dict[str, str]] | str) -> list[Prompt]:
    return [Prompt(row, [], chat, "gsm8k", "2", {}) for row, chat in enumerate(chats)]


@pytest.fixture
def found(command: list[str], tokenizer: Qwen2Tokenizer) -> Found:
    """What is found of rows with a template, by code."""
    config: PPOConfig = load_ppo_config(command)

    def ask(
        template: str | None,
        *chats: list[dict[str, str]] | str,
        bos: str | None = None,
        tokenizer: Qwen2Tokenizer = tokenizer,
    ) -> dict[str, Finding]:
        mine = copy.deepcopy(tokenizer)
        mine.chat_template = template
        if bos:
            mine.bos_token = bos
        findings = Findings()
        check_template(config, mine, rows(*(chats or ([USER],))), findings)
        return {finding.code: finding for finding in findings.found}

    return ask


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, MISTRAL, THINKING])
def test_of_a_template_in_order_the_row_is_shown(found: Found, template: str):
    told = found(template)
    assert list(told) == ["template.row"]
    assert told["template.row"].severity == "information"


def test_a_long_row_is_shortened_and_counted(found: Found):
    told = found(CHAT_TEMPLATE, [USER | {"content": "x" * 1000}])["template.row"].cause
    assert "row 0" in told and " ... " in told and len(told) < 400
    # 1000 bytes; "<|im_start|>user\n" and "<|im_start|>assistant\n": 1 + 5 + 1 + 10; "<|im_end|>\n": 2
    assert "1019 tokens" in told


def test_rows_of_plain_text_need_no_template(found: Found):
    told = found(None, "1 + 1 =")
    assert list(told) == ["template.row"]
    assert "there is no chat template: 7 tokens, '1 + 1 ='" in told["template.row"].cause


def test_a_beginning_that_is_written_twice_is_named(found: Found):
    twice = found("<|im_start|>" + CHAT_TEMPLATE, bos="<|im_start|>")
    assert "begins with <|im_start|> twice" in twice["template.bos-twice"].cause
    assert "template.bos-twice" not in found(CHAT_TEMPLATE, bos="<|im_start|>")


def test_a_beginning_that_the_template_forgets_is_named(found: Found, tokenizer: Qwen2Tokenizer):
    begins = copy.deepcopy(tokenizer)
    begins.bos_token = "<|endoftext|>"
    special = [("<|endoftext|>", begins.bos_token_id)]
    begins.backend_tokenizer.post_processor = TemplateProcessing(single="<|endoftext|> $A", special_tokens=special)
    told = found(CHAT_TEMPLATE, tokenizer=begins)["template.no-bos"]
    assert told.cause == "the tokenizer begins a text with <|endoftext|>, and the template does not"
    assert "template.no-bos" not in found("<|endoftext|>" + CHAT_TEMPLATE, tokenizer=begins)


def test_a_turn_that_is_not_opened_is_named(found: Found):
    never = CHAT_TEMPLATE.partition("{% if add_generation_prompt")[0]
    assert list(found(never)) == ["template.row", "template.no-opening"]


def test_a_system_message_that_is_left_out_is_named_though_few_rows_have_one(found: Found):
    silent = CHAT_TEMPLATE.replace("in messages %}", "in messages if m.role != 'system' %}")
    told = found(silent, [USER], [{"role": "system", "content": "Be brief."}, USER], [USER])
    assert "what the role system says" in told["template.drops"].cause
    assert "row 1" in told["template.row"].cause
    assert "template.drops" not in found(silent, [USER])


def test_an_answer_that_is_closed_by_what_does_not_end_it_is_named(found: Found):
    told = found(CHAT_TEMPLATE.replace("'<|im_end|>\\n'", "'<|im_start|>\\n'"))["template.no-end"]
    assert "closes an answer with '<|im_start|>\\n', and generation ends at <|im_end|> alone" in told.cause
    assert told.fix == "add <|im_start|> to eos_token_id in the model's generation_config.json"


def test_an_answer_that_is_not_closed_at_all_is_named(found: Found):
    told = found(CHAT_TEMPLATE.replace("'<|im_end|>\\n'", "'\\n'"))["template.no-end"]
    assert told.fix.startswith("let the template write <|im_end|> there")


def test_tokens_that_lose_some_of_the_text_are_named(found: Found, tokenizer: Qwen2Tokenizer):
    # The tokenizer normalises to NFC: what is written in two parts comes back as one character.
    told = found(CHAT_TEMPLATE, [USER | {"content": "cafe\u0301!"}])["template.lossy"].cause
    assert "comes back as 'caf" not in told and "\u00e9!" in told


def test_a_template_that_refuses_answers_is_left_at_that(found: Found):
    prompts_alone = "{% if messages[-1].role == 'assistant' %}{{ raise_exception('no') }}{% endif %}" + CHAT_TEMPLATE
    assert list(found(prompts_alone)) == ["template.row"]
