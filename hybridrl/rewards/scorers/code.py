"""Score programs by tests: printed output for an input, results of a function, or asserts.

The program runs in the sandbox; an endless loop, a crash or an exceeded limit is a wrong response, not a fault.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hybridrl.rewards.sandbox.run import ProgramLimits, run

_FENCED = re.compile(r"```(?:python3?|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL | re.IGNORECASE)
_EXTRA_OUTPUT = 1 << 16


def compute_score(
    solution_str: str,
    ground_truth: Any,
    continuous: bool = True,
    seconds: float = 5.0,
    total_seconds: float = 20.0,
    memory_mb: int = 1024,
) -> dict[str, Any]:
    """Return the share of passed tests (`continuous`), or 1 if all passed, else 0; `acc` is 1 if all passed.

    The ground truth, also as JSON text: {"inputs": [...], "outputs": [...]} with text to read and to print;
    the same with "fn_name" and arguments and return values; or asserts as a text, a list, or under "test_list",
    "functional" or "test" (with "entry_point", as in HumanEval). ValueError for anything else.
    """
    program, limits = last_program(solution_str), ProgramLimits(seconds, memory_mb, _EXTRA_OUTPUT, total_seconds)
    results = passed(program, ground_truth, limits)
    accuracy, share = float(all(results)), sum(results) / len(results)
    return {"score": share if continuous else accuracy, "acc": accuracy, "passed": share}


def last_program(text: str) -> str:
    """Return the last fenced block of Python, closed or not; the complete text if there is none."""
    blocks = _FENCED.findall(text)
    return blocks[-1] if blocks else text


def same_output(printed: str, expected: str) -> bool:
    """Whether outputs are equal word by word; numbers with a decimal point may differ by one millionth."""

    def same(word: str, expected_word: str) -> bool:
        if word == expected_word:
            return True
        try:
            return "." in word + expected_word and _close(float(word), float(expected_word))
        except ValueError:
            return False

    words, expected_words = printed.split(), expected.split()
    return len(words) == len(expected_words) and all(map(same, words, expected_words))


def _close(number: float, other: float) -> bool:
    try:
        return math.isclose(number, other, rel_tol=1e-6, abs_tol=1e-9)
    except OverflowError:  # an integer beyond all floats
        return number == other


def passed(program: str, ground_truth: Any, limits: ProgramLimits) -> list[bool]:
    """Return whether the program passes, test by test; no program passes none, also where nothing is to be printed."""
    tests = _as_tests(ground_truth)
    if "asserts" in tests:
        return [output is not None for output in run(program, tests["asserts"], limits, "asserts")]
    inputs, outputs = tests["inputs"], tests["outputs"]
    if len(inputs) != len(outputs) or not inputs:
        raise ValueError(f"the ground truth has {len(inputs)} inputs and {len(outputs)} outputs")
    function = tests.get("fn_name")
    longest = max(len(output if isinstance(output, str) else json.dumps(output)) for output in outputs)
    limits = replace(limits, output=8 * longest + _EXTRA_OUTPUT)
    if function:
        returned = run(program, [_arguments(item) for item in inputs], limits, "call", function)
        return [value is not None and same_value(value, out) for value, out in zip(returned, outputs, strict=True)]
    if not program.strip():  # an empty output may be the expected one
        return [False] * len(inputs)
    printed = run(program, [_as_text(item) for item in inputs], limits)
    return [text is not None and same_output(text, _as_text(out)) for text, out in zip(printed, outputs, strict=True)]


def _as_tests(truth: Any) -> Mapping[str, Any]:
    """Return the tests as {"asserts"} or {"inputs", "outputs"[, "fn_name"]}."""
    if isinstance(truth, str):
        try:
            truth = json.loads(truth)
        except ValueError:
            return {"asserts": [truth]}
    if isinstance(truth, list):
        return {"asserts": [str(test) for test in truth]}
    if isinstance(truth, Mapping):
        if truth.get("inputs") is not None:
            return truth
        if truth.get("test_list") is not None:
            return {"asserts": list(truth["test_list"])}
        if truth.get("functional"):
            return {"asserts": [truth["functional"]]}
        if truth.get("test"):
            call = f"\ncheck({truth['entry_point']})" if truth.get("entry_point") else ""
            return {"asserts": [truth["test"] + call]}
    raise ValueError(f"the ground truth holds no tests: {truth!r:.200}")


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _arguments(value: Any) -> list[Any]:
    """Return a function's arguments, given as a list or as a text with the JSON of one per line."""
    return [json.loads(line) for line in value.splitlines() if line.strip()] if isinstance(value, str) else list(value)


def same_value(returned: str, expected: Any) -> bool:
    """Whether a returned value, as JSON, is the expected one, given as a value or as JSON; numbers with a fraction may
    differ by one millionth, as printed ones may."""
    value, truth = _from_json(returned), _from_json(expected) if isinstance(expected, str) else expected
    # APPS wraps the expected value in a list.
    return _same(value, truth) or (isinstance(truth, list) and len(truth) == 1 and _same(value, truth[0]))


def _same(value: Any, expected: Any) -> bool:
    if isinstance(value, list) and isinstance(expected, list):
        return len(value) == len(expected) and all(map(_same, value, expected))
    if isinstance(value, dict) and isinstance(expected, dict):
        return value.keys() == expected.keys() and all(_same(value[key], expected[key]) for key in expected)
    if isinstance(value, int | float) and isinstance(expected, int | float) and float in (type(value), type(expected)):
        return _close(value, expected)
    return bool(value == expected)


def _from_json(text: str) -> Any:
    """Return the value, or the text itself if it is not JSON: a program may have printed over its result."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
