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
from hybridrl.evaluation.samples import QUESTIONS, RESULTS, SAMPLES, Sample, read_samples
from hybridrl.tracking.records import json_text

SHOWN_FAULTS = 0.01  # share of faults above which their bounds are given
CHANGES = 10  # questions with the largest change that a comparison names


@dataclass(frozen=True)
class Answers:
    """What a model wrote to one question: the values of its samples without faults, and what was excluded."""

    id: str
    prompt: str
    keys: list[str]  # of all samples
    numbers: list[int]  # of the samples
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
    return [_answers(identity, some) for identity, some in questions.items()]


def _answers(identity: str, samples: list[Sample]) -> Answers:
    samples = sorted(samples, key=lambda one: one.sample)
    sampled = [one for one in samples if not one.greedy]
    scored = [one for one in sampled if one.value is not None]
    given = [one.pred for one in scored]
    return Answers(
        identity,
        samples[0].prompt,
        [one.key for one in samples],
        numbers=[one.sample for one in scored],
        values=np.array([one.value for one in scored], dtype=float),
        scores=np.array([one.score for one in scored], dtype=float),
        predictions=[text or "" for text in given] if any(text is not None for text in given) else None,
        lengths=[one.tokens for one in sampled],
        truncated=sum(one.truncated for one in sampled),
        faults=len(sampled) - len(scored),
        greedy=next((one for one in samples if one.greedy), None),
    )


def dataset_results(samples: Sequence[Sample], ks: Sequence[int] = (), *, all_greedy: bool = False) -> dict[str, Any]:
    """Return the numbers of one dataset. `ks`: of pass@k, pass^k and maj@k; none: powers of 2 up to n. `all_greedy`: so
    are all samples, and their numbers are the greedy ones too."""
    questions = group(samples)
    scored = [one for one in questions if len(one.values)]
    most = max((len(one.values) + one.faults for one in questions), default=0)
    sizes = [k for k in (ks or powers(most)) if k <= most]
    lengths = [length for one in questions for length in one.lengths]
    faults = sum(one.faults for one in questions)
    results: dict[str, Any] = {"num_questions": len(questions), "n": most, "samples": len(lengths)}
    results["sample_length"] = float(np.mean(lengths)) if any(lengths) else None
    results |= _greedy(questions)
    results["binary"] = all(np.isin(one.values, (0, 1)).all() for one in scored)
    results["avg"] = asdict(statistics.mean([one.values for one in scored])) if scored else None
    if all_greedy:
        results |= {"greedy_acc": results["avg"], "greedy_length": results["sample_length"]}
    results["score"] = float(np.mean([one.scores.mean() for one in scored])) if scored else None
    results |= _of_k(scored, sizes)
    results["truncated"] = sum(one.truncated for one in questions)
    results["faults"] = faults
    results["excluded_questions"] = len(questions) - len(scored)
    bounded = results["binary"] and faults > SHOWN_FAULTS * len(lengths)
    results["fault_bounds"] = _bounds(questions) if bounded else None
    return results


def powers(most: int) -> list[int]:
    """Return the powers of 2 up to a number."""
    return [2**power for power in range(most.bit_length())]


def _greedy(questions: Sequence[Answers]) -> dict[str, Any]:
    greedy = [one.greedy for one in questions if one.greedy]
    scored = [np.array([one.value]) for one in greedy if one.value is not None]
    accuracy = asdict(statistics.mean(scored)) if scored else None
    return {"greedy_acc": accuracy, "greedy_length": float(np.mean([one.tokens for one in greedy])) if greedy else None}


def _of_k(questions: Sequence[Answers], sizes: Sequence[int]) -> dict[str, Any]:
    """Return pass@k, pass^k and maj@k with bootstrap intervals over questions; questions that have fewer than k
    samples, as some were faults, are left out."""
    results: dict[str, Any] = {"pass@k": {}, "pass^k": {}, "maj@k": {}}
    random = np.random.default_rng(0)
    for k in sizes:
        enough = [one for one in questions if len(one.values) >= k]
        if not enough:
            continue
        samples, right = statistics.right_counts([one.values for one in enough])
        columns = {"pass@k": statistics.pass_at(samples, right, k), "pass^k": statistics.pass_all(samples, right, k)}
        if any(one.predictions is not None for one in questions):
            given = [one.predictions or [""] * len(one.values) for one in enough]
            votes = [
                statistics.majority_at(one.values, texts, k, random) for one, texts in zip(enough, given, strict=True)
            ]
            columns["maj@k"] = np.array(votes)
        intervals = statistics.bootstrap(np.stack(list(columns.values()), axis=1))
        for (name, column), interval in zip(columns.items(), intervals, strict=True):
            results[name][str(k)] = {"value": float(column.mean()), "alike": interval}
    return results


def _bounds(questions: Sequence[Answers]) -> tuple[float, float]:
    """Return the mean if every fault were a wrong response, and if every one were right."""
    totals = [(one.values.sum(), one.faults, len(one.values) + one.faults) for one in questions if one.lengths]
    wrong = float(np.mean([total / count for total, _, count in totals]))
    return wrong, float(np.mean([(total + faults) / count for total, faults, count in totals]))


