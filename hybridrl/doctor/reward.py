"""`python -m hybridrl.doctor reward`: scores stored responses as a run does, and compares two rewards; and `rescore`,
which does so for the stored samples of a run, and compares the advantages too.

All rewards run in the scorer pool, so that an exception or a hanging call ends nothing here.
"""

import argparse
import math
import shutil
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from hybridrl.config import ConfigError, PPOConfig
from hybridrl.config.checks.algorithm import resolve_reward
from hybridrl.config.findings import Checker, Findings
from hybridrl.config.load import read_config
from hybridrl.config.schema import DataConfig
from hybridrl.config.schema_parts import RewardConfig
from hybridrl.config.values import Section
from hybridrl.core.algorithms.algorithm import bind, find_estimator
from hybridrl.core.batch import Batch
from hybridrl.core.experience.trajectory import TRUNCATED
from hybridrl.data.rows import DataRow, Faults, Rows, load_rows
from hybridrl.data.tokenizer import as_object
from hybridrl.doctor import directory_parser, load_config, show
from hybridrl.rewards.load import check_data_sources, uses_built_in
from hybridrl.rewards.pool import ScorerPool
from hybridrl.rewards.process import ScorerDied
from hybridrl.rewards.score import WRITTEN, Score, ScoringRequest
from hybridrl.runs.reward_trial import faults
from hybridrl.runs.settings import build_algorithm, build_shaping
from hybridrl.tracking.records import OWN_KEY, SampleRecord, read_records, records_of

KEY = "--rows"
SHOWN = 5  # rows that differ
RESPONSE_COLUMNS = ("output", "solution_str", "response", "prediction")
TRUTH_COLUMNS = ("gts", "ground_truth")
MAX_VALUES = 8  # more values are summarized by quantiles
CUSTOM = "reward.custom_reward_function"


class ScoringConfig(Section):
    reward: RewardConfig


class Stored(NamedTuple):
    """A row's response with its place in the file, and the score stored with it."""

    place: str
    request: ScoringRequest
    score: float | None


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m hybridrl.doctor reward",
        description="Rows hold a response (output, solution_str, response or prediction), its ground truth (gts, "
        "ground_truth or reward_model) and may hold data_source, extra_info and score: the samples that "
        "trainer.rollout_data_dir keeps are such rows.",
        allow_abbrev=False,
    )
    parser.add_argument("--rows", required=True, metavar="FILE", help=".jsonl, .json or .parquet")
    parser.add_argument("--reward", metavar="FILE.py[:NAME]", help="the reward; default: built in, by data_source")
    parser.add_argument("--against", metavar="FILE.py[:NAME]", help="a second reward, for the same responses")
    parser.add_argument("--data-source", metavar="NAME", default="", help="for rows that name none")
    parser.add_argument("--json", action="store_true", help="print findings as JSON")
    parser.add_argument("overrides", nargs="*", metavar="reward.key=value")
    arguments = parser.parse_intermixed_args(argv)
    findings = Findings()
    with findings.gathered("reward.refused"):
        examine(arguments, findings)
    return show(findings, as_json=arguments.json)


def examine(arguments: argparse.Namespace, findings: Findings) -> None:
    """Score the rows and compare. Raises ConfigError if they cannot be scored at all."""
    bad_rows = Faults(KEY)
    rows = load_rows([arguments.rows], bad_rows, key=KEY, max_samples=-1, shuffle=False, seed=0)
    needs_truth = uses_built_in(reward_config(arguments.reward, arguments.overrides))
    parsed = [_parse(row, arguments.data_source, bad_rows, needs_truth) for row in rows]
    bad_rows.close()
    stored = [row for row in parsed if row is not None]
    requests, compared = [row.request for row in stored], []
    for name, file, other in (("the reward", arguments.reward, "stored"), (arguments.against,) * 3):
        if name:
            config = reward_config(file, arguments.overrides)
            if uses_built_in(config):
                check_data_sources({request.data_source for request in requests})
            compared.append((name, other, *score_all(config, requests)))
    _, _, scores, seconds = compared[0]
    _summarize(scores, seconds, findings)
    for name, other, given, _ in compared:
        for fault, count, first in faults(given):
            cause = f"{count} of {len(stored)} responses have no score from {name}: "
            cause += f'fault "{fault}", first at {stored[first].place}'
            findings.warn(f"reward.fault.{fault.partition(':')[0]}", cause, given[first].detail)
        values = [row.score for row in stored] if given is scores else [score.value for score in given]
        _compare(stored, scores, other, values, findings)


def reward_config(file: str | None, overrides: Sequence[str]) -> RewardConfig:
    """Return the shipped section `reward` with overrides, and the custom function in `file` if one is given."""
    for override in overrides:
        if not override.lstrip("+").startswith("reward."):
            raise ConfigError(f"{override}: only keys of rewards can be set here", fix="for example reward.timeout=5")
    if file is not None:
        path, colon, name = file.rpartition(":")
        path, name = (path, name) if colon and not name.startswith("//") else (file, "")
        quoted = "'" + path.replace("\\", "\\\\").replace("'", "\\'") + "'"  # for Hydra, whatever characters it has
        overrides = [*overrides, f"{CUSTOM}.path={quoted}", *([f"{CUSTOM}.name={name}"] if name else [])]
    result = read_config(ScoringConfig, overrides, offline=True)
    if result.config is not None:
        result.cross_check(lambda config, findings: resolve_reward(config.reward, Checker(findings, asdict(config))))
    return result.accept().reward


