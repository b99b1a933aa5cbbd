"""Search questions: the words in <answer> tags against the accepted answers, as Search-R1 compares them."""

import re
import string
from collections.abc import Mapping
from typing import Any

from hybridrl.rewards.scorers.boxed import last_tagged

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_MOST_TAGS = 10


def compute_score(solution_str: str, ground_truth: Any, format_score: float = 0.0, score: float = 1.0) -> float:
    """`score` for an exact match but for case, articles and punctuation; `format_score` for another answer, else 0.

    The ground truth is a text, several, or either under "target". An answer of more than ten tags gets a quarter, as in
    verl: listing guesses is no answer.
    """
    found = last_tagged(solution_str)
    if found is None:
        return 0.0
    accepted = ground_truth["target"] if isinstance(ground_truth, Mapping) else ground_truth
    accepted = [accepted] if isinstance(accepted, str) else accepted
    if normalised(found) not in {normalised(str(answer)) for answer in accepted}:
        return format_score
    tags = max(solution_str.count("<answer>"), solution_str.count("</answer>"))
    return score / 4 if tags > _MOST_TAGS else score


def normalised(text: str) -> str:
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())
