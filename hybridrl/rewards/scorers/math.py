r"""Competition mathematics (MATH, AIME, AMC, Numina, DAPO): is the result the same value as the ground truth?

The library math-verify decides: it parses LaTeX into sympy with a grammar. Its parser of plain expressions is never
used, since that one evaluates the text as Python. There is no time limit here: the scoring process has one.
"""

import functools
import logging
import math
import re
from collections.abc import Mapping, Sequence
from decimal import Decimal
from itertools import product
from typing import Any

from math_verify import LatexExtractionConfig, parse, verify
from sympy import Basic, Expr, FiniteSet, Float, Interval, Pow, Tuple, default_sort_key
from sympy.core.evalf import PrecisionExhausted
from sympy.core.relational import Relational

from hybridrl.config import ConfigError
from hybridrl.rewards.scorers.short_answers import last_answer_line, last_boxed, thinks_then_boxes

# math-verify warns that no time limit is set.
logging.getLogger("math_verify").setLevel(logging.ERROR)

_ENCLOSED = re.compile(r"\s*(?:\$\$?|\\\(|\\\[)((?:\\\$|[^$])*?)(?:\$\$?|\\\)|\\\])[\s.]*", re.DOTALL)
_DOLLAR = re.compile(r"(?<!\\)\$")
_SIGNS = re.compile(r"\\\$|\\!\s*|\s*(?:\\?%|\bpercent(?:age)?\b)|\s*(?:\^\s*\{?\s*\\circ\b\s*\}?|\\degree\b|°)")
_THIN_SPACE = re.compile(r"(?<=[0-9])\\[,;: ](?=[0-9]{3})")
_THOUSANDS = re.compile(r"[+-]?[1-9][0-9]{0,2}(?:,[0-9]{3})+(?:\.[0-9]*)?")
_GAP = r"(?<=[0-9})])(?:\s|~|\\[,;:! ]|\\quad\b)*"
_UNIT_TEXT = re.compile(
    _GAP + r"\\(?:text|textrm|textbf|textit|mathrm|mbox|operatorname)\s*\{([^{}]*)\}(?:\^\{?-?[0-9]\}?)?\.?$"
)
_UNIT_WORDS = re.compile(r"(?<=[0-9})])\s+((?:[A-Za-z]{2,20}[ .]?){1,3}(?:\^?[23])?)$")
# Words after a number that are not units: they change its value, or join it to another number.
_POWERS = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_NO_UNIT = re.compile(r"\b(?:dozens?|half|halves|thirds?|pi|or|and|to|mod|base)\b")
_LEFT_RIGHT = re.compile(r"\\(?:left|right)(?![A-Za-z])\s*|\s+")
_LISTED = re.compile(r"(\\\{|[(\[]).*,.*(\\\}|[)\]])")
_BASED = re.compile(r"([0-9A-Z]+)_\{?([0-9]+)\}?")
_MAX_RESULT = 500  # characters of a result; the longest of MATH-500 has 159, and the grammar is slow on nonsense
_TAIL = 2000  # characters of a response in which a result outside a box is searched
_METHODS = ("strict", "flexible")
_INTEGER = re.compile(r"[+-]?[0-9]{1,400}")
_DELIMITED = re.compile(r"(?<!\\)(?:\$\$(.*?)\$\$|\$([^\n]+?)(?<!\\)\$|\\\((.*?)\\\)|\\\[(.*?)\\\])", re.DOTALL)
# 42; .5; 1,234.5; (3/4)*2^10; [1, 2); 5 million
_NUMBERS = re.compile(rf"(?<![A-Za-z0-9.])[-+(\[]*\.?[0-9][-+*/^()\[\]. 0-9,]*(?:(?:{'|'.join(_POWERS)})\b)?")
_STATED = re.compile(r".*(?:\b(?:is|are|get|be)\b|[:=])\s*")
# 6.1e31, where e is not a factor; and an upright constant: the grammar takes it for a name.
_SCIENTIFIC = re.compile(r"(?<![A-Za-z0-9.\\])([0-9]+(?:\.[0-9]*)?|\.[0-9]+)[eE]([+-]?[0-9]{1,4})(?![A-Za-z0-9.^_{])")
_UPRIGHT = re.compile(r"\\(?:mathrm|text|operatorname)\s*\{\s*([ei])\s*\}")
_EQUALS = re.compile(r"(?<![<>!:=])=(?!=)")
_LATEX = [LatexExtractionConfig()]
# Where math-verify's rule does not decide: it rounds decimals to six places and calls exact numbers equal whose
# difference is about 0, so that all numbers below a millionth are equal to it; and it takes symbols for complex
# numbers, of which the square root of 1/n is another number than one over the square root of n.
PLACES, DIGITS = 6, 3  # decimals are compared in six places, or in three digits if these are more
EXACT = 1e-12  # the relative difference of two exact numbers from which they differ
MOST_SYMBOLS = 3
# Where expressions are compared: numbers without a simple relation to one another or to a coefficient.
POINTS = (0.7390851332, 2.2360679775, 5.0265482457, 1.3247179572)

