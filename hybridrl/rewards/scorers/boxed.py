r"""Where an answer says its result: \boxed{...}, an <answer> tag, a line "Answer: ...". Linear in the text's length."""

import re

_BRACE = re.compile(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)  # an escaped brace goes with its backslash
_BETWEEN = re.compile(r"(?:[\s$,;]|\\quad|\\[()\[\]]|\\text\s*\{\s*(?:and|or)\s*\}|and\b|or\b)*")
_LONGEST_BETWEEN = 60
_BARE_BOX = re.compile(r"\\(?:boxed|fbox) +([^\s{$][^$\n]*)")
_ANSWER = re.compile(r"answer\**\s*:", re.IGNORECASE)
_SAYS_SOMETHING = re.compile(r"[^\W_]")


def last_boxed(text: str) -> str | None:
    r"""What stands in the last \boxed{...} or \fbox{...} that closes, else after "\boxed " in its line, or None.

    Boxes with no more than a comma or an "and" between them are one result: their contents, with commas.
    """
    found: list[str] = []
    before = len(text)
    for start, opening, end in reversed(_boxes(text)):
        between = text[end:before]
        if found and (len(between) > _LONGEST_BETWEEN or not _BETWEEN.fullmatch(between)):
            break
        found.append(text[opening : end - 1])
        before = start
    if found:
        return ", ".join(reversed(found))
    bare = _BARE_BOX.findall(text)
    return bare[-1].strip() if bare else None


def last_answer_line(text: str) -> str | None:
    """The first line with a letter or a digit after the last "Answer:", or None; where it only announces a box, the
    content of that box."""
    marks = list(_ANSWER.finditer(text))
    if not marks:
        return None
    after = text[marks[-1].end() :].strip(" *\n")
    line = next(filter(_SAYS_SOMETHING.search, after.splitlines()), after.partition("\n")[0]).strip(" *")
    announces = line.endswith(":") or line.startswith(r"\begin")
    return (last_boxed(after) if announces else None) or line or None


def last_tagged(text: str) -> str | None:
    """What stands between the last <answer> that is closed and its </answer>, or None."""
    before, closing, _ = text.rpartition("</answer>")
    _, opening, content = before.rpartition("<answer>")
    return content.strip() if closing and opening else None


def _boxes(text: str) -> list[tuple[int, int, int]]:
    """Of each box that closes: where it starts, where its content starts, and its end; not of boxes in a box."""
    open_braces: list[tuple[int, int] | None] = []  # None: a brace that is no box's
    boxes: list[tuple[int, int, int]] = []
    for match in _BRACE.finditer(text):
        if match[0] == "{":
            open_braces.append(None)
        elif match[0] == "}" and open_braces:
            box = open_braces.pop()
            if box is not None:
                while boxes and boxes[-1][0] > box[0]:
                    boxes.pop()
                boxes.append((*box, match.end()))
        elif match[0].endswith("{") and len(match[0]) > 2:
            open_braces.append((match.start(), match.end()))
    return boxes
