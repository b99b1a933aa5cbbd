"""The commands that a launch script runs.

They are found by executing it in a bash that cannot start programs: variables, arrays, conditions and arithmetic are
evaluated as usual. The output of a program in SOURCES ($(date), $(hostname)) is replaced by a mark, which `readable`
and `quoted` turn back into $(...); the output of any other program is empty, as if it were not installed. The kernel
denies that bash everything but computing (rewards/sandbox/confinement.py): programs, files, signals, the network. It
gets those variables of the environment that the script names; one that may hold a secret has a mark as its value.
"""

import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hybridrl.doctor.shell_text import without_files
from hybridrl.rewards.sandbox.confinement import supported
from hybridrl.tracking.secrets import is_secret, mask_text

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
# A program's path, which a restricted bash starts only if a function has its name.
PATHS = re.compile(r"(?<![\w./$}-])(?:[\w.][\w.-]*)?/[\w./-]*\w")
# Every program is recorded instead of run; builtins that would exit the shell or change anything do nothing. No process
# is there to be waited for, and a loop that sleeps so often waits for what only a program could do: its `sleep` leaves
# it, which no function could, and is one command, so that it may stand wherever a command may.
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
    elif [[ ${1##*/} =~ ^($SOURCES)$ ]]; then command=$called; fi
    [[ -n $command ]] && __mark "${command% }"
    [[ "$*" =~ main_|sft_trainer|areal|actor_rollout_ref\.|trainer\.policy\. ]]  # others fail, as if not installed
}
basename() { local name="${1%/}"; name="${name##*/}"; printf '%s\n' "${name%"${2-}"}"; }
dirname() { [[ $1 == */* ]] && printf '%s\n' "${1%/*}" || printf '.\n'; }
realpath() { printf '%s\n' "${@: -1}"; }
readlink() { printf '%s\n' "${@: -1}"; }
for name in python python3 python3.10 python3.11 python3.12 "${__paths[@]}"; do
    eval "function $name { command_not_found_handle $name \"\$@\"; }"
done
__slept() { (( ++__sleeps[BASH_LINENO[0]] % 100 == 0 )); }
shopt -s expand_aliases
alias sleep='builtin eval "__slept && break; : #"'
exec() { command_not_found_handle "$@"; }
for name in set cd . source exit trap ulimit shopt alias unalias; do eval "$name() { :; }"; done
eval() {
    local text="$*" i
    for word in "$EVALUATED" "$text" $'\n'; do printf '%s\0' "$BASHPID $word"; done >&"$RECORD"
    for i in "${!__texts[@]}"; do [[ $text == "${__texts[i]}" ]] && text=${__without_files[i]} && break; done
    builtin eval "$text"
}
kill() { false; }
wait() { [[ $1 != -n ]]; }
"""
LAST = "the end of the script"  # which is recorded there
LAST_LINE = f"\ncommand_not_found_handle '{LAST}'\n"
EVALUATED = "a text that is a command"  # recorded with the text
DEEPEST = 3  # texts in texts that are commands


def commands_of(script: Path, arguments: Sequence[str] = ()) -> tuple[list[list[str]], str]:
    """Return the words of each command that bash reaches, and why it stopped if it did not reach the end.

    Raises ValueError if the script cannot be read, or does not finish and runs nothing.
    """
    if not supported():
        raise ValueError("a script is read behind Linux's filter for system calls, on x86_64 and aarch64")
    changed: dict[str, str] = {}  # texts that the script evaluates, without their redirections
    for _ in range(DEEPEST):
        commands, stopped = _run(script, arguments, changed)
        evaluated = [words[1] for words in commands if words[:1] == [EVALUATED] and words[1:]]
        if any(len(os.fsencode(text)) > LARGEST for text in evaluated):
            raise _too_large(script)
        texts = {text: without_files(text) for text in dict.fromkeys(evaluated)}
        if (more := {text: left for text, left in texts.items() if text != left}) == changed:
            break
        changed |= more
    return [words for words in commands if words[:1] != [EVALUATED]], stopped


def _run(script: Path, arguments: Sequence[str], changed: Mapping[str, str]) -> tuple[list[list[str]], str]:
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
    known = " ".join(f"{name}=({items})" for name, items in lists.items())
    text = f"{known}\n{PRELUDE}{without_files(written)}{LAST_LINE}"
    if len(os.fsencode(text)) > LARGEST or "\0" in text:
        raise _too_large(script)
    start = START.format(str(TOP)) + f"become(sys.argv[1:], {LIMITS})"
    command = [sys.executable, "-I", "-S", "-B", "-c", start, *BASH, text, str(script), *arguments]
    with tempfile.TemporaryFile() as record, tempfile.TemporaryFile() as errors:
        more = {"PATH": EMPTY_PATH, "RECORD": str(record.fileno())}
        more |= {"SOURCES": SOURCES, "EVALUATED": EVALUATED}
        quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": errors}
        options: dict[str, Any] = quiet | {"pass_fds": [record.fileno()], "start_new_session": True}
        with subprocess.Popen(command, env=variables | more, **options) as shell:
            try:
                stopped = _await(shell, script)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(shell.pid, signal.SIGKILL)
        record.seek(0)
        errors.seek(0)
        commands = _recorded(record.read().decode(errors="replace"))
        lines = readable(errors.read().decode(errors="replace")).strip().splitlines()
    if stopped and not commands:
        raise ValueError(stopped)
    if [LAST] in commands:
        commands.remove([LAST])
        return commands, ""
    return commands, stopped or (lines[-1] if lines else "it was ended")


def _too_large(script: Path) -> ValueError:
    return ValueError(
        f"{script} or a text it evaluates is larger than {LARGEST} bytes or binary, unlike launch scripts"
    )


def _recorded(record: str) -> list[list[str]]:
    """Return the words of each command; those of commands that ran at the same time alternate."""
    commands, incomplete = [], defaultdict[str, list[str]](list)
    for sender, _, word in (entry.partition(" ") for entry in record.split("\0")):
        if word == END:
            commands.append(incomplete.pop(sender, []))
        else:
            incomplete[sender].append(word)
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
    """Return how many processes of a group run; one that has ended may never be awaited by its parent."""
    states = []
    for process in Path("/proc").glob("[0-9]*"):  # not */stat: glob fails if a process ends before it looks for that
        with contextlib.suppress(OSError):
            state, _, its_group, *_ = (process / "stat").read_text(errors="replace").rpartition(")")[2].split()
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
