"""Rows of other systems as rows of verl's: SkyRL's and AReaL's."""

import re
from collections.abc import Iterable
from typing import Any

from hybridrl.data import TRUTHS, from_json

VERL, SKYRL, AREAL = "verl", "SkyRL", "AReaL"
EPISODE_FIELDS = ("tools_kwargs", "interaction_kwargs", "tool_selection")  # columns, or fields of extra_info
# AReaL's texts contain the turns of one model's chat template, which the template of the trained model adds again.
TURNS = re.compile(r"<[|\uff5c]User[|\uff5c]>(.*)<[|\uff5c]Assistant[|\uff5c]>(?:<think>)?\s*", re.DOTALL)


def with_objects(columns: dict[str, Any]) -> dict[str, Any]:
    """Return the columns with JSON texts decoded, in the columns in which rewards and environments look."""
    columns = _decoded(columns, (*TRUTHS, "extra_info", *EPISODE_FIELDS))
    extra = columns.get("extra_info")
    return columns | {"extra_info": _decoded(extra, EPISODE_FIELDS)} if isinstance(extra, dict) else columns


def _decoded(values: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    held = {name: from_json(values[name]) for name in names if isinstance(values.get(name), str)}
    return values | {n: one for n, one in held.items() if isinstance(one, dict) or (one and n in EPISODE_FIELDS)}


def to_verl_format(values: dict[str, Any], source_key: str) -> tuple[str, dict[str, Any]]:
    """Return the name of a row's format, and the row in verl's format; `source_key` is the column of the data source.

    SkyRL: {prompt, env_class, reward_spec: {ground_truth}}. AReaL (boba): {prompt, query_id, task, solutions}, for
    programs input_output instead of solutions. Any other row is treated as verl's, and checked as such.
    """
    values = with_objects(values)
    if isinstance(values.get("reward_model"), dict):
        return VERL, values
    if isinstance(values.get("reward_spec"), dict):
        source = values.get(source_key) or values.get("env_class")
        return SKYRL, values | {"reward_model": values["reward_spec"], source_key: source}
    if "query_id" not in values or not ("solutions" in values or "input_output" in values):
        return VERL, values
    prompt, task, solutions = values.get("prompt"), values.get("task") or "math", values.get("solutions")
    if isinstance(prompt, str) and (turns := TURNS.fullmatch(prompt.strip())):
        prompt = turns[1].strip()
    if task == "code":
        truth = values.get("input_output")
    else:
        solutions = [solutions] if isinstance(solutions, str) else solutions or []
        truth = solutions[0] if len(solutions) == 1 else solutions or None
    parsed = {"prompt", "task", "solutions", "input_output"}
    return AREAL, {
        "prompt": prompt,
        source_key: values.get(source_key) or f"areal/{task}",
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": {name: value for name, value in values.items() if name not in parsed},
    }
