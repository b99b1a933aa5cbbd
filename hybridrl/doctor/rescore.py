"""`python -m hybridrl.doctor rescore RUN --reward NEW.py`: the stored samples of a run under another reward.

Says which samples change, and what the advantages would have been. Weights learned from the old reward, so this shows
what the new one would have rewarded there, and not where it would have led.
"""

import argparse
import math
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hybridrl.config import ConfigError, PPOConfig
from hybridrl.config.findings import Findings
from hybridrl.config.schema import DataConfig
from hybridrl.core.algorithms.algorithm import bind, find_estimator
from hybridrl.core.batch import Batch
from hybridrl.core.experience.trajectory import TRUNCATED
from hybridrl.data.rows import Faults, Rows, load_rows
from hybridrl.doctor import directory_parser, show
from hybridrl.doctor.replay import load_config
from hybridrl.doctor.reward import reward_config, score_all, written
from hybridrl.rewards.score import Score, ScoringRequest
from hybridrl.runs.ppo import build_shaping
from hybridrl.runs.settings import build_algorithm
from hybridrl.tracking.records import SampleRecord, read_records, records_of

STEPS, SHOWN, CHARACTERS = 10, 5, 160
MOVED = 0.1  # what counts as another advantage
DATA = "data.train_files"


def main(argv: list[str]) -> int:
    parser = directory_parser("rescore", __doc__, as_json="findings")
    parser.add_argument("--reward", required=True, metavar="FILE.py[:NAME]", help="the other reward function")
    parser.add_argument("--steps", metavar="N,N", help=f"steps to score; default: up to {STEPS}, evenly")
    parser.add_argument("overrides", nargs="*", metavar="reward.key=value")
    options = parser.parse_intermixed_args(argv)
    findings = Findings()
    with findings.gathered("rescore.rejected"):
        rescore(options, findings)
    return show(findings, as_json=options.json)


@dataclass(frozen=True)
class Rescored:
    """A stored sample with its score under the other reward."""

    record: SampleRecord
    score: Score

    @property
    def changed(self) -> bool:
        """Whether both have a score, and the scores differ by more than rounding."""
        old, new = self.record.score, self.score.value
        return old is not None and new is not None and not math.isclose(old, new, abs_tol=1e-6)


def rescore(options: argparse.Namespace, findings: Findings) -> None:
    """Score and compare. Raises ConfigError if there is nothing to score, or the reward cannot be loaded."""
    run: Path = options.directory
    files = chosen_files(run, options.steps)
    records = [record for path in files for record in read_records(path)]
    config = run_config(run, findings)
    rows = None if config is None else data_rows(config.data, findings)
    section = reward_config(options.reward, options.overrides)
    log = Path(tempfile.mkdtemp(prefix="hybridrl-doctor-"), "reward.log")
    scores, _ = score_all(section, [_request(record, rows) for record in records], log)
    shaping = build_shaping(section if options.overrides or config is None else config.reward)
    scores = [shaping.shaped(score, _length(record)) for record, score in zip(records, scores, strict=True)]
    rescored = [Rescored(record, score) for record, score in zip(records, scores, strict=True)]
    if any(turn.get("reward") for record in records for turn in record.episode.get("turns", [])):
        cause = "environments gave rewards to turns, which the other reward's scores do not have"
        findings.warn("rescore.turns", cause)
    _report_scores(rescored, log, findings)
    name, estimator = "grpo", bind(find_estimator("grpo")[1], {"norm_adv_by_std_in_grpo": True})
    if config is not None and not find_estimator(config.algorithm.adv_estimator)[0].reads:
        name, estimator = config.algorithm.adv_estimator, build_algorithm(config).estimator
    _report_advantages(rescored, name, estimator, findings)
    _show_changed(rescored, findings)


def chosen_files(run: Path, steps: str | None) -> list[Path]:
    """Return the files of the steps that were named, else of some from the first to the last."""
    files = records_of(run, "rollouts")
    if not files:
        raise ConfigError(f"{run} has no samples", fix="trainer.rollout_data_dir keeps them, and is set by default")
    if steps is None:
        evenly = np.linspace(0, len(files) - 1, min(STEPS, len(files))).round().astype(int)
        return [list(files.values())[place] for place in evenly]
    numbers = [int(part) if part.isdecimal() else -1 for part in steps.split(",")]
    if missing := [number for number in numbers if number not in files]:
        raise ConfigError(
            f"--steps={steps}: no samples of step {missing[0]}", fix=f"name some of {min(files)} to {max(files)}"
        )
    return [files[number] for number in numbers]


def run_config(run: Path, findings: Findings) -> PPOConfig | None:
    """Return the run's configuration; None if it left none that can be read, as verl's runs do."""
    if not (run / "config.yaml").is_file():
        return None
    try:
        return load_config(run, offline=True)
    except ConfigError as error:
        findings.warn("rescore.config", f"{run}/config.yaml cannot be used: {error}")
        return None


