"""`python -m hybridrl.doctor migrate run.sh`: reads a launch script or YAML file of verl, SkyRL or AReaL, reports what
differs in hybridrl, and prints the command."""

import argparse
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hybridrl.config import PPOConfig
from hybridrl.config.compose import SHIPPED, as_override, file_values, parse_overrides, shipped
from hybridrl.config.findings import Finding, Findings, show
from hybridrl.config.keys import current_name, holds, tree, verl_keys
from hybridrl.config.load import resolve_config
from hybridrl.config.schema import SFTConfig
from hybridrl.config.values import MISSING, leaves, value_of
from hybridrl.doctor.launch_script import commands_of, quoted, readable

# Values for keys that the script does not set in a usable way.
PLACEHOLDERS = {"data.train_files": "path/to/train.parquet", "actor_rollout_ref.model.path": "path/to/model"}
PLACEHOLDERS |= {"model.path": "path/to/model"}
ROUNDS = 30  # of removing rejected overrides

# Ends of a module's name or of a file's path -> the system it belongs to, and the schema of its equivalent here.
PROGRAMS = (
    (r"verl[./]trainer[./]main_ppo\w*", "verl", PPOConfig),
    (r"(recipe[./])?dapo[./](src[./])?main_dapo", "verl", PPOConfig),
    (r"verl[./]trainer[./]\w*sft_trainer\w*", "verl", SFTConfig),
    (r"skyrl\w*([./]train)?[./]entrypoints[./]main_base", "SkyRL", PPOConfig),
    (r"areal[./]launcher[./]\w+", "AReaL", PPOConfig),
)
# Programs that add their own code to the same settings.
DERIVED = (
    (r"(recipe|verl)[./][\w./]*(?!.*(generation|eval))main\w*|[\w./]*_main", "verl", PPOConfig),
    (r"(examples|integrations|skyrl\w*)[./][\w./]*main_(?!sft|generate)\w+", "SkyRL", PPOConfig),
)
SHIPPED_FILES = ("ppo_trainer", "sft_trainer", "dapo_trainer", "sft_trainer_engine")  # verl's, which set nothing more
OPTIONS = {"--config-path": "path", "-cp": "path", "--config-dir": "path", "-cd": "path"}
OPTIONS |= {"--config-name": "name", "-cn": "name", "--config": "file"}
PER_NODE = ("--nproc_per_node", "--nproc-per-node")


@dataclass
class Launch:
    """A training run that a script starts."""

    system: str
    schema: type
    overrides: list[str]
    program: str = ""
    options: dict[str, str] = field(default_factory=dict)
    findings: Findings = field(default_factory=Findings)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m hybridrl.doctor migrate",
        description="Read a launch script or YAML file of verl, SkyRL or AReaL, report what differs here, and print "
        "the command.",
    )
    parser.add_argument("script", type=Path)
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of the script")
    arguments = parser.parse_args(argv)
    script: Path = arguments.script
    if not script.is_file():
        parser.error(f"there is no script {script}")
    stopped = ""
    try:
        if script.suffix in (".yaml", ".yml"):
            launches = [_launch_of_file(script)]
        else:
            commands, stopped = commands_of(script, arguments.arguments)
            launches = [launch for words in commands if (launch := _launch(words))]
        for launch in launches:
            _read_file(launch, script)
    except ValueError as error:
        parser.error(str(error))
    if not launches:
        known = "a training program of verl, SkyRL or AReaL"
        parser.error(f"no command of {script} runs {known}{stopped and f'; bash stopped: {stopped}'}")
    return max([_migrate(launch) for launch in launches])


