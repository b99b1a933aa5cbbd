"""verl's graders with their signatures, for reward files that call them by the names in `names.py`.

gsm8k, MATH, DAPO and search questions get verl's verdicts: results are compared as spellings, those of MATH and of
Minerva's protocol, without mathematics (2/4 is not 1/2). `math.py` compares what verl compares symbolically, and
programs run in the sandbox. A docstring says what is not plain from verl's name.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from hybridrl.rewards.load import FAMILIES, compute_score, scorer_of
from hybridrl.rewards.scorers import code
from hybridrl.rewards.scorers.short_answers import last_tagged, normalised, score_search_qa, thinks_then_boxes

_ANSWER = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)
_MARKED_NUMBER, _ANY_NUMBER = re.compile(r"#### (-?[0-9.,]+)"), re.compile(r"-?[0-9.,]+")
_TAIL, _STRICT_TAIL = 300, 100  # characters that verl reads
_ABSENT = "[INVALID]"
_BRACE = re.compile(r"[{}]")
_UNITS = [
    *("cents", "childrentickets", "cm", "degrees", "digits", "dollars", "edges", "feet", "gm"),
    *("hours", "inches", "integers", "km", "meals", "meters", "minutes", "mph"),
    *("multiples", "points", "pounds", "square", "students", "sue", "units", "ways"),
]
# Markup left over once the units are removed, and other markup without meaning.
_MARKUP = [
    *(r"\text{}^2", r"\text{}^3", r"\text{s}", r"\text{.}", "\\text{\ns}", "\\text{\n}", r"\text{}", r"\mathrm{th}"),
    *(r"^{\circ}", r"^\circ", r"\ldots", r"\dots", r"\;", r",\!", "{,}", '"'),
]
_IGNORED = [re.compile("|".join(map(re.escape, words))) for words in (_UNITS, _MARKUP)]
_MINERVA_FIRST = [
    *(("an ", ""), ("a ", ""), (".$", "$"), (r"\$", ""), (r"\ ", ""), (" ", ""), ("mbox", "text")),
    *((r",\text{and}", ","), (r"\text{and}", ","), (r"\text{m}", r"\text{}")),
]
_MATH_FIRST = [
    *(("\n", ""), (r"\!", ""), ("\\\\", "\\"), ("tfrac", "frac"), ("dfrac", "frac"), (r"\left", ""), (r"\right", "")),
    *((r"^{\circ}", ""), (r"^\circ", ""), (r"\$", "")),
]


def default_compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None, *_: Any, **options: Any
) -> float | dict[str, Any]:
    """Score by data_source: a dict for DAPO's data, else a number. NotImplementedError if there is no grader."""
    scorer = scorer_of(data_source)
    if scorer is None:
        raise NotImplementedError(f"no reward is built in for data_source {data_source}")
    own = {"gsm8k": gsm8k_score, "math_dapo": dapo_score, "geo3k": geo3k_score}
    if scorer in own:
        return own[scorer](solution_str, ground_truth)
    if scorer == "math":
        symbolic = data_source.startswith(tuple(FAMILIES))
        return float((symbolic_score if symbolic else math_score)(solution_str, ground_truth))
    if scorer == "code":
        return float(code_score(solution_str, ground_truth, True, memory_mb=options.get("memory_limit_mb"))[0])
    returned = compute_score(data_source, solution_str, ground_truth)
    return returned if isinstance(returned, dict) else float(returned)


def gsm8k_score(
    solution_str: str, ground_truth: str, method: str = "strict", format_score: float = 0.0, score: float = 1.0
) -> float:
    number = gsm8k_number(solution_str, method)
    return 0.0 if number is None else score if number == ground_truth else format_score


def gsm8k_number(solution_str: str, method: str = "strict") -> str | None:
    """Return the last number after "#### " without separators, or the last number as written."""
    assert method in ("strict", "flexible"), f"method={method}: strict or flexible"
    if method == "strict":
        marked = _MARKED_NUMBER.findall(solution_str[-_TAIL:])
        return marked[-1].replace(",", "") if marked else None
    numbers = _ANY_NUMBER.findall(solution_str[-_TAIL:])
    return next((number for number in reversed(numbers) if number != "."), numbers[0] if numbers else None)


def math_score(solution_str: str, ground_truth: str) -> float:
    box = math_box(solution_str)
    try:
        return float(box is not None and same_in_math(math_unboxed(box), ground_truth))
    except AssertionError:  # \fbox
        return 0.0


def get_default_compute_score(reward_name: str | None = None) -> Callable[..., Any]:
    return default_compute_score


def math_scores(
    data_sources: Sequence[str], solution_strs: Sequence[str], ground_truths: Sequence[str], extra_infos: Sequence[Any]
) -> list[float]:
    return [math_score(*pair) for pair in zip(solution_strs, ground_truths, strict=True)]


