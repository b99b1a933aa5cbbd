"""Validation: held-out prompts answered, scored and summed up under verl's names. Changes nothing in training."""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from hybridrl.data.prompts import PromptDataset
from hybridrl.experience.episodes import Respondent, Sample
from hybridrl.rollout import RolloutPool, Sampling

BOOTSTRAP_DRAWS = 1000


class Validator:
    """The validation prompts and how they are answered."""

    def __init__(self, prompts: PromptDataset, respondent: Respondent, sampling: Sampling, samples_per_prompt: int):
        self.prompts, self.respondent = prompts, respondent
        self.sampling, self.samples_per_prompt = sampling, samples_per_prompt

    def validate(self, pool: RolloutPool) -> tuple[list[Sample], dict[str, float]]:
        """Every sample, and the metrics. A fault of the grader counts as a score of 0, and is counted by itself."""
        prompts = list(self.prompts)
        place = [f"validation {prompt.row}" for prompt in prompts]
        samples, timings = self.respondent.respond(pool, prompts, self.samples_per_prompt, self.sampling, place)
        faults = sum(sample.score.fault is not None for sample in samples)
        metrics = validation_metrics(samples, self.samples_per_prompt)
        metrics["val-aux/response_length/mean"] = float(np.mean([len(s.completion.token_ids) for s in samples]))
        if faults:
            metrics["val-aux/reward/faults"] = faults
        return samples, metrics | {"timing_s/testing": sum(timings.values())}


def validation_metrics(samples: Sequence[Sample], count: int) -> dict[str, float]:
    """mean@n, std@n, and bootstrap estimates of best@k, worst@k and maj@k, by data source and variable.

    `val-core` holds the variable that matters (`acc` where the reward gives one, else `reward`) at the largest n; the
    rest is `val-aux`. maj@k needs the reward to give `pred`: the score of the commonest prediction among k answers.
    """
    metrics: dict[str, float] = {}
    sources: dict[str, list[list[Sample]]] = defaultdict(list)
    for start in range(0, len(samples), count):
        sources[samples[start].prompt.data_source].append(list(samples[start : start + count]))
    for source, groups in sources.items():
        tables = _variables(groups)
        core = "acc" if "acc" in tables else "reward"
        for variable, values in tables.items():
            for name, value in _table_metrics(values, _predictions(groups), count).items():
                largest = name.split("@")[1].split("/")[0] == str(count)
                told = variable == core and largest and not name.startswith(("std", "worst")) and "/std" not in name
                metrics[f"{'val-core' if told else 'val-aux'}/{source}/{variable}/{name}"] = value
    return metrics


def _variables(groups: list[list[Sample]]) -> dict[str, np.ndarray]:
    """Each numeric value of the scores as a table [prompts, samples]."""
    tables = {"reward": np.array([[s.score.value or 0.0 for s in group] for group in groups])}
    names = sorted({name for group in groups for s in group for name in s.score.extras} - {"score"})
    for name in names:
        column = [[s.score.extras.get(name, 0.0) for s in group] for group in groups]
        if all(isinstance(value, bool | int | float) for row in column for value in row):
            tables[name] = np.array(column, dtype=float)
    return tables


def _predictions(groups: list[list[Sample]]) -> list[list[str]] | None:
    """What each sample predicts; an answer whose grader failed predicts nothing. None where no reward tells."""
    if not any("pred" in sample.score.extras for group in groups for sample in group):
        return None
    return [[str(sample.score.extras.get("pred", "")) for sample in group] for group in groups]


def _table_metrics(values: np.ndarray, predictions: list[list[str]] | None, count: int) -> dict[str, float]:
    metrics = {f"mean@{count}": float(values.mean())}
    if count == 1:
        return metrics
    metrics[f"std@{count}"] = float(values.std(axis=1).mean())
    random = np.random.default_rng(0)
    sizes = sorted({2**power for power in range(1, 11) if 2**power < count} | {count})
    for size in sizes:
        draws = random.integers(count, size=(BOOTSTRAP_DRAWS, size))
        estimates = {
            "best": [row[draws].max(axis=1) for row in values],
            "worst": [row[draws].min(axis=1) for row in values],
        }
        if predictions is not None:
            estimates["maj"] = [_majority(row, words, draws) for row, words in zip(values, predictions, strict=True)]
        for name, table in estimates.items():  # [prompts, draws]
            metrics[f"{name}@{size}/mean"] = float(np.mean(table))
            metrics[f"{name}@{size}/std"] = float(np.std(table, axis=1).mean())
    return metrics


def _majority(values: np.ndarray, predictions: list[str], draws: np.ndarray) -> np.ndarray:
    """For each draw, the value of the first sample that made the commonest prediction [draws]."""
    words = np.unique(predictions, return_inverse=True)[1][draws]
    votes = (words[:, :, None] == words[:, None, :]).sum(axis=2)
    return values[draws[np.arange(len(draws)), votes.argmax(axis=1)]]
