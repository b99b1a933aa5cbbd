"""Masks what looks like a secret: in texts by its form or by the name before it, in nested values by their keys."""

import re
from typing import Any

MASK = "***"

# The token of a vocabulary, or a unit, is none; a "token" alone may be a number too.
NO_SECRETS = "bos|eos|pad|unk|sep|cls|mask|stop|image|video|audio|think|special|per|next|last|first|max|min|new"
TOKEN = f"(?:(?<![a-z_])|{''.join(f'(?<!{word})' for word in NO_SECRETS.split('|'))}_)token"
SECRET_NAME = (
    r"(?:api[_-]?key|access_?key(?:_id)?|private_?key|secret(?:_?key)?|passw(?:or)?d|passphrase|pgpass|_pass|_pwd"
    rf"|credentials?|authorization|{TOKEN})"
)
KEY = re.compile(
    r"(?i)api[_-]?key|access_?key|private_?key|secret|passw|passphrase|pgpass|(?:^|_)(?:pass|pwd)$"
    rf"|credential|authorization|{TOKEN}$|(?-i:_(?:KEY|PAT)$)"
)
VALUE = r"(?!(?:null|none|true|false|-?[\d.]+)?(?:[\s,}\]]|$))[^\s\"',}\]]+"
PATTERNS = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (rf"(?i)({SECRET_NAME}[\"']?\s*[:=]\s*([\"']))(?:[^\"'\\]|\\.)+(?=\2)", rf"\1{MASK}"),
        (
            rf"(?i)((?:{SECRET_NAME}|\b[a-z0-9_]+_(?-i:KEY|PAT))[\"']?\s*[:=]\s*[\"']?(?:bearer |basic )?){VALUE}",
            rf"\1{MASK}",
        ),
        (r"(?i)\b((?:bearer|basic) )[\w.~+/=-]{8,}", rf"\1{MASK}"),
        (r"://[^\s/@\"']+@", f"://{MASK}@"),
        (r"(?i)([?&][\w-]*(?:token|key|sig|signature|secret|credential)=)[^&\s\"']+", rf"\1{MASK}"),
        # Hugging Face, OpenAI and others, GitHub, GitLab, Slack, AWS, JSON web tokens; W&B, but no part of a path
        (r"\b(?:hf_|sk-|gh[opsur]_|github_pat_|glpat-|xox[abprs]-)[\w-]{10,}", MASK),
        (r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b|\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*|(?<![\w/])[0-9a-f]{40}\b", MASK),
    )
]


def is_secret(name: str) -> bool:
    """Return whether the value of a key or variable of this name is a secret."""
    return KEY.search(name) is not None


def mask_text(text: str) -> str:
    """Return a text without what looks like a secret in it."""
    for pattern, replacement in PATTERNS:
        text = pattern.sub(replacement, text)
    return text


def mask_values(value: Any, hidden: bool = False) -> Any:
    """Return nested values without secrets: everything below a key that names one, and what texts contain."""
    if isinstance(value, dict):
        return {key: mask_values(each, hidden or is_secret(str(key))) for key, each in value.items()}
    if isinstance(value, list):
        return [mask_values(each, hidden) for each in value]
    if value is None or value == "" or isinstance(value, bool):
        return value
    if hidden:
        return MASK
    return mask_text(value) if isinstance(value, str) else value
