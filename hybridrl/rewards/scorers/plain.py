r"""A mathematical result without what says nothing about it: delimiters, money, percent, degrees, units, separators."""

import re

from hybridrl.rewards.scorers.boxed import last_boxed

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
# Words after a number that are no unit: they change its value, or join it to another.
POWERS = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_NO_UNIT = re.compile(r"\b(?:dozens?|half|halves|thirds?|pi|or|and|to|mod|base)\b")
_LEFT_RIGHT = re.compile(r"\\(?:left|right)(?![A-Za-z])\s*|\s+")
_LISTED = re.compile(r"(\\\{|[(\[]).*,.*(\\\}|[)\]])")
_BASED = re.compile(r"([0-9A-Z]+)_\{?([0-9]+)\}?")


def plain(result: str) -> str:
    r"""18.90 for \(\$18.90\), 1250 for 1{,}250\text{ cm}^2 or $1,250, 28 for 28\%, 90 for 90^\circ."""
    result = _content(result)
    result = _THIN_SPACE.sub("", _SIGNS.sub("", result).replace("{,}", ",")).strip()
    result = result.replace(r"\lbrace", r"\{").replace(r"\rbrace", r"\}")
    if len(_DOLLAR.findall(result)) == 1:  # money, since a delimiter has its partner
        result = _DOLLAR.sub("", result).strip()
    result = _without_unit(result).removesuffix(".").strip()
    return result.replace(",", "") if _THOUSANDS.fullmatch(result) else result


def notations_differ(result: str, truth: str) -> bool:
    """Whether two lists have different brackets (a set is no ordered pair, and [0, 1) not [0, 1]), or two numbers
    different bases."""
    result, truth = _LEFT_RIGHT.sub("", result), _LEFT_RIGHT.sub("", truth)
    for notation in (_LISTED, _BASED):
        first, second = notation.fullmatch(result), notation.fullmatch(truth)
        if first and second:
            return first.groups() != second.groups()
    return False


def _content(result: str) -> str:
    boxed, enclosed = last_boxed(result), _ENCLOSED.fullmatch(result)
    return boxed if boxed is not None else enclosed[1] if enclosed else result


def _without_unit(result: str) -> str:
    for unit in (_UNIT_TEXT, _UNIT_WORDS):
        found = unit.search(result)
        if found and not _NO_UNIT.search(found[1]) and r"\text" not in result[: found.start()]:
            power = POWERS.get(found[1].strip())
            return result[: found.start()].strip() + (rf" \cdot 10^{{{power}}}" if power else "")
    return result
