"""From samples to the numbers of an evaluation, per dataset, with intervals; and the comparison of two evaluations."""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hybridrl.config import ConfigError
from hybridrl.evaluation import statistics
from hybridrl.evaluation.plan import Question
from hybridrl.evaluation.samples import QUESTIONS, SAMPLES, Sample, read_samples
from hybridrl.evaluation.targets import RESULTS
from hybridrl.tracking.records import json_text

SHOWN_FAULTS = 0.01  # share of faults above which their bounds are given
CHANGES = 10  # questions with the largest change that a comparison names


@dataclass(frozen=True)
class Answers:
    """A model's responses to one question: the values of samples without faults, and counts of the excluded ones."""

    id: str
    prompt: str
    keys: list[str]  # for all samples
    numbers: list[int]  # sample numbers, one per value
    values: np.ndarray
    scores: np.ndarray
    predictions: list[str] | None  # None: the reward gives none
    lengths: list[int]
    truncated: int
    faults: int
    greedy: Sample | None


def by_dataset(samples: Iterable[Sample]) -> dict[str, list[Sample]]:
    """Group samples by dataset, in the order in which datasets occur."""
    groups: dict[str, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.dataset, []).append(sample)
    return groups


def group(samples: Sequence[Sample]) -> list[Answers]:
    """Group the samples of one dataset by question, in the order in which questions occur."""
    questions: dict[str, list[Sample]] = {}
    for sample in samples:
        questions.setdefault(sample.id, []).append(sample)
    return [_answers(identity, group) for identity, group in questions.items()]


def _answers(identity: str, samples: list[Sample]) -> Answers:
    samples = sorted(samples, key=lambda sample: sample.sample)
    sampled = [sample for sample in samples if not sample.greedy]
    scored = [sample for sample in sampled if sample.value is not None]
    texts = [sample.pred for sample in scored]
    return Answers(
        identity,
        samples[0].prompt,
        [sample.key for sample in samples],
        numbers=[sample.sample for sample in scored],
        values=np.array([sample.value for sample in scored], dtype=float),
        scores=np.array([sample.score for sample in scored], dtype=float),
        predictions=[text or "" for text in texts] if any(text is not None for text in texts) else None,
        lengths=[sample.tokens for sample in sampled],
        truncated=sum(sample.truncated for sample in sampled),
        faults=len(sampled) - len(scored),
        greedy=next((sample for sample in samples if sample.greedy), None),
    )


def dataset_results(samples: Sequence[Sample], ks: Sequence[int] = (), *, all_greedy: bool = False) -> dict[str, Any]:
    """Return the numbers of one dataset. `ks`: the k of pass@k, pass^k and maj@k; if empty, powers of 2 up to n.
    `all_greedy`: all samples are greedy; their numbers are also reported as the greedy ones."""
    questions = group(samples)
    scored = [answers for answers in questions if len(answers.values)]
    most = max((len(answers.values) + answers.faults for answers in questions), default=0)
    sizes = [k for k in (ks or powers(most)) if k <= most]
    lengths = [length for answers in questions for length in answers.lengths]
    faults = sum(answers.faults for answers in questions)
    results: dict[str, Any] = {"num_questions": len(questions), "n": most, "samples": len(lengths)}
    results["sample_length"] = float(np.mean(lengths)) if any(lengths) else None
    results |= _greedy(questions)
    results["binary"] = all(np.isin(answers.values, (0, 1)).all() for answers in scored)
    results["avg"] = asdict(statistics.mean([answers.values for answers in scored])) if scored else None
    if all_greedy:
        results |= {"greedy_acc": results["avg"], "greedy_length": results["sample_length"]}
    results["score"] = float(np.mean([answers.scores.mean() for answers in scored])) if scored else None
    results |= _of_k(scored, sizes)
    results["truncated"] = sum(answers.truncated for answers in questions)
    results["faults"] = faults
    results["excluded_questions"] = len(questions) - len(scored)
    bounded = results["binary"] and faults > SHOWN_FAULTS * len(lengths)
    results["fault_bounds"] = _bounds(questions) if bounded else None
    return results


def powers(most: int) -> list[int]:
    """Return the powers of 2 up to a number."""
    return [2**power for power in range(most.bit_length())]


