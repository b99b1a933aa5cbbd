"""The training runs that a launch script starts, or a YAML file describes: their system, options and overrides.

The commands of a script are found by executing it in a bash that cannot start programs: variables, arrays, conditions
and arithmetic are evaluated as usual. The output of a program in SOURCES ($(date), $(hostname)) is replaced by a mark,
which `readable` and `quoted` turn back into $(...); the output of any other program is empty, as if it were not
installed. The kernel denies that bash everything but computing (rewards/sandbox/confinement.py): programs, files,
signals, the network. It gets those variables of the environment that the script names; one that may hold a secret has a
mark as its value.
"""

import contextlib
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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hybridrl.config import PPOConfig
from hybridrl.config.compose import as_override, file_values
from hybridrl.config.findings import ConfigError, Findings
from hybridrl.config.load import verl_file
from hybridrl.config.schema import SFTConfig
from hybridrl.config.values import MISSING, leaves, tree
from hybridrl.doctor.shell_text import without_files
from hybridrl.rewards.sandbox.confinement import supported
from hybridrl.tracking.secrets import is_secret, mask_text

# Ends of a module's name or of a file's path -> its system, the schema of its equivalent here, and whether it adds its
# own code to the same settings.
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
# Any other program whose command sets such keys, unless its name says otherwise (NOT_TRAINING).
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
OPTIONS = {"--config-path": "path", "-cp": "path", "--config-dir": "path", "-cd": "path"}
OPTIONS |= {"--config-name": "name", "-cn": "name", "--config": "file"}
ADDED = re.compile(r"^[^#\n]*\$(@|\*|\{[@*])", re.MULTILINE)
MISSED = re.compile(r"value too great|division by 0|syntax error")  # after which bash gives up a command, or a loop
PER_NODE = ("--nproc_per_node", "--nproc-per-node")


@dataclass
class TrainingLaunch:
    """A training run that a script starts; `derived` programs have code of their own."""

    system: str
    schema: type
    program: str
    derived: bool
    options: dict[str, str] = field(default_factory=dict)
    overrides: list[str] = field(default_factory=list)
    computed: list[str] = field(default_factory=list)  # overrides of which only a program knows the value
    findings: Findings = field(default_factory=Findings)

    def __post_init__(self) -> None:
        if self.derived:
            cause = f"{self.program} has code of its own (rewards, rollouts), which is not in the command below"
            self.findings.warn("program", cause)


def launches_of(script: Path, arguments: Sequence[str]) -> list[TrainingLaunch]:
    """Return the runs that a script starts with these arguments, or the run of a YAML file.

    Raises ConfigError if there is none, or the script cannot be read.
    """
    stopped = failed = ""
    if script.suffix in (".yaml", ".yml"):  # settings by themselves; the sections show which system they belong to
        values = file_values(script, []).values
        system = "AReaL" if "gconfig" in values else "SkyRL" if "generator" in values else "verl"
        launches = [TrainingLaunch(system, PPOConfig, "the script it is for", system == "AReaL", {"file": str(script)})]
    else:
        commands, stopped, failed = commands_of(script, arguments)
        different = dict.fromkeys(map(tuple, commands))  # a loop may start the same run until it succeeds
        launches = [launch for words in different if (launch := _launch([*words]))]
        if not launches:
            runs = ", ".join(dict.fromkeys(filter(None, map(_program, commands))))
            last = f"; bash stopped: {stopped}" if stopped else failed and f"; bash's last error: {failed}"
            reasons = (runs and f"; it runs {runs}") + last
            raise ConfigError(f"no command of {script} runs a training program of verl, SkyRL or AReaL{reasons}")
        if not arguments and ADDED.search(script.read_text(encoding="utf-8", errors="replace")):
            cause = f"{script} adds its own arguments ($@), of which there are none here: write them after its name"
            launches[0].findings.info("arguments", cause)
    for launch in launches:
        _read_file(launch, script)
    if stopped or MISSED.search(failed):
        cause = f"{script} was not read to its end, so runs after that are missing: {stopped}"
        cause = cause if stopped else f"bash left out a command of {script}, in which a run may be: {failed}"
        launches[-1].findings.warn("incomplete", cause)
    return launches


