"""Completion of commands, keys and their values in a shell, by argcomplete (docs/configuration.md).

The shell runs `hybridrl` with a variable set, and prints what it writes: here, without the imports of any command.
"""

import argparse
import types
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import argcomplete
from argcomplete.completers import FilesCompleter

from hybridrl.config import PPOConfig, SFTConfig
from hybridrl.config.compose import CONF, PRESET, SHIPPED, presets
from hybridrl.config.json_schema import NAMES
from hybridrl.config.load import key_meanings
from hybridrl.config.values import tree, value_keys

SCHEMAS = dict.fromkeys(("train", "eval", "sweep", "launch", "doctor", "explain"), PPOConfig)
SCHEMAS |= dict.fromkeys(("sft", "rm"), SFTConfig)


def answer_shell(commands: Iterable[str], of_doctor: Mapping[str, str]) -> None:
    """Write the completions of the line that the shell has; ends the process. `of_doctor`: its commands' uses."""

    def completer(prefix: str, parsed_args: argparse.Namespace, **_: object) -> dict[str, str]:
        uses = of_doctor if parsed_args.command == "doctor" and not parsed_args.words else {}
        return {**uses, **completions(parsed_args.command, prefix)}

    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("command", choices=list(commands))
    words: Any = parser.add_argument("words", nargs="*")
    words.completer = completer
    argcomplete.autocomplete(parser, always_complete_options=False)


def completions(command: str, prefix: str) -> dict[str, str]:
    """Return what a word of a command may become, with its meaning if it is a key: keys up to their `=`, then values of
    the key, or files."""
    schema = SCHEMAS.get(command)
    key, equals, value = prefix.partition("=")
    if schema is PPOConfig and key.lstrip("+") == PRESET:
        return {f"{key}={name}": meaning for name, meaning in presets().items() if name.startswith(value)}
    if schema is None or (equals and key.lstrip("+") not in value_keys(schema)):
        return dict.fromkeys(FilesCompleter()(prefix), "")
    if equals:
        name = key.lstrip("+")
        choices = list(NAMES.get(name, ())) or _choices(tree(schema)[name]) or FilesCompleter()(value)
        return {f"{key}={choice}": "" for choice in choices if choice.startswith(value)}
    meanings = key_meanings(CONF / f"{SHIPPED[schema]}.yaml")
    return {f"{name}=": meaning for name, meaning in meanings.items() if name.startswith(key)}


def _choices(hint: Any) -> list[str]:
    if hint is bool:
        return ["true", "false"]
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Literal:
        return [str(value) for value in arguments]
    if origin is Annotated:
        return _choices(arguments[0])
    if origin in (Union, types.UnionType):
        return [choice for part in arguments for choice in _choices(part)]
    return []
