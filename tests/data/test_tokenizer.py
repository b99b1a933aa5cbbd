import copy
import gc
import json
import logging
import socket
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen2Tokenizer

from hybridrl.config.findings import ConfigError
from hybridrl.data.tokenizer import ResponseDecoder, end_tokens, load_tokenizer
from tests.data import stand_ins


@pytest.fixture
def directory(tokenizer: Qwen2Tokenizer, tmp_path: Path) -> Path:
    tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_a_local_directory_is_read_without_the_network(directory, monkeypatch):
    lookups: list[object] = []
    monkeypatch.setattr(socket, "getaddrinfo", lambda *address, **options: lookups.append(address))
    assert load_tokenizer(str(directory)).eos_token == "<|im_end|>"
    assert lookups == []


def test_without_a_padding_token_the_end_token_pads(directory, caplog):
    text = (directory / "tokenizer_config.json").read_text()
    (directory / "tokenizer_config.json").write_text(text.replace('"<|endoftext|>"', "null"))
    with caplog.at_level(logging.INFO, logger="hybridrl"):
        tokenizer = load_tokenizer(str(directory))
    assert tokenizer.pad_token_id == tokenizer.eos_token_id
    assert "no padding token" in caplog.text


def test_an_existing_padding_token_is_kept(directory, caplog):
    with caplog.at_level(logging.INFO, logger="hybridrl"):
        assert load_tokenizer(str(directory)).pad_token == "<|endoftext|>"
    assert caplog.text == ""


def test_another_tokenizer_and_another_template_can_be_named(directory):
    tokenizer = load_tokenizer(
        "/no/such/model", tokenizer_path=str(directory), custom_chat_template="{{ messages[0].content }}!"
    )
    chat = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "hi!"


def test_a_template_may_be_a_file_or_a_name(directory, tokenizer, tmp_path):
    chat = [{"role": "user", "content": "hi"}]
    (tmp_path / "loud.jinja").write_text("{{ messages[0].content | upper }}")
    assert (
        load_tokenizer(str(directory), custom_chat_template=str(tmp_path / "loud.jinja")).apply_chat_template(
            chat, tokenize=False
        )
        == "HI"
    )
    plain = load_tokenizer(str(directory), custom_chat_template="chatml")
    # The tokenizer's own template is the same one.
    assert plain.apply_chat_template(chat, tokenize=False) == tokenizer.apply_chat_template(chat, tokenize=False)
    tokenizer.chat_template = {"default": "{{ 'd' }}", "short": "{{ 's' }}"}
    tokenizer.save_pretrained(tmp_path / "named")
    named = load_tokenizer(str(tmp_path / "named"), custom_chat_template="short")
    assert named.apply_chat_template(chat, tokenize=False) == "s"


def test_a_custom_template_begins_as_texts_do_or_a_warning_says_that_it_does_not(directory, caplog):
    """A pretrained model that was only trained on texts behind its first token continues others with nonsense."""
    chat = [{"role": "user", "content": "hi"}]
    assert "<|endoftext|>" not in load_tokenizer(str(directory), custom_chat_template="chatml").chat_template
    plain = Tokenizer.from_file(str(directory / "tokenizer.json"))
    first = ("<|endoftext|>", plain.token_to_id("<|endoftext|>"))
    plain.post_processor = TemplateProcessing(single=f"{first[0]} $A", special_tokens=[first])
    tokens = {"bos_token": first[0], "eos_token": "<|im_end|>", "pad_token": first[0]}
    PreTrainedTokenizerFast(tokenizer_object=plain, **tokens).save_pretrained(directory)
    named = load_tokenizer(str(directory), custom_chat_template="chatml")
    assert named.apply_chat_template(chat, tokenize=False).startswith("<|endoftext|><|im_start|>user")
    load_tokenizer(str(directory), custom_chat_template="{{ bos_token }}{{ messages[0].content }}")
    assert not caplog.records
    load_tokenizer(str(directory), custom_chat_template="{{ messages[0].content }}")
    assert "begin with <|endoftext|>, and conversations do not; write {{ bos_token }} first" in caplog.text


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (
            "no/such.jinja",
            r"custom_chat_template=no/such.jinja: neither a file nor Jinja text nor one of the names chatml",
        ),
        ("{% for %}", r"custom_chat_template={% for %}: line 1 is not Jinja"),
    ],
)
def test_an_invalid_template_is_rejected(directory, template, message):
    with pytest.raises(ConfigError, match=message):
        load_tokenizer(str(directory), custom_chat_template=template)


