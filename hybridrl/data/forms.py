"""Rows as other systems write them -> rows in verl's form. Knows columns, and nothing of files."""

import re
from typing import Any

VERL, SKYRL, AREAL = "verl's", "SkyRL's", "AReaL's"
# AReaL's texts already have the turns of one model's chat template; any model's own template writes them anew.
TURNS = re.compile(r"<[|\uff5c]User[|\uff5c]>(.*)<[|\uff5c]Assistant[|\uff5c]>(?:<think>)?\s*", re.DOTALL)

# verl's columns for what is not text.
SENSES = ("images", "videos", "audios")


def more_than_text(values: dict[str, Any], messages: Any) -> list[str]:
    """What a row holds that is not text, as a fault: a filled column of images, videos or audios, or such a part of a
    message. The characters "<image>" alone are text, as in verl, which replaces them where such a column is filled."""
    found = [f"the column {name}" for name in SENSES if _is_filled(values.get(name))]
    contents = [message.get("content") for message in messages] if isinstance(messages, list) else []
    parts = [part for content in contents if isinstance(content, list) for part in content if isinstance(part, dict)]
    kinds = sorted({str(part.get("type")) for part in parts})
    found += [f"a part of type {kind}" for kind in kinds if any(name[:-1] in kind for name in SENSES)]
    return [f"more than text: {', '.join(found)}; leave such rows out, as training is on text"] if found else []


def _is_filled(value: Any) -> bool:
    return value is not None and (not hasattr(value, "__len__") or len(value) > 0)


def in_form_of_verl(values: dict[str, Any], source_key: str) -> tuple[str, dict[str, Any]]:
    """Whose form a row has, and the row in verl's; `source_key` is the column that names the source of the data.

    SkyRL: {prompt, env_class, reward_spec: {ground_truth}}. AReaL (boba): {prompt, query_id, task, solutions}, for
    programs input_output in place of solutions. Anything else is taken for verl's, and judged as such.
    """
    if isinstance(values.get("reward_model"), dict):
        return VERL, values
    if isinstance(values.get("reward_spec"), dict):
        source = values.get(source_key) or values.get("env_class")
        return SKYRL, values | {"reward_model": values["reward_spec"], source_key: source}
    if "query_id" in values and ("solutions" in values or "input_output" in values):
        return AREAL, _of_areal(values, source_key)
    return VERL, values


def _of_areal(values: dict[str, Any], source_key: str) -> dict[str, Any]:
    prompt, task, solutions = values.get("prompt"), values.get("task") or "math", values.get("solutions")
    if isinstance(prompt, str) and (turns := TURNS.fullmatch(prompt.strip())):
        prompt = turns[1].strip()
    if task == "code":
        truth = values.get("input_output")
    else:
        solutions = [solutions] if isinstance(solutions, str) else solutions or []
        truth = solutions[0] if len(solutions) == 1 else solutions or None
    known = {"prompt", "task", "solutions", "input_output"}
    return {
        "prompt": prompt,
        source_key: values.get(source_key) or f"areal/{task}",
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": {name: value for name, value in values.items() if name not in known},
    }
