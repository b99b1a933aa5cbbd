"""`python -m hybridrl.doctor migrate run.sh`: reads a launch script or YAML file of verl, SkyRL or AReaL, reports what
differs in hybridrl, and prints the command.

The commands of a script are found by executing it in a bash that cannot start programs: variables, arrays, conditions
and arithmetic are evaluated as usual. The output of a program in SOURCES ($(date), $(hostname)) is replaced by a mark,
which `readable` and `quoted` turn back into $(...); the output of any other program is empty, as if it were not
installed. The kernel denies that bash everything but computing (rewards/sandbox/confinement.py): programs, files,
signals, the network. It gets those variables of the environment that the script names; one that may hold a secret
has a mark as its value.
"""

import argparse
import contextlib
import functools
import itertools
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
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
from hybridrl.rewards.sandbox.confinement import supported
from hybridrl.tracking.console import print_text
from hybridrl.tracking.secrets import is_secret, mask_text

# Values for keys that a command does not set in a usable way.
PLACEHOLDERS = {"data.train_files": "path/to/train.parquet", "actor_rollout_ref.model.path": "path/to/model"}
PLACEHOLDERS |= {"model.path": "path/to/model"}
ROUNDS = 30  # of removing rejected overrides

# Ends of a module's name or of a file's path -> the system it belongs to, the schema of its equivalent here, and
# whether it adds its own code to the same settings.
PROGRAMS = (
    (r"verl[./]trainer[./]main_ppo\w*", "verl", PPOConfig, False),
    (r"(recipe[./])?dapo[./](src[./])?main_dapo", "verl", PPOConfig, False),
    (r"verl[./]trainer[./]\w*sft_trainer\w*", "verl", SFTConfig, False),
    (r"skyrl\w*([./]train)?[./]entrypoints[./]main_base", "SkyRL", PPOConfig, False),
    (r"areal[./]launcher[./]\w+", "AReaL", PPOConfig, True),
    (r"(recipe|verl)[./][\w./]*(?!.*(generation|eval))main\w*|[\w./]*_main", "verl", PPOConfig, True),
    (r"(examples|integrations|skyrl\w*)[./][\w./]*main_(?!sft|generate)\w+", "SkyRL", PPOConfig, True),
)
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


