"""A tokenizer of single bytes with a ChatML template, files of rows, and the default configuration."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen2Tokenizer

from hybridrl.config.schema import DataConfig, SFTDataConfig
from hybridrl.data.processor import PictureReader
from tests.sections import section_of
from tests.vision_models import reader_that_sees

OPTIONS: dict[str, Any] = {"max_samples": -1, "shuffle": False, "key": "data.train_files"}
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


@pytest.fixture(scope="session")
def reader_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., PictureReader]:
    """Return a reader with the processor of a small model that sees."""

    def make(family: str = "qwen3_vl", **arguments: Any) -> PictureReader:
        return reader_that_sees(tmp_path_factory.mktemp(family), family, **arguments)

    return make


@pytest.fixture(scope="session")
def reader(reader_of: Callable[..., PictureReader]) -> PictureReader:
    return reader_of()


@pytest.fixture
def config() -> DataConfig:
    return section_of(DataConfig, "data", train_batch_size=8)


@pytest.fixture
def sft_config() -> SFTDataConfig:
    return section_of(SFTDataConfig, "data", "sft_trainer", max_length=512, train_batch_size=8)
