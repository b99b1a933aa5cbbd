r"""Find the result in a response's text, and compare results as spellings, with verl's verdicts.

A result is in \boxed{...}, in an <answer> tag or on a line "Answer: ..."; finding it is linear in the text's length.
Spellings are those of MATH and of Minerva's protocol, without mathematics: 2/4 is not 1/2. `math.py` compares values.
"""

import re

_BOX_OR_BRACE = re.compile(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)  # an escaped brace belongs to its backslash
_BETWEEN = re.compile(r"(?:[\s$,;]|\\quad|\\[()\[\]]|\\text\s*\{\s*(?:and|or)\s*\}|and\b|or\b)*")
_MAX_BETWEEN = 60
_BARE_BOX = re.compile(r"\\(?:boxed|fbox) +([^\s{$][^$\n]*)")
_ANSWER_MARK = re.compile(r"answer\**\s*:", re.IGNORECASE)
_WORD_CHARACTER = re.compile(r"[^\W_]")
_BRACE = re.compile(r"[{}]")
_UNITS = [
    *("cents", "childrentickets", "cm", "degrees", "digits", "dollars", "edges", "feet", "gm"),
    *("hours", "inches", "integers", "km", "meals", "meters", "minutes", "mph"),
    *("multiples", "points", "pounds", "square", "students", "sue", "units", "ways"),
]
# Markup left over once the units are removed, and other markup without meaning.
_MARKUP = [
    *(r"\text{}^2", r"\text{}^3", r"\text{s}", r"\text{.}", "\\text{\ns}", "\\text{\n}", r"\text{}", r"\mathrm{th}"),
    *(r"^{\circ}", r"^\circ", r"\ldots", r"\dots", r"\;", r",\!", "{,}", '"'),
]
_IGNORED = [re.compile("|".join(map(re.escape, words))) for words in (_UNITS, _MARKUP)]
_MINERVA_FIRST = [
    *(("an ", ""), ("a ", ""), (".$", "$"), (r"\$", ""), (r"\ ", ""), (" ", ""), ("mbox", "text")),
    *((r",\text{and}", ","), (r"\text{and}", ","), (r"\text{m}", r"\text{}")),
]
_MATH_FIRST = [
    *(("\n", ""), (r"\!", ""), ("\\\\", "\\"), ("tfrac", "frac"), ("dfrac", "frac"), (r"\left", ""), (r"\right", "")),
    *((r"^{\circ}", ""), (r"^\circ", ""), (r"\$", "")),
]


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last \boxed{...} or \fbox{...} that closes, else the line after "\boxed ", or None.

    Boxes with at most a comma or an "and" between them are one result: their contents, separated by commas.
    """
    open_braces: list[tuple[int, int] | None] = []  # None: a brace without a box command
    boxes: list[tuple[int, int, int]] = []  # start, the content's start and end of each, except boxes inside a box
    for match in _BOX_OR_BRACE.finditer(text):
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
    contents: list[str] = []
    before = len(text)
    for start, opening, end in reversed(boxes):
        between = text[end:before]
        if contents and (len(between) > _MAX_BETWEEN or not _BETWEEN.fullmatch(between)):
            break
        contents.append(text[opening : end - 1])
        before = start
    if contents:
        return ", ".join(reversed(contents))
    bare = _BARE_BOX.findall(text)
    return bare[-1].strip() if bare else None


def last_answer_line(text: str) -> str | None:
    """Return the first line with a letter or a digit after the last "Answer:", or None.

    If the line only announces a box, the content of that box is returned.
    """
    marks = list(_ANSWER_MARK.finditer(text))
    if not marks:
        return None
    after = text[marks[-1].end() :].strip(" *\n")
    line = next(filter(_WORD_CHARACTER.search, after.splitlines()), after.partition("\n")[0]).strip(" *")
    announces = line.endswith(":") or line.startswith(r"\begin")
    return (last_boxed(after) if announces else None) or line or None


def last_tagged(text: str) -> str | None:
    """Return the content of the last <answer> tag that is closed, or None."""
    before, closing, _ = text.rpartition("</answer>")
    _, opening, content = before.rpartition("<answer>")
    return content.strip() if closing and opening else None


def tagged(text: str, tag: str) -> list[str]:
    """Return the contents of all tags of this name that are closed. A regular expression would search the end of a tag
    from each beginning."""
    contents, parts = [], text.split(f"</{tag}>")
    for part in parts[:-1]:
        _, opening, content = part.partition(f"<{tag}>")
        contents += [content] if opening else []
    return contents


def last_box(text: str, commands: tuple[str, ...] = (r"\boxed{",)) -> str | None:
    r"""Return the last \boxed{...} with its command; None if there is none or it never closes."""
    start = next((place for command in commands if (place := text.rfind(command)) >= 0), -1)
    depth = 0
    for brace in _BRACE.finditer(text, start) if start >= 0 else ():
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return text[start : brace.end()]
    return None


def math_box(text: str) -> str | None:
    r"""Return the last \boxed{...}, else the last \fbox{...}; "\boxed 4" extends to a dollar sign or the end."""
    _, bare, after = text.rpartition(r"\boxed ")
    return bare + after.partition("$")[0] if bare else last_box(text, (r"\boxed", r"\fbox"))


def unboxed(box: str) -> str:
    r"""Return the content of a \boxed{...}; AssertionError for any other text, as in verl, whose callers catch it."""
    assert box.startswith(r"\boxed{") and box.endswith("}"), f"not a box: {box:.80}"
    return box[len(r"\boxed{") : -1]


def math_unboxed(box: str) -> str:
    r"""Return the content of a \boxed{...} or of "\boxed 4"."""
    return box.removeprefix(r"\boxed ") if box.startswith(r"\boxed ") else unboxed(box)


def same_in_math(first: str | None, second: str | None) -> bool:
    """Whether both results have the same spelling by MATH's rules; two absent results are the same."""
    if first is None or second is None:
        return first is second
    return math_spelling(first) == math_spelling(second)


