r"""Competition mathematics (MATH, AIME, AMC, Numina): is the result the same expression as the ground truth?

Equality is the library math-verify's, which reads LaTeX by a grammar into sympy. Its reader of plain expressions is
never used, since that one evaluates the text as Python. No time limit here: the scoring process has one.
"""

import functools
import logging
import re
from typing import Any

from math_verify import LatexExtractionConfig, parse, verify

from hybridrl.config import ConfigError
from hybridrl.rewards.scorers.boxed import last_boxed

# It warns that no time limit is set.
logging.getLogger("math_verify").setLevel(logging.ERROR)

_LONGEST = 500  # characters of a result; the longest of MATH-500 has 159, and the grammar is slow on nonsense
_TAIL = 2000  # characters of an answer in which a result outside of a box is looked for
_METHODS = ("strict", "flexible")
_INTEGER = re.compile(r"[+-]?[0-9]{1,400}")
_DELIMITED = re.compile(r"\$|\\\[|\\\(")
_ENCLOSED = re.compile(r"\$\$?([^$]*)\$\$?")
# 42; .5; 1,234.5; (3/4)*2^10
_NUMBERS = re.compile(r"(?<![A-Za-z0-9.])[-+(]*\.?[0-9][-+*/^(). 0-9,]*")
_PERCENT = re.compile(r"\s*(?:\\?%|\bpercent(?:age)?\b)")
_EQUALS = re.compile(r"(?<![<>!:=])=(?!=)")
_LATEX = [LatexExtractionConfig()]


def compute_score(solution_str: str, ground_truth: Any, method: str = "strict") -> dict[str, Any]:
    r"""1 where the last \boxed{...} equals the ground truth, else 0; `pred` is what stands in it.

    "flexible" also takes an answer without a box: its last LaTeX expression, or numbers that stand after that.
    The ground truth is LaTeX, with or without \boxed or $; of a list of them any may be met.
    """
    if isinstance(ground_truth, list) and ground_truth:
        return max(
            (compute_score(solution_str, truth, method) for truth in ground_truth), key=lambda found: found["acc"]
        )
    if method not in _METHODS:
        raise ConfigError(f"reward_kwargs.method={method}: results are read by one of {', '.join(_METHODS)}")
    result, truth = last_boxed(solution_str), str(ground_truth)
    if result is not None or method == "strict":
        return verdict(result or "", is_equal(result or "", truth))
    found = _unboxed(_PERCENT.sub("", solution_str[-_TAIL:]))
    right = bool(found) and verify(_truth(_PERCENT.sub("", truth)), found, timeout_seconds=None)
    result = str(found[-1]) if found else ""
    return verdict(result, right or _right_side_is(result, truth))


def verdict(result: str, right: bool) -> dict[str, Any]:
    return {"score": float(right), "acc": float(right), "pred": result.strip()[:_LONGEST]}


def is_equal(result: str, truth: str) -> bool:
    """Whether two results are the same number, expression, equation, set, interval, matrix or text; 28% is 28."""
    result, truth = result.strip(), truth.strip()
    if not result or result == truth:
        return result != ""
    if len(result) > _LONGEST:
        return False
    result, truth = _PERCENT.sub("", result), _PERCENT.sub("", truth)
    if _INTEGER.fullmatch(result) and _INTEGER.fullmatch(truth):
        return int(result) == int(truth)
    return verify(_truth(truth), _boxed(result), timeout_seconds=None) or _right_side_is(result, truth)


def _right_side_is(equation: str, truth: str) -> bool:
    """Whether an equation gives the truth at its end; math-verify asks that only of equations that it can read."""
    sides = _EQUALS.split(equation)
    return len(sides) > 1 and not _EQUALS.search(truth) and is_equal(sides[-1], truth)


@functools.lru_cache(maxsize=4096)
def _truth(truth: str) -> list[Any]:
    boxed, enclosed = last_boxed(truth), _ENCLOSED.fullmatch(truth.strip())
    if boxed is None and not enclosed and _DELIMITED.search(truth):
        return parse(truth, _LATEX, parsing_timeout=None)
    return _boxed(boxed if boxed is not None else enclosed[1] if enclosed else truth)


def _boxed(latex: str) -> list[Any]:
    return parse(f"\\boxed{{{latex}}}", _LATEX, parsing_timeout=None)


def _unboxed(text: str) -> list[Any]:
    """What the text says last: a LaTeX expression, or numbers where none follows them."""
    delimiters = [match.start() for match in _DELIMITED.finditer(text)]
    if not delimiters and "\\" in text:
        return _boxed(text.strip().rpartition("\n")[2][:_LONGEST])
    last = delimiters[-1] if delimiters else -1
    numbers = [match[0] for match in _NUMBERS.finditer(text, last + 1)]
    if numbers:
        return _boxed(numbers[-1].rstrip(" ,."))
    return parse(text, _LATEX, parsing_timeout=None) if delimiters else []
