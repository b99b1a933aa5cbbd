"""The tokenizer: loading it, chat messages and texts -> token ids, and compact storage of these ids."""

import gc
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
from tokenizers import AddedToken, Tokenizer
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.utils import cached_file

from hybridrl.config.custom_code import attempt
from hybridrl.config.files import fault_in, resolve_model
from hybridrl.config.findings import ConfigError
from hybridrl.data import Message, from_json
from hybridrl.data.template_arguments import turn_tokens

CHUNK = 1000  # rows per call of the tokenizer: enough for its threads, few enough for memory
NO_CALLS = "it leaves out the calls of tools, which the messages have"
# Templates by name, for models that have none; these are the turn tokens of most other models.
TEMPLATES = {
    "chatml": "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
}

# Ordinary text: spaces, several in a row, line breaks, digits, other letters and scripts.
PROBES = ("What is a mask?", "one  two\n\n  three", "In 2024 it was 3.14 x 10,", "Z\u00fcrich, \u6771\u4eac")

OPTIONS = ("unk_token", "fuse_unk", "byte_fallback", "ignore_merges", "continuing_subword_prefix", "end_of_word_suffix")
NO_BEGIN = "%s: the model knows texts that begin with %s, and conversations do not; write {{ bos_token }} first"
FOREIGN_END = (
    "%s: its end token %s is none of the model's, %s, so the model has to learn it; set eos_token to one of these in "
    "tokenizer_config.json, or, to introduce the new one, add %d to eos_token_id in the model's generation_config.json"
)

logger = logging.getLogger(__name__)


def _is_needed(record: logging.LogRecord) -> bool:
    """Return whether a warning of transformers is justified. One is right for mistral, pixtral and voxtral only, but is
    given for every model without a version in config.json; another is about an option that it ignores."""
    text = record.getMessage()
    if "with an incorrect regex pattern" in text:
        settings = attempt(partial(GenerationConfig.from_pretrained, text.split("'")[1], "config.json"))
        return "tral" in str(getattr(settings, "model_type", ""))
    return not text.startswith("Ignoring clean_up_tokenization_spaces")


logging.getLogger("transformers.tokenization_utils_tokenizers").addFilter(_is_needed)


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
    if not tokenizer.chat_template:  # some models that see have it in a file of their processor
        tokenizer.chat_template = _template_of_processor(path)
    if template := custom_chat_template:  # Jinja text, a file, or a name of the tokenizer's templates or of TEMPLATES
        named = f"{model_key.rpartition('.')[0]}.custom_chat_template={template}"
        begin = "{{ bos_token }}" * (tokenizer("a").input_ids[:1] == [tokenizer.bos_token_id])
        end = "<|im_end|>" if "<|im_end|>" in tokenizer.get_vocab() else str(tokenizer.eos_token)
        known = {name: begin + text.replace("<|im_end|>", end) for name, text in TEMPLATES.items()}
        known |= tokenizer.chat_template if isinstance(tokenizer.chat_template, dict) else {}
        if "{" in template or template in known:
            tokenizer.chat_template = known.get(template, template)
        elif (file := Path(template).expanduser()).is_file():
            tokenizer.chat_template = file.read_text(encoding="utf-8")
        else:
            raise ConfigError(f"{named}: neither a file nor Jinja text nor one of the names {', '.join(known)}")
        try:
            text = tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False)
            if begin and tokenizer.bos_token not in text:
                logger.warning(NO_BEGIN, named[:80], tokenizer.bos_token)
        except TemplateSyntaxError as error:
            raise ConfigError(f"{named[:80]}: line {error.lineno} is not Jinja: {error.message}") from error
        except TemplateError:
            pass  # it may require more than this conversation has; the rows decide
    if tokenizer.eos_token_id is None:
        cause = f"{key}={path}: the tokenizer has no end-of-sequence token"
        raise ConfigError(cause, fix="set eos_token in its tokenizer_config.json")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
        logger.info("the tokenizer has no padding token: padding with its end token %s", tokenizer.eos_token)
    if (ends := end_tokens(model_path)) and tokenizer.eos_token_id not in ends:
        names = ", ".join(map(str, tokenizer.convert_ids_to_tokens(ends)))
        logger.warning(FOREIGN_END, f"{key}={path}", tokenizer.eos_token, names, tokenizer.eos_token_id)
    return tokenizer


