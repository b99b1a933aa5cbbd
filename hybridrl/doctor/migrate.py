"""`python -m hybridrl.doctor migrate run.sh`: what a launch script of verl, SkyRL or AReaL has that is different here,
and its command."""

import argparse
import functools
import re
from collections.abc import Iterator
from pathlib import Path

from hybridrl.config import PPOConfig
from hybridrl.config.compose import SHIPPED, shipped
from hybridrl.config.findings import Finding, Findings
from hybridrl.config.help import value_of
from hybridrl.config.load import judge
from hybridrl.config.names import holds, tree
from hybridrl.config.overrides import as_override, take
from hybridrl.config.read import show
from hybridrl.config.verl_keys import current_name, entry_of, verl_keys
from hybridrl.doctor.launch_script import commands_of, quoted, readable
from hybridrl.doctor.launches import Launch, launch_of_file, launches_of

# Where a script says nothing that can be taken over.
TO_FILL_IN = {"data.train_files": "path/to/train.parquet", "actor_rollout_ref.model.path": "path/to/model"}
TO_FILL_IN |= {"model.path": "path/to/model"}
ROUNDS = 30  # of leaving out what is rejected


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m hybridrl.doctor migrate",
        description="Read a launch script or YAML file of verl, SkyRL or AReaL, say what is different here, and write "
        "the command.",
    )
    parser.add_argument("script", type=Path)
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of the script")
    arguments = parser.parse_args(argv)
    if not arguments.script.is_file():
        parser.error(f"there is no script {arguments.script}")
    try:
        runs, stopped = _launches(arguments.script, arguments.arguments)
    except ValueError as error:
        parser.error(str(error))
    if not runs:
        known = "a training program of verl, SkyRL or AReaL"
        parser.error(f"no command of {arguments.script} runs {known}{stopped and f'; bash stopped: {stopped}'}")
    return max([_migrate(launch) for launch in runs])


def _launches(script: Path, arguments: list[str]) -> tuple[list[Launch], str]:
    if script.suffix in (".yaml", ".yml"):
        return [launch_of_file(script)], ""
    commands, stopped = commands_of(script, arguments)
    return launches_of(commands, script), stopped


def _migrate(launch: Launch) -> int:
    found = [Finding(code, severity, text) for code, severity, text in launch.said]
    overrides = [*_added(launch, found), *launch.overrides]
    overrides = _accepted(overrides, launch.schema, found)
    found += _left_empty(overrides, found)
    if launch.system == "verl":
        found += _other_defaults(overrides, launch)
    _print("\n".join(f"# {_line(finding)}" for finding in found))
    program = "main_ppo" if launch.schema is PPOConfig else "main_sft"
    words = [f"python -m hybridrl.{program}", *command_for(overrides, launch.schema)]
    _print(" \\\n    ".join(words) + "\n")
    return int(any(finding.severity == "refused" for finding in found))


def command_for(overrides: list[str], schema: type = PPOConfig) -> list[str]:
    """The same command in the keys of here: old names moved, what is ignored or rejected left out."""
    known = tree(schema)
    settings = (argument.lstrip("+").partition("=") for argument in take(overrides, schema, Findings()).arguments)
    last = {key: value for key, _, value in settings if holds(known, key.lstrip("~"))}
    return [quoted(f"{key}={value}" if not key.startswith("~") else key) for key, value in last.items()]


def _added(launch: Launch, found: list[Finding]) -> list[str]:
    """Values of another system where nothing is set, which a run here has only if they are set."""
    if launch.system == "verl":
        return []
    written, words = take(launch.overrides, launch.schema, Findings()).written, []
    usual = shipped(SHIPPED[launch.schema]).values
    for key, theirs in verl_keys().defaults[launch.system].items():
        if key not in written and theirs != (here := value_of(usual, key)):
            text = f"{key}={show(theirs)} is added: it is the default of {launch.system}, and {show(here)} the one here"
            found.append(Finding("default", "information", text))
            words.append(f"{key}={as_override(theirs)}")
    return words


def _accepted(overrides: list[str], schema: type, found: list[Finding]) -> list[str]:
    """The overrides without those that are rejected, and with what has to be filled in."""
    for _ in range(ROUNDS):
        findings = judge(schema, overrides, SHIPPED[schema], elsewhere=True).findings
        said = (finding for finding in findings.found if finding.severity != "information" or finding.code == "own-key")
        found += [finding for finding in said if finding not in found]
        remaining = overrides
        for finding in findings.refused:
            remaining = _without(remaining, finding, schema)
        if remaining == overrides:
            break
        overrides = remaining
    return overrides


def _without(overrides: list[str], finding: Finding, schema: type) -> list[str]:
    """The overrides less those that a finding speaks of: all of its reason, or those of the key that it names first."""
    places = {text: place for text in overrides if (place := _place(text, finding.text, schema)) is not None}
    for key, value in TO_FILL_IN.items():
        if finding.text.startswith((f"{key} is not set", f"{key}=")):
            return [*(text for text in overrides if text not in places), f"{key}={value}"]
    return [text for text in overrides if not places or places.get(text) != min(places.values())]


def _left_empty(overrides: list[str], found: list[Finding]) -> list[Finding]:
    """Keys without a value, of which nothing has been said."""
    keys = [text.lstrip("+").partition("=")[0] for text in overrides if text.endswith("=")]
    text = "is empty: a variable that is not set here, or the output of a program, as none was run"
    return [Finding("empty-value", "warning", f"{key} {text}") for key in keys if key not in str(found)]


def _place(text: str, said: str, schema: type) -> int | None:
    """Where a message speaks of the key that an override sets; None where it does not."""
    name, keys = _keys(text, schema)
    entry = entry_of(current_name(name))
    if entry and entry.kind == "refused" and said.endswith(entry.why):
        return 0
    spoken = (re.search(rf"(?<![\w.]){re.escape(key)}(?!\w|\.\w)", said) for key in (name, *keys))
    named = [found.start() for found in spoken if found]
    within = [said.find(key.rpartition(".")[0]) for key in keys if _names(said, key)]
    return min(named or within, default=None)


def _names(said: str, key: str) -> bool:
    """Whether a message speaks of a section, and of this key in it by its last name."""
    section, _, name = key.rpartition(".")
    return f"{section}:" in said and re.search(rf"\b{re.escape(name)}\b", said) is not None


@functools.cache
def _keys(text: str, schema: type) -> tuple[str, list[str]]:
    """The key that an override names, and those that it sets."""
    arguments = take([text], schema, Findings()).arguments
    return text.lstrip("+~").partition("=")[0], [argument.lstrip("+~").partition("=")[0] for argument in arguments]


def _other_defaults(overrides: list[str], launch: Launch) -> Iterator[Finding]:
    """Keys that the script leaves to verl, whose value here is another one."""
    taken = take(overrides, launch.schema, Findings())
    usual = shipped(SHIPPED[launch.schema]).values
    program = "sft_trainer" if launch.schema is not PPOConfig else "verl"
    for key, theirs in verl_keys().defaults[launch.program if "fsdp_" in launch.program else program].items():
        if key not in taken.written and theirs != value_of(usual, key):
            yield Finding("default", "information", f"{key}={show(value_of(usual, key))} here, {show(theirs)} in verl")


def _line(finding: Finding) -> str:
    return f"{finding.severity} [{finding.code}] {readable(finding.text)}"


def _print(text: str) -> None:
    if text:
        print(text)