def _launch(words: list[str]) -> TrainingLaunch | None:
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
    launch = TrainingLaunch(system, schema, before[-1], derived)
    if schema is SFTConfig:  # torchrun's devices
        for word, following in itertools.pairwise(before):
            option, equals, value = word.partition("=")
            if option in PER_NODE and (count := value if equals else following).isdecimal():
                launch.overrides.append(f"trainer.n_gpus_per_node={count}")
    launch.overrides += [default for part, default in OF_PROGRAM.items() if part in launch.program]
    return _with_arguments(launch, rest)


def _by_settings(words: list[str]) -> TrainingLaunch | None:
    """Return the run of a program with a name of its own, whose command sets keys of a system."""
    program, names = _program(words), [word.lstrip("+~") for word in words if "=" in word]
    system = next((system for start, system in SETTINGS if any(name.startswith(start) for name in names)), None)
    if system is None or program is None or NOT_TRAINING.search(program):
        return None
    after = words.index(program) + 1
    return _with_arguments(TrainingLaunch(system, PPOConfig, program, True), words[after:])


def _program(words: list[str]) -> str | None:
    """Return the module or file that a command runs, if it runs one."""
    for word, following in itertools.pairwise([*words, ""]):
        if word == MODULE_FLAG:
            return following
        if word.endswith((".py", ".sh")) and "=" not in word:
            return word
    return None


def _with_arguments(launch: TrainingLaunch, words: Iterable[str]) -> TrainingLaunch:
    """Add what follows the program in its command: its options, and its overrides."""
    words = iter(words)
    for word in words:
        option, equals, value = word.partition("=")
        if option in OPTIONS:
            launch.options[OPTIONS[option]] = value if equals else next(words, "")
        elif equals and not word.startswith("--"):
            launch.overrides.append(word)
    return launch


def _read_file(launch: TrainingLaunch, script: Path) -> None:
    """Put the values of the launch's settings file, which is found as by the script's program, from this directory or
    one above the script, before those of its command."""
    options = launch.options
    if not options:
        return
    name = options.get("file") or str(Path(options.get("path", ""), options.get("name", "")))
    names = (name, Path(name).with_name(f"{Path(name).name}.yaml"), Path("verl/trainer/config", f"{name}.yaml"))
    places = (directory / path for directory in (Path.cwd(), *script.resolve().parents) for path in names)
    file = next(filter(Path.is_file, places), None)
    if file is None and verl_file(options.get("name", ""), Path(options.get("path", "config")), launch.findings):
        return
    if file is None:
        cause = f"{name}: this settings file was not found, so none of its values are in the command below"
        launch.findings.error("config-file", cause, f"run migrate in the directory from which {script.name} is started")
        return
    of_verl, schema_tree = launch.system == "verl", tree(launch.schema)
    plain = file_values(file, [] if of_verl else [word.lstrip("+") for word in launch.overrides])
    overrides = []
    for key, value in leaves(plain.values).items():
        target = plain.follows.get(key, "")
        # verl's references to keys that exist here stay references.
        shown: Any = f"${{{target}}}" if of_verl and target in schema_tree else value
        if shown != MISSING:
            overrides.append(f"{key}={as_override(shown)}")
    launch.overrides = [*overrides, *launch.overrides]