def read_tokenizer(place: str, *, trusted: bool, local: bool = False) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a directory or hub name as its tokenizer.json describes it: the class that transformers
    chooses, unless tokenizer.json alone keeps text and gives it other tokens. The chosen class may not fit the file: a
    tokenizer of bytes drops every space if it is read as Llama's first one, and splits every number into digits if it
    is read as Qwen's. `local`: do not ask the hub."""
    tokenizer = AutoTokenizer.from_pretrained(place, trust_remote_code=trusted, local_files_only=local)
    change = changed_text(tokenizer)
    other = None if change else _other_tokens(tokenizer, place, local)
    if change is None and other is None:
        return tokenizer
    special = tokenizer.special_tokens_map  # some come from the class and are in no file
    described = attempt(partial(PreTrainedTokenizerFast.from_pretrained, place, local_files_only=local, **special))
    if isinstance(described, Exception) or changed_text(described):  # such as without a tokenizer.json
        return tokenizer
    fault = "turns {!r} into {!r}".format(*change) if change else f"gives {other!r} other tokens"
    cause = "the tokenizer is read as tokenizer.json describes it, not as %s, which %s"
    logger.info(cause, type(tokenizer).__name__, fault)
    return described


def _other_tokens(tokenizer: PreTrainedTokenizerBase, place: str, local: bool) -> str | None:
    """Return the first of PROBES to which tokenizer.json gives other tokens; None if there is none or no such file, and
    if the class is the model's own or its settings add a space."""
    own = not type(tokenizer).__module__.startswith("transformers.")
    if type(tokenizer) is PreTrainedTokenizerFast or own or tokenizer.init_kwargs.get("add_prefix_space"):
        return None
    file = cached_file(place, "tokenizer.json", local_files_only=local, _raise_exceptions_for_missing_entries=False)
    if file is None:
        return None
    described = attempt(partial(_without_vocabulary, file, tokenizer.backend_tokenizer))
    described = Tokenizer.from_file(file) if isinstance(described, Exception) else described
    described.no_padding()
    described.no_truncation()
    ids = {text: tokenizer(text, add_special_tokens=False)["input_ids"] for text in PROBES}
    return next((text for text in PROBES if described.encode(text, add_special_tokens=False).ids != ids[text]), None)


def _without_vocabulary(file: str, other: Tokenizer) -> Tokenizer:
    """Return the tokenizer of a tokenizer.json with the vocabulary and merges of `other`, which was made from the same
    file: reading these takes a second. Raises any error if this fails."""
    with open(file, encoding="utf-8") as opened:
        head = json.loads(opened.read(2**23).partition('"vocab"')[0] + '"vocab": {}, "merges": []}}')
    added = [AddedToken(**{name: token[name] for name in token.keys() - {"id"}}) for token in head["added_tokens"]]
    described = Tokenizer.from_str(json.dumps(head | {"added_tokens": [], "pre_tokenizer": head["pre_tokenizer"]}))
    if any((getattr(described.model, name) or None) != (getattr(other.model, name) or None) for name in OPTIONS):
        raise ValueError("the model has other options")
    described.model = other.model
    described.add_tokens(added)
    return described


def changed_text(tokenizer: PreTrainedTokenizerBase) -> tuple[str, str] | None:
    """Return the first of PROBES that changes by encoding and decoding, and the changed text. The space that
    sentencepiece writes before the first word does not count as a change."""
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
    gc.disable()  # collections would look through the million objects of a large vocabulary again and again
    tokenizer = attempt(partial(read_tokenizer, str(path), trusted=trust_remote_code, local=local))
    gc.enable()
    if isinstance(tokenizer, Exception):
        reason = next(iter(str(tokenizer).strip().splitlines()), type(tokenizer).__name__)
        cause = "holds no tokenizer" if local else "is neither a directory nor a tokenizer on the hub"
        raise ConfigError(f"{key}={path}: {cause} ({reason})", fix=fix) from tokenizer
    # For some models transformers creates an empty tokenizer if the files are missing.
    if len(tokenizer) <= len(set(tokenizer.all_special_tokens)):
        raise ConfigError(f"{key}={path}: holds no tokenizer", fix=fix)
    if change := changed_text(tokenizer):
        kind = type(tokenizer).__name__
        # Only words that run together are an error: normalisation and unknown characters are the tokenizer's choice.
        if _decoded(tokenizer, PROBES[0]).lower() == PROBES[0].replace(" ", "").lower():
            raise ConfigError(f"{key}={path}: {kind} drops spaces ({change[0]!r} becomes {change[1]!r})", fix=fix)
        logger.warning("the tokenizer changes text: %r becomes %r, in prompts and in what rewards read", *change)
    return tokenizer


