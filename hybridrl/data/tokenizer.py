"""The tokenizer: loading it, chat messages and texts -> token ids, and compact storage of these. Knows no rows."""

import json
import logging
from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from jinja2 import TemplateError, TemplateSyntaxError
from tokenizers import Tokenizer
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.utils import cached_file

from hybridrl.config.custom_code import attempt
from hybridrl.config.files import fault_in, resolve_model
from hybridrl.config.findings import ConfigError

Message = dict[str, Any]

CHUNK = 1000  # rows per call of the tokenizer: enough for its threads, few enough for memory
MEDIA = ("images", "videos", "audios")  # verl's columns for content that is not text
# Templates by name, for models that have none; these are the turn tokens of most other models.
TEMPLATES = {
    "chatml": "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
}

# Ordinary text: spaces, several in a row, line breaks, digits, other letters and scripts.
PROBES = ("What is a mask?", "one  two\n\n  three", "In 2024 it was 3.14 x 10,", "Z\u00fcrich, \u6771\u4eac")

logger = logging.getLogger(__name__)


def load_tokenizer(
    model_path: str,
    *,
    tokenizer_path: str | None = None,
    trust_remote_code: bool = False,
    custom_chat_template: str | None = None,
    model_key: str = "actor_rollout_ref.model.path",
) -> PreTrainedTokenizerBase:
    """Load the tokenizer from `tokenizer_path`, by default from the model; it always has a padding token.

    A local directory is read without the network; any other name is looked up on the Hugging Face hub.
    Raises ConfigError naming `data.tokenizer` or `model_key`.
    """
    key = "data.tokenizer" if tokenizer_path else model_key
    path = Path(tokenizer_path or resolve_model(model_path)).expanduser()
    tokenizer = _read(path, key, trust_remote_code)
    if template := custom_chat_template:  # Jinja text, a file, or a name of the tokenizer's templates or of TEMPLATES
        template_key = f"{model_key.rpartition('.')[0]}.custom_chat_template={template}"
        known = TEMPLATES | (tokenizer.chat_template if isinstance(tokenizer.chat_template, dict) else {})
        if "{" in template or template in known:
            tokenizer.chat_template = known.get(template, template)
        elif (file := Path(template).expanduser()).is_file():
            tokenizer.chat_template = file.read_text(encoding="utf-8")
        else:
            raise ConfigError(f"{template_key}: neither a file nor Jinja text nor one of the names {', '.join(known)}")
        try:
            tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False)
        except TemplateSyntaxError as error:
            cause = f"{template_key[:80]}: line {error.lineno} of the template is not Jinja: {error.message}"
            raise ConfigError(cause) from error
        except TemplateError:
            pass  # it may require more than this conversation has; the rows decide
    if tokenizer.eos_token_id is None:
        cause = f"{key}={path}: the tokenizer has no end-of-sequence token"
        raise ConfigError(cause, fix="set eos_token in its tokenizer_config.json")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
        logger.info("the tokenizer has no padding token: padding with its end token %s", tokenizer.eos_token)
    return tokenizer


