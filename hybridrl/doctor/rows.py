"""Check the loaded rows: lengths, empty and repeated prompts, overlap with validation, and how the chat template
renders them. Unusable rows have been rejected by the loader, all together, with file and line.

`hybridrl doctor template MODEL`: whether a model's chat template serves episodes of several turns. Reads
tokenizer and configuration of the model, and starts nothing.
"""

import argparse
import contextlib
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import groupby, takewhile
from operator import itemgetter
from typing import Any

import numpy as np
from jinja2 import TemplateError
from rich.console import Console
from rich.text import Text
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from hybridrl.agents.environments import Message
from hybridrl.agents.environments.calls import call_parser
from hybridrl.agents.environments.dialogue import Dialogue
from hybridrl.agents.environments.template import TOOL
from hybridrl.config import PPOConfig
from hybridrl.config.files import resolve_model
from hybridrl.config.findings import ConfigError, Findings
from hybridrl.core.device import store_bytes
from hybridrl.data.pictures import content, size_of
from hybridrl.data.prompts import PromptDataset, Prompts
from hybridrl.data.template_arguments import arguments_read, row_arguments
from hybridrl.data.tokenizer import as_chat, end_tokens, load_tokenizer
from hybridrl.doctor import Result
from hybridrl.doctor.machine import machine_resources
from hybridrl.doctor.memory_sizes import in_gib
from hybridrl.required import required
from hybridrl.runtime.environment import joins

SIZES, SHARES, RANKS = 500, (0.5, 0.99, 1.0), ("median", "99%", "largest")  # pictures whose size is read
SAMPLE = 50_000  # prompts that are checked one by one; of a larger set as many, evenly spaced
PERCENTILES = (50, 90, 99, 100)
Texts = tuple[tuple[str, str], ...]  # role and text of each message
MESSAGES_AS_TEXT = r"""\A\s*\[\s*\{\s*["']role["']"""
TURN_MARKS = re.compile(
    r"<\|im_start\|>|<\|start_header_id\|>|<start_of_turn>|\[INST\]|<[|\uff5c]User[|\uff5c]>|" + MESSAGES_AS_TEXT
)

SHOWN = 240  # characters of a rendered row
SEARCHED = 1000  # rows among which the one with the most roles is chosen
RESPONSE = "ANSWER"
TEMPLATE = "actor_rollout_ref.model.custom_chat_template"


def check_rows(prompts: PromptDataset, validation: PromptDataset | None, limit: int, findings: Findings) -> None:
    """Report the lengths of the prompts next to their `limit`, and warn about probable mistakes."""
    training = _check_dataset(prompts, "data.train_files", limit, findings)
    if validation is None:
        return
    counts = _check_dataset(validation, "data.val_files", limit, findings)
    if overlap := [texts for texts in counts if texts in training]:
        cause = f"{sum(counts[texts] for texts in overlap)} validation prompts{_sampled(prompts, validation)} are "
        cause += f"training prompts too, such as {_beginning(overlap[0])}: validation on them measures memorization"
        findings.info("data.overlap", cause, keys=("data.val_files", "data.train_files"))


