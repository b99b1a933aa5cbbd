"""Contents of a chat template, and its further arguments, apart from messages and tools: from the run or from a row."""

import difflib
from collections.abc import Collection, Iterator, Mapping
from inspect import signature
from typing import Any

import numpy as np
from jinja2 import Environment, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from transformers import PreTrainedTokenizerBase

from hybridrl.config.findings import Findings

KEY = "data.apply_chat_template_kwargs"
COLUMN = "enable_thinking"  # verl's column of an argument for one row
FIXES = {
    "chat_template": "set actor_rollout_ref.model.custom_chat_template (model.custom_chat_template for SFT)",
    "tools": "give each row its tools (data.tools_key), or episodes tools of their own",
}
# Variables that the library gives every template, and names of its own parameters.
GIVEN = {"messages", "tools", "add_generation_prompt", "raise_exception", "strftime_now"}
FIXED = {"messages", "conversations", *signature(PreTrainedTokenizerBase.apply_chat_template).parameters} - {
    "documents"
}


class _Generation(Extension):
    """Support for the tag of transformers that marks the assistant's text."""

    tags = {"generation"}  # noqa: RUF012 (as jinja2 declares it)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def arguments_read(tokenizer: PreTrainedTokenizerBase, *, surely: bool = False) -> set[str] | None:
    """Return the names of the arguments that the chat template reads, in any of its forms; None if they are unknown, as
    it is code of the tokenizer or not a valid template. `surely`: without the template's own variables, even if they
    are unassigned in some branch, where an argument would set them."""
    if type(tokenizer).apply_chat_template is not PreTrainedTokenizerBase.apply_chat_template:
        return None
    template, environment = tokenizer.chat_template or "", Environment(extensions=[loopcontrols, _Generation])
    try:
        sources = [*map(environment.parse, template.values() if isinstance(template, dict) else [template])]
    except TemplateSyntaxError:
        return None
    return set().union(*(_arguments(source, surely) for source in sources)) - GIVEN


def _arguments(source: nodes.Template, surely: bool) -> set[str]:
    names, first = find_undeclared_variables(source), dict[str, str]()
    for name in _names(source) if surely else ():
        first.setdefault(name.name, name.ctx)
    return {name for name in names if first.get(name, "load") == "load"}


def _names(node: nodes.Node) -> Iterator[nodes.Name]:
    """Yield the names in a template in the order in which they are read and assigned."""
    if isinstance(node, nodes.Name):
        yield node
    value = node.iter if isinstance(node, nodes.For) else node.node if isinstance(node, nodes.Assign) else None
    for child in sorted(node.iter_child_nodes(), key=lambda child: child is not value):
        yield from _names(child)


def check_template_arguments(tokenizer: PreTrainedTokenizerBase, arguments: Collection[str]) -> None:
    """Raise ConfigError for configured arguments that the run sets itself or the template does not read."""
    read, findings = arguments_read(tokenizer), Findings()
    named = arguments_read(tokenizer, surely=True) or set()
    known = sorted(named - tokenizer.special_tokens_map.keys())
    for name in arguments:
        key = f"{KEY}.{name}"
        if name in FIXED:
            findings.error("conflict", f"{key}: the run sets {name} itself", FIXES.get(name, "leave it out"), keys=key)
        elif read is not None and name not in read:
            cause = f"{key}: the chat template does not read {name}; it reads {', '.join(known) or 'nothing further'}"
            cause = cause if tokenizer.chat_template else f"{key}: there is no chat template that could read it"
            near = difflib.get_close_matches(name, known, n=1)
            findings.error("conflict", cause, f"set {KEY}.{near[0]}?" if near else "leave it out", keys=key)
    findings.close()


def row_arguments(row: Mapping[str, Any], read: Collection[str] | None) -> dict[str, Any]:
    """Return the arguments of a row for the template, if the template reads them; `read` None: it may read any."""
    value = row.get(COLUMN)
    return {} if _is_missing(value) or (read is not None and COLUMN not in read) else {COLUMN: bool(value)}


def row_fault(row: Mapping[str, Any]) -> str:
    """Describe an argument of a row with an invalid value, or return ""."""
    value = row.get(COLUMN)
    fits = _is_missing(value) or isinstance(value, bool | np.bool_)
    return "" if fits else f"the column {COLUMN} holds {value!r:.40}, not true or false"


def _is_missing(value: Any) -> bool:  # null, or an empty cell
    return value is None or (isinstance(value, str) and not value)


def unread_column(rows: int, read: Collection[str] | None) -> str:
    """Describe the column, which `rows` rows have, if the template does not read it; else return ""."""
    if not rows or read is None or COLUMN in read:
        return ""
    return f"{rows} rows have a column {COLUMN}, which the chat template does not read: it has no effect"


def turn_tokens(tokenizer: PreTrainedTokenizerBase) -> set[str]:
    """Return the special tokens that the chat template writes for every message. Pairs such as <think> and </think> are
    excluded, as tags that it may mention or leave empty, unless the text of a user is between them."""
    special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    chat = [{"role": role, "content": f"qz{n}zq"} for n, role in enumerate(["user", "assistant"] * 2)]
    short, long = (str(tokenizer.apply_chat_template(part, tokenize=False)) for part in (chat[:2], chat))
    before = long.partition(chat[2]["content"])[0]

    def is_tag(token: str) -> bool:
        name = token[1:].removeprefix("/")
        opening, closing = token[0] + name, f"{token[0]}/{name}"
        return {opening, closing} <= special and before.rfind(opening) <= before.rfind(closing)

    return {token for token in special if long.count(token) > short.count(token) and not is_tag(token)}
