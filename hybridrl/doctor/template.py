"""`python -m hybridrl.doctor template MODEL`: whether a model's chat template serves episodes of several turns.

Reads tokenizer and configuration of the model, and starts nothing.
"""

import argparse
from collections.abc import Iterator
from itertools import groupby

from rich.table import Table
from rich.text import Text
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from hybridrl.agents.environments.calls import KEY as FORMAT
from hybridrl.agents.environments.calls import call_parser
from hybridrl.agents.environments.dialogue import Dialogue
from hybridrl.agents.environments.environment import Message
from hybridrl.agents.environments.template import TOOL
from hybridrl.config.files import resolve_model
from hybridrl.config.findings import ConfigError
from hybridrl.data.template_arguments import arguments_read
from hybridrl.data.tokenizer import end_tokens, load_tokenizer
from hybridrl.tracking.console import Terminal

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


def main(argv: list[str]) -> int:
    """Return 1 if rows of several turns would differ from the template's text, else 0."""
    parser = argparse.ArgumentParser(
        prog="python -m hybridrl.doctor template",
        description="Check a model's chat template for episodes of several turns.",
        allow_abbrev=False,
    )
    parser.add_argument("model", metavar="MODEL", help="a directory, or a name on the Hugging Face hub")
    parser.add_argument("--format", default="auto", help=f"of tool calls, as {FORMAT}")
    parser.add_argument("--template", metavar="FILE", help="another template, as model.custom_chat_template")
    options = parser.parse_args(argv)
    console = Terminal(highlight=False)
    try:
        tokenizer = load_tokenizer(options.model, custom_chat_template=options.template, model_key="MODEL")
        dialogue = Dialogue(tokenizer, ends := end_tokens(options.model, tokenizer))
    except ConfigError as error:
        console.print(Text(str(error)), style="bold red", soft_wrap=True)
        return 1
    differences = dialogue.check()
    written = {name: text for name, _, text in (item.partition(": ") for item in differences)}
    table = Table.grid(padding=(0, 2))
    for name, text in [
        ("user turns", written.get("users", "exact")),
        ("tools", written.get("tools", "exact")),
        ("reasoning", "dropped after a new user message" if dialogue.strips_reasoning else "kept"),
        ("tool calls", _calls(options.model, options.format, dialogue)),
        ("arguments", _arguments(tokenizer)),
        ("stop tokens", _names(tokenizer, ends)),
        ("for tools", _names(tokenizer, dialogue.stop_ids) or "no further stop tokens"),
    ]:
        table.add_row(Text(name, "bold"), Text(text, overflow="fold"))
    console.print(table)
    console.print(_conversation(console, tokenizer, dialogue), soft_wrap=True)
    return int(bool(differences))


def _arguments(tokenizer: PreTrainedTokenizerBase) -> str:
    """Describe the further arguments that the template reads, which data.apply_chat_template_kwargs may have."""
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


def _conversation(console: Terminal, tokenizer: PreTrainedTokenizerBase, dialogue: Dialogue) -> Text:
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
    for sampled, part in _runs(ids, mask):
        piece = tokenizer.decode(part, clean_up_tokenization_spaces=False)
        if sampled and not console.is_terminal:
            piece = piece.join(SAMPLED)
        text.append(piece, "black on green" if sampled else "dim")
    return text


def _runs(ids: list[int], mask: list[int]) -> Iterator[tuple[int, list[int]]]:
    for sampled, pairs in groupby(zip(mask, ids, strict=True), key=lambda pair: pair[0]):
        yield sampled, [token for _, token in pairs]
