import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing
from transformers import Qwen2Tokenizer

from hybridrl.config import PPOConfig
from hybridrl.config.compose import SHIPPED
from hybridrl.config.findings import Finding, Findings
from hybridrl.config.load import load_ppo_config, resolve_config
from hybridrl.data.prompts import Prompt, PromptDataset, Prompts, load_prompts
from hybridrl.doctor import rows
from hybridrl.doctor.rows import check_rows, check_template
from tests.vision_models import noise_picture, reader_that_sees

from .conftest import CHAT_TEMPLATE


@pytest.fixture(scope="module")
def plain_tokenizer() -> Qwen2Tokenizer:
    special = Qwen2Tokenizer(eos_token="<|im_end|>", pad_token="<|endoftext|>")
    return special.train_new_from_iterator([""], vocab_size=258, show_progress=False)


@pytest.fixture
def config() -> PPOConfig:
    needed = ["data.train_files=rows.jsonl", "actor_rollout_ref.model.path=a/model", "data.max_prompt_length=20"]
    config = resolve_config(PPOConfig, needed, SHIPPED[PPOConfig], offline=True).config
    assert config is not None
    return config


@pytest.fixture
def load(tmp_path: Path, config: PPOConfig, plain_tokenizer: Qwen2Tokenizer) -> Any:
    def prompts(*texts: Any, **settings: Any) -> PromptDataset:
        rows = [{"prompt": text, "reward_model": {"ground_truth": "1"}} for text in texts]
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        data = replace(config.data, **settings)
        files = [str(tmp_path / "rows.jsonl")]
        return load_prompts(files, data, plain_tokenizer, max_samples=-1, shuffle=False, key="data.train_files")

    return prompts


def check(config: PPOConfig, prompts: PromptDataset, validation: PromptDataset | None = None) -> dict[str, Finding]:
    findings = Findings()
    check_rows(prompts, validation, config.data.max_prompt_length, findings)
    return {finding.code: finding for finding in findings.items}


def test_valid_rows_give_only_their_lengths(config, load):
    findings = check(config, load(*("x" * length for length in range(1, 11))))
    assert list(findings) == ["data.lengths"]
    assert findings["data.lengths"].severity == "info"
    # Half of the lengths 1 to 10 are at most 6 by the next higher rank.
    lengths = "10 prompts, in tokens 50% up to 6, 90% up to 10, 99% up to 10, 100% up to 10"
    assert lengths in findings["data.lengths"].cause