def _migrate(launch: Launch) -> int:
    findings = launch.findings
    overrides = _accepted([*_added_defaults(launch), *launch.overrides], launch.schema, findings)
    for key in (text.lstrip("+").partition("=")[0] for text in overrides if text.endswith("=")):
        if not any(key in finding.keys or key in finding.text for finding in findings.items):
            cause = f"{key} is empty: a variable that is not set here, or the output of a program, as none was run"
            findings.warn("empty-value", cause, keys=key)
    if launch.system == "verl":
        _report_other_defaults(overrides, launch)
    for finding in findings.items:
        print(f"# {finding.severity} [{finding.code}] {readable(finding.text)}".replace("\n", "\n# "))
    program = "main_ppo" if launch.schema is PPOConfig else "main_sft"
    print(" \\\n    ".join([f"python -m hybridrl.{program}", *_arguments(overrides, launch.schema)]) + "\n")
    return int(bool(findings.errors))


def _arguments(overrides: list[str], schema: type) -> list[str]:
    """The overrides with current key names, quoted, without those that are ignored or rejected."""
    known = tree(schema)
    settings = (
        argument.lstrip("+").partition("=") for argument in parse_overrides(overrides, schema, Findings()).arguments
    )
    last = {key: value for key, _, value in settings if holds(known, key.lstrip("~"))}
    return [quoted(f"{key}={value}" if not key.startswith("~") else key) for key, value in last.items()]


def _added_defaults(launch: Launch) -> list[str]:
    """Overrides for the other system's defaults of keys that the script does not set."""
    if launch.system == "verl":
        return []
    written, overrides = parse_overrides(launch.overrides, launch.schema, Findings()).written, []
    usual = shipped(SHIPPED[launch.schema]).values
    for key, theirs in verl_keys().defaults[launch.system].items():
        if key not in written and theirs != (here := value_of(usual, key)):
            cause = (
                f"{key}={show(theirs)} is added: it is the default of {launch.system}, and {show(here)} the one here"
            )
            launch.findings.info("default", cause, keys=key)
            overrides.append(f"{key}={as_override(theirs)}")
    return overrides


def _report_other_defaults(overrides: list[str], launch: Launch) -> None:
    """Report keys that the script leaves to verl's default, if the default here is another one."""
    written = parse_overrides(overrides, launch.schema, Findings()).written
    usual = shipped(SHIPPED[launch.schema]).values
    program = "sft_trainer" if launch.schema is not PPOConfig else "verl"
    for key, theirs in verl_keys().defaults[launch.program if "fsdp_" in launch.program else program].items():
        if key not in written and theirs != (here := value_of(usual, key)):
            launch.findings.info("default", f"{key}={show(here)} here, {show(theirs)} in verl", keys=key)


# -- removing what is rejected -----------------------------------------------------------------------------------------


def _accepted(overrides: list[str], schema: type, findings: Findings) -> list[str]:
    """Return the overrides without those that are rejected, and with placeholders for required keys."""
    for _ in range(ROUNDS):
        result = resolve_config(schema, overrides, SHIPPED[schema], offline=True).findings
        findings.add(*(item for item in result.items if item.severity != "info" or item.code == "own-key"))
        remaining = overrides
        for finding in result.errors:
            remaining = _without(remaining, finding, schema)
        if remaining == overrides:
            break
        overrides = remaining
    return overrides


def _without(overrides: list[str], finding: Finding, schema: type) -> list[str]:
    """Remove the overrides that an error is about: all that are unsupported for one reason, else those of the first of
    its keys that the command sets."""
    ranks = {}
    for text in overrides:
        names = [f"{name}." for name in _keys(text, schema)]  # findings may name the section that a key is in
        ranks[text] = [
            rank for rank, key in enumerate(finding.keys) if any(name.startswith(f"{key}.") for name in names)
        ]
    first = finding.keys[0] if finding.keys else ""
    if first in PLACEHOLDERS:
        return [*(text for text in overrides if not ranks[text]), f"{first}={PLACEHOLDERS[first]}"]
    least = min((rank for matches in ranks.values() for rank in matches), default=None)
    return [
        text for text in overrides if not ranks[text] or not (finding.code == "unsupported" or least in ranks[text])
    ]


@functools.cache
def _keys(text: str, schema: type) -> list[str]:
    """The keys by which findings may name an override: as written, its current name, and the keys that it sets."""
    name = text.lstrip("+~").partition("=")[0]
    arguments = parse_overrides([text], schema, Findings()).arguments
    return [name, current_name(name), *(argument.lstrip("+~").partition("=")[0] for argument in arguments)]


