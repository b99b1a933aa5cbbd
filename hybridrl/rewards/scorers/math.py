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
from hybridrl.rewards.scorers.plain import POWERS, notations_differ, plain

# It warns that no time limit is set.
logging.getLogger("math_verify").setLevel(logging.ERROR)

_LONGEST = 500  # characters of a result; the longest of MATH-500 has 159, and the grammar is slow on nonsense
_TAIL = 2000  # characters of an answer in which a result outside of a box is looked for
_METHODS = ("strict", "flexible")
_INTEGER = re.compile(r"[+-]?[0-9]{1,400}")
_DELIMITED = re.compile(r"(?<!\\)(?:\$\$(.*?)\$\$|\$([^\n]+?)(?<!\\)\$|\\\((.*?)\\\)|\\\[(.*?)\\\])", re.DOTALL)
# 42; .5; 1,234.5; (3/4)*2^10; [1, 2); 5 million
_NUMBERS = re.compile(rf"(?<![A-Za-z0-9.])[-+(\[]*\.?[0-9][-+*/^()\[\]. 0-9,]*(?:(?:{'|'.join(POWERS)})\b)?")
_STATED = re.compile(r".*(?:\b(?:is|are|get|be)\b|[:=])\s*")
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
    results = _unboxed(solution_str[-_TAIL:])
    right = next((result for result in results if is_equal(result, truth)), None)
    return verdict(right or "".join(results[:1]), right is not None)


def verdict(result: str, right: bool) -> dict[str, Any]:
    return {"score": float(right), "acc": float(right), "pred": result.strip()[:_LONGEST]}


def is_equal(result: str, truth: str) -> bool:
    """Whether two results are the same number, expression, equation, set, interval, matrix or text.

    Units, signs of money and thousands separators say nothing: $1,250.00 is 1250, and 28% is 28.
    """
    result, truth = result.strip(), truth.strip()
    if not result or result == truth:
        return result != ""
    if len(result) > _LONGEST:
        return False
    result, truth = plain(result), plain(truth)
    if not result or result == truth:
        return result != ""
    if _INTEGER.fullmatch(result) and _INTEGER.fullmatch(truth):
        return int(result) == int(truth)
    if notations_differ(_EQUALS.split(result)[-1], _EQUALS.split(truth)[-1]):
        return False
    return verify(_truth(truth), _boxed(result), timeout_seconds=None) or _right_side_is(result, truth)


def _right_side_is(equation: str, truth: str) -> bool:
    """Whether an equation gives the truth at its end; math-verify asks that only of equations that it can read."""
    sides = _EQUALS.split(equation)
    return len(sides) > 1 and not _EQUALS.search(truth) and is_equal(sides[-1], truth)


@functools.lru_cache(maxsize=4096)
def _truth(truth: str) -> list[Any]:
    return parse(truth, _LATEX, parsing_timeout=None) if _DELIMITED.search(truth) else _boxed(truth)


def _boxed(latex: str) -> list[Any]:
    return parse(f"\\boxed{{{latex}}}", _LATEX, parsing_timeout=None)


def _unboxed(text: str) -> list[str]:
    """What the text may give as its result: its last LaTeX between delimiters, or numbers where they follow it.

    Without delimiters also what its last line states: "... is x^2 + 1."
    """
    enclosed = list(_DELIMITED.finditer(text))
    numbers = _NUMBERS.findall(text, max(enclosed[-1].end() if enclosed else 0, text.rfind("$") + 1))
    number = [numbers[-1].rstrip(" ,.")] if numbers else []
    number = [found if "," in found else found.strip("[] ") for found in number]
    if enclosed:
        return number or [next(filter(None, enclosed[-1].groups()), "")]
    line = text.strip().rpartition("\n")[2]
    stated = [line[found.end() :].rstrip(" .")] if (found := _STATED.match(line)) else []
    return (stated or [line]) if "\\" in text else [*stated, *number]
