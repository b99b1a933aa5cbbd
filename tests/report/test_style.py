"""The page's colours: every text can be read on every background, in the light and in the dark."""

import re
from pathlib import Path

import pytest

CSS = (Path(__file__).parents[2] / "hybridrl" / "report" / "page.css").read_text(encoding="utf-8")
READABLE, VISIBLE = 4.5, 3.0  # of text, and of lines, by WCAG 2.2
TEXTS = ("ink", "soft", "faint", "accent", "good", "fair", "bad")
BACKGROUNDS = ("paper", "card", "hush", "tint", "bad-tint")
LINES = ("accent", "soft", *(f"run{number}" for number in range(1, 8)))


def colours(theme: int) -> dict[str, tuple[float, ...]]:
    """The variables of the light (0) or the dark (1) theme, as red, green and blue from 0 to 1."""
    found: dict[str, tuple[float, ...]] = {}
    for block in re.findall(r":root \{(.*?)\}", CSS, re.DOTALL)[: theme + 1]:
        for name, value in re.findall(r"--([\w-]+): #([0-9a-f]{6}|[0-9a-f]{3})\b", block):
            pairs = re.findall("..", value if len(value) == 6 else "".join(2 * digit for digit in value))
            found[name] = tuple(int(pair, 16) / 255 for pair in pairs)
    return found


def contrast(one: tuple[float, ...], other: tuple[float, ...]) -> float:
    def luminance(colour: tuple[float, ...]) -> float:
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in colour]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    dark, light = sorted(map(luminance, (one, other)))
    return (light + 0.05) / (dark + 0.05)


def mixed(one: tuple[float, ...], other: tuple[float, ...], share: float) -> tuple[float, ...]:
    return tuple(share * a + (1 - share) * b for a, b in zip(one, other, strict=True))


def test_contrast_is_that_of_the_standard() -> None:
    assert contrast((0, 0, 0), (1, 1, 1)) == pytest.approx(21)
    assert contrast((0x76 / 255,) * 3, (1, 1, 1)) == pytest.approx(4.54, abs=0.01)  # the lightest grey on white


def test_no_text_has_a_colour_of_its_own() -> None:
    used = re.findall(r"(?<![\w-])(?:color|fill): ([^;}]+)[;}]", CSS)
    known = {f"var(--{name})" for name in TEXTS} | {"inherit", "none", "var(--c)"}  # --c: lines and areas
    assert {*used} <= known


@pytest.mark.parametrize("theme", [0, 1])
def test_every_text_is_readable_on_every_background(theme: int) -> None:
    known = colours(theme)
    low = {
        f"{text} on {background}": round(ratio, 2)
        for text in TEXTS
        for background in BACKGROUNDS
        if (ratio := contrast(known[text], known[background])) < READABLE
    }
    assert not low


@pytest.mark.parametrize("theme", [0, 1])
def test_signs_and_coloured_tokens_are_readable(theme: int) -> None:
    known = colours(theme)
    shares = {name: int(share) / 100 for name, share in re.findall(r"\.(\w+) \.sign \{.*?--\w+\) (\d+)%", CSS)}
    assert shares.keys() == {"good", "fair", "bad"}
    for name, share in shares.items():
        assert contrast(known[name], mixed(known[name], known["paper"], share)) >= READABLE, name
    strongest = int(re.search(r"calc\(var\(--v, 0\) \* (\d+)%\)", CSS)[1]) / 100
    for name in ("accent", "bad", "fair"):
        assert contrast(known["ink"], mixed(known[name], known["card"], strongest)) >= READABLE, name


@pytest.mark.parametrize("theme", [0, 1])
def test_every_line_is_visible(theme: int) -> None:
    known = colours(theme)
    assert not [name for name in LINES if contrast(known[name], known["card"]) < VISIBLE]