Parsed = Sequence[Any]  # what math-verify's parser returns: an expression of sympy first


def compute_score(solution_str: str, ground_truth: Any, method: str = "strict") -> dict[str, Any]:
    r"""Return 1 if the last \boxed{...} equals the ground truth, else 0; `pred` is its content.

    "flexible" also accepts a response without a box: its last LaTeX expression, or numbers that follow it.
    The ground truth is LaTeX, with or without \boxed or $; any element of a list is accepted.
    """
    if isinstance(ground_truth, list) and ground_truth:
        scores = [compute_score(solution_str, truth, method) for truth in ground_truth]
        return max(scores, key=lambda score: score["acc"])
    if method not in _METHODS:
        raise ConfigError(f"reward_kwargs.method={method}: unknown", fix=f"choose {' or '.join(_METHODS)}")
    result, truth = last_boxed(solution_str), str(ground_truth)
    if result is not None or method == "strict":
        return _verdict(result or "", is_equal(result or "", truth))
    results = _unboxed(solution_str[-_TAIL:])
    right = next((result for result in results if is_equal(result, truth)), None)
    return _verdict(right or "".join(results[:1]), right is not None)


def compute_dapo_score(solution_str: str, ground_truth: Any, strict_box_verify: bool = False) -> dict[str, Any]:
    r"""Return 1 if the last line "Answer: ..." or the box equals the ground truth, else -1; `acc` is 1 or 0.

    verl compares rewritten texts; here 1/2 and 0.5 are the same. With `strict_box_verify` only a box counts.
    """
    line, boxed = last_answer_line(solution_str), last_boxed(solution_str)
    result = boxed if strict_box_verify or line is None else last_boxed(line) or line.strip("*$ ").rstrip("*$. ")
    verdict = _verdict(result or "", is_equal(result or "", str(ground_truth)))
    return verdict | {"score": 1.0 if verdict["acc"] else -1.0}


def compute_geometry_score(solution_str: str, ground_truth: Any) -> dict[str, Any]:
    r"""Return 0.9 if the last \boxed{...} equals the ground truth, and 0.1 for the `form`: thoughts, then a box."""
    verdict, form = compute_score(solution_str, ground_truth), thinks_then_boxes(solution_str)
    return verdict | {"score": 0.9 * verdict["acc"] + 0.1 * form, "form": form}


def _verdict(result: str, right: bool) -> dict[str, Any]:
    return {"score": float(right), "acc": float(right), "pred": result.strip()[:_MAX_RESULT]}


