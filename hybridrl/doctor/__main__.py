"""`python -m hybridrl.doctor key=value ...`, or one of its commands; each is a module here with a `main(argv)`."""

import importlib
import sys

from hybridrl.runtime.guard import guarded

COMMANDS = {
    "explain": "KEY [key=value ...]: a key's value, who set it, its default and its meaning",
    "keys": "PATTERN: the keys with it in their name or meaning",
    "reward": "--rows FILE [--reward FILE.py] [--against OTHER.py]: scores stored answers and compares two rewards",
    "migrate": "run.sh: reads a launch script for verl, says every difference and writes the command for here",
    "selftest-resume": "key=value ...: kills a short run again and again and compares it with one left alone",
}
INTERRUPTED = 130
CHECK = "check"  # the command that needs no name


def main(argv: list[str] | None = None) -> int:
    """The exit status: 0, 1 (refused, or a test failed), 2 (usage), 130 (Ctrl-C)."""
    arguments = sys.argv[1:] if argv is None else argv
    first = arguments[0] if arguments else ""
    if first not in COMMANDS and "=" not in first and not first.startswith(("-", "~")):
        print("expected key=value, or one of the commands:")
        print("\n".join(f"  python -m hybridrl.doctor {name} {words}" for name, words in COMMANDS.items()))
        return 2
    command, rest = (first, arguments[1:]) if first in COMMANDS else (CHECK, arguments)
    module = importlib.import_module(f"hybridrl.doctor.{command.replace('-', '_')}")  # some import torch, most do not
    try:
        return module.main(rest)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(guarded(main))
