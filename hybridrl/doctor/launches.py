"""The training runs among the commands of a script: whose they are, and what they and their files of settings set."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hybridrl.config import PPOConfig
from hybridrl.config.compose import file_values
from hybridrl.config.names import tree
from hybridrl.config.overrides import as_override
from hybridrl.config.read import MISSING, leaves
from hybridrl.config.schema_sft import SFTConfig

# What is run, as the end of a module's name or of a file's path -> whose it is, and what it does here.
PROGRAMS = (
    (r"verl[./]trainer[./]main_ppo\w*", "verl", PPOConfig),
    (r"(recipe[./])?dapo[./](src[./])?main_dapo", "verl", PPOConfig),
    (r"verl[./]trainer[./]\w*sft_trainer\w*", "verl", SFTConfig),
    (r"skyrl\w*([./]train)?[./]entrypoints[./]main_base", "SkyRL", PPOConfig),
    (r"areal[./]launcher[./]\w+", "AReaL", PPOConfig),
)
# Programs with code of their own around the same settings.
DERIVED = (
    (r"(recipe|verl)[./][\w./]*(?!.*(generation|eval))main\w*|[\w./]*_main", "verl", PPOConfig),
    (r"(examples|integrations|skyrl\w*)[./][\w./]*main_(?!sft|generate)\w+", "SkyRL", PPOConfig),
)
OWN_FILES = ("ppo_trainer", "sft_trainer", "dapo_trainer", "sft_trainer_engine")  # verl's, which set nothing more
OPTIONS = {"--config-path": "path", "-cp": "path", "--config-dir": "path", "-cd": "path"}
OPTIONS |= {"--config-name": "name", "-cn": "name", "--config": "file"}
PER_NODE = ("--nproc_per_node", "--nproc-per-node")


@dataclass
class Launch:
    """`said` are differences that are no key's, as code, severity and text."""

    system: str
    schema: type
    overrides: list[str]
    program: str = ""
    options: dict[str, str] = field(default_factory=dict)
    said: list[tuple[str, str, str]] = field(default_factory=list)


def launches_of(commands: list[list[str]], script: Path) -> list[Launch]:
    found = [launch for words in commands for launch in _launch(words)]
    for launch in found:
        _read_file(launch, script)
    return found


def launch_of_file(file: Path) -> Launch:
    """A file of settings by itself: whose it is shows in its sections."""
    values = file_values(file, []).values
    system = "AReaL" if "gconfig" in values else "SkyRL" if "generator" in values else "verl"
    launch = Launch(system, PPOConfig, [], options={"file": str(file)})
    if system == "AReaL":
        launch.said.append(_own_code("the script it is for"))
    _read_file(launch, file)
    return launch


def _launch(words: list[str]) -> Iterator[Launch]:
    place, program = next(
        ((place, found) for place, word in enumerate(words) if (found := _program(word, words))), (0, None)
    )
    if program is None:
        return
    system, schema, derived = program
    launch = Launch(system, schema, [], re.split(r"[./]", words[place].removesuffix(".py"))[-1])
    rest = iter(words[place + 1 :])
    for word in rest:
        option, equals, value = word.partition("=")
        if option in OPTIONS:
            launch.options[OPTIONS[option]] = value if equals else next(rest, "")
        elif equals and not word.startswith("--"):
            launch.overrides.append(word)
    if schema is SFTConfig:
        launch.overrides[:0] = _torchrun_devices(words[:place])
    if "main_dapo" in words[place]:
        launch.overrides.insert(0, "reward.reward_manager.name=dapo")  # its own file's default
    if derived or system == "AReaL":
        launch.said.append(_own_code(words[place]))
    yield launch


def _program(word: str, words: list[str]) -> tuple[str, type, bool] | None:
    name = word.removesuffix(".py")
    for derived, programs in ((False, PROGRAMS), (True, DERIVED)):
        for pattern, system, schema in programs:
            if re.fullmatch(f"(.*/)?{pattern}", name):
                return system, schema, derived
    if word.endswith(".py") and "--config" in (other.partition("=")[0] for other in words):
        return "AReaL", PPOConfig, True
    return None


def _own_code(program: str) -> tuple[str, str, str]:
    return "program", "warning", f"{program} has code of its own (rewards, rollouts), which is not in the command below"


def _torchrun_devices(words: list[str]) -> Iterator[str]:
    for place, word in enumerate(words):
        option, equals, value = word.partition("=")
        if option in PER_NODE and (count := value if equals else words[place + 1]).isdecimal():
            yield f"trainer.n_gpus_per_node={count}"


def _read_file(launch: Launch, script: Path) -> None:
    """Put what the launch's file of settings says before what its command says."""
    options = launch.options
    asked = options.get("file") or str(Path(options.get("path", ""), options.get("name", ""))) if options else ""
    if not asked or (options.get("name") in OWN_FILES and "path" not in options):
        return
    file = _find(Path(asked), script)
    if file is None:
        launch.said.append(
            (
                "config-file",
                "refused",
                f"{asked}: this file of settings was not found, so nothing of it is in the command "
                f"below; run migrate in the directory from which {script.name} is started",
            )
        )
        return
    launch.overrides = [*_words(file, launch), *launch.overrides]


def _find(asked: Path, script: Path) -> Path | None:
    """The file as the script's program would find it, from this directory or one around the script."""
    for directory in (Path.cwd(), *script.resolve().parents):
        for name in (asked, asked.with_name(asked.name + ".yaml"), Path("verl/trainer/config", f"{asked}.yaml")):
            if (directory / name).is_file():
                return directory / name
    return None


def _words(file: Path, launch: Launch) -> list[str]:
    """What a file sets, as a command line; verl's references to keys that are here stay references."""
    of_verl, known = launch.system == "verl", tree(launch.schema)
    plain = file_values(file, [] if of_verl else [word.lstrip("+") for word in launch.overrides])
    found = []
    for key, value in leaves(plain.values).items():
        target = plain.follows.get(key, "")
        shown: Any = f"${{{target}}}" if of_verl and target in known else value
        if shown != MISSING:
            found.append(f"{key}={as_override(shown)}")
    return found
