"""The driver's one voice: a shared console on standard output, plain text where that is not a terminal.

Everything said while the progress bar stands goes through here, so that the bar stays below it.
"""

import errno

from rich.console import Console
from rich.text import Text

console = Console()


def info(text: str) -> None:
    _say(Text(text))


def warn(text: str) -> None:
    _say(Text.assemble(("warning: ", "yellow"), text))


def _say(text: Text) -> None:
    try:
        console.print(text, soft_wrap=True)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EIO):  # a full disk or a lost terminal ends no run
            raise