SECONDS = 10  # a script that waits for something would wait indefinitely
PROCESSES = 100  # at a time; a subshell is one
LIMITS = {"CPU": SECONDS, "DATA": 64 << 20, "FSIZE": 4 << 20, "NOFILE": 256, "CORE": 0}  # of each process
TOP = Path(__file__).resolve().parents[2]
START = "import sys; sys.path.append({!r}); from hybridrl.rewards.sandbox.confinement import become_bash as become; "
BASH = ("--norc", "--noprofile", "-p", "-r", "-c")  # no start-up file, nothing from the environment, restricted
LARGEST = 100_000  # bytes; Linux takes no argument above 128 KiB
EMPTY_PATH = "/dev/null"  # an empty string would be the current directory
END = "\n"  # a separate word after each command: no argument is a single newline
# A program's output: its command in hexadecimal. It begins with a digit, so that arithmetic with it is an error.
MARK = re.compile(r"9q([0-9a-f]+)q")
SOURCES = "date|hostname|whoami|id|uuidgen|git|nproc|cat"  # whose output is part of a name or a number
# Every program is recorded instead of run; builtins that would exit the shell or change anything do nothing.
PRELUDE = r"""
__mark() {
    local text="$*" code i LC_ALL=C
    printf 9q
    for ((i = 0; i < ${#text}; i++)); do printf -v code %d "'${text:i:1}"; printf %02x "$((code & 255))"; done
    printf q
}
command_not_found_handle() {
    local input="" command="" called
    local word  # each is written at once: the commands of a pipeline run at the same time
    for word in "$@" $'\n'; do printf '%s\0' "$BASHPID $word"; done >&"$RECORD"
    [[ -p /dev/stdin ]] && IFS= read -r -d '' input
    printf -v called '%q ' "$@"
    if [[ $input =~ ^9q[0-9a-f]+q$ ]]; then command="$input | $called"
    elif [[ -n $input ]]; then command="echo \"${input%$'\n'}\" | $called"
    elif [[ $1 =~ ^($SOURCES)$ ]]; then command=$called; fi
    [[ -n $command ]] && __mark "${command% }"
    [[ "$*" == *main_* || "$*" == *sft_trainer* || "$*" == *areal* ]]  # all others fail, as if they were not installed
}
basename() { local name="${1%/}"; name="${name##*/}"; printf '%s\n' "${name%"${2-}"}"; }
dirname() { [[ $1 == */* ]] && printf '%s\n' "${1%/*}" || printf '.\n'; }
realpath() { printf '%s\n' "${@: -1}"; }
readlink() { printf '%s\n' "${@: -1}"; }
for name in python python3 python3.10 python3.11 python3.12; do
    eval "$name() { command_not_found_handle $name \"\$@\"; }"
done
exec() { command_not_found_handle "$@"; }
for name in set cd . source exit kill trap ulimit wait shopt; do eval "$name() { :; }"; done
"""
# A process substitution is a file, which cannot be opened: its output becomes a here-string, which is in memory.
FROM_COMMAND = re.compile(r"<[ \t]+<\(((?:[^()]|\((?:[^()]|\([^()]*\))*\))*)\)")
TO_A_FILE = re.compile(r"(?<![<>=\-\w])(?:&|[012])?>>?\s*(?![&>(])[^\s;|&]+")
PROGRAM = re.compile(r"(?<![\w=:])[^\s=\"']*/(python[\d.]*)(?=\s)")


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
        if script.suffix in (".yaml", ".yml"):  # settings by themselves; the sections show which system they belong to
            values = file_values(script, []).values
            system = "AReaL" if "gconfig" in values else "SkyRL" if "generator" in values else "verl"
            launches = [Launch(system, PPOConfig, "the script it is for", system == "AReaL", {"file": str(script)})]
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
    schema, findings = launch.schema, launch.findings
    if launch.system != "verl":
        launch.overrides = [*_other_defaults(launch), *launch.overrides]
    # Remove what is rejected, and put placeholders for required keys, until the command is accepted.
    for _ in range(ROUNDS):
        result = resolve_config(schema, launch.overrides, SHIPPED[schema], offline=True).findings
        findings.add(*(item for item in result.items if item.severity != "info" or item.code == "own-key"))
        remaining = launch.overrides
        for finding in result.errors:
            remaining = _without(remaining, finding, schema)
        if remaining == launch.overrides:
            break
        launch.overrides = remaining
    overrides = launch.overrides
    for key in (text.lstrip("+").partition("=")[0] for text in overrides if text.endswith("=")):
        if not any(key in finding.keys or key in finding.text for finding in findings.items):
            cause = f"{key} is empty: a variable that is not set here, or the output of a program, as none was run"
            findings.warn("empty-value", cause, keys=key)
    if launch.system == "verl":
        _other_defaults(launch)
    for finding in findings.items:
        text = f"# {finding.severity} [{finding.code}] {readable(finding.text)}"
        print_text(text.replace("\n", "\n# "))
    # The overrides with current names, quoted, without those that are ignored or rejected.
    settings = [text.lstrip("+").partition("=") for text in parse_overrides(overrides, schema, Findings()).arguments]
    last = {key: value for key, _, value in settings if holds(tree(schema), key.lstrip("~"))}
    words = [quoted(key if key.startswith("~") else f"{key}={value}") for key, value in last.items()]
    program = "main_ppo" if schema is PPOConfig else "main_sft"
    print_text(" \\\n    ".join([f"python -m hybridrl.{program}", *words]) + "\n")
    return int(bool(findings.errors))


def _other_defaults(launch: Launch) -> list[str]:
    """Report the other system's defaults of keys that the script does not set, and return overrides for them."""
    written, overrides = parse_overrides(launch.overrides, launch.schema, Findings()).written, []
    usual, system = shipped(SHIPPED[launch.schema]).values, launch.system
    program = re.split(r"[./]", launch.program.removesuffix(".py"))[-1]
    name = system if launch.schema is PPOConfig else program if "fsdp_" in program else "sft_trainer"
    for key, theirs in verl_keys().defaults[name].items():
        if key not in written and theirs != (here := value_of(usual, key)):
            cause = f"{key}={show(here)} here, {show(theirs)} in verl"
            if system != "verl":
                cause = f"{key}={show(theirs)} is added: it is the default of {system}, and {show(here)} the one here"
            launch.findings.info("default", cause, keys=key)
            overrides.append(f"{key}={as_override(theirs)}")
    return overrides


def _without(overrides: list[str], finding: Finding, schema: type) -> list[str]:
    """Remove the overrides that an error is about: all that are unsupported for one reason, else those of the first of
    its keys that the command sets."""
    ranks = {  # findings may name the section that a key is in
        text: [n for n, key in enumerate(finding.keys) if any(f"{name}.".startswith(f"{key}.") for name in names)]
        for text, names in ((text, _keys(text, schema)) for text in overrides)
    }
    first = finding.keys[0] if finding.keys else ""
    if first in PLACEHOLDERS:
        return [*(text for text in overrides if not ranks[text]), f"{first}={PLACEHOLDERS[first]}"]
    least = min(itertools.chain(*ranks.values()), default=None)
    return [
        text for text in overrides if least not in ranks[text] and not (ranks[text] and finding.code == "unsupported")
    ]


@functools.cache
def _keys(text: str, schema: type) -> list[str]:
    """The keys by which findings may name an override: as written, its current name, and the keys that it sets."""
    name = text.lstrip("+~").partition("=")[0]
    arguments = parse_overrides([text], schema, Findings()).arguments
    return [name, current_name(name), *(argument.lstrip("+~").partition("=")[0] for argument in arguments)]