def read_tokenizer(place: str, *, trusted: bool, local: bool = False) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a directory or hub name as its tokenizer.json describes it: the class that transformers
    chooses, unless tokenizer.json alone keeps text and gives it other tokens. That class may be one that the file was
    not written for: a tokenizer of bytes that is read as Llama's first one drops every space, and read as Qwen's it
    splits every number into digits. `local`: do not ask the hub."""
    tokenizer = AutoTokenizer.from_pretrained(place, trust_remote_code=trusted, local_files_only=local)
    change = changed_text(tokenizer)
    other = None if change else _other_tokens(tokenizer, place, local)
    if change is None and other is None:
        return tokenizer

    def read() -> PreTrainedTokenizerBase | None:
        special = tokenizer.special_tokens_map  # some are the class's own, which no file has
        described = PreTrainedTokenizerFast.from_pretrained(place, local_files_only=local, **special)
        return None if changed_text(described) else described

    described = attempt(read)
    if described is None or isinstance(described, Exception):  # such as without a tokenizer.json
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


def _decoded(tokenizer: PreTrainedTokenizerBase, text: str) -> str:
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _read(path: Path, key: str, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    local, fix = path.is_dir(), "data.tokenizer can name another"
    if not local and (path.is_absolute() or str(path).startswith(".") or len(path.parts) > 2):
        raise ConfigError(f"{key}={path}: there is no such directory")
    if cause := fault_in(path / "tokenizer_config.json"):
        raise ConfigError(f"{key}={path}: {cause}", fix=fix)
    tokenizer = attempt(partial(read_tokenizer, str(path), trusted=trust_remote_code, local=local))
    if isinstance(tokenizer, Exception):
        reason = next(iter(str(tokenizer).strip().splitlines()), type(tokenizer).__name__)
        cause = "holds no tokenizer" if local else "is neither a directory nor a tokenizer on the hub"
        raise ConfigError(f"{key}={path}: {cause} ({reason})", fix=fix) from tokenizer
    # For some models transformers creates an empty tokenizer if the files are missing.
    if set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):
        raise ConfigError(f"{key}={path}: holds no tokenizer", fix=fix)
    if change := changed_text(tokenizer):
        kind = type(tokenizer).__name__
        # Words run together. Text that is normalised, or has unknown characters, is the tokenizer's own.
        if _decoded(tokenizer, PROBES[0]).lower() == PROBES[0].replace(" ", "").lower():
            raise ConfigError(f"{key}={path}: {kind} drops spaces ({change[0]!r} becomes {change[1]!r})", fix=fix)
        logger.warning("the tokenizer changes text: %r becomes %r, in prompts and in what rewards read", *change)
    return tokenizer


def other_tokens(tokenizer: PreTrainedTokenizerBase, place: str, known: int, *, trusted: bool) -> str:
    """Describe how the tokenizer of a directory or hub name differs in tokens of ids below `known`; empty if it does
    not, or if there is none."""
    path = resolve_model(place)
    other = attempt(partial(read_tokenizer, str(path), trusted=trusted, local=path.is_dir()))
    if isinstance(other, Exception) or set(other.get_vocab()) <= set(other.all_special_tokens):
        return ""
    ours, theirs = ({number: token for token, number in one.get_vocab().items()} for one in (tokenizer, other))
    changed = [number for number, token in ours.items() if number < known and theirs.get(number) != token]
    if not changed:
        return ""
    number = min(changed)
    kind = "added token" if number in tokenizer.added_tokens_decoder else "token"
    token = repr(theirs[number]) if number in theirs else "no token"
    cause = f"its tokenizer has {token} where the policy's has the {kind} {ours[number]!r}, at {number}"
    return f"{cause} ({len(changed)} of {known} differ)"


def end_tokens(model_path: str, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Every token that ends a response: the tokenizer's end token, and those of the model's generation config."""
    try:
        configured = GenerationConfig.from_pretrained(str(resolve_model(model_path))).eos_token_id
    except OSError:
        configured = None
    further = configured if isinstance(configured, list) else [] if configured is None else [configured]
    return tuple(sorted({tokenizer.eos_token_id, *further}))


