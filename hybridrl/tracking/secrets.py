"""Masks texts that look like secrets: by their form, by the name before them, and by their value if the environment or
a remembered configuration has it."""

import functools
import json
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

MASK = "***"
SHORTEST = 8  # characters; shorter values are not masked everywhere
USERS_HOME = re.compile(r"/(home|Users)/[^/\s\"':]+")
PLAIN_WORD = re.compile(r"[a-z_]+")  # may be a column's name or a kind of key: only passwords are masked everywhere

# Words before "token" and "key" that do not name a secret: tokens of a vocabulary, units, and names of columns.
NO_TOKENS = (
    "bos|eos|pad|unk|sep|cls|mask|stop|start|end|eot|eom|image|video|audio|think|special|per|next|last|first|max|min"
    "|new"
)
PLAIN_KEYS = (
    "ground_truth|prompt|response|messages|tools|images?|videos?|audios?|reward_fn|reward_model|data_source|gdpo_reward"
    "|public|primary|foreign|sort|cache|group|teacher"
)
WORDS = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])|[\s-]")  # refreshToken, APIKey, x-api-key
CERTAIN = re.compile(
    r"secret|passw|passphrase|passcode|pgpass|credential|(?<!forward)(?<!backward)_(?:pass|pwd)$"
)  # a number too
NAMES = re.compile(
    rf"{CERTAIN.pattern}|authorization|(?:^|_)(?:auth|pass|pwd|jwt|bearer|cookies?|webhook(?:_url)?)$|_pat$"
    r"|(?:api|access|private|auth|ssh|client|signing|encryption|account|service|master|storage)_?keys?(?:_|$)"
    rf"|^(?!(?:{PLAIN_KEYS})_).*_key(?:_(?:id|data|pem|value|\d+))?$|^key$"
    rf"|(?:^|{''.join(f'(?<!{word})' for word in NO_TOKENS.split('|'))}_)token(?:_(?:value|\d+))?$"
    r"|(?:auth|access|api|refresh|bearer)_?tokens?(?:_|$)|(?:session|hf|hub|id|bot)token$"
)
WORKING_DIRECTORIES = {"PWD", "OLDPWD"}

VALUE = re.compile(  # quoted, with the quotes escaped or not; in brackets; a bare word
    r"(?i)(?P<escaped>\\+[\"'])(?:(?!(?P=escaped)).)*(?P=escaped)|(?P<quote>[\"'])(?:\\+.|(?!(?P=quote)).)*(?P=quote)?"
    r"|\{[^{}\n]*\}|\[[^\[\]\n]*\]|(?:(?:bearer|basic|token) +)?[^\s\"',}\])&;]+"
)
NAMED = [
    re.compile(r"(?i)(?<![\w.-])-?-?(?P<name>[a-z_][\w.-]*)(?:\\*[\"'])?[ \t]*(?:=>|[:=])[ \t]*"),
    re.compile(r"(?i)(?<![\w-])--?(?P<name>[a-z][\w-]*)(?:[ \t]+|\\*[\"'],(?:\s|\\+n)*)(?![ \t-])"),
]
NO_VALUE = re.compile(r"(?i)(?:\\*[\"'])?(?:null|none|true|false|~|\*+)?(?:\\*[\"'])?,?")
NUMBER = re.compile(r"-?[\d.]+(?:e[+-]?\d+)?,?")
GAP = r"(?:\s|\\+n)"
PRIVATE = r"(?:[A-Z0-9 ]*PRIVATE KEY(?: BLOCK)?)"
LINES = r"(?:[\w+/=:, \r\n\"-]|\\+n)*"  # lines of a private key with one end cut off, also as items of a list
# Hugging Face, OpenAI and others, Stripe, GitHub, GitLab, Slack, npm, PyPI, Docker, Vault, Groq, LangSmith, W&B, Google
PREFIXES = (
    r"hf_|api_org_|sk-|[srp]k_(?:live|test)_|gh[opsur]_|github_pat_|gl[a-z]{2,4}-|xox[a-z]-|xapp-|npm_|pypi-|dckr_pat_"
    r"|hv[sb]\.|gsk_|xai-|nvapi-|pplx-|lsv2_|wandb_v1_|GOCSPX-|ya29\.|AGE-SECRET-KEY-|r8_|shp[a-z]{2}_|dop_v1_|SG\."
)
PATTERNS = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (rf"-----BEGIN {PRIVATE}-----(?:[\s\S]{{0,8192}}?-----END {PRIVATE}-----|{LINES})", MASK),
        (rf"(?<![\w+/=\s\\])[\w+/=\s\\]+-----END {PRIVATE}-----", MASK),
        (r"(?i)\b((?:authorization|cookie)(?:\\*[\"'])?[ \t]*[:=][ \t]*)[^\r\n\"'\\]+", rf"\1{MASK}"),
        (r"(?i)\b((?:bearer|basic) )[\w.~+/=-]{8,}", rf"\1{MASK}"),
        (rf"(?is)\b((?:machine|login){GAP}.{{1,200}}?\bpassword{GAP}+)[^\s\"\\]+", rf"\1{MASK}"),  # netrc
        (r"\b([\w.*-]+:(?:\d{4,5}|\*):[\w*-]+:[\w*-]+:)[^\s\"']+", rf"\1{MASK}"),  # pgpass
        (r"((?<![\w-])(?:-u|--user)[ \t=]+[^\s:\"']+:)[^\s\"']+", rf"\1{MASK}"),
        (r"://(?:[^\s/\"']{1,200}|[^\s/:@\"']{0,99}:[^\s@\"']{1,99})@", f"://{MASK}@"),
        (r"(?i)([?&][\w-]*(?:token|key|sig|signature|secret|credential|password|code)=)[^&\s\"']+", rf"\1{MASK}"),
        (r"(hooks\.slack\.com/\w+/|/api/webhooks/|api\.telegram\.org/bot)[\w/:-]+", rf"\1{MASK}"),
        (rf"\b(?:{PREFIXES})[\w.-]{{10,}}|\bAIza[\w-]{{30,}}|\bA[A-Z]IA[0-9A-Z]{{16}}\b", MASK),
        # JSON web tokens; W&B keys of 40 digits, unless they are part of a path
        (r"\beyJ[\w-]{8,}\.[\w-]{8,}(?:\.[\w-]*)*|(?<![\w/])[0-9a-f]{40}\b", MASK),
    )
]