def _check_dataset(prompts: PromptDataset, key: str, limit: int, findings: Findings) -> Counter[Texts]:
    """Check one dataset. Returns how often each prompt occurs in it."""
    _report_lengths(prompts, key, limit, findings)
    _report_pictures(prompts, key, findings)
    counts: Counter[Texts] = Counter()
    empty, marked = [], []
    sample = min(len(prompts), SAMPLE)
    for index in (number * len(prompts) // sample for number in range(sample)):
        prompt = prompts.without_pixels(index)
        texts: Texts = ()
        for message in as_chat(prompt.messages):
            content: Any = message["content"]
            if not isinstance(content, str):  # the text of all parts
                content = "".join(part.get("text") or "" if isinstance(part, dict) else str(part) for part in content)
            texts += ((message["role"], content),)
        text = "".join(content for role, content in texts if role != "system")
        if prompt.encoded:  # equal pictures have equal checksums
            texts = (("pictures", str(prompts.seen[index])), *texts)
        counts[texts] += 1
        if not text.strip() and not prompt.encoded:
            empty.append(prompts.rows[index].place)
        elif TURN_MARKS.search(text):
            marked.append(prompts.rows[index].place)
    of_sample = _sampled(prompts)
    if empty:
        cause = f"{key}: {len(empty)} prompts{of_sample} are empty, the first {empty[0]}"
        findings.warn("data.empty", cause, "remove these rows", keys=key)
    if marked:
        cause = f"{key}: {len(marked)} prompts{of_sample} have marks of a chat template in their text, or messages "
        cause += f"written as text, the first {marked[0]}, and the model's own template is applied to that"
        findings.warn("data.template", cause, "give the plain question, or a list of messages", keys=key)
    if repeated := sum(counts.values()) - len(counts):
        texts, times = counts.most_common(1)[0]
        cause = f"{key}: {repeated} prompts{of_sample} repeat an earlier one ({_beginning(texts)} occurs {times} times)"
        findings.info("data.duplicates", cause, keys=key)
    return counts


def _report_lengths(prompts: PromptDataset, key: str, limit: int, findings: Findings) -> None:
    values = np.percentile(prompts.lengths, PERCENTILES, method="higher").astype(int)
    lengths = ", ".join(f"{rank}% up to {value}" for rank, value in zip(PERCENTILES, values, strict=True))
    summary = f"{key}: {len(prompts)} prompts, in tokens {lengths} (data.max_prompt_length={limit})"
    findings.info("data.lengths", summary, keys=key)
    if prompts.over:
        dropped, truncation = prompts.config.filter_overlong_prompts, prompts.config.truncation
        treatment = "dropped (data.filter_overlong_prompts=true)" if dropped else f"cut (data.truncation={truncation})"
        total = len(prompts) + (prompts.over if dropped else 0)
        cause = f"{key}: {prompts.over} of {total} prompts ({prompts.over / total:.1%}) are longer than "
        cause += f"data.max_prompt_length={limit} and are {treatment}"
        findings.warn("data.long", cause, "raise the limit to keep them complete", keys=(key, "data.max_prompt_length"))


def _report_pictures(prompts: PromptDataset, key: str, findings: Findings) -> None:
    """Report tokens of all pictures, and sizes of those in some rows."""
    tokens = np.array([seen.tokens for pictures in prompts.pictures() for seen in pictures])
    if not len(tokens):
        return
    rows = np.flatnonzero(prompts.seen.lengths)[:: -(-len(tokens) // SIZES)]
    files = (encoded for row in rows for encoded in prompts.without_pixels(int(row)).encoded.values())
    sizes = sorted((size_of(content(encoded)) for encoded in files), key=math.prod)
    shown = [" x ".join(map(str, sizes[math.ceil(share * (len(sizes) - 1))])) for share in SHARES]
    counts = np.quantile(tokens, SHARES, method="higher").astype(int).tolist()
    parts = [f"{name} {size} pixels, {count} tokens" for name, size, count in zip(RANKS, shown, counts, strict=True)]
    summary = f"{key}: {len(tokens)} pictures in {np.count_nonzero(prompts.seen.lengths)} of {len(prompts)} prompts"
    of_sizes = f" (sizes of {len(sizes)})" * (len(sizes) < len(tokens))
    findings.info("data.pictures", f"{summary}{of_sizes}: {'; '.join(parts)}", keys=key)


def check_pixels(config: PPOConfig, prompts: PromptDataset, findings: Findings) -> None:
    """Compare the pixels of two steps with Ray's object store: those of the next are made while one trains."""
    tokens = np.mean([sum(seen.tokens for seen in pictures) for pictures in prompts.pictures()])
    needed = int(2 * config.data.train_batch_size * tokens * required(prompts.reader).bytes_per_token)
    ray_init, key = config.ray_kwargs.ray_init, "data.mm_processor_kwargs"
    store = store_bytes(ray_init, machine_resources().shared_free or 0)
    cause = (
        f"the pixels of two steps take an estimated {in_gib(needed)} GiB of {in_gib(store)} GiB in Ray's object store"
    )
    if needed < store or joins(ray_init):
        findings.info("memory.pictures", cause)
    else:
        fix = f"lower the max_pixels of {key}, or set ray_kwargs.ray_init.object_store_memory={2 * needed}"
        findings.warn("memory.pictures", cause, fix, keys=key)


def _sampled(*datasets: PromptDataset) -> str:
    return f" (of {SAMPLE} that were checked)" if any(len(dataset) > SAMPLE for dataset in datasets) else ""


def _beginning(texts: Texts) -> str:
    text = " ".join(texts[-1][1].split())
    return f'"{text[:60]}{"..." if len(text) > 60 else ""}"'


# -- the chat template -------------------------------------------------------------------------------------------------


def check_template(
    model: str,
    arguments: Mapping[str, Any],
    tokenizer: PreTrainedTokenizerBase,
    prompts: PromptDataset | Prompts,
    findings: Findings,
) -> None:
    """Show how the row with the most roles is rendered, and check that responses begin and end as generation expects.
    `arguments` are the template's; needs prompts."""
    searched = [prompts.without_pixels(index) for index in range(0, len(prompts), -(-len(prompts) // SEARCHED))]
    prompt = max(searched, key=lambda prompt: len({message["role"] for message in as_chat(prompt.messages)}))
    chat, templated = as_chat(prompt.messages), bool(tokenizer.chat_template)
    render: Callable[..., str] = partial(
        tokenizer.apply_chat_template,
        tools=prompt.tools or None,
        tokenize=False,
        **arguments | row_arguments(prompt.columns, arguments_read(tokenizer)),
    )
    text = render(chat, add_generation_prompt=True) if templated else str(prompt.messages)
    plain = tokenizer(text, add_special_tokens=False)["input_ids"]
    ids = plain if templated else tokenizer(text)["input_ids"]
    shown = repr(text if len(text) <= SHOWN else f"{text[: SHOWN // 2]} ... {text[-SHOWN // 2 :]}")
    how = "as the chat template renders it" if templated else "as it is, as there is no chat template"
    findings.info("template.row", f"row {prompt.row}, {how}: {len(ids)} tokens, {shown}")
    _check_tokens(tokenizer, text, ids, plain, findings)
    if not templated:
        return
    flat = "".join(text.split())
    for role in dict.fromkeys(message["role"] for message in chat):
        contents = [m["content"] for m in chat if m["role"] == role and isinstance(m["content"], str)]
        if any("".join(content.split()) not in flat for content in contents):
            cause = f"the chat template leaves out the messages of the role {role}, or a part of them"
            fix = f"put them into the user's message, or set {TEMPLATE}"
            findings.warn("template.drops", cause, fix, keys=TEMPLATE)
    with contextlib.suppress(TemplateError):  # a template for prompts only
        complete = render([*chat, {"role": "assistant", "content": RESPONSE}], add_generation_prompt=False)
        unopened = render(chat, add_generation_prompt=False)
        _check_response(end_tokens(model, tokenizer), tokenizer, text, complete, unopened, findings)


def _check_tokens(
    tokenizer: PreTrainedTokenizerBase, text: str, ids: list[int], plain: list[int], findings: Findings
) -> None:
    """Check how the row's tokens begin, and that the `plain` ones, without special tokens, decode to the text, except
    for spaces, which some tokenizers add."""
    beginning = tokenizer.bos_token_id
    if beginning is not None and ids[:2] == [beginning, beginning]:
        cause = f"the row begins with {tokenizer.bos_token} twice, which no model was trained on"
        fix = f"remove it from the template: {TEMPLATE}, or from the prompts"
        findings.warn("template.bos-twice", cause, fix, keys=TEMPLATE)
    elif beginning is not None and ids[:1] != [beginning] and tokenizer("x")["input_ids"][:1] == [beginning]:
        cause = f"the tokenizer begins a text with {tokenizer.bos_token}, but the template does not"
        findings.warn("template.no-bos", cause, f"add it at the beginning of the template: {TEMPLATE}", keys=TEMPLATE)
    decoded = tokenizer.decode(plain, clean_up_tokenization_spaces=False)
    expected, back = ("".join(text.split()) for text in (text, decoded))
    if expected != back:
        at = len([*takewhile(lambda pair: pair[0] == pair[1], zip(expected, back, strict=False))])
        cause = f"the row's tokens do not decode to its text: {expected[at : at + 20]!r} becomes {back[at : at + 20]!r}"
        fix = "check that it is the model's own tokenizer; data.tokenizer names another"
        findings.warn("template.lossy", cause, fix, keys="data.tokenizer")


def _check_response(
    ends: Iterable[int],
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    complete: str,
    unopened: str,
    findings: Findings,
) -> None:
    """Check how the template opens and closes a response: `complete` is the rendered chat with one, `unopened` without
    a generation prompt."""
    before, there, closing = complete.rpartition(RESPONSE)
    continues = bool(there) and before.startswith(text) and not before.removeprefix(text).strip()
    if unopened == text and not continues:
        cause = "the chat template does not open the assistant's turn, so the model may continue as the user"
        fix = f"honour add_generation_prompt in the template: {TEMPLATE}"
        findings.warn("template.no-opening", cause, fix, keys=TEMPLATE)
    if not there or set(tokenizer(closing, add_special_tokens=False)["input_ids"]) & set(ends):
        return
    names = ", ".join(tokenizer.convert_ids_to_tokens(list(ends)))
    cause = f"the chat template closes a response with {closing!r}, but generation ends only at {names}, so responses "
    if special := re.match(r"\s*(\S+)", closing):
        fix = f"add {special[1]} to eos_token_id in the model's generation_config.json"
    else:
        fix = f"write {tokenizer.eos_token} there in the template: {TEMPLATE}"
    findings.warn("template.no-end", f"{cause}run on to data.max_response_length", fix, keys=TEMPLATE)


CALL = {"id": "call00000", "type": "function", "function": {"name": "lookup", "arguments": {"word": "mask"}}}
TALK: list[Message] = [
    {"role": "user", "content": "What is a mask?"},
    {"role": "assistant", "content": "", "reasoning_content": "I look it up.", "tool_calls": [CALL]},
    {"role": "tool", "content": "0: observed, 1: sampled", "name": "lookup", "tool_call_id": "call00000"},
    {"role": "assistant", "content": "It marks sampled tokens.", "reasoning_content": "Now I know."},
    {"role": "user", "content": "Thanks."},
    {"role": "assistant", "content": "You are welcome."},
    {"role": "user", "content": "Bye."},
]
SAMPLED = "\N{MATHEMATICAL LEFT WHITE SQUARE BRACKET}", "\N{MATHEMATICAL RIGHT WHITE SQUARE BRACKET}"


def show_template(options: argparse.Namespace) -> Result:
    """Check a model's chat template for episodes of several turns. Fails if rows would differ from its text."""
    tokenizer = load_tokenizer(options.model, custom_chat_template=options.template, model_key="MODEL")
    dialogue = Dialogue(tokenizer, ends := end_tokens(options.model, tokenizer))
    differences = dialogue.check()
    written = {name: text for name, _, text in (item.partition(": ") for item in differences)}
    facts = {
        "user turns": written.get("users", "exact"),
        "tools": written.get("tools", "exact"),
        "reasoning": "dropped after a new user message" if dialogue.strips_reasoning else "kept",
        "tool calls": _calls(options.model, options.format, dialogue),
        "arguments": _arguments(tokenizer),
        "stop tokens": _names(tokenizer, ends),
        "for tools": _names(tokenizer, dialogue.stop_ids) or "no further stop tokens",
    }
    return Result(facts, [facts, partial(_conversation, tokenizer, dialogue)], failed=bool(differences))


def _arguments(tokenizer: PreTrainedTokenizerBase) -> str:
    """Describe the template's further arguments, for data.apply_chat_template_kwargs."""
    read = arguments_read(tokenizer, surely=True)
    return "any, as it is code" if read is None else ", ".join(sorted(read - {*tokenizer.special_tokens_map})) or "none"


def _names(tokenizer: PreTrainedTokenizerBase, ids: tuple[int, ...]) -> str:
    return ", ".join(tokenizer.convert_ids_to_tokens(list(ids)))


def _calls(model: str, format: str, dialogue: Dialogue) -> str:
    """Describe the format of calls, and whether it reads the one that the template writes."""
    settings, _ = PretrainedConfig.get_config_dict(str(resolve_model(model)))
    try:
        parser = call_parser(format, settings.get("model_type", ""), dialogue)
    except ConfigError as error:
        return str(error)
    written = dialogue.written_call()
    if not written:
        return f"{parser.format}; the template writes no calls"
    does = "reads" if parser.reads(written) else "does not read"
    return f"{parser.format}, which {does} the template's {written!r}"


def _conversation(tokenizer: PreTrainedTokenizerBase, dialogue: Dialogue, console: Console) -> Text:
    """Return a conversation with its sampled tokens in colour, or in brackets where there are no colours."""
    for talk, tools in ((TALK, [TOOL]), ([*TALK[:1], *TALK[3:]], [])):
        try:
            ids, mask = dialogue.replay(talk, tools)
            break
        except ConfigError:  # a template without tools
            continue
    else:
        return Text()
    text = Text(f"\n{mask.count(0)} tokens observed (mask 0), {mask.count(1)} sampled (mask 1):\n", "bold")
    for sampled, pairs in groupby(zip(mask, ids, strict=True), key=itemgetter(0)):
        piece = tokenizer.decode([token for _, token in pairs], clean_up_tokenization_spaces=False)
        if sampled and not console.is_terminal:
            piece = piece.join(SAMPLED)
        text.append(piece, "black on green" if sampled else "dim")
    return text
