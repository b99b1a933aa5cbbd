r"""Short results: GSM8K's number, Countdown's equation, a choice's letter, a search question's words; and where a text
has any result, in \boxed{...}, in an <answer> tag or on a line "Answer: ...", found in linear time.
"""

import ast
import operator
import re
import string
from collections import Counter
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from hybridrl.config import ConfigError

# It starts with a digit, so that a run of dots and commas is neither a result nor slow to search.
_NUMBER = r"-?\.?[0-9][0-9.,]*"
_NUMBERS = {"strict": re.compile(rf"#### ({_NUMBER})"), "flexible": re.compile(rf"({_NUMBER})")}
_MAX_LENGTH = 200  # characters of an equation, or of a text with a letter
_EQUATION = re.compile(r"[0-9+\-*/() ]+")
_OPERATIONS: dict[type, Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_LETTER = re.compile(r"\W*(?:\\text\w*\{)?\W*([A-Za-z])(?![A-Za-z'])")  # B; (b); **B**; \text{B}; B. because
_STATED_LETTER = re.compile(r"\b(?:answer|choice|option)\b(?: is|:|\s)*\W{0,4}([A-Za-z])\b", re.IGNORECASE)
_SINGLE_LETTER = re.compile(r"\W*([A-Z])\W*")
_THOUGHT_THEN_BOX = re.compile(r"<think>.*</think>.*\\boxed\{.*\}.*", re.DOTALL)
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_MAX_TAGS = 10
_BOX_OR_BRACE = re.compile(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)  # an escaped brace belongs to its backslash
_BETWEEN = re.compile(r"(?:[\s$,;]|\\quad|\\[()\[\]]|\\text\s*\{\s*(?:and|or)\s*\}|and\b|or\b)*")
_MAX_BETWEEN = 60
_BARE_BOX = re.compile(r"\\(?:boxed|fbox) +([^\s{$][^$\n]*)")
_ANSWER_MARK = re.compile(r"answer\**\s*:", re.IGNORECASE)
_WORD_CHARACTER = re.compile(r"[^\W_]")


def score_gsm8k(
    solution_str: str, ground_truth: Any, method: str = "strict", format_score: float = 0.0, score: float = 1.0
) -> float:
    """Return `score` if the last number is the ground truth, `format_score` for another number, 0 without one.

    "strict" searches for numbers after "#### ", "flexible" for any. A ground truth may be a whole solution of the
    dataset, which ends with such a number. The complete response is searched; verl
    reads its last 300 characters and so misses a correct result that more text follows.
    """
    if method not in _NUMBERS:
        raise ConfigError(
            f"reward.custom_reward_function.reward_kwargs.method={method}: unknown for GSM8K",
            fix=f"choose {' or '.join(_NUMBERS)}",
        )
    numbers = _NUMBERS[method].findall(solution_str)
    if not numbers:
        return 0.0
    return (
        score if _plain_number(numbers[-1]) == _plain_number(str(ground_truth).rpartition("#### ")[2]) else format_score
    )


def _plain_number(number: str) -> str:
    """Return 1875 for 1,875. and $1875; 18.00 is not 18."""
    return number.strip().replace(",", "").replace("$", "").rstrip(".")


def score_countdown(
    solution_str: str, ground_truth: Mapping[str, Any], format_score: float = 0.1, score: float = 1.0
) -> float:
    """Return `score` for a correct equation in <answer> tags, `format_score` for any other with a value, else 0.

    The ground truth is {"target": 24, "numbers": [1, 2, 3, 4]}.
    """
    equation = (last_tagged(solution_str) or "").partition("=")[0].strip()
    value = equation_value(equation)
    if value is None:
        return 0.0
    used = Counter(int(number) for number in re.findall("[0-9]+", equation))
    right = used == Counter(int(number) for number in ground_truth["numbers"]) and value == ground_truth["target"]
    return score if right else format_score


def equation_value(equation: str) -> Fraction | None:
    """Return the exact value of integers joined by + - * / and brackets; None for anything else and for x / 0."""
    if len(equation) > _MAX_LENGTH or not _EQUATION.fullmatch(equation):
        return None
    try:
        return _value(ast.parse(equation, mode="eval").body)
    except (SyntaxError, ZeroDivisionError, TypeError, RecursionError, MemoryError):
        return None


def _value(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=int(number)):
            return Fraction(number)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.BinOp(left=left, op=operation, right=right) if type(operation) in _OPERATIONS:
            return _OPERATIONS[type(operation)](_value(left), _value(right))
    raise TypeError("not an operation of Countdown")  # ** and // too


def score_multiple_choice(solution_str: str, ground_truth: Any) -> dict[str, Any]:
    r"""Return 1 for the right letter, else 0; `pred` is the letter in the response.

    It is searched in the last \boxed{...}, in <answer> tags, after "answer", "choice" or "option", and in a
    last line of one letter, in this order. The ground truth is a letter, or the index of the choice from 0.
    """
    letter = chosen_letter(solution_str)
    truth = chr(ord("A") + ground_truth) if isinstance(ground_truth, int) else str(ground_truth).strip("() .").upper()
    right = float(letter != "" and letter == truth)
    return {"score": right, "acc": right, "pred": letter}


def chosen_letter(text: str) -> str:
    """Return the chosen letter in upper case, or an empty text."""
    for marked in (last_boxed(text), last_tagged(text)):
        if marked is not None:
            letter = _LETTER.match(marked[:_MAX_LENGTH])
            return letter[1].upper() if letter else ""
    if stated := _STATED_LETTER.findall(text):
        return stated[-1].upper()
    single = _SINGLE_LETTER.fullmatch(text.strip().rpartition("\n")[2])
    return single[1] if single else ""


def score_search_qa(solution_str: str, ground_truth: Any, format_score: float = 0.0, score: float = 1.0) -> float:
    """Return `score` for a match up to case, articles and punctuation, `format_score` for another answer, else 0.

    The ground truth is a text, several, or either under "target". A response with more than ten tags gets a quarter, as
    in verl, since it lists guesses.
    """
    answer = last_tagged(solution_str)
    if answer is None:
        return 0.0
    accepted = ground_truth["target"] if isinstance(ground_truth, Mapping) else ground_truth
    accepted = [accepted] if isinstance(accepted, str) else accepted
    if normalised(answer) not in {normalised(str(other)) for other in accepted}:
        return format_score
    tags = max(solution_str.count("<answer>"), solution_str.count("</answer>"))
    return score / 4 if tags > _MAX_TAGS else score


def normalised(text: str) -> str:
    """Return a text in lower case without articles, punctuation and repeated spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


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


def thinks_then_boxes(predict_str: str) -> float:
    """Return 1 if <think>...</think> begins the response and a box follows, else 0."""
    return float(_THOUGHT_THEN_BOX.fullmatch(predict_str) is not None)


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


def score_nothing(solution: str, ground_truth: object) -> dict[str, float]:
    """Return 0 without any component, for rows that learn from teachers alone."""
    return {"score": 0.0}
