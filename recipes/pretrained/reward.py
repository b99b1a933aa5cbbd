"""The reward of recipes/pretrained: half for an answer that begins with the right name, the rest for ending there."""

import re
import unicodedata
from typing import Any


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Return `score`, and `acc`: 1 if the right name comes first. Accents, hyphens, case and a full stop do
    not count."""
    answer = _plain(solution_str)
    names = [name for name in map(_plain, ground_truth.split("/")) if re.match(rf"{re.escape(name)}(?!\w)", answer)]
    alone = any(answer.rstrip(".") == name.rstrip(".") for name in names)
    return {"score": 0.5 * bool(names) + 0.5 * alone, "acc": float(bool(names)), "alone": float(alone)}


def _plain(text: str) -> str:
    letters = unicodedata.normalize("NFKD", text.replace("\N{RIGHT SINGLE QUOTATION MARK}", "'").replace("-", " "))
    return "".join(letter for letter in letters if not unicodedata.combining(letter)).casefold().strip()
