r"""Results compared as texts, with verl's verdicts: what counts as the same spelling in MATH and in Minerva's protocol.

No mathematics: 2/4 is not 1/2. `math.py` compares expressions, and takes an equal spelling as a shortcut.
"""

import re

_BRACE = re.compile(r"[{}]")
_UNITS = [
    "cents",
    "childrentickets",
    "cm",
    "degrees",
    "digits",
    "dollars",
    "edges",
    "feet",
    "gm",
    "hours",
    "inches",
    "integers",
    "km",
    "meals",
    "meters",
    "minutes",
    "mph",
    "multiples",
    "points",
    "pounds",
    "square",
    "students",
    "sue",
    "units",
    "ways",
]
# What is left of markup once the units are gone, and what says nothing either.
_MARKUP = [
    *(r"\text{}^2", r"\text{}^3", r"\text{s}", r"\text{.}", "\\text{\ns}", "\\text{\n}", r"\text{}", r"\mathrm{th}"),
    *(r"^{\circ}", r"^\circ", r"\ldots", r"\dots", r"\;", r",\!", "{,}", '"'),
]
_SILENT = [re.compile("|".join(map(re.escape, words))) for words in (_UNITS, _MARKUP)]
_MINERVA_FIRST = [
    *(("an ", ""), ("a ", ""), (".$", "$"), (r"\$", ""), (r"\ ", ""), (" ", ""), ("mbox", "text")),
    *((r",\text{and}", ","), (r"\text{and}", ","), (r"\text{m}", r"\text{}")),
]
_MATH_FIRST = [
    *(("\n", ""), (r"\!", ""), ("\\\\", "\\"), ("tfrac", "frac"), ("dfrac", "frac"), (r"\left", ""), (r"\right", "")),
    *((r"^{\circ}", ""), (r"^\circ", ""), (r"\$", "")),
]


def last_box(text: str, commands: tuple[str, ...] = (r"\boxed{",)) -> str | None:
    r"""The last \boxed{...} with its command, or None; also where it never closes."""
    start = next((place for command in commands if (place := text.rfind(command)) >= 0), -1)
    depth = 0
    for brace in _BRACE.finditer(text, start) if start >= 0 else ():
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return text[start : brace.end()]
    return None


def math_box(text: str) -> str | None:
    r"""The last \boxed{...}, or \fbox{...} where there is none; "\boxed 4" reaches to a dollar sign or the end."""
    _, bare, after = text.rpartition(r"\boxed ")
    return bare + after.partition("$")[0] if bare else last_box(text, (r"\boxed", r"\fbox"))


def unboxed(box: str) -> str:
    r"""What a \boxed{...} holds; AssertionError for any other text, as in verl, whose callers catch it."""
    assert box.startswith(r"\boxed{") and box.endswith("}"), f"not a box: {box:.80}"
    return box[len(r"\boxed{") : -1]


def math_unboxed(box: str) -> str:
    r"""As `unboxed`; also of "\boxed 4"."""
    return box.removeprefix(r"\boxed ") if box.startswith(r"\boxed ") else unboxed(box)


def same_in_math(first: str | None, second: str | None) -> bool:
    """Whether MATH's rules write both results alike; two absent results are alike."""
    if first is None or second is None:
        return first is second
    return math_spelling(first) == math_spelling(second)


def math_spelling(result: str) -> str:
    r"""A result as MATH writes it: \frac{1}{2} for \dfrac12, 1/2 and 0.5; no units, degrees, percent, money, spaces."""
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
    """An answer as Minerva's protocol writes it: what stands after the last "=", without units and markup."""
    answer = answer.rpartition("=")[2]
    for before, after in _MINERVA_FIRST:
        answer = answer.replace(before, after)
    for silent in _SILENT:
        answer = silent.sub("", answer)
    answer = re.sub(r".*?\$(.*?)\$.*", r"$\1$", answer)
    for command in ("text", "textbf", "overline"):
        answer = re.sub(rf"\\{command}{{(.*?)}}", r"\1", answer)
    answer = re.sub(r"\\boxed{(.*)}", r"\1", answer)
    answer = re.sub(r"frac([^{])(.)", r"frac{\1}{\2}", answer)
    answer = re.sub(r"sqrt([^{])", r"sqrt{\1}", answer).replace("$", "")
    digits = answer.replace(",", "")
    return (digits if digits.isdigit() else answer).strip()