SECONDS = 10  # a script that waits for something would wait indefinitely
PROCESSES = 100  # at a time; a subshell is one
LIMITS = {"CPU": SECONDS, "DATA": 64 << 20, "FSIZE": 4 << 20, "NOFILE": 256, "CORE": 0}  # per process
TOP = Path(__file__).resolve().parents[2]
# The lowest priority, so that whoever counts its processes has its turn while they multiply.
START = (
    "import os, sys; os.nice(19); sys.path.append({!r}); from hybridrl.rewards.sandbox.confinement import become_bash"
)
BASH = ("--norc", "--noprofile", "-p", "-r", "-c")  # no start-up file, nothing from the environment, restricted
LARGEST = 100_000  # bytes; Linux takes no argument above 128 KiB
EMPTY_PATH = "/dev/null"  # an empty string would be the current directory
NEW_LINE = "\x1e"  # in words: bash would write a line at a time, between those of commands that run at the same time
END = NEW_LINE  # a separate word after each command: no argument is a single newline
# A program's output: its command in hexadecimal. It begins with a digit, so that arithmetic with it is an error.
MARK = re.compile(r"9q([0-9a-f]+)q")
SOURCES = "date|hostname|whoami|id|uuidgen|git|nproc|cat|shuf|od|openssl|expr|mktemp"  # for part of a name or a number
# A command within a text for another shell: ssh, tmux, docker, a script that is written to a file. Not one of a program
# whose own words are settings, or are Python.
TRAINS = r"main_|sft_trainer|areal|actor_rollout_ref\.|trainer\.policy\."
SETTING = r"^[+~]*(actor_rollout_ref|data|trainer|algorithm|generator|model|optim|reward\w*|critic|rollout)\.[a-z_.]+="
# A program's path, which a restricted bash starts only if a function has its name.
PATHS = re.compile(r"(?<![\w./$}-])(?:[\w.][\w.-]*)?/[\w./-]*\w")
PRELUDE = Path(__file__).with_name("prelude.sh").read_text(encoding="utf-8")
LAST = "the end of the script"  # recorded there
LAST_LINE = f"\ncommand_not_found_handle '{LAST}'\n"
EVALUATED = "a text that is a command"  # recorded with the text
DEEPEST = 3  # texts in texts that are commands


def commands_of(script: Path, arguments: Sequence[str] = ()) -> tuple[list[list[str]], str, str]:
    """Return the words of each command that bash reaches, why it stopped before the end, if it did, and its last error.

    Raises ConfigError if the script cannot be read, or does not finish and runs nothing.
    """
    if not supported():
        raise ConfigError("a script is read behind Linux's filter for system calls, on x86_64 and aarch64")
    changed: dict[str, str] = {}  # texts that the script evaluates, without their redirections
    for _ in range(DEEPEST):
        commands, stopped, failed = _run(script, arguments, changed)
        evaluated = [words[1] for words in commands if words[:1] == [EVALUATED] and words[1:]]
        if any(len(os.fsencode(text)) > LARGEST for text in evaluated):
            raise _too_large(script)
        texts = {text: without_files(text, sums=True) for text in dict.fromkeys(evaluated)}
        if (new := {text: left for text, left in texts.items() if text != left}) == changed:
            break
        changed |= new
    return [words for words in commands if words[:1] != [EVALUATED]], stopped, failed


