"""The training runs that a launch script starts, or a YAML file describes: their system, options and overrides."""

import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hybridrl.config import PPOConfig
from hybridrl.config.compose import as_override, file_values
from hybridrl.config.findings import Findings
from hybridrl.config.keys import tree
from hybridrl.config.schema import SFTConfig
from hybridrl.config.values import MISSING, leaves
from hybridrl.doctor.script_commands import commands_of

# Ends of a module's name or of a file's path -> the system it belongs to, the schema of its equivalent here, and
# whether it adds its own code to the same settings.
PROGRAMS = (
    (r"verl[./]trainer[./]main_ppo\w*", "verl", PPOConfig, False),
    (r"(recipe[./])?dapo[./](src[./])?main_dapo", "verl", PPOConfig, False),
    (r"verl[./]trainer[./]\w*sft_trainer\w*", "verl", SFTConfig, False),
    (r"skyrl\w*([./]train)?[./]entrypoints[./]main_base", "SkyRL", PPOConfig, False),
    (r"areal[./]launcher[./]\w+", "AReaL", PPOConfig, True),
    (r"(?!verl[./])[\w./]+[./]trainer[./]main_ppo\w*", "verl", PPOConfig, True),  # a fork's
    (r"(recipe|verl)[./][\w./]*(?!.*(generation|eval))main\w*|[\w./]*_main", "verl", PPOConfig, True),
    (r"(examples|integrations|skyrl\w*)[./][\w./]*main_(?!sft|generate)\w+", "SkyRL", PPOConfig, True),
)
# Any other program whose command sets such keys, unless its name says that it does not train.
SETTINGS = (("actor_rollout_ref.", "verl"), ("trainer.policy.", "SkyRL"))
NOT_TRAINING = re.compile(r"generat|eval|serve|infer|merge|preprocess|rollout_viewer")
MODULE_FLAG = "-m"
# Parts of a program's name -> what its settings file has by default.
OF_PROGRAM = {
    "main_dapo": "reward.reward_manager.name=dapo",
    "one_step_off": "actor_rollout_ref.hybrid_engine=false",
    "fully_async_main": "async_training.staleness_threshold=0.1",
    "main_async": "trainer.v1.sampler.max_off_policy_threshold=1",
}
ASYNC_FILES = ("fully_async_ppo_trainer", "one_step_off_ppo_trainer")  # what they set is in OF_PROGRAM and the tables
SHIPPED_FILES = ("ppo_trainer", "sft_trainer", "dapo_trainer", "sft_trainer_engine")  # verl's, which set nothing more
OPTIONS = {"--config-path": "path", "-cp": "path", "--config-dir": "path", "-cd": "path"}
OPTIONS |= {"--config-name": "name", "-cn": "name", "--config": "file"}
PER_NODE = ("--nproc_per_node", "--nproc-per-node")


@dataclass
class Launch:
    """A training run that a script starts; `derived` programs have code of their own."""

    system: str
    schema: type
    program: str
    derived: bool
    options: dict[str, str] = field(default_factory=dict)
    overrides: list[str] = field(default_factory=list)
    findings: Findings = field(default_factory=Findings)

    def __post_init__(self) -> None:
        if self.derived:
            cause = f"{self.program} has code of its own (rewards, rollouts), which is not in the command below"
            self.findings.warn("program", cause)


def launches_of(script: Path, arguments: Sequence[str]) -> list[Launch]:
    """Return the runs that a script starts with these arguments, or the one that a YAML file describes.

    Raises ValueError if there is none, or the script cannot be read.
    """
    stopped = ""
    if script.suffix in (".yaml", ".yml"):  # settings by themselves; the sections show which system they belong to
        values = file_values(script, []).values
        system = "AReaL" if "gconfig" in values else "SkyRL" if "generator" in values else "verl"
        launches = [Launch(system, PPOConfig, "the script it is for", system == "AReaL", {"file": str(script)})]
    else:
        commands, stopped = commands_of(script, arguments)
        different = dict.fromkeys(map(tuple, commands))  # a loop may start the same run until it succeeds
        launches = [launch for words in different if (launch := _launch([*words]))]
        if not launches:
            runs = ", ".join(dict.fromkeys(filter(None, map(_program, commands))))
            reasons = (runs and f"; it runs {runs}") + (stopped and f"; bash stopped: {stopped}")
            raise ValueError(f"no command of {script} runs a training program of verl, SkyRL or AReaL{reasons}")
    for launch in launches:
        _read_file(launch, script)
    if stopped:
        cause = f"{script} was not read to its end, so runs after that are missing: {stopped}"
        launches[-1].findings.warn("incomplete", cause)
    return launches


def _launch(words: list[str]) -> Launch | None:
    """Return the training run that a command starts, if it starts one."""
    configured = any(word.partition("=")[0] == "--config" for word in words)
    before, rest = [], iter(words)
    for word in rest:
        before.append(word)
        programs = (program for program in PROGRAMS if re.fullmatch(f"(.*/)?{program[0]}", word.removesuffix(".py")))
        launcher = ("", "AReaL", PPOConfig, True) if configured and word.endswith(".py") else None
        if program := next(programs, launcher):
            break
    else:
        return _by_settings(words)
    _, system, schema, derived = program
    launch = Launch(system, schema, before[-1], derived)
    if schema is SFTConfig:  # torchrun's devices
        for word, following in itertools.pairwise(before):
            option, equals, value = word.partition("=")
            if option in PER_NODE and (count := value if equals else following).isdecimal():
                launch.overrides.append(f"trainer.n_gpus_per_node={count}")
    launch.overrides += [default for part, default in OF_PROGRAM.items() if part in launch.program]
    return _with_arguments(launch, rest)


def _by_settings(words: list[str]) -> Launch | None:
    """Return the run of a program with a name of its own, whose command sets keys of a system."""
    program, names = _program(words), [word.lstrip("+~") for word in words if "=" in word]
    system = next((system for start, system in SETTINGS if any(name.startswith(start) for name in names)), None)
    if system is None or program is None or NOT_TRAINING.search(program):
        return None
    after = words.index(program) + 1
    return _with_arguments(Launch(system, PPOConfig, program, True), words[after:])


def _program(words: list[str]) -> str | None:
    """Return the module or file that a command runs, if it runs one."""
    for word, following in itertools.pairwise([*words, ""]):
        if word == MODULE_FLAG:
            return following
        if word.endswith((".py", ".sh")) and "=" not in word:
            return word
    return None


def _with_arguments(launch: Launch, words: Iterable[str]) -> Launch:
    """Add what follows the program in its command: its options, and its overrides."""
    words = iter(words)
    for word in words:
        option, equals, value = word.partition("=")
        if option in OPTIONS:
            launch.options[OPTIONS[option]] = value if equals else next(words, "")
        elif equals and not word.startswith("--"):
            launch.overrides.append(word)
    return launch


def _read_file(launch: Launch, script: Path) -> None:
    """Put the values of the launch's settings file, which is found as by the script's program, from this directory or
    one above the script, before those of its command."""
    options = launch.options
    if not options or (options.get("name") in SHIPPED_FILES and "path" not in options):
        return
    name = options.get("file") or str(Path(options.get("path", ""), options.get("name", "")))
    names = (name, Path(name).with_name(f"{Path(name).name}.yaml"), Path("verl/trainer/config", f"{name}.yaml"))
    places = (directory / path for directory in (Path.cwd(), *script.resolve().parents) for path in names)
    file = next(filter(Path.is_file, places), None)
    if file is None and Path(name).stem in ASYNC_FILES:
        return
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
