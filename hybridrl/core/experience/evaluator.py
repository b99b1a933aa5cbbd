"""Validation: held-out prompts, sampled, scored and summarised under verl's names. Changes nothing in training."""

import logging
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hybridrl.core.experience.collector import Devices, Rate
from hybridrl.core.experience.episodes import EpisodeRunner
from hybridrl.core.experience.trajectory import Episode
from hybridrl.core.pictures import in_parts
from hybridrl.core.rollout import Sampling
from hybridrl.data.prompts import PromptDataset
from hybridrl.rewards.score import FaultGuard, diagnosis

BOOTSTRAP_DRAWS = 1000

logger = logging.getLogger(__name__)


@dataclass
class Evaluator:
    """Scores the policy on held-out prompts."""

    engine: Devices
    prompts: PromptDataset
    runner: EpisodeRunner
    sampling: Sampling
    samples_per_prompt: int
    guard: FaultGuard
    rate: Rate | None = None  # returns the samples with the scores of a reward model

    def evaluate(self, step: int) -> tuple[list[Episode], dict[str, float]]:
        """Return every sample of the policy after `step` steps, and the metrics. The engines keep the devices,
        unless a reward model needs them.

        Faults of the grader are treated as in training, and counted separately.
        """
        self.engine.to_rollout(version=step)
        samples: list[Episode] = []
        seconds = 0.0
        for prompts in in_parts(self.prompts):
            rows = [prompt.row for prompt in prompts]
            run, timings = self.runner.run(prompts, self.samples_per_prompt, self.sampling, rows, stream="validation")
            samples += [episode.without_pixels() for episode in run]
            seconds += sum(timings.values())
            del prompts, run  # else their pixels are in memory with those of the next part
        if self.rate is not None:
            self.engine.to_training()
            samples = self.rate(samples)
        self.guard.apply([sample.score for sample in samples])
        faults = sum(sample.score.fault is not None for sample in samples)
        metrics = validation_metrics(samples, self.samples_per_prompt)
        metrics["val-aux/response_length/mean"] = float(np.mean([sample.sampled_tokens for sample in samples]))
        if faults:
            metrics["val-aux/reward/faults"] = faults
            logger.warning("validation after step %d: %s", step, diagnosis([sample.score for sample in samples]))
        for source in {sample.prompt.data_source for sample in samples}:
            of_source = self.runner.metrics([sample for sample in samples if sample.prompt.data_source == source])
            metrics |= {f"val-aux/{source}/{name}": value for name, value in of_source.items()}
        return samples, metrics | {"timing_s/testing": seconds}


def validation_metrics(samples: Sequence[Episode], count: int) -> dict[str, float]:
    """Return mean@n, std@n, and bootstrap estimates of best@k, worst@k and maj@k, by data source and variable.

    `val-core` holds the main variable (`acc` if the reward gives it for every response, else `reward`) at the largest
    n, as in verl; the rest is `val-aux`. maj@k, the score of the most frequent prediction among k responses, needs the
    reward to give `pred`. A variable that only some responses have gets only a mean, over these responses. Responses
    without a score are left out: all figures are means over the prompts with scored responses, and over these.
    """
    metrics: dict[str, float] = {}
    sources: dict[str, list[list[Episode]]] = defaultdict(list)
    for start in range(0, len(samples), count):
        if graded := [sample for sample in samples[start : start + count] if sample.score.value is not None]:
            sources[graded[0].prompt.data_source].append(graded)
    for source, groups in sources.items():
        tables = _variables(groups)
        whole = {name for name, values in tables.items() if not np.isnan(np.concatenate(values)).any()}
        core = "acc" if "acc" in whole else "reward"
        for variable, values in tables.items():
            if variable not in whole:
                metrics[f"val-aux/{source}/{variable}/mean@{count}"] = float(np.nanmean(np.concatenate(values)))
                continue
            for name, value in _table_metrics(values, _predictions(groups), count).items():
                largest = name.split("@")[1].split("/")[0] == str(count)
                main = variable == core and largest and not name.startswith(("std", "worst"))
                metrics[f"{'val-core' if main else 'val-aux'}/{source}/{variable}/{name}"] = value
    return metrics


def _variables(groups: list[list[Episode]]) -> dict[str, list[np.ndarray]]:
    """Return each numeric value of the scores by prompt; NaN if a response does not have it, 0 if the grader failed and
    a failure counts as 0. `reward` is always the score: another number of that name, given by the reward, appears only
    in the metrics of training and in the samples."""
    tables = {"reward": [np.array([s.score.value for s in group], dtype=float) for group in groups]}
    scores = [s.score for group in groups for s in group if not s.score.fault]
    names = sorted({name for score in scores for name in score.extras} - {"score", *tables})
    for name in names:
        column = [[0.0 if s.score.fault else s.score.extras.get(name) for s in group] for group in groups]
        values = [value for row in column for value in row if value is not None]
        if values and all(isinstance(value, bool | int | float) for value in values):
            tables[name] = [np.array(row, dtype=float) for row in column]
    return tables


def _predictions(groups: list[list[Episode]]) -> list[list[str]] | None:
    """Return the prediction of each sample, empty if its grader failed; None if the reward gives no predictions."""
    if not any("pred" in sample.score.extras for group in groups for sample in group):
        return None
    return [[str(sample.score.extras.get("pred", "")) for sample in group] for group in groups]


def _table_metrics(values: list[np.ndarray], predictions: list[list[str]] | None, count: int) -> dict[str, float]:
    metrics = {f"mean@{count}": float(np.mean([row.mean() for row in values]))}
    if count == 1:
        return metrics
    metrics[f"std@{count}"] = float(np.mean([row.std() for row in values]))
    randoms = {len(row): np.random.default_rng(0) for row in values}
    sizes = sorted({2**power for power in range(1, 11) if 2**power < count} | {count})
    for size in sizes:
        of_length = {n: random.integers(n, size=(BOOTSTRAP_DRAWS, size)) for n, random in randoms.items()}
        draws = [of_length[len(row)] for row in values]
        drawn = [row[places] for row, places in zip(values, draws, strict=True)]
        estimates = {"best": [each.max(axis=1) for each in drawn], "worst": [each.min(axis=1) for each in drawn]}
        if predictions is not None:
            estimates["maj"] = list(map(_majority, values, predictions, draws))
        for name, table in estimates.items():  # [prompts, draws]
            metrics[f"{name}@{size}/mean"] = float(np.mean(table))
            metrics[f"{name}@{size}/std"] = float(np.std(table, axis=1).mean())
    return metrics


def _majority(values: np.ndarray, predictions: list[str], draws: np.ndarray) -> np.ndarray:
    """Return, per draw, the value of the first sample with the most frequent prediction [draws]."""
    words = np.unique(predictions, return_inverse=True)[1][draws]
    votes = (words[:, :, None] == words[:, None, :]).sum(axis=2)
    return values[draws[np.arange(len(draws)), votes.argmax(axis=1)]]