def test_rows_with_the_same_text_repeat_another_only_if_their_pictures_are_equal(config, tmp_path):
    written = [noise_picture(40, 40), noise_picture(40, 40, 1), noise_picture(40, 40)]
    for number, picture in enumerate(written):
        picture.save(tmp_path / f"{number}.png")
    rows = [
        {"prompt": "<image>", "images": f"{number}.png", "reward_model": {"ground_truth": "1"}} for number in (0, 1, 2)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    reader = reader_that_sees(tmp_path / "model")
    files, options = [str(tmp_path / "rows.jsonl")], {"max_samples": -1, "shuffle": False, "key": "data.train_files"}
    data = replace(config.data, max_prompt_length=64)
    found = check(config, load_prompts(files, data, reader.processor.tokenizer, **options, pictures=reader))
    assert list(found) == ["data.lengths", "data.pictures", "data.duplicates"]
    assert "1 prompts repeat an earlier one" in found["data.duplicates"].cause


@pytest.fixture
def seen(config, tmp_path) -> PromptDataset:
    """Prompts with none, one and two pictures, of 1, 1 and 6 tokens of 32 x 32 pixels."""
    for number, size in enumerate([(40, 30), (30, 40), (96, 64)]):
        noise_picture(*size, number).save(tmp_path / f"{number}.png")
    images = [[], ["0.png"], ["1.png", "2.png"]]
    rows = [{"prompt": "<image>" * len(each), "images": each, "reward_model": {"ground_truth": "1"}} for each in images]
    rows[0]["prompt"] = "text"
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    reader = reader_that_sees(tmp_path / "model")
    options = {"max_samples": -1, "shuffle": False, "key": "data.train_files", "pictures": reader}
    data = replace(config.data, max_prompt_length=64)
    return load_prompts([str(tmp_path / "rows.jsonl")], data, reader.processor.tokenizer, **options)


def test_sizes_and_tokens_of_pictures_are_reported(config, seen):
    assert check(config, seen)["data.pictures"].cause == (
        "data.train_files: 3 pictures in 2 of 3 prompts: median 30 x 40 pixels, 1 tokens; "
        "99% 96 x 64 pixels, 6 tokens; largest 96 x 64 pixels, 6 tokens"
    )


@pytest.mark.parametrize(("room", "severity"), [(80_000, "info"), (60_000, "warning")])
def test_the_pixels_of_two_steps_are_compared_with_the_object_store(config, seen, room, severity, monkeypatch):
    """A token has 4 patches of 2 x 3 x 16 x 16 bytes. Two steps of 4 prompts have 8 x 8 / 3 tokens: 131 kB."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    config.data.train_batch_size, findings = 4, Findings()
    config.ray_kwargs.ray_init["object_store_memory"] = 2 * room
    rows.check_pixels(config, seen, findings)
    (finding,) = findings.items
    assert (finding.code, finding.severity) == ("memory.pictures", severity)
    assert ("max_pixels of data.mm_processor_kwargs" in finding.text) == (severity == "warning")


LONG, BEYOND = ("a", "b", "c", "x" * 21), "1 of 4 prompts (25.0%) are longer than data.max_prompt_length=20 and are "


@pytest.mark.parametrize(
    ("texts", "settings", "code", "severity", "said"),
    [
        (("a", " \n", "b", "\t"), {}, "empty", "warning", ["2 prompts are empty, the first", "line 2"]),
        (LONG, {"filter_overlong_prompts": True}, "long", "warning", [f"{BEYOND}dropped"]),
        (LONG, {"truncation": "left"}, "long", "warning", [f"{BEYOND}cut"]),
        ("abaabc", {}, "duplicates", "info", ['3 prompts repeat an earlier one ("a" occurs 3 times)']),
        (("a", "[INST] b [/INST]"), {}, "template", "warning", ["1 prompts have marks of a chat template", "line 2"]),
        (("a", "[{'role': 'user'"), {}, "template", "warning", ["1 prompts have marks of a chat template", "line 2"]),
        (("a", '[ {"role" : "u'), {}, "template", "warning", ["1 prompts have marks of a chat template", "line 2"]),
    ],
    ids=["empty", "dropped", "cut", "repeated", "marks of a template", "messages as text", "messages of JSON as text"],
)
def test_prompts_that_may_be_mistaken_are_counted(config, load, texts, settings, code, severity, said):
    finding = check(config, load(*texts, **settings))[f"data.{code}"]
    assert finding.severity == severity and all(part in finding.cause for part in said)


def test_prompts_in_both_datasets_are_counted(config, load):
    training = load("a", "b", "c")
    findings = check(config, training, load("d", "b", "b"))
    assert '2 validation prompts are training prompts too, such as "b"' in findings["data.overlap"].text
    assert "data.overlap" not in check(config, training, load("d"))


def test_a_semicolon_in_a_prompt_does_not_split_the_message(config, load):
    assert check(config, load("a; b", "a; b"))["data.duplicates"].fix == ""


def test_a_sample_of_a_large_dataset_is_checked(config, load, monkeypatch):
    monkeypatch.setattr(rows, "SAMPLE", 2)
    findings = check(config, load("a", "b", "a", "b"))  # the first and the third
    assert "1 prompts (of 2 that were checked) repeat" in findings["data.duplicates"].cause
    assert "4 prompts" in findings["data.lengths"].cause


# -- the chat template -------------------------------------------------------------------------------------------------


USER = {"role": "user", "content": "What is 1 + 1?"}
Render = Callable[..., dict[str, Finding]]
# Without the model's own directory no generation config names further end tokens.
MISTRAL = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]"
    "{% else %} {{ m.content }}<|im_end|>{% endif %}{% endfor %}"
)
THINKING = CHAT_TEMPLATE.replace(
    "m.role + '\\n'", "m.role + '\\n' + ('<think></think>' if m.role == 'assistant' else '')"
)


def prompts(*chats: list[dict[str, str]] | str) -> Prompts:
    return Prompts(Prompt(row, [], chat, "gsm8k", "2", {}) for row, chat in enumerate(chats))


@pytest.fixture
def render(command: list[str], tokenizer: Qwen2Tokenizer) -> Render:
    """Findings about rows with a template, by code."""
    config: PPOConfig = load_ppo_config(command)
    model = config.actor_rollout_ref.model.path

    def run(
        template: str | None,
        *chats: list[dict[str, str]] | str,
        bos: str | None = None,
        tokenizer: Qwen2Tokenizer = tokenizer,
    ) -> dict[str, Finding]:
        changed = copy.deepcopy(tokenizer)
        changed.chat_template = template
        if bos:
            changed.bos_token = bos
        findings = Findings()
        arguments = config.data.apply_chat_template_kwargs
        check_template(model, arguments, changed, prompts(*(chats or ([USER],))), findings)
        return {finding.code: finding for finding in findings.items}

    return run


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, MISTRAL, THINKING])
def test_a_valid_template_gives_only_the_row(render, template):
    findings = render(template)
    assert list(findings) == ["template.row"]
    assert findings["template.row"].severity == "info"


def test_a_long_row_is_shortened_and_counted(render):
    findings = render(CHAT_TEMPLATE, [USER | {"content": "x" * 1000}])["template.row"].cause
    assert "row 0" in findings and " ... " in findings and len(findings) < 400
    # 1000 bytes; "<|im_start|>user\n" and "<|im_start|>assistant\n": 1 + 5 + 1 + 10; "<|im_end|>\n": 2
    assert "1019 tokens" in findings


def test_rows_of_plain_text_need_no_template(render):
    findings = render(None, "1 + 1 =")
    assert list(findings) == ["template.row"]
    assert "there is no chat template: 7 tokens, '1 + 1 ='" in findings["template.row"].cause


def test_a_duplicate_beginning_is_named(render):
    twice = render("<|im_start|>" + CHAT_TEMPLATE, bos="<|im_start|>")
    assert "begins with <|im_start|> twice" in twice["template.bos-twice"].cause
    assert "template.bos-twice" not in render(CHAT_TEMPLATE, bos="<|im_start|>")


def test_a_missing_beginning_is_named(render, tokenizer):
    begins = copy.deepcopy(tokenizer)
    begins.bos_token = "<|endoftext|>"
    special = [("<|endoftext|>", begins.bos_token_id)]
    begins.backend_tokenizer.post_processor = TemplateProcessing(single="<|endoftext|> $A", special_tokens=special)
    findings = render(CHAT_TEMPLATE, tokenizer=begins)["template.no-bos"]
    assert findings.cause == "the tokenizer begins a text with <|endoftext|>, but the template does not"
    assert "template.no-bos" not in render("<|endoftext|>" + CHAT_TEMPLATE, tokenizer=begins)


def test_a_turn_that_is_not_opened_is_named(render):
    never = CHAT_TEMPLATE.partition("{% if add_generation_prompt")[0]
    assert list(render(never)) == ["template.row", "template.no-opening"]


def test_a_system_message_that_is_left_out_is_named_even_if_few_rows_have_one(render):
    silent = CHAT_TEMPLATE.replace("in messages %}", "in messages if m.role != 'system' %}")
    findings = render(silent, [USER], [{"role": "system", "content": "Be brief."}, USER], [USER])
    assert "the messages of the role system" in findings["template.drops"].cause
    assert "row 1" in findings["template.row"].cause
    assert "template.drops" not in render(silent, [USER])


def test_a_response_whose_closing_does_not_end_generation_or_is_absent_is_named(render):
    finding = render(CHAT_TEMPLATE.replace("'<|im_end|>\\n'", "'<|im_start|>\\n'"))["template.no-end"]
    assert "closes a response with '<|im_start|>\\n', but generation ends only at <|im_end|>" in finding.cause
    assert finding.fix == "add <|im_start|> to eos_token_id in the model's generation_config.json"
    absent = render(CHAT_TEMPLATE.replace("'<|im_end|>\\n'", "'\\n'"))["template.no-end"]
    assert absent.fix.startswith("write <|im_end|> there in the template")


def test_tokens_that_lose_some_of_the_text_are_named(render, tokenizer):
    # The tokenizer normalises to NFC: two code points become one character.
    findings = render(CHAT_TEMPLATE, [USER | {"content": "cafe\u0301!"}])["template.lossy"].cause
    assert "becomes 'caf" not in findings and "\u00e9!" in findings


def test_a_template_that_rejects_responses_is_not_checked_further(render):
    prompts_only = "{% if messages[-1].role == 'assistant' %}{{ raise_exception('no') }}{% endif %}" + CHAT_TEMPLATE
    assert list(render(prompts_only)) == ["template.row"]