def _parse(row: DataRow, data_source: str, bad_rows: Faults, needs_truth: bool) -> Stored | None:
    values, model = row.values, as_object(row.values.get("reward_model")) or {}
    response = next((values[name] for name in RESPONSE_COLUMNS if isinstance(values.get(name), str)), None)
    truths = [place[name] for place in (values, model) for name in TRUTH_COLUMNS if name in place]
    truth = next((truth for truth in truths if truth is not None), None)
    if response is None or not truths or (truth is None and needs_truth):
        missing = f"no response ({', '.join(RESPONSE_COLUMNS)})" if response is None else "no ground truth"
        bad_rows.add(row.place, f"{missing}; the row has {', '.join(values)}")
        return None
    source, score, episode = values.get("data_source"), values.get("score"), values.get(OWN_KEY)
    extra = (as_object(values.get("extra_info")) or {}) | written(episode if isinstance(episode, dict) else {})
    return Stored(
        row.place.rpartition(", ")[2],  # without the file, which is the same for all
        ScoringRequest(str(source or data_source), response, truth, extra),
        float(score) if isinstance(score, int | float) else None,
    )


def written(episode: Mapping[str, Any]) -> dict[str, str]:
    """Return for `extra_info` what the policy wrote in a conversation of a file of samples; empty for others."""
    messages, turns = episode.get("messages"), episode.get("turns")
    if not isinstance(messages, list) or not isinstance(turns, list) or not turns:
        return {}
    mine = [one for one in messages if isinstance(one, dict) and one.get("role") == "assistant"]
    return {WRITTEN: "\n".join(str(one.get("content") or "") for one in mine[-len(turns) :])}


def score_all(
    config: RewardConfig, requests: list[ScoringRequest], log: Path | None = None
) -> tuple[list[Score], float]:
    """Return the scores in order, and the seconds that scoring took without the start of the processes. What the reward
    prints goes to `log`."""
    try:
        with ScorerPool(config, log, data_sources={request.data_source for request in requests}) as pool:
            began = time.monotonic()
            return [future.result() for future in pool.submit(requests)], time.monotonic() - began
    except ScorerDied as error:
        raise ConfigError(str(error)) from error


def _summarize(scores: list[Score], seconds: float, findings: Findings) -> None:
    values = [value for score in scores if (value := score.value) is not None]
    rate = f"{len(scores)} responses in {seconds:.2f} s ({len(scores) / max(seconds, 1e-9):,.0f}/s)"
    if not values:
        findings.warn("reward.scores", f"{rate}: none could be scored")
        return
    counts = Counter(values)
    if len(counts) <= MAX_VALUES:
        spread = ", ".join(f"{value:g}: {count}" for value, count in sorted(counts.items()))
    else:
        points = [min(values), *statistics.quantiles(values, n=4), max(values)]
        spread = "minimum, quartiles, maximum: " + ", ".join(f"{point:.4g}" for point in points)
    findings.info("reward.scores", f"{rate}: mean {statistics.fmean(values):.4f}; {spread}")
    if len(values) > 1 and len(counts) == 1:
        cause = f"every score is {values[0]:g}: a run learns nothing from identical scores"
        findings.warn("reward.constant", cause, "look at a row and at how its response is read")


def _compare(rows: list[Stored], scores: list[Score], name: str, others: list[Any], findings: Findings) -> None:
    """Report where two scores of a response differ; responses without one of the two are not compared."""

    def short(value: Any) -> str:
        text = " ".join(str(value).split())
        return repr(text if len(text) <= 60 else "..." + text[-60:])

    pairs = zip(rows, (score.value for score in scores), others, strict=True)
    both = [(row, mine, other) for row, mine, other in pairs if mine is not None and other is not None]
    if not both:
        return
    differing = [(row, mine, other) for row, mine, other in both if abs(mine - other) > 1e-6]
    findings.info("reward.agreement", f"{len(both) - len(differing)} of {len(both)} scores agree with {name}")
    for row, mine, other in differing[:SHOWN]:
        cause = f"{row.place}: {mine:g} here, {other:g} {name}; ground truth {short(row.request.ground_truth)}"
        findings.info("reward.differs", f"{cause}; response ends {short(row.request.solution)}")
    if len(differing) > SHOWN:
        findings.info("reward.differs", f"... and {len(differing) - SHOWN} more")


# -- the samples of a run ----------------------------------------------------------------------------------------------


STEPS, CHARACTERS = 10, 160
MOVED = 0.1  # what counts as another advantage
DATA = "data.train_files"


def rescore_main(argv: list[str]) -> int:
    """`python -m hybridrl.doctor rescore RUN --reward NEW.py`: the stored samples of a run under another reward.

    Says which samples change, and what the advantages would have been. Weights learned from the old reward, so this
    shows what the new one would have rewarded there, and not where it would have led.
    """
    parser = directory_parser("rescore", rescore_main.__doc__, as_json="findings")
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
    extra = as_object(rows[number].values.get("extra_info")) if there else None
    extra = (extra or {}) | written(record.episode)
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