class ResponseDecoder:
    """Decodes responses as rewards, environments and clients read them: without the tokens `left_out`, which end a
    response, pad it, or mark turns. Any other special token is text, as a policy may have to write it: <answer>."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, end_ids: Iterable[int]) -> None:
        named = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id} - {None}
        turns = attempt(partial(_turn_tokens, tokenizer))  # without a template, or if it rejects short messages, none
        turns = [] if isinstance(turns, Exception) else tokenizer.convert_tokens_to_ids(sorted(turns))
        self.tokenizer, self.left_out = tokenizer, sorted({*end_ids, *named, *turns})
        self._kept = np.ones(self.left_out[-1] + 2, bool)  # the last for all larger ids
        self._kept[self.left_out] = False

    def __call__(self, ids: Sequence[int] | np.ndarray) -> str:
        ids = np.asarray(ids, np.int64)  # which the library turns into a list faster than it looks at one
        ids = ids[self._kept.take(ids, mode="clip")]
        return self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def _turn_tokens(tokenizer: PreTrainedTokenizerBase) -> set[str]:
    """Return the special tokens that the chat template writes for every message. Those of a pair, such as <think> and
    </think>, are tags that it may mention or leave empty there, unless the text of a user is between them."""
    special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    chat = [{"role": role, "content": f"qz{n}zq"} for n, role in enumerate(["user", "assistant"] * 2)]
    short, long = (str(tokenizer.apply_chat_template(part, tokenize=False)) for part in (chat[:2], chat))
    before = long.partition(chat[2]["content"])[0]

    def is_tag(token: str) -> bool:
        name = token[1:].removeprefix("/")
        opening, closing = token[0] + name, f"{token[0]}/{name}"
        return {opening, closing} <= special and before.rfind(opening) <= before.rfind(closing)

    return {token for token in special if long.count(token) > short.count(token) and not is_tag(token)}


def as_messages(value: Any) -> list[Message] | None:
    """Return the value as chat messages, or None if it is not a chat: JSON text of messages is decoded, parts that are
    all text become one text, and fields that are null are left out. A message with calls needs no content."""
    value = value.tolist() if isinstance(value, np.ndarray) else value
    value = from_json(value) if isinstance(value, str) else value
    if not isinstance(value, list) or not value:
        return None
    messages = list(map(_as_message, value))
    return None if None in messages else messages


def _as_message(item: Any) -> Message | None:
    if not isinstance(item, dict) or not isinstance(item.get("role"), str) or not item["role"]:
        return None
    content = "" if item.get("content") is None and item.get("tool_calls") else item.get("content")
    if isinstance(content, list):
        parts = [part if isinstance(part, dict) else {} for part in content]
        texts = [part.get("text") for part in parts if part.get("type", "text") == "text"]
        if not all(isinstance(text, str) for text in texts):
            return None
        content = "".join(texts) if len(texts) == len(parts) else content  # of others `multimodal_fault` speaks
    if not isinstance(content, str | list):
        return None
    return {name: field for name, field in (item | {"content": content}).items() if field is not None}


def from_json(text: str) -> Any:
    """Return the list or object that a text with JSON holds; None for any other text."""
    if not text.lstrip().startswith(("[", "{")):
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def as_object(value: Any) -> dict[str, Any] | None:
    """Return an object, also one that is JSON text; None for any other value."""
    value = from_json(value) if isinstance(value, str) else value
    return value if isinstance(value, dict) else None


def as_tools(value: Any) -> list[dict[str, Any]] | None:
    """Return the schemas of tools that a row has, also as JSON text; [] for none, None if it is something else."""
    value = value.tolist() if isinstance(value, np.ndarray) else value
    if value is None or value == "":
        return []
    value = from_json(value) if isinstance(value, str) else value
    return value if isinstance(value, list) and all(map(_is_tool, value)) else None


def _is_tool(value: Any) -> bool:
    """Whether it is a schema with a name: {"type": "function", "function": {"name": ...}}, or {"name": ...} alone."""
    schema = value.get("function", value) if isinstance(value, dict) else None
    return isinstance(schema, dict) and isinstance(schema.get("name"), str) and schema["name"] != ""


def as_chat(prompt: list[Message] | str) -> list[Message]:
    """Return the prompt as chat messages; a plain text becomes one user message."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


