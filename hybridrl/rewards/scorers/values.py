"""Compare the values of two parsed results where math-verify's rule does not decide: small numbers, and roots.

math-verify rounds decimals to six places and calls exact numbers equal whose difference is about 0, so that all numbers
below a millionth are equal to it; and it takes symbols for complex numbers, of which the square root of 1/n is another
number than one over the square root of n.
"""

import math
from collections.abc import Mapping, Sequence
from decimal import Decimal
from itertools import product
from typing import Any

from sympy import Basic, Expr, FiniteSet, Float, Interval, Pow, Tuple, default_sort_key
from sympy.core.evalf import PrecisionExhausted
from sympy.core.relational import Relational

PLACES, DIGITS = 6, 3  # a decimal is compared in six places, or in three digits where that is more
EXACT = 1e-12  # the relative difference of two exact numbers from which they differ
MOST_SYMBOLS = 3
# Where expressions are compared: numbers without a simple relation to one another or to a coefficient.
POINTS = (0.7390851332, 2.2360679775, 5.0265482457, 1.3247179572)

Parsed = Sequence[Any]  # what math-verify's parser returns: an expression of sympy first


def same_number(result: Parsed, truth: Parsed) -> bool | None:
    """Whether two real numbers are equal: decimals to six places or three digits; None if one of them is no number."""
    return _same(result[0], truth[0]) if result and truth else None


def has_other_number(result: Parsed, truth: Parsed) -> bool:
    """Whether a list, set, interval or equation has another number at the same place."""
    return bool(result and truth) and _has_other(result[0], truth[0])


def _has_other(one: Any, other: Any) -> bool:
    if isinstance(one, Expr) and isinstance(other, Expr):
        return _same(one, other) is False
    if isinstance(one, Relational) and isinstance(other, Relational):
        return one.lhs == other.lhs and _has_other(one.rhs, other.rhs)
    for kind in (FiniteSet, Tuple, Interval):
        if isinstance(one, kind) and isinstance(other, kind) and len(one.args) == len(other.args):
            ordered = [sorted(side.args, key=_place) if kind is FiniteSet else side.args for side in (one, other)]
            return any(map(_has_other, *ordered))
    return False


def _place(element: Basic) -> Any:
    value = _value(element)
    return (0, value) if value is not None else (1, default_sort_key(element))


def _same(one: Any, other: Any) -> bool | None:
    first, second = _value(one), _value(other)
    if first is None or second is None:
        return None
    largest = max(abs(first), abs(second))
    if abs(first - second) <= EXACT * largest:
        return True
    if not (one.has(Float) or other.has(Float)):
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
    one, other = result[0], truth[0]
    if not all(isinstance(side, Expr) and _has_root(side) for side in (one, other)):
        return False
    symbols = sorted(one.free_symbols, key=str)
    if not 0 < len(symbols) <= MOST_SYMBOLS or {str(s) for s in symbols} != {str(s) for s in other.free_symbols}:
        return False
    compared = 0
    for start, signs in enumerate(product((1, -1), repeat=len(symbols))):
        for shift in range(2):
            at = {
                str(s): sign * POINTS[(start + shift + n) % len(POINTS)]
                for n, (s, sign) in enumerate(zip(symbols, signs, strict=True))
            }
            values = [_real_at(side, at) for side in (one, other)]
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