def data_rows(data: DataConfig, findings: Findings) -> Rows | None:
    """Return the rows of the run's data, for the `extra_info` that files of samples do not repeat."""
    if data.custom_cls.path:
        return None
    try:
        return load_rows(data.train_files, Faults(DATA), key=DATA, max_samples=-1, shuffle=False, seed=0)
    except ConfigError as error:
        findings.warn("rescore.data", f"{error}: the reward gets an empty extra_info")
        return None


def _request(record: SampleRecord, rows: Rows | None) -> ScoringRequest:
    number, source = record.episode.get("row"), str(record.episode.get("data_source", ""))
    there = rows is not None and number is not None and number < len(rows)  # the data may have changed since
    extra: Any = rows[number].values.get("extra_info") if there else None
    extra = (extra if isinstance(extra, dict) else {}) | written(record.episode)
    return ScoringRequest(source, record.response, record.truth, extra)


def _report_scores(rescored: Sequence[Rescored], log: Path, findings: Findings) -> None:
    faults = [one.score for one in rescored if one.score.value is None]
    if faults:
        add = findings.error if len(faults) == len(rescored) else findings.warn
        cause = f"{len(faults)} of {len(rescored)} samples have no score now; its tracebacks are in {log}"
        add("rescore.fault", cause, faults[0].detail)
    else:
        shutil.rmtree(log.parent)
    changed = sum(one.changed for one in rescored)
    findings.info("rescore.changed", f"{changed} of {len(rescored)} samples have another score")
    for step in sorted({one.record.step for one in rescored}):
        some = [one for one in rescored if one.record.step == step]
        old, new = ([value for value in values if value is not None] for values in _values(some))
        means = " -> ".join(f"{np.mean(values):.3f}" if values else "none" for values in (old, new))
        findings.info("rescore.step", f"step {step}: mean reward {means}, {sum(one.changed for one in some)} changed")


def _values(rescored: Sequence[Rescored]) -> tuple[list[float | None], list[float | None]]:
    return [one.record.score for one in rescored], [one.score.value for one in rescored]


def _report_advantages(rescored: Sequence[Rescored], name: str, estimator: Any, findings: Findings) -> None:
    """Compare the advantages by an estimator: the run's if it needs rewards only, else GRPO's."""
    both = [one for one in rescored if one.record.score is not None and one.score.value is not None]
    if not both:
        return
    batch = as_batch([one.record for one in both])
    old, new = (mean_advantages(batch, estimator, values) for values in _values(both))
    moved, turned = int(((old - new).abs() > MOVED).sum()), int(((old * new) < 0).sum())
    flat = [int((values == 0).sum()) for values in (old, new)]
    findings.info(
        "rescore.advantages",
        f"by {name}: {moved} of {len(both)} advantages change by more than {MOVED}, {turned} of them their sign; "
        f"{flat[0]} were 0, {flat[1]} would be 0",
    )


def as_batch(records: Sequence[SampleRecord]) -> Batch:
    """Return samples as rows of their lengths, with what an estimator reads of rewards alone."""
    groups = {key: number for number, key in enumerate(dict.fromkeys(record.group for record in records))}
    lengths = torch.tensor(list(map(_length, records)))
    group = torch.tensor([groups[record.group] for record in records])
    tokens = torch.zeros(int(lengths.sum()), dtype=torch.int32)
    ones, sample = torch.ones_like(lengths), torch.arange(len(records))
    mask = torch.ones(tokens.shape, dtype=torch.bool)
    truncated = torch.tensor([record.episode.get("stop") in TRUNCATED for record in records])
    rows = Batch(ones, lengths, tokens[: len(records)], tokens, group, group, sample)
    rows.response_mask, rows.truncated = mask, truncated
    return rows


def _length(record: SampleRecord) -> int:
    return max(int(record.episode.get("sampled_tokens", 1)), 1)


def mean_advantages(batch: Batch, estimator: Any, scores: Sequence[float | None]) -> torch.Tensor:
    """Return the mean advantage per token of each row [B] for these scores."""
    batch.rewards = torch.tensor(scores, dtype=torch.float32)
    batch.token_rewards = torch.zeros(batch.response_ids.shape).index_add_(0, batch.last_tokens, batch.rewards)
    return batch.trained_mean(estimator(batch)[0])


def _show_changed(rescored: Sequence[Rescored], findings: Findings) -> None:
    """Show the samples whose score changes most."""
    changed = [one for one in rescored if one.changed]
    changed.sort(key=lambda one: -abs((one.score.value or 0.0) - (one.record.score or 0.0)))
    for one in changed[:SHOWN]:
        scores = " -> ".join("none" if value is None else f"{value:g}" for value in (one.record.score, one.score.value))
        text = " ".join(one.record.response.split())
        where = f"step {one.record.step}, {_place(one.record)}"
        cause = f"{where}: {scores}; ground truth {one.record.truth!s:.60}"
        findings.info("rescore.sample", f"{cause}; response ends {text[-CHARACTERS:]!r}")
    if len(changed) > SHOWN:
        findings.info("rescore.sample", f"... and {len(changed) - SHOWN} more")


def _place(record: SampleRecord) -> str:
    """Return which sample it is."""
    row, sample = (record.episode.get(name) for name in ("row", "sample"))
    return f"row {row}, sample {sample}" if row is not None else f"prompt {record.prompt[:40]!r}"
