"""`python -m hybridrl.doctor migrate run.sh`: what of a verl launch script is different here, and its command."""

import argparse
import shlex
from collections.abc import Iterator
from pathlib import Path

from hybridrl.config import PPOConfig
from hybridrl.config.compose import shipped
from hybridrl.config.findings import Finding, Findings
from hybridrl.config.help import value_of
from hybridrl.config.load import judge
from hybridrl.config.names import value_keys
from hybridrl.config.overrides import take
from hybridrl.config.read import show
from hybridrl.config.verl_keys import verl_keys
from hybridrl.doctor.launch_script import commands_of

MODULES = ("verl.trainer.main_ppo", "verl.trainer.main_ppo_sync", "verl.trainer.main_ppo_v0")
FILE = "verl/trainer/main_ppo.py"


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m hybridrl.doctor migrate",
        description="Read a launch script for verl's main_ppo, say what is different here, and write the command.",
    )
    parser.add_argument("script", type=Path)
    arguments = parser.parse_args(argv)
    if not arguments.script.is_file():
        parser.error(f"there is no script {arguments.script}")
    try:
        commands, stopped = commands_of(arguments.script)
    except ValueError as error:
        parser.error(str(error))
    runs = [overrides for command in commands for overrides in _overrides(command)]
    if not runs:
        parser.error(f"no command of {arguments.script} runs {MODULES[0]}{stopped and f'; bash stopped: {stopped}'}")
    return max([_migrate(overrides) for overrides in runs])


def _overrides(command: list[str]) -> Iterator[list[str]]:
    """What follows the module's name in a command that runs it, whatever stands before."""
    for place, word in enumerate(command):
        if word in MODULES or word.endswith(FILE):
            yield [item for item in command[place + 1 :] if not item.startswith("-")]


def _migrate(overrides: list[str]) -> int:
    findings = judge(PPOConfig, overrides, "ppo_trainer", elsewhere=True).findings
    told = [finding for finding in findings.found if finding.severity != "information"]
    _print("\n".join(f"# {_line(finding)}" for finding in [*told, *_other_defaults(overrides)]))
    words = ["python -m hybridrl.main_ppo", *command_for(overrides)]
    _print(" \\\n    ".join(words) + "\n")
    return int(bool(findings.refused))


def command_for(overrides: list[str]) -> list[str]:
    """The same command in the keys of here: old names moved, what is ignored or refused left out."""
    known = value_keys(PPOConfig)
    taken = take(overrides, PPOConfig, Findings())
    settings = (argument.lstrip("+").partition("=") for argument in taken.arguments)
    return [
        shlex.quote(f"{key}={value}")
        for key, _, value in settings
        if key in known or any(key.startswith(f"{name}.") for name in known)
    ]


def _other_defaults(overrides: list[str]) -> Iterator[Finding]:
    """Keys that the script leaves to verl, whose value here is another one."""
    taken = take(overrides, PPOConfig, Findings())
    usual = shipped("ppo_trainer").values
    for key, theirs in verl_keys().defaults.items():
        if key not in taken.written:
            yield Finding("default", "information", f"{key}={show(value_of(usual, key))} here, {show(theirs)} in verl")


def _line(finding: Finding) -> str:
    return f"{finding.severity} [{finding.code}] {finding.text}"


def _print(text: str) -> None:
    if text:
        print(text)
