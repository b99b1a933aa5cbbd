"""The driver's one voice: a shared console on standard output, plain text where that is not a terminal.

Everything said while the progress bar stands goes through here, so that the bar stays below it.
"""

from rich.console import Console
from rich.text import Text

console = Console()


def info(text: str) -> None:
    console.print(Text(text), soft_wrap=True)


def warn(text: str) -> None:
    console.print(Text.assemble(("warning: ", "yellow"), text), soft_wrap=True)
