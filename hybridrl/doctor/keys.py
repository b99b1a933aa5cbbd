"""`python -m hybridrl.doctor keys PATTERN`: the keys with the pattern in their name or meaning, and verl's others."""

import argparse
import shutil
import textwrap

from hybridrl.config import PPOConfig
from hybridrl.config.compose import CONF, SHIPPED, shipped
from hybridrl.config.help import key_meanings, value_of
from hybridrl.config.read import MISSING, show
from hybridrl.config.verl_keys import verl_keys

NAME = SHIPPED[PPOConfig]


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m hybridrl.doctor keys", description="Search the keys, by a part of their name or meaning."
    )
    parser.add_argument("pattern")
    found = list(search(parser.parse_args(argv).pattern))
    if not found:
        print("nothing found")
    width = min(shutil.get_terminal_size((100, 24)).columns, 120)
    for head, meaning in found:
        print(head)
        print(textwrap.fill(meaning, width, initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False))
    return 0 if found else 1


def search(pattern: str) -> list[tuple[str, str]]:
    """Keys with their values, and their meanings: those with the pattern in the name first."""
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