def dapo_score(
    solution_str: str, ground_truth: str, strict_box_verify: bool = False, pause_tokens_index: list[int] | None = None
) -> dict[str, Any]:
    right, result = dapo_verdict(solution_str[-_TAIL:], ground_truth, strict_box_verify, pause_tokens_index)
    return {"score": 1.0 if right else -1.0, "acc": right, "pred": result}


def dapo_verdict(
    solution_str: str, answer: str, strict_box_verify: bool = False, pause_tokens_index: list[int] | None = None
) -> tuple[bool, str | None]:
    """Return whether the line "Answer: ..." is right, and its text; the box if there is no such line, or strictly."""
    right, stated = minerva_verdict(solution_str, answer)
    if stated != _ABSENT and not strict_box_verify:
        return right, stated
    score, boxed = strict_box_verdict(solution_str, answer, pause_tokens_index)
    return (right, stated) if boxed is None and not strict_box_verify else (score == 1, boxed)


def minerva_verdict(
    solution_str: str, gt: str, gt_need_extract: bool = False, answer_pattern: str | re.Pattern[str] = _ANSWER
) -> tuple[bool, str]:
    stated = re.findall(answer_pattern, solution_str)
    result = minerva_spelling(stated[-1] if stated else _ABSENT)
    return result == minerva_spelling(unboxed(last_box(gt) or "") if gt_need_extract else gt), result


def strict_box_verdict(pred: str, gt: str, pause_tokens_index: list[int] | None = None) -> tuple[int, str | None]:
    box = last_box(pred[pause_tokens_index[-1] - _STRICT_TAIL :] if pause_tokens_index else pred[-_STRICT_TAIL:])
    result = None if box is None else unboxed(box)
    return 1 if result == gt else -1, result


def symbolic_score(model_output: str, ground_truth: str, timeout_score: float = 0.0, timeout: float = 30.0) -> float:
    """Score symbolically, with no time limit except that of the scoring process."""
    return float(_symbolic(str(model_output), ground_truth)["acc"])


def prime_score(model_output: str, ground_truth: str) -> tuple[bool, bool, str]:
    verdict = _symbolic(str(model_output), ground_truth)
    return verdict["acc"] == 1, "Step 2:" in model_output and r"\box" in model_output, verdict["pred"]


def grade_answer(given_answer: str | None, ground_truth: str) -> bool:
    return given_answer is not None and geo3k_accuracy(given_answer, ground_truth, use_boxed=False) == 1


def geo3k_score(predict_str: str, ground_truth: str, use_boxed: bool = True, format_score: float = 0.1) -> float:
    accuracy = geo3k_accuracy(predict_str, ground_truth, use_boxed)
    return (1 - format_score) * accuracy + format_score * thinks_then_boxes(predict_str)


def geo3k_accuracy(predict_str: str, ground_truth: str, use_boxed: bool = True) -> float:
    result = predict_str if use_boxed else f"\\boxed{{{predict_str}}}"
    return compute_score("lighteval/MATH", result, ground_truth)["acc"]


def code_score(
    completion: str, test_cases: Any, continuous: bool = False, memory_mb: int | None = None
) -> tuple[float | bool, list[dict[str, Any]]]:
    """Return the share of all tests; verl's is of the first ten."""
    results = code.passed(code.last_program(completion), test_cases, _limits(10.0, memory_mb))
    share = sum(results) / len(results)
    return share if continuous else all(results), [{"res": str(result)} for result in results]


def sandbox_score(
    sandbox_fusion_url: str | None,
    concurrent_semaphore: Any,
    memory_limit_mb: int | None,
    completion: str,
    test_cases: Any,
    continuous: bool = False,
    timeout: float = 10,
) -> tuple[float, list[dict[str, Any]]]:
    """Score in the local sandbox, whatever the service's address."""
    share, details = code_score(completion, test_cases, True, memory_limit_mb)
    return float(share), details


def run_test(
    in_outs: Mapping[str, Any], test: str = "", debug: bool = False, timeout: float = 15
) -> tuple[list[bool], dict[str, Any]]:
    """Return whether the program `test` passes, test by test."""
    return code.passed(test, in_outs, _limits(timeout)), {}


def check_correctness(
    in_outs: Mapping[str, Any] | None, generation: str, timeout: float = 10, debug: bool = True
) -> tuple[list[bool], list[dict[str, Any]]]:
    results = run_test(in_outs or {}, generation, debug, timeout)[0]
    return results, [{} for _ in results]