def _greedy(questions: Sequence[Answers]) -> dict[str, Any]:
    greedy = [answers.greedy for answers in questions if answers.greedy]
    scored = [np.array([sample.value]) for sample in greedy if sample.value is not None]
    accuracy = asdict(statistics.mean(scored)) if scored else None
    lengths = [sample.tokens for sample in greedy]
    return {"greedy_acc": accuracy, "greedy_length": float(np.mean(lengths)) if lengths else None}


def _of_k(questions: Sequence[Answers], sizes: Sequence[int]) -> dict[str, Any]:
    """Return pass@k, pass^k and maj@k with bootstrap intervals over questions. Questions with fewer than k samples,
    because of faults, are left out."""
    results: dict[str, Any] = {"pass@k": {}, "pass^k": {}, "maj@k": {}}
    random = np.random.default_rng(0)
    for k in sizes:
        enough = [answers for answers in questions if len(answers.values) >= k]
        if not enough:
            continue
        samples, right = statistics.right_counts([answers.values for answers in enough])
        columns = {"pass@k": statistics.pass_at(samples, right, k), "pass^k": statistics.pass_all(samples, right, k)}
        if any(answers.predictions is not None for answers in questions):
            predictions = [answers.predictions or [""] * len(answers.values) for answers in enough]
            pairs = zip((answers.values for answers in enough), predictions, strict=True)
            votes = [statistics.majority_at(values, texts, k, random) for values, texts in pairs]
            columns["maj@k"] = np.array(votes)
        intervals = statistics.bootstrap(np.stack(list(columns.values()), axis=1))
        for (name, column), interval in zip(columns.items(), intervals, strict=True):
            results[name][str(k)] = {"value": float(column.mean()), "alike": interval}
    return results


def _bounds(questions: Sequence[Answers]) -> tuple[float, float]:
    """Return the mean with every fault counted as wrong, and with every fault counted as right."""
    totals = [(row.values.sum(), row.faults, len(row.values) + row.faults) for row in questions if row.lengths]
    wrong = float(np.mean([total / count for total, _, count in totals]))
    return wrong, float(np.mean([(total + faults) / count for total, faults, count in totals]))


def write_results(
    directory: Path, samples: Sequence[Sample], facts: dict[str, Any], ks: Sequence[int], *, all_greedy: bool = False
) -> dict[str, Any]:
    """Write results.json and questions.jsonl; return the results. `facts`: further entries of results.json."""
    groups = by_dataset(samples)
    datasets = {name: dataset_results(members, ks, all_greedy=all_greedy) for name, members in groups.items()}
    results = facts | {"datasets": datasets}
    lines = [json_text(_question(name, answers)) for name, members in groups.items() for answers in group(members)]
    publish_text(directory / QUESTIONS, "\n".join(lines) + "\n")
    publish_text(directory / RESULTS, json_text(results, indent=1))
    return results


def publish_text(path: Path, text: str) -> None:
    """Write a file atomically, by a rename."""
    temporary = path.with_name(f".{path.name}.writing")
    temporary.write_text(text, encoding="utf-8", errors="backslashreplace")
    temporary.replace(path)