def math_spelling(result: str) -> str:
    r"""Return MATH's spelling: \frac{1}{2} for \dfrac12, 1/2 and 0.5; no units, degrees, percent, money, spaces."""
    for before, after in _MATH_FIRST:
        result = result.replace(before, after)
    result = result.partition(r"\text{ ")[0].replace(r"\%", "")
    result = re.sub(r"(?<=[ {])\.|^\.", "0.", result)
    name, equals, value = result.partition("=")
    if equals and len(name) <= 2 and "=" not in value:  # x = 5
        result = value
    result = re.sub(r"\\sqrt([^{])", r"\\sqrt{\1}", result).replace(" ", "")
    result = re.sub(r"\\frac([^{])([^{])", r"\\frac{\1}{\2}", result)
    result = re.sub(r"\\frac([^{]){", r"\\frac{\1}{", result)
    result = r"\frac{1}{2}" if result == "0.5" else result
    return re.sub(r"^(0|-?[1-9][0-9]*)/(0|-?[1-9][0-9]*)$", r"\\frac{\1}{\2}", result)


def minerva_spelling(answer: str) -> str:
    """Return the spelling of Minerva's protocol: what follows the last "=", without units and markup."""
    answer = answer.rpartition("=")[2]
    for before, after in _MINERVA_FIRST:
        answer = answer.replace(before, after)
    for ignored in _IGNORED:
        answer = ignored.sub("", answer)
    answer = re.sub(r".*?\$(.*?)\$.*", r"$\1$", answer)
    for command in ("text", "textbf", "overline"):
        answer = re.sub(rf"\\{command}{{(.*?)}}", r"\1", answer)
    answer = re.sub(r"\\boxed{(.*)}", r"\1", answer)
    answer = re.sub(r"frac([^{])(.)", r"frac{\1}{\2}", answer)
    answer = re.sub(r"sqrt([^{])", r"sqrt{\1}", answer).replace("$", "")
    digits = answer.replace(",", "")
    return (digits if digits.isdigit() else answer).strip()
