"""A tokenizer of single bytes with a ChatML template, files of rows, and the default configuration."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen2Tokenizer

from hybridrl.config.schema import CustomDatasetConfig, DataConfig, SamplerConfig, SFTDataConfig

CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


@pytest.fixture(scope="session")
def byte_tokenizer() -> Qwen2Tokenizer:
    special = Qwen2Tokenizer(eos_token="<|im_end|>", pad_token="<|endoftext|>", extra_special_tokens=["<|im_start|>"])
    return special.train_new_from_iterator([""], vocab_size=259, show_progress=False)


@pytest.fixture
def plain_tokenizer(byte_tokenizer: Qwen2Tokenizer) -> Qwen2Tokenizer:
    byte_tokenizer.chat_template = None
    return byte_tokenizer


@pytest.fixture
def tokenizer(byte_tokenizer: Qwen2Tokenizer) -> Qwen2Tokenizer:
    byte_tokenizer.chat_template = CHAT_TEMPLATE
    return byte_tokenizer


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., str]:
    """Write rows, one per line, and return the name of the file."""

    def to_file(*rows: Any, name: str = "rows.jsonl") -> str:
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(tmp_path / name)

    return to_file


@pytest.fixture
def config() -> DataConfig:
    return DataConfig(
        tokenizer=None,
        train_files=[],
        val_files=[],
        train_max_samples=-1,
        val_max_samples=-1,
        prompt_key="prompt",
        tools_key="tools",
        reward_fn_key="data_source",
        ground_truth_key=None,
        max_prompt_length=512,
        max_response_length=512,
        train_batch_size=8,
        gen_batch_size=None,
        shuffle=True,
        drop_last=False,
        validation_shuffle=False,
        seed=42,
        filter_overlong_prompts=False,
        truncation="error",
        trust_remote_code=False,
        apply_chat_template_kwargs={},
        train_weights=[],
        custom_cls=CustomDatasetConfig(path=None, name=None),
        sampler=SamplerConfig(class_path=None, class_name=None),
    )


@pytest.fixture
def sft_config() -> SFTDataConfig:
    return SFTDataConfig(
        tokenizer=None,
        train_files=[],
        val_files=[],
        train_max_samples=-1,
        val_max_samples=-1,
        messages_key="messages",
        prompt_key="prompt",
        tools_key="tools",
        response_key="response",
        max_length=512,
        train_batch_size=8,
        max_token_len_per_gpu=8192,
        shuffle=True,
        seed=42,
        truncation="error",
        trust_remote_code=False,
        apply_chat_template_kwargs={},
    )