def test_a_template_that_requires_more_than_one_message_is_accepted(directory):
    strict = "{% if messages[0].role != 'system' %}{{ raise_exception('no system') }}{% endif %}"
    assert load_tokenizer(str(directory), custom_chat_template=strict).chat_template == strict


def test_a_custom_template_is_saved_with_the_tokenizer(directory, tmp_path):
    tokenizer = load_tokenizer(str(directory), custom_chat_template="{{ messages[0].content }}!")
    tokenizer.save_pretrained(tmp_path / "saved")
    chat = [{"role": "user", "content": "hi"}]
    assert load_tokenizer(str(tmp_path / "saved")).apply_chat_template(chat, tokenize=False) == "hi!"


def test_a_missing_directory_is_rejected_with_its_key(tmp_path):
    with pytest.raises(ConfigError, match=r"actor_rollout_ref.model.path=.*/none: there is no such directory"):
        load_tokenizer(str(tmp_path / "none"))
    with pytest.raises(ConfigError, match=r"data.tokenizer=.*/none: there is no such directory"):
        load_tokenizer(str(tmp_path), tokenizer_path=str(tmp_path / "none"))


@pytest.mark.parametrize("config", ['{"model_type": "qwen2"}', '{"model_type": "llama"}', "{}"])
def test_a_directory_without_a_tokenizer_is_rejected(tmp_path, config):
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(ConfigError, match=r"model.path=.*holds no tokenizer.*data.tokenizer can name another"):
        load_tokenizer(str(tmp_path), model_key="model.path")


SENTENCE = "The quick fox,\n\n  3.14: Zürich 東京"
PIECES = partial(stand_ins.of_sentencepiece, leading_space=True)


@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_a_tokenizer_of_bytes_that_is_named_as_llamas_first_one_is_read_as_its_file_describes_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, model_type: str
) -> None:
    """As in DeepSeek-R1-Distill-Llama-8B and DeepSeek-R1-0528-Qwen3-8B, whose every space would be dropped."""
    named = {
        "bos_token": {"__type": "AddedToken", "content": "<s>"},
        "legacy": True,
        "chat_template": "{{ bos_token }}",
    }
    place = stand_ins.write(tmp_path / "a", stand_ins.of_bytes, "LlamaTokenizerFast", model_type, **named)
    with caplog.at_level(logging.INFO, logger="hybridrl"):
        tokenizer = load_tokenizer(str(place))
    assert "not as LlamaTokenizer, which turns 'What is a mask?' into 'Whatisamask?'" in caplog.text
    expected = stand_ins.of_bytes().encode(SENTENCE).ids
    tokenizer.save_pretrained(tmp_path / "saved")
    for read in (tokenizer, AutoTokenizer.from_pretrained(tmp_path / "saved")):
        assert read(SENTENCE)["input_ids"] == expected
        assert read.decode(expected) == SENTENCE
        assert (read.bos_token, read.eos_token, read.chat_template) == ("<s>", "</s>", "{{ bos_token }}")


