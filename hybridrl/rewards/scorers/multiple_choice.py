"""Multiple choice: the letter that the answer settles on against the right one."""

import re
from typing import Any

from hybridrl.rewards.scorers.boxed import last_boxed, last_tagged

_LONGEST = 200
_LETTER = re.compile(r"\W*(?:\\text\w*\{)?\W*([A-Za-z])(?![A-Za-z'])")  # B; (b); **B**; \text{B}; B. because
_SAID = re.compile(r"\b(?:answer|choice|option)\b(?: is|:|\s)*\W{0,4}([A-Za-z])\b", re.IGNORECASE)
_ALONE = re.compile(r"\W*([A-Z])\W*")


def compute_score(solution_str: str, ground_truth: Any) -> dict[str, Any]:
    r"""1 for the right letter, else 0; `pred` is the letter found.

    It is looked for in the last \boxed{...}, in <answer> tags, after "answer", "choice" or "option", and where the
    last line is a letter alone, in this order. The ground truth is a letter, or the place of the choice from 0.
    """
    letter = chosen_letter(solution_str)
    truth = chr(ord("A") + ground_truth) if isinstance(ground_truth, int) else str(ground_truth).strip("() .").upper()
    right = float(letter != "" and letter == truth)
    return {"score": right, "acc": right, "pred": letter}


def chosen_letter(text: str) -> str:
    """The letter as a capital, or an empty text."""
    for marked in (last_boxed(text), last_tagged(text)):
        if marked is not None:
            found = _LETTER.match(marked[:_LONGEST])
            return found[1].upper() if found else ""
    said = _SAID.findall(text)
    if said:
        return said[-1].upper()
    alone = _ALONE.fullmatch(text.strip().rpartition("\n")[2])
    return alone[1] if alone else ""
