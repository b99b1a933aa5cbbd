"""Rows of files, hub datasets or custom classes -> token ids, in a reproducible order."""

import difflib
import json
from typing import Any

Message = dict[str, Any]  # {"role", "content"}, as a chat template reads it
PROMPT_NAMES = ("question", "problem", "query", "instruction", "input", "messages", "text")  # in other datasets
TRUTH_NAMES = ("ground_truth", "answer", "label", "target", "solution")  # likewise
TRUTHS = ("reward_model", "reward_spec")  # verl's and SkyRL's columns of the ground truth
NO_TRUTH = "none"  # the key of the ground truth if no row has one


def no_prompt(columns: dict[str, Any], key: str) -> str:
    """Describe why a row has no prompt, with the column that may hold it."""
    near = difflib.get_close_matches(key, columns, n=1) or [name for name in PROMPT_NAMES if name in columns]
    hint = "; it is empty" if isinstance(columns.get(key), str) else ""
    hint = f"; set data.prompt_key={near[0]}?" if near and key not in columns else hint
    needed = f"no prompt: data.prompt_key={key} must hold chat messages ([{{role, content}}, ...]) or a text; "
    return f"{needed}the row has {', '.join(columns) or 'no columns'}{hint}"


def no_truth(columns: dict[str, Any], reward: Any, key: str | None) -> str:
    """Describe why a row has no ground truth, with the column that may hold it."""
    near = difflib.get_close_matches(key or "", columns, n=1) or [name for name in TRUTH_NAMES if name in columns]
    hint = f"; set data.ground_truth_key={near[0]}?" if near and key not in near[:1] else ""
    if key:
        return f"no ground truth: data.ground_truth_key={key} is not a column: the row has {', '.join(columns)}{hint}"
    if isinstance(reward, str | list):
        kind = "a text" if isinstance(reward, str) else "a list"
        return (
            f'reward_model holds {kind}, {reward!r:.60}, not an object {{"ground_truth": ...}}; if it is the ground '
            "truth, set data.ground_truth_key=reward_model, else convert it"
        )
    hint = hint or f"; if no reward needs one, set data.ground_truth_key={NO_TRUTH}"
    return f'no ground truth: the column reward_model must hold {{"style": "rule", "ground_truth": ...}}{hint}'


def from_json(text: str) -> Any:
    """Return the list or object that a text with JSON holds; None for any other text."""
    if not text.lstrip().startswith(("[", "{")):
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
