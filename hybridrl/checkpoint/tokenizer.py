"""Reading the tokenizer of a model's directory or hub name, so that it keeps text.

transformers may choose a class that the files were not written for: a tokenizer of bytes that is read as Llama's first
one drops every space. Knows no configuration.
"""

import logging

from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

# Ordinary text: spaces, several in a row, line breaks, digits, other letters and scripts.
PROBES = ("What is a mask?", "one  two\n\n  three", "In 2024 it was 3.14 x 10,", "Z\u00fcrich, \u6771\u4eac")

logger = logging.getLogger(__name__)


def read_tokenizer(place: str, *, trusted: bool, local: bool = False) -> PreTrainedTokenizerBase:
    """Return the tokenizer, as its tokenizer.json describes it where only that keeps text. `local`: do not ask the
    hub."""
    tokenizer = AutoTokenizer.from_pretrained(place, trust_remote_code=trusted, local_files_only=local)
    if (change := changed_text(tokenizer)) is None:
        return tokenizer
    try:
        described = PreTrainedTokenizerFast.from_pretrained(place, local_files_only=local)
        keeps = changed_text(described) is None
    except Exception:  # without a tokenizer.json; the library raises many types
        return tokenizer
    if not keeps:
        return tokenizer
    kind = type(tokenizer).__name__
    cause = "the tokenizer is read as tokenizer.json describes it, not as %s, which turns %r into %r"
    logger.info(cause, kind, *change)
    return described


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
