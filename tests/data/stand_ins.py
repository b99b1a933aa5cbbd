"""Small tokenizers of the kinds that published models have, each trained on a few words."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

TEXTS = ["What is a mask? The quick brown fox.\nNext line 123 202 é ü 日本"] * 20
WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,%d}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
UNKNOWN = {"unk_token": "<unk>"}


def of_bytes(digits: int = 3) -> Tokenizer:
    """As Llama 3's and DeepSeek's, and with single digits Qwen's."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(WORDS % digits), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return _train(tokenizer, trainers.BpeTrainer(special_tokens=["<s>", "</s>"], initial_alphabet=alphabet))


def of_sentencepiece(*, leading_space: bool) -> Tokenizer:
    """As those of Llama 2 and Mistral, which write a space before the first word, and Gemma's."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, **UNKNOWN))
    blanks, shown = (
        normalizers.Replace(" ", "▁"),
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()],
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), blanks] if leading_space else [blanks])
    tokenizer.decoder = decoders.Sequence([*shown, decoders.Strip(" ", 1, 0)] if leading_space else shown)
    single = [f"<0x{byte:02X}>" for byte in range(256)]
    return _train(tokenizer, trainers.BpeTrainer(special_tokens=["<unk>", "<s>", "</s>", *single]))


def of_lower_case_words() -> Tokenizer:
    """As those of uncased models."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    return _train(tokenizer, trainers.WordPieceTrainer(special_tokens=["[UNK]", "</s>"]))


def of_words_without_spaces() -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel(**UNKNOWN))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Whitespace(), decoders.Fuse()
    return _train(tokenizer, trainers.WordLevelTrainer(special_tokens=["<unk>", "</s>"]))


def _train(tokenizer: Tokenizer, trainer: Any) -> Tokenizer:
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


def write(directory: Path, make: Callable[[], Tokenizer], kind: str, model_type: str, **settings: Any) -> Path:
    """Write a model's directory with the tokenizer, whose class is to be `kind`."""
    directory.mkdir()
    make().save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": kind, "eos_token": "</s>", **settings}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    (directory / "config.json").write_text(json.dumps({"model_type": model_type}))
    return directory