def multimodal_fault(values: dict[str, Any], messages: Any) -> str:
    """Describe the content of a row that is not text, or return "" if there is none.

    This is a non-empty column of images, videos or audios, or a message part of any other type than text. The
    characters "<image>" alone are text, as in verl, which replaces them only if such a column is non-empty.
    """
    filled = {name: value for name in MEDIA if (value := values.get(name)) is not None}
    content = [f"the column {name}" for name, value in filled.items() if not hasattr(value, "__len__") or len(value)]
    contents = [message.get("content") for message in messages] if isinstance(messages, list) else []
    parts = [part for parts in contents if isinstance(parts, list) for part in parts if isinstance(part, dict)]
    kinds = sorted({str(part.get("type", "text")) for part in parts} - {"text"})
    content += [f"a part of type {kind}" for kind in kinds]
    return f"more than text: {', '.join(content)}; leave such rows out: only text is supported" if content else ""


class Chat(NamedTuple):
    """A conversation with what its chat template gets besides the messages: the schemas of its tools, and arguments of
    its own."""

    messages: list[Message]
    tools: list[dict[str, Any]]
    arguments: Mapping[str, Any] = MappingProxyType({})


def render(
    tokenizer: PreTrainedTokenizerBase,
    chats: Iterable[Chat],
    arguments: dict[str, Any],
    *,
    add_generation_prompt: bool,
) -> Iterator[list[int] | TemplateError]:
    """Yield the token ids of each conversation, or the template's error for it; `arguments` are those of all."""

    def apply(messages: Any, chat: Chat) -> Any:
        options = {"add_generation_prompt": add_generation_prompt, "tokenize": True, "return_dict": False}
        return tokenizer.apply_chat_template(
            messages, tools=chat.tools or None, **options, **{**arguments, **chat.arguments}
        )

    def apply_alone(chat: Chat) -> list[int] | TemplateError:
        try:
            return apply(chat.messages, chat)
        except TemplateError as error:
            return error

    for chunk in _chunks(chats):
        rendered: list[list[int] | TemplateError] = [[]] * len(chunk)
        alike: dict[str, list[int]] = defaultdict(list)  # rendered in one call, which uses every core
        for number, chat in enumerate(chunk):
            alike[repr((chat.tools, dict(chat.arguments)))].append(number)
        for numbers in alike.values():
            some = [chunk[number] for number in numbers]
            try:
                found = apply([chat.messages for chat in some], some[0])
            except TemplateError:
                found = map(apply_alone, some)
            for number, ids in zip(numbers, found, strict=True):
                rendered[number] = ids
        yield from rendered


def encode(
    tokenizer: PreTrainedTokenizerBase, texts: Iterable[str], *, add_special_tokens: bool = True
) -> Iterator[list[int]]:
    """Yield the token ids of plain texts; special tokens are those that the tokenizer adds, such as a leading bos."""
    for chunk in _chunks(texts):
        yield from tokenizer(chunk, add_special_tokens=add_special_tokens)["input_ids"]


def _chunks(items: Iterable[Any]) -> Iterator[list[Any]]:
    rest = iter(items)
    while chunk := list(islice(rest, CHUNK)):
        yield chunk


class TokenRows:
    """Rows of token ids, concatenated in one array; lists of Python integers take about nine times the memory."""

    def __init__(self) -> None:
        self._values = array("i")
        self._ends = array("q", [0])

    def append(self, row: Sequence[int]) -> None:
        self._values.extend(row)
        self._ends.append(len(self._values))

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, index: int) -> list[int]:
        index = range(len(self))[index]
        return self._values[self._ends[index] : self._ends[index + 1]].tolist()

    @property
    def largest(self) -> int:
        """The largest id of all rows; -1 if there are no tokens."""
        return max(self._values, default=-1)

    @property
    def lengths(self) -> np.ndarray:  # [rows], int64
        return np.diff(np.array(self._ends))


def truncate(row: list[int], limit: int, side: str) -> list[int]:
    """Cut the row to `limit` tokens by removing tokens on the left, on the right or in the middle."""
    if len(row) <= limit:
        return row
    kept_left = {"left": 0, "right": limit, "middle": limit // 2}[side]
    return row[:kept_left] + row[len(row) - (limit - kept_left) :]
