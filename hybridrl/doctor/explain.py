"""`python -m hybridrl.doctor explain KEY [key=value ...]`: a key's value, who set it, its default and meaning."""

import argparse
import types
import typing
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from hybridrl.config import PPOConfig
from hybridrl.config.compose import CONF, SHIPPED, shipped
from hybridrl.config.help import key_meanings, value_of
from hybridrl.config.load import Judgement, judge
from hybridrl.config.names import tree, unknown_key, value_keys
from hybridrl.config.read import EXPECTED, MISSING, show
from hybridrl.config.values import Range
from hybridrl.config.verl_keys import current_name, entry_of

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
    ("temperature", "top_p", "top_k"): "as vLLM has it",
}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m hybridrl.doctor explain", description="A key's value, who set it, its default and its meaning."
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
        return _explain_other(key, parser)
    judgement = judge(PPOConfig, arguments.overrides, arguments.config_name, arguments.config_path, elsewhere=True)
    print("\n".join(f"{title:<9}{text}" for title, text in _lines(key, judgement, arguments.config_name)))
    return 0


def _lines(key: str, judgement: Judgement[PPOConfig], name: str) -> list[tuple[str, str]]:
    """What is to be said of a key, as titles and texts."""
    usual = shipped(NAME)
    default, follows = value_of(usual.values, key), usual.follows.get(key)
    value = value_of(judgement.values.values, key) if judgement.values else default
    lines = [
        ("key", key),
        ("value", "must be set" if value == MISSING else show(value)),
        ("set by", _who(key, value != default, judgement, name)),
        ("default", f"follows {follows}" if follows else "none" if default == MISSING else show(default)),
        ("takes", _takes(tree(PPOConfig)[key])),
        ("unit", unit(key)),
        ("meaning", key_meanings(CONF / f"{NAME}.yaml")[key]),
    ]
    said = [finding for finding in judgement.findings.found if key in finding.text]
    lines += [(finding.severity, f"[{finding.code}] {finding.text}") for finding in said]
    return [(title, text) for title, text in lines if text]


def _who(key: str, changed: bool, judgement: Judgement[PPOConfig], name: str) -> str:
    written = judgement.written.get(key)
    if written:
        old = written.lstrip("+~").partition("=")[0]
        return f"the command line: {written}" + (" (an old name)" if old != key else "")
    follows = judgement.values and judgement.values.follows.get(key)
    if follows and changed:
        return f"{follows}, which it follows"
    return f"the file {name}.yaml" if changed else "default"


def _takes(hint: Any) -> str:
    """A type in words, with its rules."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        rules = [rule for rule in arguments[1:] if isinstance(rule, Range)]
        # A rule says of a value outside what it must be.
        limits = [(rule.fault(float("nan")) or "").removeprefix("must be ") for rule in rules]
        return ", ".join([_takes(arguments[0]), *limits])
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_takes(item) for item in arguments if item is not type(None)) + ", or null"
    if origin is Literal:
        return " | ".join(map(show, arguments))
    if origin is list:
        return f"a list: {_takes(arguments[0])}"
    return "names and values" if origin is dict else EXPECTED[hint]


def unit(key: str) -> str:
    """The unit of a key's value, or nothing."""
    return next((unit for ends, unit in UNITS.items() if key.endswith(ends)), "")


def _explain_other(key: str, parser: argparse.ArgumentParser) -> int:
    """A key of verl's that is none here; what is no key at all is a usage error."""
    entry = entry_of(key)
    if entry is None:
        parser.error(unknown_key(key, value_keys(PPOConfig)))
    silent = f" (but for {', '.join(map(show, entry.silent))})" if entry.silent else ""
    sets = " ".join(f"{name}={show(value)}" for name, value in entry.sets.items())
    words = {"refused": "is refused", "ignored": "has no effect", "translated": "is translated"}
    print(f"{key} {words[entry.kind]}{silent}: {entry.why or sets}")
    return 0