def _template_of_processor(path: Path) -> str | None:
    options = {"local_files_only": path.is_dir(), "_raise_exceptions_for_missing_entries": False}
    file = attempt(partial(cached_file, str(path), "chat_template.json", **options))
    settings = attempt(lambda: json.loads(Path(file).read_text(encoding="utf-8"))) if isinstance(file, str) else None
    return settings.get("chat_template") if isinstance(settings, dict) else None


def end_tokens(model_path: str, tokenizer: PreTrainedTokenizerBase | None = None) -> tuple[int, ...]:
    """Every token that ends a response: end tokens in the model's files, and the one of `tokenizer` if it is given."""
    read = partial(GenerationConfig.from_pretrained, str(resolve_model(model_path)))
    files = [attempt(partial(read, name)) for name in ("config.json", "generation_config.json")]
    values = [*(getattr(file, "eos_token_id", None) for file in files), tokenizer and tokenizer.eos_token_id]
    ids = (token for value in values for token in (value if isinstance(value, list) else [value]))
    return tuple(sorted({token for token in ids if token is not None}))


class ResponseDecoder:
    """Decodes responses for rewards, environments and clients, without the tokens `left_out`: they end a response, pad
    it, or mark turns. Other special tokens stay in the text: a policy may have to write them, such as <answer>."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, end_ids: Iterable[int]) -> None:
        named = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id} - {None}
        turns = attempt(partial(turn_tokens, tokenizer))  # without a template, or if it rejects short messages, none
        turns = [] if isinstance(turns, Exception) else tokenizer.convert_tokens_to_ids(sorted(turns))
        self.tokenizer, self.left_out = tokenizer, sorted({*end_ids, *named, *turns})
        self._kept = np.ones(self.left_out[-1] + 2, bool)  # the last for all larger ids
        self._kept[self.left_out] = False

    def __call__(self, ids: Sequence[int] | np.ndarray) -> str:
        ids = np.asarray(ids, np.int64)  # faster for the library than a list
        ids = ids[self._kept.take(ids, mode="clip")]
        return self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


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
        content = "".join(texts) if len(texts) == len(parts) else content  # other parts: pictures.py
    if not isinstance(content, str | list):
        return None
    return {name: field for name, field in (item | {"content": content}).items() if field is not None}


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


class Chat(NamedTuple):
    """A conversation with the inputs of its chat template: its messages, the schemas of its tools, and further
    arguments."""

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
    """Yield the token ids of each conversation, or the template's error for it; `arguments` apply to all of them."""

    def apply(messages: Any, chat: Chat) -> Any:
        options = {"add_generation_prompt": add_generation_prompt, "tokenize": True, "return_dict": False}
        options |= {**arguments, **chat.arguments}
        try:
            return tokenizer.apply_chat_template(messages, tools=chat.tools or None, **options)
        except TypeError as error:  # a template for texts, and a message with a picture
            raise TemplateError(str(error)) from error

    def apply_alone(chat: Chat) -> list[int] | TemplateError:
        try:
            return apply(chat.messages, chat)
        except TemplateError as error:
            return error

    def lacks_calls(ids: list[int] | TemplateError, chat: Chat) -> bool:
        """Return whether the template ignores tool calls: its output is the same without them."""
        messages = [{name: value for name, value in m.items() if name != "tool_calls"} for m in chat.messages]
        return messages != chat.messages and ids == apply_alone(chat._replace(messages=messages))

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
                rendered[number] = TemplateError(NO_CALLS) if lacks_calls(ids, chunk[number]) else ids
        yield from rendered


def encode(
    tokenizer: PreTrainedTokenizerBase, texts: Iterable[str], *, add_special_tokens: bool = True
) -> Iterator[list[int]]:
    """Yield the token ids of plain texts; special tokens are those that the tokenizer adds, such as a leading bos."""
    for chunk in _chunks(texts):
        yield from tokenizer(chunk, add_special_tokens=add_special_tokens)["input_ids"]


def _chunks(items: Iterable[Any]) -> Iterator[list[Any]]:
    rest = iter(items)
    yield from iter(lambda: list(islice(rest, CHUNK)), [])


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
