"""An object that a program returns decides no assert of a test, by whichever method, and learns no expected value."""

import contextlib
import operator

import pytest

from hybridrl.rewards.sandbox.run import ProgramLimits, run
from hybridrl.rewards.scorers.code import compute_score

LIMITS = ProgramLimits(seconds=5.0, total_seconds=120.0)
# An object with every method that an operator or a builtin calls. It returns what it was compared with, or what passes.
FORGER = """
seen = [0]
class Forged:
    def __init__(self, *arguments): pass
    def __getattr__(self, name): return lambda *a: True
    def __hash__(self): return hash(seen[-1])
    __bool__ = lambda self: True
    __iter__ = lambda self: iter([self])
    __call__ = lambda self, *a: self
def returning_what_it_saw(self, *others):
    seen.extend(others)
    return seen[-1]
def agreeing(self, other):
    seen.append(other)
    return True
def zero(self, *others):
    seen.extend(others)
    return 0
for name in ("eq", "ne", "lt", "le", "gt", "ge", "contains", "instancecheck"):
    setattr(Forged, f"__{name}__", agreeing)
for name in "add sub mul truediv floordiv mod divmod pow matmul and or xor lshift rshift".split():
    for kind in ("", "r", "i"):
        setattr(Forged, f"__{kind}{name}__", zero)
for name in "abs neg pos invert int float complex index round floor ceil trunc len format str repr getitem".split():
    setattr(Forged, f"__{name}__", returning_what_it_saw)
def f(*x): return Forged()
class np: allclose = isclose = array_equal = lambda *a, **k: True
numpy, pytest = np, np
class Counter(Forged): pass
Decimal = Fraction = deque = Counter
isclose = isnan = approx = lambda *a, **k: True
"""


def on_numbers(count: int) -> list[str]:
    """The functions of the operator module that take this many numbers, except those that ask only for the truth."""
    names = []
    for name in set(dir(operator)) - {"truth", "not_", "length_hint"}:
        with contextlib.suppress(TypeError, AttributeError):
            if not name.startswith("_") and isinstance(getattr(operator, name)(*[11] * count), int | float):
                names.append(name)
    return sorted(names)


# What passes if r, the value of f(1), is 11.
NUMBERS = """
r == 11; 11 == r; r != 12; not r != 11; r < 12; not r < 10; 10 < r < 12; 0 <= r; r is not None and r + 1 == 12
r in [11]; r in (11,); r in {11}; r in {11: 0}; r not in [12]; 11 in [r]; [r].count(11) == 1; any(x == r for x in [11])
[r] == [11]; (1, r) == (1, 11); {"a": r} == {"a": 11}; {r} == {11}; {11: "x"}[r] == "x"; list(range(12))[r] == 11
abs(r - 11) < 1e-6; abs(11 - r) < 1e-6; -1e-6 < r - 11 < 1e-6; (r - 11) ** 2 < 1e-9; not r - 11; bool(r - 11) is False
abs(r) == 11; round(r) == 11; round(r, 2) == 11; round(abs(r - 11), 3) == 0; divmod(r, 3) == (3, 2); pow(r, 2, 5) == 1
int(r) == 11; float(r) == 11; complex(r) == 11; bin(r) == "0b1011"; hash(r) == hash(11); [7] * r == [7] * 11
str(r) == "11"; repr(r) == "11"; f"{r:.1f}" == "11.0"; "%.1f" % r == "11.0"; "%d" % r == "11"; isinstance(r, int)
max(r, 10) == 11; min(r, 12) == 11; sorted([r, 12]) == [11, 12]; sum([r]) == 11; max([r]) == 11; type(r) is int
math.isclose(r, 11); math.fabs(r - 11) < 1e-6; math.floor(r) == 11; math.dist([r], [11]) < 1e-6; isclose(r, 11)
Counter([r]) == Counter([11]); Decimal(r) == Decimal(11); deque([r]) == deque([11]); statistics.mean([r, 11]) == 11
unittest.TestCase().assertAlmostEqual(r, 11) is None; unittest.TestCase().assertIn(r, [11]) is None
"""
# What passes if it is [1, 2, 3].
LISTS = """
r == [1, 2, 3]; r + [4] == [1, 2, 3, 4]; [0] + r == [0, 1, 2, 3]; r * 2 == [1, 2, 3] * 2; r < [2]; r[0] + 1 == 2
list(r) == [1, 2, 3]; tuple(r) == (1, 2, 3); set(r) == {1, 2, 3}; sorted(r) == [1, 2, 3]; [*r] == [1, 2, 3]; 2 in r
len(r) == 3; sum(r) == 6; max(r) == 3; min(r) == 1; 4 not in r and len(r) == 3; r[1:] == [2, 3]
[x + 1 for x in r] == [2, 3, 4]; list(map(abs, r)) == [1, 2, 3]; all(map(lambda x: x < 4, r)); any(x > 2 for x in r)
Counter(r) == Counter([1, 2, 3]); all(isinstance(x, int) for x in r); operator.countOf(r, 2) == 1
"""


