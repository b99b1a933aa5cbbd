"""Reading the tokenizer of a model's directory or hub name as its tokenizer.json describes it.

transformers may choose a class that the file was not written for: a tokenizer of bytes that is read as Llama's first
one drops every space, and read as Qwen's it splits every number into digits. Knows no configuration.
"""

import logging
from pathlib import Path

from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

# Ordinary text: spaces, several in a row, line breaks, digits, other letters and scripts.
PROBES = ("What is a mask?", "one  two\n\n  three", "In 2024 it was 3.14 x 10,", "Z\u00fcrich, \u6771\u4eac")

logger = logging.getLogger(__name__)


def read_tokenizer(place: str, *, trusted: bool, local: bool = False) -> PreTrainedTokenizerBase:
    """Return the tokenizer: the class that transformers chooses, unless tokenizer.json alone keeps text and gives it
    other tokens. `local`: do not ask the hub."""
    tokenizer = AutoTokenizer.from_pretrained(place, trust_remote_code=trusted, local_files_only=local)
    change = changed_text(tokenizer)
    other = None if change else _other_tokens(tokenizer, Path(place) / "tokenizer.json")
    if change is None and other is None:
        return tokenizer
    try:
        described = PreTrainedTokenizerFast.from_pretrained(place, local_files_only=local)
        if changed_text(described):
            return tokenizer
    except Exception:  # without a tokenizer.json; the library raises many types
        return tokenizer
    fault = "turns {!r} into {!r}".format(*change) if change else f"gives {other!r} other tokens"
    cause = "the tokenizer is read as tokenizer.json describes it, not as %s, which %s"
    logger.info(cause, type(tokenizer).__name__, fault)
    return described


def _other_tokens(tokenizer: PreTrainedTokenizerBase, file: Path) -> str | None:
    """Return the first of some ordinary texts to which the file gives other tokens; None without a file, or if the
    class is the one that follows it."""
    if type(tokenizer) is PreTrainedTokenizerFast or not file.is_file():
        return None
    described = Tokenizer.from_file(str(file))
    described.no_padding()
    described.no_truncation()
    ids = {text: tokenizer(text, add_special_tokens=False)["input_ids"] for text in PROBES}
    return next((text for text in PROBES if described.encode(text, add_special_tokens=False).ids != ids[text]), None)


def changed_text(tokenizer: PreTrainedTokenizerBase) -> tuple[str, str] | None:
    """Return the first of some ordinary texts that is another one after encoding and decoding, and what it becomes. The
    space that sentencepiece writes before the first word is no change."""
    decoded = ((text, _decoded(tokenizer, text)) for text in PROBES)
    return next(((text, other) for text, other in decoded if other.removeprefix(" ") != text), None)


def drops_spaces(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether words run together. Text that is normalised, or has unknown characters, is the tokenizer's own."""
    return _decoded(tokenizer, PROBES[0]).lower() == PROBES[0].replace(" ", "").lower()


def _decoded(tokenizer: PreTrainedTokenizerBase, text: str) -> str:
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
