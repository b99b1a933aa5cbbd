"""What the chat template makes of a real row, and whether a model can tell where its answer begins and ends."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from hybridrl.config import PPOConfig
from hybridrl.config.findings import Findings
from hybridrl.data.chat import Message, as_chat
from hybridrl.data.prompts import Prompt
from hybridrl.runs.setup import end_tokens

SHOWN = 240  # characters of a row
SEARCHED = 1000  # rows among which one with the most turns is looked for
ANSWER = "ANSWER"
TEMPLATE = "actor_rollout_ref.model.custom_chat_template"


@dataclass(frozen=True)
class Rendered:
    """A row as the model reads it: the text, its tokens, and the messages it is made of."""

    chat: list[Message]
    text: str
    ids: list[int]


def check_template(
    config: PPOConfig, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt], findings: Findings
) -> None:
    """Prompts must be there. A template that refuses rows has been told of with the data."""
    prompt, options = _telling_row(prompts), config.data.apply_chat_template_kwargs
    row = _rendered(tokenizer, prompt, options)
    shown = repr(row.text if len(row.text) <= SHOWN else f"{row.text[: SHOWN // 2]} ... {row.text[-SHOWN // 2 :]}")
    way = "as the chat template writes it" if tokenizer.chat_template else "as it is, as there is no chat template"
    findings.inform("template.row", f"row {prompt.row}, {way}: {len(row.ids)} tokens, {shown}")
    _check_special(tokenizer, row, findings)
    _check_tokens(tokenizer, row, findings)
    if tokenizer.chat_template:
        _check_content(row, findings)
        _check_answer(config, tokenizer, row, options, findings)


def _telling_row(prompts: Sequence[Prompt]) -> Prompt:
    """One with as many different roles as any has."""
    some = [prompts[index] for index in range(0, len(prompts), -(-len(prompts) // SEARCHED))]
    return max(some, key=lambda prompt: len({message["role"] for message in as_chat(prompt.messages)}))


def _rendered(tokenizer: PreTrainedTokenizerBase, prompt: Prompt, options: dict[str, Any]) -> Rendered:
    chat = as_chat(prompt.messages)
    if tokenizer.chat_template:
        text = _text(tokenizer, chat, options, opens_answer=True)
        return Rendered(chat, text, tokenizer(text, add_special_tokens=False)["input_ids"])
    text = str(prompt.messages)
    return Rendered(chat, text, tokenizer(text)["input_ids"])


def _text(
    tokenizer: PreTrainedTokenizerBase, chat: list[Message], options: dict[str, Any], *, opens_answer: bool
) -> str:
    return tokenizer.apply_chat_template(chat, add_generation_prompt=opens_answer, tokenize=False, **options)


def _check_special(tokenizer: PreTrainedTokenizerBase, row: Rendered, findings: Findings) -> None:
    beginning = tokenizer.bos_token_id
    if beginning is None:
        return
    if row.ids[:2] == [beginning, beginning]:
        told = f"the row begins with {tokenizer.bos_token} twice, which no model was trained on"
        findings.warn("template.bos-twice", f"{told}; take it out of the template: {TEMPLATE}, or out of the prompts")
    elif row.ids[:1] != [beginning] and tokenizer("x")["input_ids"][:1] == [beginning]:
        told = f"the tokenizer begins a text with {tokenizer.bos_token}, and the template does not"
        findings.warn("template.no-bos", f"{told}; write it at the beginning of the template: {TEMPLATE}")


def _check_tokens(tokenizer: PreTrainedTokenizerBase, row: Rendered, findings: Findings) -> None:
    """Tokens that do not give the text back have lost some of it. Spaces may move: some tokenizers add them."""
    ids = tokenizer(row.text, add_special_tokens=False)["input_ids"]
    back = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    wanted, found = ("".join(text.split()) for text in (row.text, back))
    if wanted != found:
        at = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(wanted, found, strict=False))))
        came = f"{wanted[at : at + 20]!r} comes back as {found[at : at + 20]!r}"
        told = f"the row's tokens do not say what its text says: {came}"
        findings.warn("template.lossy", f"{told}; is it the model's own tokenizer? data.tokenizer names another")


def _check_content(row: Rendered, findings: Findings) -> None:
    flat = "".join(row.text.split())
    for role in dict.fromkeys(message["role"] for message in row.chat):
        said = [m["content"] for m in row.chat if m["role"] == role and isinstance(m["content"], str)]
        if any("".join(content.split()) not in flat for content in said):
            told = f"the chat template leaves out what the role {role} says, or a part of it"
            findings.warn("template.drops", f"{told}; put it into the user's message, or set {TEMPLATE}")


def _check_answer(
    config: PPOConfig, tokenizer: PreTrainedTokenizerBase, row: Rendered, options: dict[str, Any], findings: Findings
) -> None:
    """By what the template makes of an answer: how it is opened and closed."""
    try:
        whole = _text(tokenizer, [*row.chat, {"role": "assistant", "content": ANSWER}], options, opens_answer=False)
        unopened = _text(tokenizer, row.chat, options, opens_answer=False)
    except TemplateError:
        return  # a template for prompts alone
    before, there, closing = whole.rpartition(ANSWER)
    goes_on = bool(there) and before.startswith(row.text) and not before.removeprefix(row.text).strip()
    if unopened == row.text and not goes_on:
        told = "the chat template does not open the assistant's turn, so that the model may go on as the user"
        findings.warn("template.no-opening", f"{told}; honour add_generation_prompt in the template: {TEMPLATE}")
    if there:
        _check_closing(config, tokenizer, closing, findings)


def _check_closing(config: PPOConfig, tokenizer: PreTrainedTokenizerBase, closing: str, findings: Findings) -> None:
    ends = end_tokens(config.actor_rollout_ref.model.path, tokenizer)
    closes = tokenizer(closing, add_special_tokens=False)["input_ids"]
    if set(closes) & set(ends):
        return
    names = ", ".join(tokenizer.convert_ids_to_tokens(list(ends)))
    told = f"the chat template closes an answer with {closing!r}, and generation ends at {names} alone"
    special = re.match(r"\s*(\S+)", closing)
    way_out = f"add {special[1]} to eos_token_id in the model's generation_config.json" if special else ""
    way_out = way_out or f"let the template write {tokenizer.eos_token} there: {TEMPLATE}"
    findings.warn("template.no-end", f"{told}, so that answers run on to data.max_response_length; {way_out}")