def passing(program: str, expressions: list[str]) -> list[str]:
    """Return those of the expressions of r = f(1) whose assert the program passes."""
    outputs = run(program, [f"r = f(1)\nassert {text}" for text in expressions], LIMITS, "asserts")
    return [text for text, output in zip(expressions, outputs, strict=True) if output is not None]


@pytest.mark.parametrize(("texts", "value"), [(NUMBERS, 11), (LISTS, [1, 2, 3])], ids=["number", "list"])
def test_an_object_with_every_method_passes_no_assert_that_a_plain_value_passes(texts, value):
    expressions = [text.strip() for text in texts.replace("\n", ";").split(";") if text.strip()]
    assert passing(f"def f(x): return {value}", expressions) == expressions
    assert passing(FORGER, expressions) == []


def test_an_object_with_every_method_passes_no_function_of_the_operator_module():
    expressions = [f"operator.{name}(r) == operator.{name}(11)" for name in on_numbers(1)]
    for arguments in ("r, 11", "11, r"):
        expressions += [f"operator.{name}({arguments}) == operator.{name}(11, 11)" for name in on_numbers(2)]
    assert len(expressions) > 50
    assert passing("def f(x): return 11", expressions) == expressions
    assert passing(FORGER, expressions) == []


DEVIATION = """
class Deviation:
    __sub__ = __rsub__ = lambda self, other: Deviation()
    __abs__ = lambda self: 0.0
    __lt__ = __gt__ = __eq__ = lambda self, other: True
def f(numbers): return Deviation()
"""


@pytest.mark.parametrize(
    ("program", "test"),
    [
        (DEVIATION, {"test": "def check(g):\n    assert abs(g([1.0, 2.0]) - 0.5) < 1e-6", "entry_point": "f"}),
        (DEVIATION, "def equal(a, b): return abs(a - b) <= 1e-6 * max(abs(a), abs(b))\nassert equal(f([1]), 11)"),
        (DEVIATION, "assert all(abs(a - b) < 1e-6 for a, b in zip([f([1])], [11], strict=True))"),
        ("def f(x): raise StopIteration", "assert all(map(lambda x: f(x) == 11, [1, 2]))"),
        ("def f(x): raise StopIteration", "assert sum(1 for _ in iter(lambda: f(1), 11)) == 0"),
        ("abs = lambda x: 0\ndef sqrt(x): return 5", "assert abs(sqrt(4) - 2) < 1e-6"),
        ("def sorted(x): return 5", "xs = [2, 1]\nassert sorted(xs) == [1, 2]"),
        (
            "class numpy: allclose = lambda *a: True\ndef f(x): return 5",
            "import numpy\nassert numpy.allclose(f(1), 11)",
        ),
        ("class np: allclose = lambda *a: True\ndef f(x): return 5", "assert np.allclose(f(1), 11)"),
        ("def isclose(*a): return True\ndef f(x): return 5", "assert isclose(f(1), 11)"),
        (
            "class E: __eq__ = lambda *a: True\ndef f(x): return E()\ndef Counter(x): return E()",
            "assert Counter(f(1)) == Counter('a')",
        ),
        (
            "class M(type): __instancecheck__ = lambda *a: True\nclass P(metaclass=M): pass\ndef f(x): return 5",
            "assert isinstance(f(1), P)",
        ),
    ],
)
def test_a_test_that_computes_with_a_result_is_not_passed_by_deceit(program, test):
    assert compute_score(f"```python\n{program}\n```", test)["acc"] == 0.0


def test_a_program_sees_no_value_that_its_object_is_compared_with():
    test = """
r, expected = f(1), 11
for use in (lambda: r - expected, lambda: expected - r, lambda: r == expected, lambda: r < expected,
            lambda: expected in r, lambda: r in [expected], lambda: isinstance(expected, r), lambda: round(r, 11)):
    try:
        use()
    except TypeError:
        pass
assert seen_values() == [0]
"""
    program = FORGER + "def seen_values(): return seen\n"
    assert run(program, [test], LIMITS, "asserts") == [""]
