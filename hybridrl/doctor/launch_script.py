"""The commands that a launch script would run, found by letting bash read it with every program out of reach.

Variables, arrays, conditions and arithmetic are bash's own, so they come out as they would; what a program would have
answered ($(date), $(nproc)) comes out empty. The shell is a restricted one with an empty path: it starts no program,
opens no file for writing and changes no directory.
"""

import os
import re
import subprocess
import tempfile
from pathlib import Path

SECONDS = 10  # a script that waits for something would wait for ever
NOWHERE = "/dev/null"  # for a path: an empty one would be the current directory
END = "\n"  # a word of its own after each command: no argument is a line's end alone
# Every program is recorded instead of run; builtins that would end the reading or touch anything do nothing.
PRELUDE = r"""
command_not_found_handle() {
    printf '%s\0' "$@" >&"$RECORD"
    printf '\n\0' >&"$RECORD"
    [[ "$*" == *main_ppo* ]]  # all others fail, as where they are not installed
}
for name in python python3 python3.10 python3.11 python3.12; do
    eval "$name() { command_not_found_handle $name \"\$@\"; }"
done
exec() { command_not_found_handle "$@"; }
for name in set cd . source exit kill trap ulimit wait shopt; do eval "$name() { :; }"; done
"""
TO_A_FILE = re.compile(r"(?<![<>=\-\w])(?:&|[012])?>>?\s*(?![&>(])[^\s;|&]+")
PROGRAM = re.compile(r"(?<![\w=:])[^\s=\"']*/(python[\d.]*)(?=\s)")


def commands_of(script: Path) -> tuple[list[list[str]], str]:
    """Each command that bash comes to, as its words; and where it stopped before the end, why.

    Raises ValueError for a script that does not come to an end.
    """
    text = PROGRAM.sub(r"\1", TO_A_FILE.sub("", script.read_text(encoding="utf-8")))
    with tempfile.TemporaryFile() as record:
        try:
            shell = subprocess.run(
                ["/bin/bash", "-r", "-c", PRELUDE + text, str(script)],
                env=os.environ | {"PATH": NOWHERE, "RECORD": str(record.fileno())},
                pass_fds=[record.fileno()],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=SECONDS,
            )
        except subprocess.TimeoutExpired:
            raise ValueError(f"bash did not come to the end of {script} within {SECONDS} s") from None
        record.seek(0)
        words = record.read().decode().split("\0")
    ends = [place for place, word in enumerate(words) if word == END]
    commands = [words[start:end] for start, end in zip([0, *(end + 1 for end in ends)], ends, strict=False)]
    said = shell.stderr.decode().strip().splitlines()
    return commands, said[-1] if shell.returncode and said else ""