def read_results(directory: Path, setting: str) -> tuple[dict[str, Any], list[Sample]]:
    """Return the results in a directory and their samples; its sample file may hold further ones. Raises ConfigError,
    which begins with `setting`, if a file or a sample is missing."""
    fix = "start that evaluation again, which uses its samples"
    if not (directory / RESULTS).is_file():
        raise ConfigError(f"{setting} is an evaluation that was interrupted: it has no {RESULTS}", fix=fix)
    try:
        results = json.loads((directory / RESULTS).read_text(encoding="utf-8"))
        lines = (directory / QUESTIONS).read_text(encoding="utf-8").split("\n")
        keys = [key for line in lines if line for key in json.loads(line)["keys"]]
        results["model"]["name"], results["datasets"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        cause = f"{setting}: its {RESULTS} and {QUESTIONS} do not say which samples they are of"
        raise ConfigError(cause, fix=fix) from error
    samples = {sample.key: sample for sample in read_samples(directory / SAMPLES)}
    if missing := [key for key in keys if key not in samples]:
        cause = f"{setting}: {SAMPLES} lacks {len(missing)} of the {len(keys)} samples of its results"
        raise ConfigError(cause, fix=fix)
    return results, [samples[key] for key in keys]


def add_to_results(directory: Path, facts: dict[str, Any]) -> None:
    """Add entries to the results in a directory."""
    file = directory / RESULTS
    results = json.loads(file.read_text(encoding="utf-8")) | facts
    publish_text(file, json_text(results, indent=1))


def _question(dataset: str, row: Answers) -> dict[str, Any]:
    count = len(row.values)
    majority = statistics.majority_at(row.values, row.predictions, count) if row.predictions and count else None
    return {
        "dataset": dataset,
        "id": row.id,
        "n": count,
        "correct": int((row.values > statistics.CORRECT).sum()),
        "mean": float(row.values.mean()) if count else None,
        "maj": majority,
        "greedy": row.greedy.value if row.greedy else None,
        "lengths": row.lengths,
        "truncated": row.truncated,
        "faults": row.faults,
        "keys": row.keys,
    }


# -- two evaluations ---------------------------------------------------------------------------------------------------


def comparisons(a: Sequence[Sample], b: Sequence[Sample]) -> dict[str, dict[str, Any]]:
    """Compare two evaluations on their common questions, by dataset: B minus A. `other_prompt` counts questions with
    equal ids and different prompts; they are not compared."""
    first, second = by_dataset(a), by_dataset(b)
    return {name: _comparison(first[name], second[name]) for name in first if name in second}


def _comparison(a: Sequence[Sample], b: Sequence[Sample]) -> dict[str, Any]:
    mine, theirs = ({row.id: row for row in group(samples) if len(row.values)} for samples in (a, b))
    both = [identity for identity in mine if identity in theirs]
    shared = [identity for identity in both if same_prompt(mine[identity].prompt, theirs[identity].prompt)]
    result: dict[str, Any] = {"num_questions": len(shared), "only_a": len(mine) - len(both)}
    result |= {"only_b": len(theirs) - len(both), "other_prompt": len(both) - len(shared)}
    if not shared:
        return result
    tables = [[answers[identity].values for identity in shared] for answers in (mine, theirs)]
    aligned = all(mine[identity].numbers == theirs[identity].numbers for identity in shared)
    means = [statistics.means_of(table) for table in tables]
    order = sorted(range(len(shared)), key=lambda index: -abs(means[1][index] - means[0][index]))
    changed = [index for index in order[:CHANGES] if means[1][index] != means[0][index]]
    result |= {"a": float(means[0].mean()), "b": float(means[1].mean())} | asdict(
        statistics.compare(*tables, aligned=aligned)
    )
    result["largest"] = [(shared[index], float(means[0][index]), float(means[1][index])) for index in changed]
    return result


def reject_nothing_in_common(questions: Sequence[Question], samples: Sequence[Sample], setting: str) -> None:
    """Raise ConfigError if no question has a sample in another evaluation."""
    prompts = {(sample.dataset, sample.id): sample.prompt for sample in samples}
    both = [question for question in questions if (question.dataset, question.id) in prompts]
    if any(same_prompt(question.text, prompts[question.dataset, question.id]) for question in both):
        return
    cause = f"{setting}: no question in common"
    if both:
        cause += f"; {len(both)} have the same dataset and id, and other prompts"
    else:
        names = (", ".join(dict.fromkeys(row.dataset for row in rows)) for rows in (samples, questions))
        cause += f" (datasets there: {next(names)}; here: {next(names)})"
    raise ConfigError(cause, fix="name an evaluation of the same files")


def same_prompt(a: str, b: str) -> bool:
    """Whether two prompts are equal; an empty one equals any, since stored responses may have no prompt."""
    return a == b or not a or not b


def corrected(compared: Sequence[dict[str, dict[str, Any]]]) -> None:
    """Add `p_holm` to all comparisons of an evaluation: p corrected for the number of comparisons."""
    all_of_them = [row for datasets in compared for row in datasets.values() if "p" in row]
    for row, p in zip(all_of_them, statistics.holm([row["p"] for row in all_of_them]), strict=True):
        row["p_holm"] = p


def selection_biases(evaluations: Sequence[Sequence[Sample]]) -> dict[str, float]:
    """Return by dataset how much better the best of these models looks by chance alone."""
    tables: dict[str, list[list[np.ndarray]]] = {}
    for samples in evaluations:
        for name, group_samples in by_dataset(samples).items():
            tables.setdefault(name, []).append([row.values for row in group(group_samples) if len(row.values)])
    biases = {name: statistics.selection_bias(by_model) for name, by_model in tables.items()}
    return {name: bias for name, bias in biases.items() if bias is not None and not math.isnan(bias)}
