"""`python -m hybridrl.doctor COMMAND ...`; each command is a module here with a `main(argv)`."""

import importlib
import sys

from hybridrl.guard import guarded

COMMANDS = {
    "selftest-resume": "key=value ...: kills a short run again and again and compares it with one left alone",
}


def main(argv: list[str] | None = None) -> int:
    """The exit status: 0, 1 (refused, or a test failed), 2 (usage)."""
    arguments = sys.argv[1:] if argv is None else argv
    if not arguments or arguments[0] not in COMMANDS:
        print("\n".join(f"python -m hybridrl.doctor {name} {what}" for name, what in COMMANDS.items()))
        return 2
    module = importlib.import_module(f"hybridrl.doctor.{arguments[0].replace('-', '_')}")
    return module.main(arguments[1:])


if __name__ == "__main__":
    sys.exit(guarded(main))