# -- the launches of a script ------------------------------------------------------------------------------------------


def _launch_of_file(file: Path) -> Launch:
    """Read a settings file by itself; its sections show which system it belongs to."""
    values = file_values(file, []).values
    system = "AReaL" if "gconfig" in values else "SkyRL" if "generator" in values else "verl"
    launch = Launch(system, PPOConfig, [], options={"file": str(file)})
    if system == "AReaL":
        _warn_of_code("the script it is for", launch)
    return launch


def _launch(words: list[str]) -> Launch | None:
    """Return the training run that a command starts, if it starts one."""
    programs = ((index, program) for index, word in enumerate(words) if (program := _program(word, words)))
    index, program = next(programs, (0, None))
    if program is None:
        return None
    system, schema, derived = program
    launch = Launch(system, schema, [], re.split(r"[./]", words[index].removesuffix(".py"))[-1])
    rest = iter(words[index + 1 :])
    for word in rest:
        option, equals, value = word.partition("=")
        if option in OPTIONS:
            launch.options[OPTIONS[option]] = value if equals else next(rest, "")
        elif equals and not word.startswith("--"):
            launch.overrides.append(word)
    if schema is SFTConfig:
        launch.overrides[:0] = _torchrun_devices(words[:index])
    if "main_dapo" in words[index]:
        launch.overrides.insert(0, "reward.reward_manager.name=dapo")  # the default of DAPO's settings file
    if derived or system == "AReaL":
        _warn_of_code(words[index], launch)
    return launch


def _program(word: str, words: list[str]) -> tuple[str, type, bool] | None:
    """The system, schema, and whether the program has its own code; None if the word is no training program."""
    name = word.removesuffix(".py")
    for derived, programs in ((False, PROGRAMS), (True, DERIVED)):
        for pattern, system, schema in programs:
            if re.fullmatch(f"(.*/)?{pattern}", name):
                return system, schema, derived
    if word.endswith(".py") and "--config" in (other.partition("=")[0] for other in words):
        return "AReaL", PPOConfig, True
    return None


def _warn_of_code(program: str, launch: Launch) -> None:
    cause = f"{program} has code of its own (rewards, rollouts), which is not in the command below"
    launch.findings.warn("program", cause)


def _torchrun_devices(words: list[str]) -> Iterator[str]:
    for index, word in enumerate(words):
        option, equals, value = word.partition("=")
        if option in PER_NODE and (count := value if equals else words[index + 1]).isdecimal():
            yield f"trainer.n_gpus_per_node={count}"


def _read_file(launch: Launch, script: Path) -> None:
    """Put the values of the launch's settings file before those of its command."""
    options = launch.options
    name = options.get("file") or str(Path(options.get("path", ""), options.get("name", ""))) if options else ""
    if not name or (options.get("name") in SHIPPED_FILES and "path" not in options):
        return
    file = _find(Path(name), script)
    if file is None:
        cause = f"{name}: this settings file was not found, so none of its values are in the command below"
        launch.findings.error("config-file", cause, f"run migrate in the directory from which {script.name} is started")
        return
    of_verl, known = launch.system == "verl", tree(launch.schema)
    plain = file_values(file, [] if of_verl else [word.lstrip("+") for word in launch.overrides])
    overrides = []
    for key, value in leaves(plain.values).items():
        target = plain.follows.get(key, "")
        # verl's references to keys that exist here stay references.
        shown: Any = f"${{{target}}}" if of_verl and target in known else value
        if shown != MISSING:
            overrides.append(f"{key}={as_override(shown)}")
    launch.overrides = [*overrides, *launch.overrides]


def _find(name: Path, script: Path) -> Path | None:
    """Return the file as the script's program would find it, from this directory or one above the script."""
    for directory in (Path.cwd(), *script.resolve().parents):
        for path in (name, name.with_name(name.name + ".yaml"), Path("verl/trainer/config", f"{name}.yaml")):
            if (directory / path).is_file():
                return directory / path
    return None