def search_score(
    solution_str: str, ground_truth: Any, method: str = "strict", format_score: float = 0.0, score: float = 1.0
) -> float:
    return score_search_qa(solution_str, ground_truth, format_score, score)


def search_part_score(
    solution_str: str, ground_truth: Any, method: str = "strict", format_score: float = 0.0, score: float = 1.0
) -> float:
    answer = last_tagged(solution_str)
    return 0.0 if answer is None else score if part_match(answer, ground_truth["target"]) else format_score


def exact_match(prediction: str, golden_answers: str | Sequence[str]) -> int:
    accepted = [golden_answers] if isinstance(golden_answers, str) else golden_answers
    return int(normalised(prediction) in map(normalised, accepted))


def part_match(prediction: str, golden_answers: str | Sequence[str]) -> int:
    accepted = [golden_answers] if isinstance(golden_answers, str) else golden_answers
    return int(any(normalised(answer) in normalised(prediction) for answer in accepted))


def _symbolic(solution: str, truth: str) -> dict[str, Any]:
    return compute_score("numina_", solution, truth, method="flexible")


def _limits(seconds: float, memory_mb: int | None = None) -> code.ProgramLimits:
    limits = code.ProgramLimits(seconds)
    return limits if memory_mb is None else replace(limits, memory_mb=memory_mb)


def last_box(text: str, commands: tuple[str, ...] = (r"\boxed{",)) -> str | None:
    r"""Return the last \boxed{...} with its command; None if there is none or it never closes."""
    start = next((place for command in commands if (place := text.rfind(command)) >= 0), -1)
    depth = 0
    for brace in _BRACE.finditer(text, start) if start >= 0 else ():
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return text[start : brace.end()]
    return None


def math_box(text: str) -> str | None:
    r"""Return the last \boxed{...}, else the last \fbox{...}; "\boxed 4" extends to a dollar sign or the end."""
    _, bare, after = text.rpartition(r"\boxed ")
    return bare + after.partition("$")[0] if bare else last_box(text, (r"\boxed", r"\fbox"))


def unboxed(box: str) -> str:
    r"""Return the content of a \boxed{...}; AssertionError for any other text, as in verl, whose callers catch it."""
    assert box.startswith(r"\boxed{") and box.endswith("}"), f"not a box: {box:.80}"
    return box[len(r"\boxed{") : -1]


def math_unboxed(box: str) -> str:
    r"""Return the content of a \boxed{...} or of "\boxed 4"."""
    return box.removeprefix(r"\boxed ") if box.startswith(r"\boxed ") else unboxed(box)


def same_in_math(first: str | None, second: str | None) -> bool:
    """Whether both results have the same spelling by MATH's rules; two absent results are the same."""
    if first is None or second is None:
        return first is second
    return math_spelling(first) == math_spelling(second)


def math_spelling(result: str) -> str:
    r"""Return MATH's spelling: \frac{1}{2} for \dfrac12, 1/2 and 0.5; no units, degrees, percent, money, spaces."""
    for before, after in _MATH_FIRST:
        result = result.replace(before, after)
    result = result.partition(r"\text{ ")[0].replace(r"\%", "")
    result = re.sub(r"(?<=[ {])\.|^\.", "0.", result)
    name, equals, value = result.partition("=")
    if equals and len(name) <= 2 and "=" not in value:  # x = 5
        result = value
    result = re.sub(r"\\sqrt([^{])", r"\\sqrt{\1}", result).replace(" ", "")
    result = re.sub(r"\\frac([^{])([^{])", r"\\frac{\1}{\2}", result)
    result = re.sub(r"\\frac([^{]){", r"\\frac{\1}{", result)
    result = r"\frac{1}{2}" if result == "0.5" else result
    return re.sub(r"^(0|-?[1-9][0-9]*)/(0|-?[1-9][0-9]*)$", r"\\frac{\1}{\2}", result)


def minerva_spelling(answer: str) -> str:
    """Return the spelling of Minerva's protocol: what follows the last "=", without units and markup."""
    answer = answer.rpartition("=")[2]
    for before, after in _MINERVA_FIRST:
        answer = answer.replace(before, after)
    for ignored in _IGNORED:
        answer = ignored.sub("", answer)
    answer = re.sub(r".*?\$(.*?)\$.*", r"$\1$", answer)
    for command in ("text", "textbf", "overline"):
        answer = re.sub(rf"\\{command}{{(.*?)}}", r"\1", answer)
    answer = re.sub(r"\\boxed{(.*)}", r"\1", answer)
    answer = re.sub(r"frac([^{])(.)", r"frac{\1}{\2}", answer)
    answer = re.sub(r"sqrt([^{])", r"sqrt{\1}", answer).replace("$", "")
    digits = answer.replace(",", "")
    return (digits if digits.isdigit() else answer).strip()
