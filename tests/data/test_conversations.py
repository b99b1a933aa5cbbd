from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from transformers import Qwen2Tokenizer

from hybridrl.agents.environments.dialogue import Dialogue
from hybridrl.config.findings import ConfigError
from hybridrl.config.schema import SFTDataConfig
from hybridrl.data.conversations import Conversation, ConversationDataset, load_conversations

Write = Callable[..., str]


def chat(*texts: str, **columns: Any) -> dict[str, Any]:
    roles = ("user", "assistant") * len(texts)
    return {"messages": [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)], **columns}


def load(file: str, config: SFTDataConfig, tokenizer: Qwen2Tokenizer) -> ConversationDataset:
    return load_conversations([file], config, tokenizer, max_samples=-1, shuffle=False, key="data.train_files")


def rejection(file: str, config: SFTDataConfig, tokenizer: Qwen2Tokenizer) -> str:
    with pytest.raises(ConfigError) as error:
        load(file, config, tokenizer)
    return str(error.value)


def trained_text(conversation: Conversation, tokenizer: Qwen2Tokenizer) -> str:
    """Return the text on which the loss is computed."""
    assert len(conversation.ids) == len(conversation.loss_mask)
    pairs = zip(conversation.ids, conversation.loss_mask, strict=True)
    return tokenizer.decode([token for token, mask in pairs if mask])


def test_a_conversation_with_an_image_is_rejected(write, sft_config, tokenizer):
    message = rejection(write(chat("<image>what is it?", "a cat") | {"images": ["cat.png"]}), sft_config, tokenizer)
    assert "line 1: more than text: the column images; leave such rows out" in message


def test_the_loss_is_on_the_response_and_the_end_of_its_turn(write, sft_config, tokenizer):
    (conversation,) = load(write(chat("2+2?", "4")), sft_config, tokenizer)
    text = "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n4<|im_end|>\n"
    assert tokenizer.decode(conversation.ids) == text
    assert trained_text(conversation, tokenizer) == "4<|im_end|>"
    assert conversation.loss_mask[-3:] == [1, 1, 0]


def test_the_loss_is_on_every_response_of_a_conversation(write, sft_config, tokenizer):
    dataset = load(write(chat("a", "one", "b", "two"), chat("c", "three")), sft_config, tokenizer)
    assert [trained_text(item, tokenizer) for item in dataset] == ["one<|im_end|>two<|im_end|>", "three<|im_end|>"]


def test_prompt_and_response_columns_make_the_same_conversation(write, sft_config, tokenizer):
    rows = [
        chat("2+2?", "4"),
        {"prompt": "2+2?", "response": "4"},
        {"prompt": chat("2+2?")["messages"], "response": "4"},
    ]
    first, second, third = load(write(*rows), sft_config, tokenizer)
    assert first == second == third


def test_without_a_chat_template_the_response_follows_the_prompt_and_ends(write, sft_config, plain_tokenizer):
    (conversation,) = load(write({"prompt": "2+2=", "response": "4"}), sft_config, plain_tokenizer)
    assert plain_tokenizer.decode(conversation.ids) == "2+2=4<|im_end|>"
    assert trained_text(conversation, plain_tokenizer) == "4<|im_end|>"


def test_without_an_end_of_turn_token_the_loss_covers_the_full_turn(write, sft_config, tokenizer):
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    (conversation,) = load(write(chat("2+2?", "4")), sft_config, tokenizer)
    assert trained_text(conversation, tokenizer) == "4\n\n"


def test_a_template_that_rewrites_earlier_turns_is_rejected_per_row(write, sft_config, tokenizer):
    tokenizer.chat_template = "{% for m in messages %}{{ m.content if loop.last else m.content|upper }}{% endfor %}"
    message = rejection(write(chat("1", "2"), chat("1", "two", "3", "four")), sft_config, tokenizer)
    assert "1 bad row\n" in message
    assert "line 2: the chat template renders the beginning of this conversation differently" in message
    assert "model.custom_chat_template" in message