def _run(script: Path, arguments: Sequence[str], changed: Mapping[str, str]) -> tuple[list[list[str]], str, str]:
    if script.stat().st_size > LARGEST:
        raise _too_large(script)
    written = script.read_text(encoding="utf-8", errors="surrogateescape")
    variables = _environment(written)
    paths = sorted({*PATHS.findall(written), *(path for value in variables.values() for path in PATHS.findall(value))})
    lists = {
        "__paths": " ".join(paths),
        "__texts": shlex.join(changed),
        "__without_files": shlex.join(changed.values()),
    }
    arrays = " ".join(f"{name}=({items})" for name, items in lists.items())
    before = f"{arrays}\n{PRELUDE}"
    text = f"{before}{without_files(written, sums=True)}{LAST_LINE}"
    if len(os.fsencode(text)) > LARGEST or "\0" in text:
        raise _too_large(script)
    start = START.format(str(TOP)) + f"; become_bash(sys.argv[1:], {LIMITS})"
    command = [sys.executable, "-I", "-S", "-B", "-c", start, *BASH, text, str(script), *arguments]
    with tempfile.TemporaryFile() as record, tempfile.TemporaryFile() as errors:
        names = {"PATH": EMPTY_PATH, "RECORD": str(record.fileno())}
        names |= {"SOURCES": SOURCES, "EVALUATED": EVALUATED, "TRAINS": TRAINS, "SETTING": SETTING}
        quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": errors}
        options: dict[str, Any] = quiet | {"pass_fds": [record.fileno()], "start_new_session": True}
        with subprocess.Popen(command, env=variables | names, **options) as shell:
            try:
                stopped = _await(shell, script)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(shell.pid, signal.SIGKILL)
        record.seek(0)
        errors.seek(0)
        commands = _recorded(record.read().decode(errors="replace"))
        printed = readable(errors.read().decode(errors="replace"))
    if stopped and not commands:
        raise ConfigError(stopped)
    failed = _last_error(printed, script, before.count("\n"))
    if [LAST] in commands:
        commands.remove([LAST])
        return commands, "", failed
    return commands, stopped or failed or "it was ended", failed


def _last_error(printed: str, script: Path, before: int) -> str:
    """Return the last error of bash itself, with its line in the script. Bash reads `before` lines before the script.
    Texts of a confined bash only are left out."""
    line = rf"{re.escape(str(script))}: (?:-c: |eval: )?line (\d+): "
    errors = [text for text in printed.splitlines() if re.match(line, text) and "not permitted" not in text]
    last = errors[-1] if errors else ""
    last = last.replace("restricted: cannot specify `/' in command names", "No such file or directory")
    return re.sub(line, lambda match: f"line {int(match[1]) - before}: ", last)


def _too_large(script: Path) -> ConfigError:
    return ConfigError(
        f"{script} or a text it evaluates is larger than {LARGEST} bytes or binary, unlike launch scripts"
    )


def _recorded(record: str) -> list[list[str]]:
    """Return the words of each command; those of commands that ran at the same time alternate."""
    commands, incomplete = [], defaultdict[str, list[str]](list)
    for sender, _, word in (entry.partition(" ") for entry in record.split("\0")):
        if word == END:
            commands.append(incomplete.pop(sender, []))
        else:
            incomplete[sender].append(word.replace(NEW_LINE, "\n"))
    return commands


def _environment(script: str) -> dict[str, str]:
    """Return the variables that a script names."""
    named = {name: os.environ[name] for name in {*re.findall(r"\w+", script), "HOME"} if name in os.environ}
    secrets = {name for name, value in named.items() if is_secret(name) or mask_text(value) != value}
    return named | {name: f"9q{f'printenv {name}'.encode().hex()}q" for name in secrets}


def _await(shell: subprocess.Popen[bytes], script: Path) -> str:
    """Wait for all processes of a shell, which cannot leave its group. Return why not, if there are too many or they do
    not end."""
    deadline = time.monotonic() + SECONDS
    while shell.poll() is None or _processes(shell.pid):
        if _processes(shell.pid) > PROCESSES:
            return f"{script} starts more than {PROCESSES} processes"
        if time.monotonic() > deadline:
            return f"bash did not reach the end of {script} within {SECONDS} s"
        time.sleep(0.02)
    return ""


def _processes(group: int) -> int:
    """Return how many processes of a group run, or a number above PROCESSES as soon as there are more; one that has
    ended may never be awaited by its parent."""
    running = 0
    for process in Path("/proc").glob("[0-9]*"):  # not */stat: glob fails if a process ends before it looks for that
        with contextlib.suppress(OSError):
            state, _, its_group, *_ = (process / "stat").read_text(errors="replace").rpartition(")")[2].split()
            running += int(its_group) == group and state not in "ZX"
        if running > PROCESSES:  # while thousands more may start
            break
    return running


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
