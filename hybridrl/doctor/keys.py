"""`python -m hybridrl.doctor explain KEY` and `keys PATTERN`: what a key is set to and means, and a search for keys."""

import argparse
import shutil
import textwrap
import types
import typing
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from hybridrl.config import PPOConfig
from hybridrl.config.compose import CONF, SHIPPED, shipped
from hybridrl.config.findings import show
from hybridrl.config.help import key_meanings
from hybridrl.config.keys import current_name, entry_of, nearest_keys, tree, value_keys, verl_keys
from hybridrl.config.load import ResolvedConfig, resolve_config
from hybridrl.config.values import MISSING, value_of
from hybridrl.config.values import EXPECTED, Range

NAME = SHIPPED[PPOConfig]
# Ends of names -> the unit of their values.
UNITS = {
    ("timeout", "_secs"): "seconds",
    ("_length", "_len", "token_len_per_gpu", "max_model_len", "min_tokens", "num_batched_tokens"): "tokens",
    ("train_batch_size", "mini_batch_size", "gen_batch_size"): "prompts",
    ("micro_batch_size", "micro_batch_size_per_gpu", "max_samples"): "rows",
    ("_megabytes",): "MB",
    ("_freq", "total_training_steps", "critic_warmup", "fault_steps", "lr_warmup_steps"): "steps",
    ("epochs",): "passes over the data",
}
KINDS = {"rejected": "is rejected", "ignored": "has no effect", "translated": "is translated"}


def main(argv: list[str]) -> int:
    """Print the keys with a pattern in their name or meaning, and verl's other keys."""
    parser = argparse.ArgumentParser(
        prog="python -m hybridrl.doctor keys", description="Search the keys by a part of their name or meaning."
    )
    parser.add_argument("pattern")
    matches = search(parser.parse_args(argv).pattern)
    if not matches:
        print("nothing found")
    width = min(shutil.get_terminal_size((100, 24)).columns, 120)
    for head, meaning in matches:
        print(head)
        print(textwrap.fill(meaning, width, initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False))
    return 0 if matches else 1


def search(pattern: str) -> list[tuple[str, str]]:
    """Return keys with their values, and their meanings; matches of the name come first."""
    wanted, values = pattern.lower(), shipped(NAME).values
    keys = [
        (f"{key} = {'(must be set)' if (value := value_of(values, key)) == MISSING else show(value)}", meaning)
        for key, meaning in key_meanings(CONF / f"{NAME}.yaml").items()
    ]
    keys += [(old, f"is now {new}") for old, new in verl_keys().moved.items()]
    for entry in verl_keys().entries:
        sets = " ".join(f"{name}={show(value)}" for name, value in entry.sets.items())
        keys += [(key, f"{entry.kind}: {entry.why or sets}") for key in entry.keys]
    named = [item for item in keys if wanted in item[0].lower()]
    return named + [item for item in keys if wanted in item[1].lower() and item not in named]


def explain(argv: list[str]) -> int:
    """Print a key's value, what set it, its default and its meaning."""
    parser = argparse.ArgumentParser(
        prog="python -m hybridrl.doctor explain", description="A key's value, what set it, its default and its meaning."
    )
    parser.add_argument("key")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="a command, whose value of it is shown")
    parser.add_argument("-cp", "--config-path", type=Path, default=CONF, metavar="DIR", help="as for hybridrl.main_ppo")
    parser.add_argument("-cn", "--config-name", default=NAME, metavar="NAME", help="likewise")
    arguments = parser.parse_args(argv)
    key = current_name(arguments.key.lstrip("+~"))
    if key != arguments.key:
        print(f"{arguments.key} is now {key}")
    if key not in value_keys(PPOConfig):
        return _explain_foreign(key, parser)
    judgement = resolve_config(
        PPOConfig, arguments.overrides, arguments.config_name, arguments.config_path, offline=True
    )
    print("\n".join(f"{title:<9}{text}" for title, text in _lines(key, judgement, arguments.config_name) if text))
    return 0


def _explain_foreign(key: str, parser: argparse.ArgumentParser) -> int:
    """Explain a verl key that hybridrl does not have; an unknown key is a usage error."""
    entry = entry_of(key)
    if entry is None:
        parser.error(f"unknown key {key}; {nearest_keys(key, PPOConfig)}")
    silent = f" (except for {', '.join(map(show, entry.silent))})" if entry.silent else ""
    sets = " ".join(f"{name}={show(value)}" for name, value in entry.sets.items())
    print(f"{key} {KINDS[entry.kind]}{silent}: {entry.why or sets}")
    return 0


def _lines(key: str, judgement: ResolvedConfig[PPOConfig], name: str) -> list[tuple[str, str]]:
    """The titles and texts of an explanation."""
    usual = shipped(NAME)
    default, follows = value_of(usual.values, key), usual.follows.get(key)
    value = value_of(judgement.values.values, key) if judgement.values else default
    lines = [
        ("key", key),
        ("value", "must be set" if value == MISSING else show(value)),
        ("set by", _source(key, value != default, judgement, name)),
        ("default", f"follows {follows}" if follows else "none" if default == MISSING else show(default)),
        ("takes", _accepted(tree(PPOConfig)[key])),
        ("unit", next((unit for ends, unit in UNITS.items() if key.endswith(ends)), "")),
        ("meaning", key_meanings(CONF / f"{NAME}.yaml")[key]),
    ]
    findings = [finding for finding in judgement.findings.items if key in finding.keys or key in finding.text]
    return lines + [(finding.severity, f"[{finding.code}] {finding.text}") for finding in findings]


def _source(key: str, changed: bool, judgement: ResolvedConfig[PPOConfig], name: str) -> str:
    """What set the key's value."""
    if written := judgement.written.get(key):
        old = written.lstrip("+~").partition("=")[0]
        return f"the command line: {written}" + (" (an old name)" if old != key else "")
    follows = judgement.values and judgement.values.follows.get(key)
    if follows and changed:
        return f"{follows}, which it follows"
    return f"the file {name}.yaml" if changed else "default"


def _accepted(hint: Any) -> str:
    """Describe the values that a type accepts."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        rules = [rule for rule in arguments[1:] if isinstance(rule, Range)]
        # A rule describes the valid range in its message about an invalid value.
        limits = [rule.requirement for rule in rules]
        return ", ".join([_accepted(arguments[0]), *limits])
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_accepted(item) for item in arguments if item is not type(None)) + ", or null"
    if origin is Literal:
        return " | ".join(map(show, arguments))
    if origin is list:
        return f"a list: {_accepted(arguments[0])}"
    return "names and values" if origin is dict else EXPECTED[hint]