def test_all_rows_that_are_not_conversations_are_in_one_message(write, sft_config, tokenizer):
    rows = [chat("a", "b"), chat("a"), {"messages": "text"}, {"prompt": "a"}, {"prompt": 1, "response": "b"}]
    message = rejection(write(*rows), sft_config, tokenizer)
    assert "4 bad rows" in message
    assert "line 2: data.messages_key=messages must hold chat messages" in message
    assert "(and 1 more row)" in message
    assert "line 4: neither chat messages (data.messages_key=messages) nor a prompt and a response" in message
    assert "line 5: neither" in message


def test_chat_messages_without_a_chat_template_are_rejected_with_the_fix(write, sft_config, plain_tokenizer):
    message = rejection(write(chat("a", "b")), sft_config, plain_tokenizer)
    assert "line 1: without a chat template a row needs plain text" in message
    assert "model.custom_chat_template" in message


def test_overlong_conversations_are_rejected_with_row_length_and_limit(write, sft_config, plain_tokenizer):
    config = replace(sft_config, max_length=4)
    rows = [{"prompt": "a", "response": "b"}, {"prompt": "abc", "response": "de"}]
    message = rejection(write(*rows), config, plain_tokenizer)
    assert "1 of 2 rows are longer than data.max_length=4" in message
    assert "rows.jsonl, line 2 with 6 tokens" in message
    assert "data.truncation=left|right" in message


def test_a_truncated_conversation_keeps_its_mask_and_is_dropped_without_response_tokens(
    write: Write, sft_config: SFTDataConfig, plain_tokenizer: Qwen2Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    file = write({"prompt": "ab", "response": "cde"}, {"prompt": "abcdef", "response": "g"})
    left = load(file, replace(sft_config, max_length=3, truncation="left"), plain_tokenizer)
    assert [plain_tokenizer.decode(item.ids) for item in left] == ["de<|im_end|>", "fg<|im_end|>"]
    assert [item.loss_mask for item in left] == [[1, 1, 1], [0, 1, 1]]
    right = load(file, replace(sft_config, max_length=3, truncation="right"), plain_tokenizer)
    assert [plain_tokenizer.decode(item.ids) for item in right] == ["abc"]
    assert right[0].loss_mask == [0, 0, 1]
    assert right.ids.lengths.tolist() == [3]
    assert "2 of 2 rows are longer than data.max_length=3" in caplog.text
    assert "1 dropped because no response token is left" in caplog.text


# Writes an empty thought into the last response only, as templates of reasoning models do.
THOUGHT_IN_THE_LAST = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think></think>{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_turns_that_the_template_renders_differently_are_trained_as_they_are_sampled(
    write: Write, sft_config: SFTDataConfig, tokenizer: Qwen2Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer.chat_template = THOUGHT_IN_THE_LAST
    replay = Dialogue(tokenizer, [tokenizer.eos_token_id]).replay
    file = write(chat("q1", "one", "q2", "two"), chat("q", "single"))
    options = {"max_samples": -1, "shuffle": False, "key": "data.train_files"}
    two, single = load_conversations([file], sft_config, tokenizer, **options, replay=replay)
    assert trained_text(two, tokenizer) == "<think></think>one<|im_end|><think></think>two<|im_end|>"
    assert trained_text(single, tokenizer) == "<think></think>single<|im_end|>"
    assert "differently" not in tokenizer.decode(two.ids) and "of 1 conversations differently" in caplog.text
    assert "line 1: the chat template renders the beginning" in rejection(file, sft_config, tokenizer)


def test_the_line_break_after_a_turn_is_not_trained_on_where_it_is_a_token_of_its_own(write, sft_config, tokenizer):
    tokenizer.add_tokens(["\n"])  # as Gemma's tokenizers have it
    (conversation,) = load(write(chat("q1", "one", "q2", "two")), sft_config, tokenizer)
    assert trained_text(conversation, tokenizer) == "one<|im_end|>two<|im_end|>"


def test_the_tools_of_a_row_are_in_its_conversation(write, sft_config, tokenizer):
    tokenizer.chat_template = "{% for t in tools or [] %}{{ t.name }};{% endfor %}" + tokenizer.chat_template
    file = write(chat("a", "b") | {"tools": [{"name": "add"}]}, chat("a", "b"))
    with_tools, without = load(file, sft_config, tokenizer)
    assert tokenizer.decode(with_tools.ids) == "add;" + tokenizer.decode(without.ids)
    assert trained_text(with_tools, tokenizer) == trained_text(without, tokenizer) == "b<|im_end|>"