@pytest.mark.parametrize(
    ("make", "kind", "model_type"),
    [
        (partial(stand_ins.of_bytes, digits=1), "Qwen2Tokenizer", "qwen2"),
        (stand_ins.of_bytes, "PreTrainedTokenizerFast", "llama"),
        (stand_ins.of_bytes, "GPT2Tokenizer", "gpt2"),
        (PIECES, "LlamaTokenizer", "llama"),
        (PIECES, "LlamaTokenizerFast", "mistral"),
        (partial(stand_ins.of_sentencepiece, leading_space=False), "GemmaTokenizer", "gemma2"),
    ],
    ids=["Qwen2.5", "Llama 3", "GPT-2", "Llama 2", "Mistral", "Gemma"],
)
def test_a_tokenizer_that_keeps_text_is_read_as_it_is_without_a_word(tmp_path, caplog, make, kind, model_type):
    place = stand_ins.write(tmp_path / "a", make, kind, model_type, pad_token="</s>", unk_token="<unk>")
    with caplog.at_level(logging.INFO, logger="hybridrl"):
        tokenizer = load_tokenizer(str(place))
    assert type(tokenizer) is type(AutoTokenizer.from_pretrained(place))
    assert caplog.text == ""


def test_a_tokenizer_to_which_the_class_gives_other_tokens_is_read_as_its_file_describes_it(tmp_path, caplog):
    """Qwen's class splits numbers into digits, which its own files do too."""
    place = stand_ins.write(tmp_path / "a", stand_ins.of_bytes, "Qwen2Tokenizer", "qwen2", pad_token="</s>")
    with caplog.at_level(logging.INFO, logger="hybridrl"):
        tokenizer = load_tokenizer(str(place))
    assert "not as Qwen2Tokenizer, which gives 'In 2024 it was 3.14 x 10,' other tokens" in caplog.text
    assert tokenizer.tokenize("123") == ["123"]


