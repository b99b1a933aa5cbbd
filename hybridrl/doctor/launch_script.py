"""The commands that a launch script would run, found by executing it in a bash that cannot start programs.

bash evaluates variables, arrays, conditions and arithmetic as usual. The output of a program in SOURCES ($(date),
$(hostname)) is replaced by a mark, which `readable` and `quoted` turn back into $(...); the output of any other program
is empty, as if it were not installed. The shell is restricted and has an empty path: it starts no program, opens no
file for writing and changes no directory.
"""

import os
import re
import shlex
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

SECONDS = 10  # a script that waits for something would wait indefinitely
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
    printf '%s\0' "$@" >&"$RECORD"
    printf '\n\0' >&"$RECORD"
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
TO_A_FILE = re.compile(r"(?<![<>=\-\w])(?:&|[012])?>>?\s*(?![&>(])[^\s;|&]+")
PROGRAM = re.compile(r"(?<![\w=:])[^\s=\"']*/(python[\d.]*)(?=\s)")


def readable(text: str) -> str:
    """Replace each mark in a text by the $(command) that it stands for."""
    while (marked := MARK.search(text)) is not None:
        text = text.replace(marked[0], f"$({_command(marked)})")
    return text


def quoted(word: str) -> str:
    """Quote a word for a shell, which runs the $(command) of each mark."""
    parts, end = [], 0
    for marked in MARK.finditer(word):
        parts += [shlex.quote(word[end : marked.start()]) if marked.start() > end else "", f'"{readable(marked[0])}"']
        end = marked.end()
    return "".join(parts) + (shlex.quote(word[end:]) if word[end:] or not parts else "")


def _command(marked: re.Match[str]) -> str:
    text = bytes.fromhex(marked[1]).decode(errors="replace")
    piped = MARK.match(text)  # the command whose output goes into this one
    return f"{_command(piped)}{text[piped.end() :]}" if piped else text


def commands_of(script: Path, arguments: Sequence[str] = ()) -> tuple[list[list[str]], str]:
    """Return the words of each command that bash reaches, and why it stopped if it stopped early.

    Raises ValueError if the script does not finish.
    """
    text = PROGRAM.sub(r"\1", TO_A_FILE.sub("", script.read_text(encoding="utf-8")))
    with tempfile.TemporaryFile() as record:
        try:
            shell = subprocess.run(
                ["/bin/bash", "-r", "-c", PRELUDE + text, str(script), *arguments],
                env=os.environ | {"PATH": EMPTY_PATH, "RECORD": str(record.fileno()), "SOURCES": SOURCES},
                pass_fds=[record.fileno()],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=SECONDS,
            )
        except subprocess.TimeoutExpired:
            raise ValueError(f"bash did not reach the end of {script} within {SECONDS} s") from None
        record.seek(0)
        words = record.read().decode().split("\0")
    ends = [index for index, word in enumerate(words) if word == END]
    commands = [words[start:end] for start, end in zip([0, *(end + 1 for end in ends)], ends, strict=False)]
    errors = readable(shell.stderr.decode(errors="replace")).strip().splitlines()
    return commands, errors[-1] if shell.returncode and errors else ""
