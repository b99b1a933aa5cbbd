"""`python -m hybridrl.doctor key=value ...`, or one of its commands: a function of a module here that takes argv."""

import importlib
import sys

from hybridrl.runtime.guard import guarded

COMMANDS = {
    "explain": ("keys:explain", "KEY [key=value ...]: a key's value, what set it, its default and its meaning"),
    "keys": ("keys:main", "PATTERN: the keys with the pattern in their name or meaning"),
    "reward": (
        "reward:main",
        "--rows FILE [--reward FILE.py] [--against OTHER.py]: scores stored responses and compares two rewards",
    ),
    "migrate": (
        "migrate:main",
        "run.sh: reads a launch script for verl, reports every difference and prints the command for hybridrl",
    ),
    "selftest-resume": (
        "selftest_resume:main",
        "key=value ...: kills a short run repeatedly and compares it with one that was not killed",
    ),
}
INTERRUPTED = 130


def main(argv: list[str] | None = None) -> int:
    """Return the exit status: 0, 1 (an error, or a failed test), 2 (usage), 130 (Ctrl-C)."""
    arguments = sys.argv[1:] if argv is None else argv
    first = arguments[0] if arguments else ""
    if first not in COMMANDS and "=" not in first and not first.startswith(("-", "~")):
        print("expected key=value, or one of the commands:")
        print("\n".join(f"  python -m hybridrl.doctor {name} {use}" for name, (_, use) in COMMANDS.items()))
        return 2
    module, _, function = COMMANDS[first][0].partition(":") if first in COMMANDS else ("check", "", "main")
    command = getattr(importlib.import_module(f"hybridrl.doctor.{module}"), function)  # some import torch, most do not
    try:
        return command(arguments[1:] if first in COMMANDS else arguments)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(guarded(main))
