"""Reading the tokenizer of a model's directory or hub name as its tokenizer.json describes it.

transformers may choose a class that the file was not written for: a tokenizer of bytes that is read as Llama's first
one drops every space, and read as Qwen's it splits every number into digits. Knows no configuration.
"""

import logging

from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.utils import cached_file

# Ordinary text: spaces, several in a row, line breaks, digits, other letters and scripts.
PROBES = ("What is a mask?", "one  two\n\n  three", "In 2024 it was 3.14 x 10,", "Z\u00fcrich, \u6771\u4eac")

logger = logging.getLogger(__name__)


def read_tokenizer(place: str, *, trusted: bool, local: bool = False) -> PreTrainedTokenizerBase:
    """Return the tokenizer: the class that transformers chooses, unless tokenizer.json alone keeps text and gives it
    other tokens. `local`: do not ask the hub."""
    tokenizer = AutoTokenizer.from_pretrained(place, trust_remote_code=trusted, local_files_only=local)
    change = changed_text(tokenizer)
    other = None if change else _other_tokens(tokenizer, place, local)
    if change is None and other is None:
        return tokenizer
    try:
        special = tokenizer.special_tokens_map  # some are the class's own, which no file has
        described = PreTrainedTokenizerFast.from_pretrained(place, local_files_only=local, **special)
        if changed_text(described):
            return tokenizer
    except Exception:  # without a tokenizer.json; the library raises many types
        return tokenizer
    fault = "turns {!r} into {!r}".format(*change) if change else f"gives {other!r} other tokens"
    cause = "the tokenizer is read as tokenizer.json describes it, not as %s, which %s"
    logger.info(cause, type(tokenizer).__name__, fault)
    return described


def _other_tokens(tokenizer: PreTrainedTokenizerBase, place: str, local: bool) -> str | None:
    """Return the first of some ordinary texts to which tokenizer.json gives other tokens; None without that file, if
    the class follows it, and if the class is the model's own or its settings add a space."""
    own = not type(tokenizer).__module__.startswith("transformers.")
    if type(tokenizer) is PreTrainedTokenizerFast or own or tokenizer.init_kwargs.get("add_prefix_space"):
        return None
    names = {"local_files_only": local, "_raise_exceptions_for_missing_entries": False}
    file = cached_file(place, "tokenizer.json", **names)
    if file is None:
        return None
    described = Tokenizer.from_file(file)
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
