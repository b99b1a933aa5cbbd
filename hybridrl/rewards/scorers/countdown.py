"""Countdown: an equation that uses every number once and gives the target. Evaluated as a syntax tree of + - * /."""

import ast
import re
from collections import Counter
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from hybridrl.rewards.scorers.boxed import last_tagged

_LONGEST = 200
_EQUATION = re.compile(r"[0-9+\-*/() ]+")


def compute_score(
    solution_str: str, ground_truth: Mapping[str, Any], format_score: float = 0.1, score: float = 1.0
) -> float:
    """`score` for the right equation in <answer> tags, `format_score` for any other that can be worked out, else 0.

    The ground truth is {"target": 24, "numbers": [1, 2, 3, 4]}.
    """
    equation = (last_tagged(solution_str) or "").partition("=")[0].strip()
    value = evaluate(equation)
    if value is None:
        return 0.0
    used = Counter(int(number) for number in re.findall("[0-9]+", equation))
    right = used == Counter(int(number) for number in ground_truth["numbers"]) and value == ground_truth["target"]
    return score if right else format_score


def evaluate(equation: str) -> Fraction | None:
    """The exact value of whole numbers joined by + - * / and brackets; None for anything else and for x / 0."""
    if len(equation) > _LONGEST or not _EQUATION.fullmatch(equation):
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
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _value(left) + _value(right)
        case ast.BinOp(left=left, op=ast.Sub(), right=right):
            return _value(left) - _value(right)
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            return _value(left) * _value(right)
        case ast.BinOp(left=left, op=ast.Div(), right=right):
            return _value(left) / _value(right)
    raise TypeError("not an operation of Countdown")  # ** and // among them
