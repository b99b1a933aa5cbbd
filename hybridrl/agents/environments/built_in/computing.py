"""Tools that compute: a calculator, which is arithmetic of numbers without eval, and Python in the sandbox that runs
the programs of rewards: no files, no network, limits of time and memory."""

import ast
import json
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hybridrl.agents.environments import Schema, ToolError, schema_of_texts
from hybridrl.agents.environments.tools import Tool
from hybridrl.rewards.sandbox.run import ProgramLimits, check_sandbox, run

CALCULATOR = schema_of_texts(
    "calculator",
    "Evaluate an arithmetic expression, such as (3 + 4) * 2.5.",
    expression="Numbers, + - * / // % ** and parentheses; sqrt, log, exp, sin, cos, tan, floor, ceil, round, abs, min, "
    "max; pi, e.",
)
PYTHON = schema_of_texts(
    "python",
    "Run Python code and return what it prints. The standard library can be imported.",
    code="The code to run.",
)
LAST_LINES = 3  # of a traceback
# Runs the earlier cells in silence, then the last one; a last expression is printed, and an exception is printed short.
_PROGRAM = """
import ast, contextlib, io, json, sys, traceback
cells = json.loads({cells!r})
names = {{"__name__": "__main__"}}
def execute(code):
    tree = ast.parse(code, "<cell>")
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "<cell>", "exec"), names)
    if last is not None:
        value = eval(compile(ast.Expression(last.value), "<cell>", "eval"), names)
        if value is not None:
            print(repr(value))
for cell in cells[:-1]:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(BaseException):
        execute(cell)
try:
    execute(cells[-1])
except SystemExit:
    pass
except BaseException:
    lines = traceback.format_exc().rstrip().split("\\n")
    print("\\n".join(lines[-{last_lines}:]))
"""
LONGEST, LARGEST_BITS, DIGITS = 1000, 10_000, 12
OPERATIONS: dict[type, Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: lambda base, exponent: _power(base, exponent),
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}
FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{name: getattr(math, name) for name in ("sqrt", "log", "log2", "log10", "exp", "sin", "cos", "tan", "gcd")},
    **{"floor": math.floor, "ceil": math.ceil, "abs": abs, "min": min, "max": max},
    "round": lambda number, *digits: _round(number, *digits),
}
CONSTANTS = {"pi": math.pi, "e": math.e}


class Calculator(Tool):
    """The tool `calculator`."""

    def __init__(self, config: Mapping[str, Any], schema: Schema = CALCULATOR) -> None:
        super().__init__(schema)

    async def call(self, state: None, arguments: dict[str, Any]) -> str:
        return calculate(arguments["expression"])


def calculate(expression: str) -> str:
    """Return the value with 12 significant digits; ToolError says what cannot be calculated."""
    if len(expression) > LONGEST:
        raise ToolError(f"Error: the expression has {len(expression)} characters; at most {LONGEST} are allowed")
    text = expression.replace("^", "**").replace("\u00d7", "*").replace("\u00f7", "/")
    if "(" not in text:  # no arguments: commas separate thousands
        text = text.replace(",", "")
    try:
        value = _value(ast.parse(text.strip(), mode="eval").body)
        if isinstance(value, int):
            return str(value)
        return f"{value:.{DIGITS}g}"
    except SyntaxError:
        raise ToolError(f"Error: {expression!r:.80} is not an arithmetic expression") from None
    except (ArithmeticError, ValueError, TypeError, RecursionError, MemoryError) as error:
        raise ToolError(f"Error: {error}") from None


def _value(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return number
        case ast.Name(id=name) if name in CONSTANTS:
            return CONSTANTS[name]
        case ast.UnaryOp(op=operation, operand=operand) if type(operation) in OPERATIONS:
            return OPERATIONS[type(operation)](_value(operand))
        case ast.BinOp(left=left, op=operation, right=right) if type(operation) in OPERATIONS:
            return _bounded(OPERATIONS[type(operation)](_value(left), _value(right)))
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in FUNCTIONS:
            return _bounded(FUNCTIONS[name](*map(_value, arguments)))
    raise ValueError(f"{ast.unparse(node)!r:.80} cannot be calculated")


def _bounded(value: Any) -> Any:
    if isinstance(value, int) and value.bit_length() > LARGEST_BITS:
        raise ValueError(f"a number of more than {LARGEST_BITS} bits is too large")
    return value


def _round(number: Any, digits: int | None = None) -> Any:
    """A rounded number. Rounding to 10,000 places before the decimal point gives 0 too, but in an acceptable time."""
    return round(number, max(digits, -LARGEST_BITS) if isinstance(digits, int) else digits)


def _power(base: Any, exponent: Any) -> Any:
    """A power whose result is of a bounded size; a negative base with a fraction has no real one."""
    if (
        isinstance(base, int)
        and isinstance(exponent, int)
        and base.bit_length() * abs(exponent) > LARGEST_BITS
        and abs(base) > 1
    ):
        raise ValueError(f"{base}**{exponent} is too large".replace("\n", " ")[:100])
    result = base**exponent
    if isinstance(result, complex):
        raise ValueError(f"{base}**{exponent} is not a real number")
    return result


class Python(Tool):
    """The tool `python`; with `stateful: true` in its configuration, names of earlier calls of the episode persist.

    `seconds` (5) and `memory_mb` (512) limit a call. State is kept by running the earlier cells again.
    """

    def __init__(self, config: Mapping[str, Any], schema: Schema = PYTHON) -> None:
        super().__init__(schema)
        check_sandbox()
        self._seconds, self._memory = float(config.get("seconds", 5)), int(config.get("memory_mb", 512))
        self._stateful = bool(config.get("stateful", False))

    async def start(self, row: Mapping[str, Any]) -> list[str]:
        return []

    def call(self, state: list[str], arguments: dict[str, Any]) -> str:
        printed = run_python(arguments["code"], self._seconds, state, self._memory)
        if self._stateful:
            state.append(arguments["code"])
        return printed


def run_python(code: str, seconds: float = 5, earlier: Sequence[str] = (), memory_mb: int = 512) -> str:
    """Return what the code printed, after the cells of `earlier`; ToolError if it exceeded a limit."""
    program = _PROGRAM.format(cells=json.dumps([*earlier, code]), last_lines=LAST_LINES)
    printed = run(program, [""], ProgramLimits(seconds, memory_mb, total_seconds=2 * seconds + 5))[0]
    if printed is None:
        raise ToolError(
            f"Error: stopped at a limit: {seconds:g} s of computing, {memory_mb} MiB of memory, or 64 KiB printed"
        )
    return printed.rstrip("\n")
