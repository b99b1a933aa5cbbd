"""Small pieces of HTML. Every text that comes from a run goes through `text`."""

import re
from collections.abc import Iterable, Sequence
from html import escape

CONTROLS = {number: chr(0x2400 + number) for number in range(32) if chr(number) not in "\n\t"} | {127: "\u2421"}
# Marks that change the direction of the text around them, ends of lines that browsers differ in, half characters.
INVISIBLE = re.compile("[\u0080-\u009f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]")


def text(value: object) -> str:
    """Escape a text, with what is invisible or would reorder its surroundings made visible."""
    visible = INVISIBLE.sub(lambda match: f"\u27e6U+{ord(match[0]):04X}\u27e7", str(value).translate(CONTROLS))
    return escape(visible)


def code(name: str) -> str:
    """A key, a path or a value as code, which a narrow place breaks between its words before it breaks one."""
    return f"<code>{re.sub('[./_,=]', lambda match: match[0] + '<wbr>', text(name))}</code>"


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], name: str = "") -> str:
    """A table of cells that are HTML already; a column whose title begins with > is aligned to the right."""
    sides = [' class="num"' if column.startswith(">") else "" for column in columns]
    head = "".join(f"<th{side}>{column.lstrip('>')}</th>" for side, column in zip(sides, columns, strict=True))
    body = "".join(
        "<tr>" + "".join(f"<td{side}>{cell}</td>" for side, cell in zip(sides, row, strict=True)) + "</tr>"
        for row in rows
    )
    return (
        f'<div class="scroll"><table class="{name}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def command(line: str) -> str:
    """A command with a button that copies it."""
    return f'<div class="command"><code>{text(line)}</code><button class="copy" type="button">Copy</button></div>'


def folded(title: str, inside: str, *, opened: bool = False) -> str:
    return f"<details{' open' * opened}><summary>{title}</summary>{inside}</details>"


def section(name: str, title: str, inside: str, about: str = "") -> str:
    note = f'<p class="about">{about}</p>' if about else ""
    return f'<section id="{name}"><h2>{title}</h2>{note}{inside}</section>'


def size(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.3g} TB"