def test_what_is_read_as_its_file_describes_it_keeps_the_special_tokens_of_its_class(tmp_path):
    place = stand_ins.write(tmp_path / "a", stand_ins.of_bytes, "Qwen2Tokenizer", "qwen2")
    settings = json.loads((place / "tokenizer_config.json").read_text())
    del settings["eos_token"]
    (place / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = load_tokenizer(str(place))
    assert type(tokenizer) is PreTrainedTokenizerFast and tokenizer.eos_token == "<|endoftext|>"


def test_a_space_that_the_configuration_adds_stays(tmp_path):
    place = stand_ins.write(tmp_path / "a", stand_ins.of_bytes, "GPT2Tokenizer", "gpt2", add_prefix_space=True)
    assert load_tokenizer(str(place)).decode(load_tokenizer(str(place))("What")["input_ids"]) == " What"


def test_a_tokenizer_that_drops_spaces_by_itself_is_rejected(tmp_path):
    make = stand_ins.of_words_without_spaces
    place = stand_ins.write(tmp_path / "a", make, "PreTrainedTokenizerFast", "llama")
    with pytest.raises(ConfigError, match=r"model.path=.*drops spaces \('What is a mask\?' becomes 'Whatisamask\?'\)"):
        load_tokenizer(str(place))


def test_a_tokenizer_that_normalises_text_is_read_with_a_warning(tmp_path, caplog):
    place = stand_ins.write(tmp_path / "a", stand_ins.of_lower_case_words, "BertTokenizer", "bert")
    load_tokenizer(str(place))
    assert "changes text: 'What is a mask?' becomes 'what is a mask?'" in caplog.text


CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"
TAGS = [f"<{slash}{name}>" for name in ("answer", "think", "tool_call") for slash in ("", "/")]
TEMPLATES = {
    "it has none": None,
    "it raises": "{{ raise_exception('no') }}",
    "of ChatML": CHATML,
    "it mentions tags at the start": "Write <think> </think>, then <answer> </answer>. " + CHATML,
    "it mentions tags after each message": CHATML.replace("<|im_end|>", " (write <answer></answer>)<|im_end|>"),
    "it writes empty thoughts": CHATML.replace("{{ m.c", "{% if m.role != 'user' %}<think></think>{% endif %}{{ m.c"),
}


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_tags_that_are_special_tokens_are_part_of_a_response(tokenizer, template):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.add_tokens(TAGS, special_tokens=True)
    tokenizer.chat_template, tokenizer.clean_up_tokenization_spaces = template, True
    tokenizer.clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output = True
    text = " ".join(TAGS) + " 7 , 8 ."
    ids = [*tokenizer(text)["input_ids"], tokenizer.eos_token_id, tokenizer.pad_token_id]
    assert ResponseDecoder(tokenizer, [])(ids) == text
    ended = ResponseDecoder(tokenizer, tokenizer.convert_tokens_to_ids([TAGS[1]]))
    assert ended(ids) == text.replace(TAGS[1], "") and ended([]) == ""


@pytest.mark.parametrize("opening", ["<|im_start|>", "[INST]", "<user>"])
def test_the_tokens_around_the_messages_of_users_are_no_part_of_a_response(tokenizer, opening):
    tokenizer = copy.deepcopy(tokenizer)
    closing = "<|im_end|>" if "|" in opening else f"{opening[0]}/{opening[1:]}"
    tokenizer.add_tokens([opening, closing], special_tokens=True)
    tokenizer.chat_template = f"{{% for m in messages %}}{opening}{{{{ m.content }}}}{closing}{{% endfor %}}"
    assert ResponseDecoder(tokenizer, [])(tokenizer(f"7{closing}{opening}8{closing}")["input_ids"]) == "78"


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_the_end_tokens_are_those_of_the_model_too_and_another_of_the_tokenizer_is_named(directory, caplog, file):
    path, own = str(directory), AutoTokenizer.from_pretrained(directory).eos_token_id
    for published in (own, [0, own]):
        (directory / file).write_text(json.dumps({"model_type": "qwen2", "eos_token_id": published}))
        assert load_tokenizer(path).eos_token_id == own and caplog.text == ""
    (directory / file).write_text(json.dumps({"model_type": "qwen2", "eos_token_id": [0, own + 1]}))
    assert end_tokens(path, load_tokenizer(path)) == (*sorted({0, own, own + 1}),)
    first, second = AutoTokenizer.from_pretrained(directory).convert_ids_to_tokens([0, own + 1])
    assert f"model.path={path}: its end token <|im_end|> is none of the model's, {first}, {second}," in caplog.text
    assert f"add {own} to eos_token_id in the model's generation_config.json" in caplog.text


@pytest.mark.parametrize(
    ("model_type", "text", "shown"),
    [
        ("gemma3_text", "The tokenizer you are loading from '{}' with an incorrect regex pattern: ...", False),
        ("mistral", "The tokenizer you are loading from '{}' with an incorrect regex pattern: ...", True),
        ("mistral", "Ignoring clean_up_tokenization_spaces=True for BPE tokenizer", False),
        ("gemma3_text", "Another warning", True),
    ],
)
def test_a_warning_of_transformers_without_a_reason_is_not_shown(tmp_path, model_type, text, shown):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    record = logging.makeLogRecord({"msg": text.format(tmp_path), "levelno": logging.WARNING})
    assert bool(logging.getLogger("transformers.tokenization_utils_tokenizers").filter(record)) == shown


def test_a_vocabulary_is_not_read_again_to_compare_a_class_with_its_file(tmp_path, monkeypatch):
    make = partial(stand_ins.of_bytes, digits=1)
    place = stand_ins.write(tmp_path / "a", make, "Qwen2Tokenizer", "qwen2", pad_token="</s>", unk_token="<unk>")
    whole = []
    library = SimpleNamespace(from_str=Tokenizer.from_str, from_file=lambda file: whole.append(file))
    monkeypatch.setattr("hybridrl.data.tokenizer.Tokenizer", library)
    assert load_tokenizer(str(place)).tokenize("12") == ["1", "2"] and whole == []
    assert gc.isenabled()