def is_equal(result: str, truth: str) -> bool:
    """Whether two results are the same number, expression, equation, set, interval, matrix or text.

    Units, currency signs and thousands separators are ignored: $1,250.00 is 1250, and 28% is 28.
    """
    result, truth = result.strip(), truth.strip()
    if not result or result == truth:
        return result != ""
    if len(result) > _MAX_RESULT:
        return False
    result, truth = without_units(result), without_units(truth)
    if not result or result == truth:
        return result != ""
    if _INTEGER.fullmatch(result) and _INTEGER.fullmatch(truth):
        return int(result) == int(truth)
    if notations_differ(_EQUALS.split(result)[-1], _EQUALS.split(truth)[-1]):
        return False
    expected, parsed = _truth(truth), _boxed(result)
    if (same := same_number(parsed, expected)) is not None:
        return same
    if verify(expected, parsed, timeout_seconds=None) or same_where_real(parsed, expected):
        return not has_other_number(parsed, expected)
    # The right side of an equation may be the truth; math-verify checks that only for equations it can parse.
    sides = _EQUALS.split(result)
    return len(sides) > 1 and not _EQUALS.search(truth) and is_equal(sides[-1], truth)


@functools.lru_cache(maxsize=4096)
def _truth(truth: str) -> list[Any]:
    return parse(truth, _LATEX, parsing_timeout=None) if _DELIMITED.search(truth) else _boxed(truth)


def _boxed(latex: str) -> list[Any]:
    return parse(f"\\boxed{{{latex}}}", _LATEX, parsing_timeout=None)


def _unboxed(text: str) -> list[str]:
    """Return candidate results of a text: its last LaTeX between delimiters, or numbers that follow it.

    Without delimiters also what its last line states: "... is x^2 + 1."
    """
    enclosed = list(_DELIMITED.finditer(text))
    numbers = _NUMBERS.findall(text, max(enclosed[-1].end() if enclosed else 0, text.rfind("$") + 1))
    number = [numbers[-1].rstrip(" ,.")] if numbers else []
    number = [text if "," in text else text.strip("[] ") for text in number]
    if enclosed:
        return number or [next(filter(None, enclosed[-1].groups()), "")]
    line = text.strip().rpartition("\n")[2]
    stated = [line[match.end() :].rstrip(" .")] if (match := _STATED.match(line)) else []
    return (stated or [line]) if "\\" in text else [*stated, *number]


def without_units(result: str) -> str:
    r"""Remove delimiters, currency, percent, degrees, units and separators: 1250 for 1{,}250\text{ cm}^2 or $1,250."""
    boxed, enclosed = last_boxed(result), _ENCLOSED.fullmatch(result)
    result = boxed if boxed is not None else enclosed[1] if enclosed else result
    result = _SCIENTIFIC.sub(r"\1 \\cdot 10^{\2}", _UPRIGHT.sub(r"\1", result))
    result = _THIN_SPACE.sub("", _SIGNS.sub("", result).replace("{,}", ",")).strip()
    result = result.replace(r"\lbrace", r"\{").replace(r"\rbrace", r"\}")
    if len(_DOLLAR.findall(result)) == 1:  # currency, since delimiters come in pairs
        result = _DOLLAR.sub("", result).strip()
    for unit in (_UNIT_TEXT, _UNIT_WORDS):
        match = unit.search(result)
        if match and not _NO_UNIT.search(match[1]) and r"\text" not in result[: match.start()]:
            power = _POWERS.get(match[1].strip())
            result = result[: match.start()].strip() + (rf" \cdot 10^{{{power}}}" if power else "")
            break
    result = result.removesuffix(".").strip()
    return result.replace(",", "") if _THOUSANDS.fullmatch(result) else result


def notations_differ(result: str, truth: str) -> bool:
    """Whether two lists differ in brackets (sets are not ordered pairs, [0, 1) not [0, 1]), or two numbers in bases."""
    result, truth = _LEFT_RIGHT.sub("", result), _LEFT_RIGHT.sub("", truth)
    for notation in (_LISTED, _BASED):
        first, second = notation.fullmatch(result), notation.fullmatch(truth)
        if first and second:
            return first.groups() != second.groups()
    return False


