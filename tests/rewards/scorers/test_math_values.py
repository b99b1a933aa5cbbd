r"""Numbers of every size have the value that is written: small ones, powers of ten, constants, roots."""

import pytest

from hybridrl.rewards.scorers.math import is_equal

# Numbers of any size are compared to six places or three digits.
DIFFERENT = [
    ("0.0000104", "0.00001"),
    ("0.00000149", r"\frac{1}{1000000}"),
    (r"6.6\times 10^{-34}", r"1.6\times 10^{-19}"),
    ("0.00000007", r"\frac{1}{2004}"),
    (r"\frac{1}{2^{99}}", r"\frac{1}{2^{98}}"),
    (r"\frac{2^{2005}+1}{3\cdot 2^{2006}}", r"\frac{1}{3\cdot 2^{2006}}"),
    ("0", "1e-7"),
    ("-1e-7", "1e-7"),
    ("e^{-20}", "2.07e-9"),
    ("(0.00001, 2)", "(0.0000104, 2)"),
    (r"\{0.0000001, 3\}", r"\{3, 0.0000002\}"),
    ("[0, 0.0000001)", "[0, 0.0000002)"),
    ("x=0.0000001", "x=0.0000002"),
    (r"\sqrt{x^2}", "x"),  # |x|
    (r"\sqrt{x+1}", r"\sqrt{x}+1"),
    (r"\sqrt{x}", r"\sqrt{y}"),
]
EQUAL = [
    ("0.00000010", "0.0000001"),
    ("0.000977", r"\frac{1}{1024}"),  # 0.0009765625
    ("0.333333", r"\frac{1}{3}"),
    ("e^{-20}", "2.06e-9"),  # 2.0612e-9
    (r"\sin(\pi)", "0"),
    (r"\{0.0000001, 3\}", r"\{3, 10^{-7}\}"),
    (r"-x \ge -1", r"x \le 1"),
    (r"\frac{x^2}{16}+\frac{y^2}{12}=\frac{1}{4}", r"\frac{x^2}{4}+\frac{y^2}{3}=1"),
    (r"\sqrt{\frac{1}{n}}", r"\frac{1}{\sqrt{n}}"),
    (r"\frac{\sqrt{n}}{n}", r"\frac{1}{\sqrt{n}}"),
    (r"\sqrt{x^2}", "|x|"),
]


@pytest.mark.parametrize(
    ("result", "truth", "equal"), [*((*pair, False) for pair in DIFFERENT), *((*pair, True) for pair in EQUAL)]
)
def test_numbers_and_roots_are_equal_that_have_the_same_value_as_precisely_as_written(result, truth, equal):
    assert is_equal(result, truth) is equal and is_equal(truth, result) is equal


@pytest.mark.parametrize("written", ["6.1e31", "6.1E+31", r"6.1\times 10^{31}", r"6.1 \cdot 10^{31}", "61" + "0" * 30])
def test_a_power_of_ten_may_be_written_with_e(written):
    assert is_equal(written, "6.1e31") and is_equal("6.1e31", written)
    assert not is_equal(written, "6.1e32") and not is_equal(written, "6.1")


def test_the_constant_e_is_no_power_of_ten_and_may_be_upright():
    assert is_equal("1-e^{-1}", r"1-\frac{1}{\mathrm{e}}")
    assert is_equal(r"3\mathrm{e}", "3e") and not is_equal("3", r"3\mathrm{e}")
    assert not is_equal(r"1+\frac{1}{\mathrm{e}}", "1-e^{-1}")
    assert not is_equal("2e^3", "2000")