def write_results(
    directory: Path, samples: Sequence[Sample], facts: dict[str, Any], ks: Sequence[int], *, all_greedy: bool = False
) -> dict[str, Any]:
    """Write results.json and questions.jsonl; return the results. `facts` is what else to record of the evaluation."""
    groups = by_dataset(samples)
    datasets = {name: dataset_results(some, ks, all_greedy=all_greedy) for name, some in groups.items()}
    results = facts | {"datasets": datasets}
    lines = [json_text(_question(name, one)) for name, some in groups.items() for one in group(some)]
    publish_text(directory / QUESTIONS, "\n".join(lines) + "\n")
    publish_text(directory / RESULTS, json_text(results, indent=1))
    return results


def publish_text(path: Path, text: str) -> None:
    """Write a file by one rename."""
    temporary = path.with_name(f".{path.name}.writing")
    temporary.write_text(text, encoding="utf-8", errors="backslashreplace")
    temporary.replace(path)


def read_results(directory: Path, setting: str) -> tuple[dict[str, Any], list[Sample]]:
    """Return the results that a directory has, and the samples that they are of; its file may hold others. Raises
    ConfigError, which begins with `setting`, if they are not all there."""
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
    samples = {one.key: one for one in read_samples(directory / SAMPLES)}
    if missing := [key for key in keys if key not in samples]:
        cause = f"{setting}: {SAMPLES} lacks {len(missing)} of the {len(keys)} samples of its results"
        raise ConfigError(cause, fix=fix)
    return results, [samples[key] for key in keys]


def add_to_results(directory: Path, facts: dict[str, Any]) -> None:
    """Add to the results that a directory has."""
    file = directory / RESULTS
    results = json.loads(file.read_text(encoding="utf-8")) | facts
    publish_text(file, json_text(results, indent=1))


def _question(dataset: str, one: Answers) -> dict[str, Any]:
    count = len(one.values)
    majority = statistics.majority_at(one.values, one.predictions, count) if one.predictions and count else None
    return {
        "dataset": dataset,
        "id": one.id,
        "n": count,
        "correct": int((one.values > statistics.CORRECT).sum()),
        "mean": float(one.values.mean()) if count else None,
        "maj": majority,
        "greedy": one.greedy.value if one.greedy else None,
        "lengths": one.lengths,
        "truncated": one.truncated,
        "faults": one.faults,
        "keys": one.keys,
    }


# -- two evaluations ---------------------------------------------------------------------------------------------------


def comparisons(a: Sequence[Sample], b: Sequence[Sample]) -> dict[str, dict[str, Any]]:
    """Compare two evaluations on the questions that both have, by dataset: B minus A. `other_prompt` counts questions
    of the same id that are not the same, as their prompts differ."""
    first, second = by_dataset(a), by_dataset(b)
    return {name: _comparison(first[name], second[name]) for name in first if name in second}


def _comparison(a: Sequence[Sample], b: Sequence[Sample]) -> dict[str, Any]:
    mine, theirs = ({one.id: one for one in group(some) if len(one.values)} for some in (a, b))
    both = [identity for identity in mine if identity in theirs]
    shared = [identity for identity in both if same_prompt(mine[identity].prompt, theirs[identity].prompt)]
    result: dict[str, Any] = {"num_questions": len(shared), "only_a": len(mine) - len(both)}
    result |= {"only_b": len(theirs) - len(both), "other_prompt": len(both) - len(shared)}
    if not shared:
        return result
    tables = [[some[identity].values for identity in shared] for some in (mine, theirs)]
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
    """Raise ConfigError if no question has a sample among those of another evaluation."""
    prompts = {(one.dataset, one.id): one.prompt for one in samples}
    both = [one for one in questions if (one.dataset, one.id) in prompts]
    if any(same_prompt(one.text, prompts[one.dataset, one.id]) for one in both):
        return
    cause = f"{setting}: no question in common"
    if both:
        cause += f"; {len(both)} have the same dataset and id, and other prompts"
    else:
        names = (", ".join(dict.fromkeys(one.dataset for one in some)) for some in (samples, questions))
        cause += f" (datasets there: {next(names)}; here: {next(names)})"
    raise ConfigError(cause, fix="name an evaluation of the same files")


def same_prompt(a: str, b: str) -> bool:
    """Whether two prompts are equal, as far as they are known: stored responses may have none."""
    return a == b or not a or not b


def corrected(compared: Sequence[dict[str, dict[str, Any]]]) -> None:
    """Add to all comparisons of an evaluation the p that is corrected for their number."""
    all_of_them = [one for datasets in compared for one in datasets.values() if "p" in one]
    for one, p in zip(all_of_them, statistics.holm([one["p"] for one in all_of_them]), strict=True):
        one["p_holm"] = p


def selection_biases(evaluations: Sequence[Sequence[Sample]]) -> dict[str, float]:
    """Return by dataset how much better the best of these models looks by chance alone."""
    tables: dict[str, list[list[np.ndarray]]] = {}
    for samples in evaluations:
        for name, some in by_dataset(samples).items():
            tables.setdefault(name, []).append([one.values for one in group(some) if len(one.values)])
    biases = {name: statistics.selection_bias(some) for name, some in tables.items()}
    return {name: bias for name, bias in biases.items() if bias is not None and not math.isnan(bias)}