# -- the launches of a script ------------------------------------------------------------------------------------------


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
        return None
    _, system, schema, derived = program
    launch = Launch(system, schema, before[-1], derived)
    if schema is SFTConfig:  # torchrun's devices
        for word, following in itertools.pairwise(before):
            option, equals, value = word.partition("=")
            if option in PER_NODE and (count := value if equals else following).isdecimal():
                launch.overrides.append(f"trainer.n_gpus_per_node={count}")
    launch.overrides += [default for part, default in OF_PROGRAM.items() if part in launch.program]
    for word in rest:
        option, equals, value = word.partition("=")
        if option in OPTIONS:
            launch.options[OPTIONS[option]] = value if equals else next(rest, "")
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


# -- the commands of a script ------------------------------------------------------------------------------------------


def commands_of(script: Path, arguments: Sequence[str] = ()) -> tuple[list[list[str]], str]:
    """Return the words of each command that bash reaches, and why it stopped if it stopped early.

    Raises ValueError if the script does not finish.
    """
    text = PRELUDE + _without_files(script.read_text(encoding="utf-8", errors="surrogateescape"))
    if not supported():
        raise ValueError("a script is read behind Linux's filter for system calls, on x86_64 and aarch64")
    if len(os.fsencode(text)) > LARGEST or "\0" in text:
        raise ValueError(f"{script} is larger than {LARGEST} bytes or binary, which no launch script is")
    start = START.format(str(TOP)) + f"become(sys.argv[1:], {LIMITS})"
    command = [sys.executable, "-I", "-S", "-B", "-c", start, *BASH, text, str(script), *arguments]
    with tempfile.TemporaryFile() as record, tempfile.TemporaryFile() as errors:
        more = {"PATH": EMPTY_PATH, "RECORD": str(record.fileno()), "SOURCES": SOURCES}
        quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": errors}
        options: dict[str, Any] = quiet | {"pass_fds": [record.fileno()], "start_new_session": True}
        with subprocess.Popen(command, env=_environment(text) | more, **options) as shell:
            try:
                _await(shell, script)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(shell.pid, signal.SIGKILL)
        record.seek(0)
        errors.seek(0)
        words = record.read().decode(errors="replace").split("\0")
        lines = readable(errors.read().decode(errors="replace")).strip().splitlines()
    commands, incomplete = [], defaultdict[str, list[str]](list)
    for sender, _, word in (entry.partition(" ") for entry in words):
        if word == END:
            commands.append(incomplete.pop(sender, []))
        else:
            incomplete[sender].append(word)
    return commands, lines[-1] if shell.returncode and lines else ""


def _without_files(script: str) -> str:
    return PROGRAM.sub(r"\1", TO_A_FILE.sub("", FROM_COMMAND.sub(r'<<< "$(\1)"', script)))


def _environment(script: str) -> dict[str, str]:
    """Return the variables that a script names."""
    named = {name: os.environ[name] for name in {*re.findall(r"\w+", script), "HOME"} if name in os.environ}
    secrets = {name for name, value in named.items() if is_secret(name) or mask_text(value) != value}
    return named | {name: f"9q{f'printenv {name}'.encode().hex()}q" for name in secrets}


def _await(shell: subprocess.Popen[bytes], script: Path) -> None:
    """Wait for all processes of a shell, which cannot leave its group. Raises ValueError if there are too many, or if
    they do not end."""
    deadline = time.monotonic() + SECONDS
    while shell.poll() is None or _processes(shell.pid):
        if _processes(shell.pid) > PROCESSES:
            raise ValueError(f"{script} starts more than {PROCESSES} processes")
        if time.monotonic() > deadline:
            raise ValueError(f"bash did not reach the end of {script} within {SECONDS} s")
        time.sleep(0.02)


def _processes(group: int) -> int:
    """Return how many processes of a group run; one that has ended may never be awaited by its parent."""
    states = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, its_group, *_ = file.read_text(errors="replace").rpartition(")")[2].split()
            states += [state] if int(its_group) == group else []
    return sum(state not in "ZX" for state in states)


def readable(text: str) -> str:
    """Replace each mark in a text by the $(command) that it stands for."""
    while (marked := MARK.search(text)) is not None:
        text = text.replace(marked[0], f"$({_command(marked)})")
    return text


def _command(marked: re.Match[str]) -> str:
    text = bytes.fromhex(marked[1]).decode(errors="replace")
    piped = MARK.match(text)  # the command whose output goes into this one
    return f"{_command(piped)}{text[piped.end() :]}" if piped else text


def quoted(word: str) -> str:
    """Quote a word for a shell, which runs the $(command) of each mark."""
    pieces = re.split(f"({MARK.pattern})", word)  # text, mark, the mark's digits, text ...
    texts = [shlex.quote(text) if text or len(pieces) == 1 else "" for text in pieces[::3]]
    marks = [f'"{readable(mark)}"' for mark in pieces[1::3]]
    return "".join(text + mark for text, mark in zip(texts, [*marks, ""], strict=True))