@functools.lru_cache(1 << 14)
def is_secret(name: str) -> bool:
    """Return whether a key or variable of this name holds a secret; a dotted name does if any part does. One that ends
    in _env holds the name of a variable."""
    parts = (WORDS.sub("_", part.strip("_-+~ ")).lower() for part in name.split("."))
    return name not in WORKING_DIRECTORIES and any(NAMES.search(part) and not part.endswith("_env") for part in parts)


_remembered: set[str] = set()


def remember(config: dict[str, Any]) -> None:
    """From now on, mask the secrets of a configuration in all texts."""
    mask_values(config, secrets=_remembered)


def mask_text(text: str) -> str:
    """Return a text with everything masked that looks like a secret, and the secrets of this environment and of
    remembered configurations."""
    for value in _values_here():
        text = text.replace(value, MASK)
    for pattern, replacement in PATTERNS:
        text = pattern.sub(replacement, text)
    for pattern in NAMED:
        text = _mask_named(text, pattern)
    return text


def without_users(text: str) -> str:
    """Return a text without the names of users, in paths of home directories."""
    home = os.path.expanduser("~")
    if len(home) > 1:
        text = re.sub(rf"{re.escape(home)}(?![\w.-])", "~", text)
    return USERS_HOME.sub(r"/\1/USER", text)


def _mask_named(text: str, pattern: re.Pattern[str]) -> str:
    """Mask values after names of secrets. Values of other names are searched: "ValueError: password=word"."""
    parts, end = [], 0
    for named in pattern.finditer(text):
        value = VALUE.match(text, named.end()) if named.start() >= end and is_secret(named["name"]) else None
        if value is None or _is_harmless(named["name"].lower(), value[0]):
            continue
        quote = value["escaped"] or value["quote"] or ""
        parts += [text[end : named.end()], quote, MASK, quote]
        end = value.end()
    return "".join([*parts, text[end:]])


def _is_harmless(name: str, value: str) -> bool:
    if NO_VALUE.fullmatch(value) or name.rpartition(".")[2] == "key":  # a key of any mapping
        return True
    return bool(NUMBER.fullmatch(value)) and not CERTAIN.search(name)


def _values_here() -> list[str]:
    values = [value for name, value in os.environ.items() if is_secret(name)]
    values += _stored(os.environ.get("HF_TOKEN_PATH") or os.path.expanduser("~/.cache/huggingface/token"))
    return sorted({value for value in {*values, *_remembered} if len(value) >= SHORTEST}, key=len, reverse=True)


@functools.cache
def _stored(path: str) -> list[str]:
    try:
        return [Path(path).read_text(encoding="utf-8").strip()]
    except (OSError, ValueError):
        return []


def mask_values(value: Any, name: str = "", secrets: set[str] | None = None) -> Any:
    """Return nested values with secrets masked: all values below a secret's key or after a secret's option, and secrets
    within texts. `name`: name of the secret around the value. `secrets` collects the values to mask everywhere."""
    if isinstance(value, dict):
        plain = {"key"} if "model_path" in value else set()  # a teacher's: the value of a column
        inner = {key: name or str(key) * (key not in plain and is_secret(str(key))) for key in value}
        return {key: mask_values(each, inner[key], secrets) for key, each in value.items()}
    if isinstance(value, list | tuple):
        before = (last if _is_option(last) else "" for last in ["", *value])
        return [mask_values(each, name or last, secrets) for last, each in zip(before, value, strict=False)]
    if value is None or value == "" or isinstance(value, bool):
        return value
    if name:
        if secrets is not None and (CERTAIN.search(name) or not PLAIN_WORD.fullmatch(str(value))):
            secrets |= {str(value), json.dumps(str(value))[1:-1]}
        return MASK
    return mask_text(value) if isinstance(value, str) else value


def _is_option(word: Any) -> bool:
    return isinstance(word, str) and word.startswith("-") and "=" not in word and is_secret(word)


@contextmanager
def masked_arguments() -> Iterator[None]:
    """Context in which this process's arguments are masked, since trackers record them."""
    before, sys.argv = sys.argv, mask_values(sys.argv)
    try:
        yield
    finally:
        sys.argv = before