def same_number(result: Parsed, truth: Parsed) -> bool | None:
    """Whether two real numbers are equal: decimals to six places or three digits; None if one is not a number."""
    return _same(result[0], truth[0]) if result and truth else None


def has_other_number(result: Parsed, truth: Parsed) -> bool:
    """Whether a list, set, interval or equation has another number at the same place."""
    return bool(result and truth) and _has_other(result[0], truth[0])


def _has_other(result: Any, other: Any) -> bool:
    if isinstance(result, Expr) and isinstance(other, Expr):
        return _same(result, other) is False
    if isinstance(result, Relational) and isinstance(other, Relational):
        return result.lhs == other.lhs and _has_other(result.rhs, other.rhs)
    for kind in (FiniteSet, Tuple, Interval):
        if isinstance(result, kind) and isinstance(other, kind) and len(result.args) == len(other.args):
            ordered = [sorted(side.args, key=_place) if kind is FiniteSet else side.args for side in (result, other)]
            return any(map(_has_other, *ordered))
    return False


def _place(element: Basic) -> Any:
    value = _value(element)
    return (0, value) if value is not None else (1, default_sort_key(element))


def _same(result: Any, other: Any) -> bool | None:
    first, second = _value(result), _value(other)
    if first is None or second is None:
        return None
    largest = max(abs(first), abs(second))
    if abs(first - second) <= EXACT * largest:
        return True
    if not (result.has(Float) or other.has(Float)):
        return False
    places = max(PLACES, DIGITS - 1 - Decimal(str(largest)).adjusted())
    return bool(first.round(places) == second.round(places))


def _value(number: Any) -> Float | None:
    """Return a real number's value to 30 digits; None for anything else, and for what cannot be computed to them."""
    if not isinstance(number, Expr) or number.free_symbols:
        return None
    try:
        value: Any = number.evalf(30, strict=True)
    except (PrecisionExhausted, ValueError, TypeError, ArithmeticError, AttributeError, RecursionError):
        return None
    return Float(value, 30) if value.is_Float or value.is_Integer or value.is_Rational else None


def same_where_real(result: Parsed, truth: Parsed) -> bool:
    """Whether two expressions with roots of their symbols are equal wherever one of them is a real number."""
    if not result or not truth:
        return False
    first, other = result[0], truth[0]
    if not all(isinstance(side, Expr) and _has_root(side) for side in (first, other)):
        return False
    symbols = sorted(first.free_symbols, key=str)
    if not 0 < len(symbols) <= MOST_SYMBOLS or {str(s) for s in symbols} != {str(s) for s in other.free_symbols}:
        return False
    compared = 0
    for start, signs in enumerate(product((1, -1), repeat=len(symbols))):
        for shift in range(2):
            at = {
                str(s): sign * POINTS[(start + shift + n) % len(POINTS)]
                for n, (s, sign) in enumerate(zip(symbols, signs, strict=True))
            }
            values = [_real_at(side, at) for side in (first, other)]
            if values == [None, None]:
                continue
            if None in values or not math.isclose(*values, rel_tol=1e-9):
                return False
            compared += 1
    return compared > 1


def _has_root(expression: Expr) -> bool:
    return any(
        power.exp.is_Rational and not power.exp.is_Integer and power.free_symbols for power in expression.atoms(Pow)
    )


def _real_at(expression: Any, at: Mapping[str, float]) -> float | None:
    """Return the value at a point, None if it is not real or not defined there."""
    value = expression.subs({symbol: at[str(symbol)] for symbol in expression.free_symbols}).evalf(15)
    real, imaginary = value.as_real_imag()
    if not all(part.is_Float or part.is_Integer for part in (real, imaginary)):
        return None
    return float(real) if abs(imaginary) <= 1e-9 * (1 + abs(real)) else None
