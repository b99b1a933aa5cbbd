"""`hybridrl rescore RUN|FILE`: scores stored responses as a run does: those in a file of rows, also with two rewards,
or the samples of a run, whose advantages are compared too.

All rewards run in scoring processes, so that an exception or a hanging call does not end the command.
"""

import argparse
import math
import shutil
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from hybridrl.config import ConfigError, PPOConfig
from hybridrl.config.checks.algorithm import resolve_reward
from hybridrl.config.custom_code import attempt
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
from hybridrl.doctor import config_of_run
from hybridrl.required import required
from hybridrl.rewards.load import check_data_sources, uses_built_in
from hybridrl.rewards.process import ScorerDied
from hybridrl.rewards.rescoring import Rescorer, conversation_facts
from hybridrl.rewards.score import Score, ScoringRequest, Shaping, diagnosis
from hybridrl.runs.settings import build_algorithm
from hybridrl.runs.trials import scored_batch
from hybridrl.tracking.faults import count_faults, fault_kind
from hybridrl.tracking.records import OWN_KEY, SampleRecord, checked_episode, prompt_text, read_records, records_of

KEY = "FILE"
SHOWN = 5  # responses whose scores differ
TRUTH, ENDING = 60, 160  # characters shown of a ground truth, and of a response
RESPONSE_COLUMNS = ("output", "solution_str", "response", "prediction")
PROMPT_COLUMNS = ("input", "prompt")
TRUTH_COLUMNS = ("gts", "ground_truth")
MAX_VALUES = 8  # more values are summarized by quantiles
CUSTOM = "reward.custom_reward_function"
Pair = tuple[float | None, float | None]  # a score, and another of the same response


class ScoringConfig(Section):
    reward: RewardConfig


class Stored(NamedTuple):
    """A stored response: its place in the file, the score stored with it, its length in tokens, and the group of
    responses that are scored together by the manager of this name."""

    place: str
    request: ScoringRequest
    score: float | None
    length: int
    group: Hashable


def rescore(options: argparse.Namespace) -> Findings:
    """Score the samples of a run, or the rows of a file. Raises ConfigError for an option of the other one."""
    run = Path(options.source).expanduser()
    if not run.is_dir():
        if options.steps:
            raise ConfigError(f"--steps={options.steps} chooses steps of a run, and {run} is not the directory of one")
        return rescore_rows(options)
    if options.against or options.data_source:
        unused = "--against" if options.against else "--data-source"
        fix = f"name a file of its samples instead, in {run}/rollouts"
        raise ConfigError(f"{unused} is for a file of rows, and {run} is a directory", fix=fix)
    return rescore_run(run.absolute(), options)


def rescore_rows(options: argparse.Namespace) -> Findings:
    """Score the rows of a file, and compare with their scores and those of another reward. Raises ConfigError if they
    cannot be scored at all."""
    findings, bad_rows = Findings(), Faults(KEY)
    rows = load_rows([options.source], bad_rows, key=KEY, max_samples=-1, shuffle=False, seed=0)
    needs_truth = uses_built_in(reward_config(options.reward, options.overrides))
    parsed = [_parse(row, options.data_source, bad_rows, needs_truth) for row in rows]
    bad_rows.close()
    stored = [row for row in parsed if row is not None]
    scores, seconds = score_all(reward_config(options.reward, options.overrides), stored)
    compared = [("the reward", "stored", scores, [row.score for row in stored])]
    if options.against:
        others, _ = score_all(reward_config(options.against, options.overrides), stored)
        compared.append((options.against, options.against, others, [score.value for score in others]))
    _summarize(scores, seconds, findings)
    for reward, other, its_scores, values in compared:
        for fault, count, first in count_faults(its_scores):
            cause = f"{count} of {len(stored)} responses have no score from {reward}: {fault} ({fault_kind(fault)}), "
            cause += f"first at {stored[first].place}"
            add = findings.error if count == len(stored) else findings.warn
            add(f"reward.fault.{fault.partition(':')[0]}", cause, its_scores[first].detail)
        pairs = [(score.value, value) for score, value in zip(scores, values, strict=True)]
        if both := sum(None not in pair for pair in pairs):
            agreeing = both - sum(_differ(*pair) for pair in pairs)
            findings.info("reward.agreement", f"{agreeing} of {both} scores agree with {other}")
        for difference in _differences(stored, pairs, other):
            findings.info("reward.differs", difference)
    return findings


def reward_config(file: str | None, overrides: Sequence[str]) -> RewardConfig:
    """Return the shipped section `reward` with overrides, and the custom function in `file` if one is given."""
    for override in overrides:
        if not override.lstrip("+").startswith("reward."):
            raise ConfigError(f"{override}: only keys of rewards can be set here", fix="for example reward.timeout=5")
    if file is not None:
        if twice := [text for text in overrides if text.lstrip("+").startswith((f"{CUSTOM}.path=", f"{CUSTOM}.name="))]:
            raise ConfigError(f"--reward={file} and {twice[0]} both name the reward", fix="give one of them")
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
    episode = checked_episode(episode) if isinstance(episode, dict) else {}
    prompt = next((values[name] for name in PROMPT_COLUMNS if isinstance(values.get(name), str | list)), None)
    number = attempt(lambda: float(score))  # also from a text
    extra = (as_object(values.get("extra_info")) or {}) | conversation_facts(episode)
    return Stored(
        row.place.rpartition(", ")[2],  # without the file, which is the same for all
        ScoringRequest(str(source or data_source), response, truth, extra, prompt=prompt),
        None if isinstance(number, Exception) else number,
        _length(episode),
        repr([values.get("step"), episode.get("position"), source, prompt, truth]),
    )


def _length(episode: Mapping[str, Any]) -> int:
    return max(int(episode.get("sampled_tokens", 1)), 1)


def score_all(
    config: RewardConfig, stored: Sequence[Stored], log: Path | None = None, shaped_by: RewardConfig | None = None
) -> tuple[list[Score], float]:
    """Return the scores in order, and the seconds that scoring took without the start of the processes. What the reward
    prints goes to `log`; scores are shaped by `config`, or by another section."""
    sources = {row.request.data_source for row in stored}
    if uses_built_in(config):
        check_data_sources(sources, config.name)
    try:
        with Rescorer(config, sources, log) as rescorer:
            rescorer.shaping, began = Shaping.of(shaped_by or config), time.monotonic()
            requests, groups = [row.request for row in stored], [row.group for row in stored]
            scores = rescorer.rescore(requests, [row.length for row in stored], groups)
            return list(scores), time.monotonic() - began
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


def _differ(score: float | None, other: float | None) -> bool:
    """Whether there are two scores, and they differ by more than rounding."""
    return score is not None and other is not None and not math.isclose(score, other, abs_tol=1e-6)


def _differences(stored: Sequence[Stored], pairs: Sequence[Pair], name: str) -> Iterator[str]:
    """Describe responses with different scores, the largest difference first; `name` is that of the second score."""

    def short(value: Any, most: int) -> str:
        text = " ".join(str(value).split())
        return repr(text if len(text) <= most else "..." + text[-most:])

    differing = [(row, *pair) for row, pair in zip(stored, pairs, strict=True) if _differ(*pair)]
    differing.sort(key=lambda item: -round(abs(required(item[1]) - required(item[2])), 6))
    for row, score, other in differing[:SHOWN]:
        cause = f"{row.place}: {score:g} here, {other:g} {name}; ground truth {short(row.request.ground_truth, TRUTH)}"
        yield f"{cause}; response ends {short(row.request.solution, ENDING)}"
    if len(differing) > SHOWN:
        yield f"... and {len(differing) - SHOWN} more"


# -- the samples of a run ----------------------------------------------------------------------------------------------


STEPS = 10
MOVED = 0.1  # a larger difference is another advantage
DATA = "data.train_files"


def rescore_run(run: Path, options: argparse.Namespace) -> Findings:
    """Score the stored samples of a run with another reward, and compare scores and advantages. Raises ConfigError if
    there is nothing to score, or the reward cannot be loaded."""
    findings = Findings()
    records = [record for path in chosen_files(run, options.steps) for record in read_records(path)]
    section = reward_config(options.reward, options.overrides)
    config = run_config(run, findings, [] if options.reward else options.overrides)
    rows = None if config is None else data_rows(config.data, findings)
    if config is not None and not options.reward:
        section = config.reward
    prompt_key = "prompt" if config is None else config.data.prompt_key
    stored = [_stored(record, rows, prompt_key) for record in records]
    log = Path(tempfile.mkdtemp(prefix="hybridrl-doctor-"), "reward.log")
    shaped_by = section if options.overrides or config is None else config.reward
    scores, _ = score_all(section, stored, log, shaped_by)
    if any(turn.get("reward") for record in records for turn in record.episode.get("turns", [])):
        cause = "environments gave rewards to turns, which the other reward's scores do not have"
        findings.warn("rescore.turns", cause)
    if config is not None and config.reward.reward_model.enable:
        cause = "a reward model, which only training ranks compute, is part of the stored scores, not of the others"
        findings.warn("rescore.reward_model", cause)
    if any(score.fault for score in scores):
        add = findings.error if all(score.fault for score in scores) else findings.warn
        add("rescore.fault", f"{diagnosis(scores)}; its tracebacks are in {log}")
    else:
        shutil.rmtree(log.parent)
    pairs = [(score.value, record.score) for record, score in zip(records, scores, strict=True)]
    changed = sum(_differ(*pair) for pair in pairs)
    findings.info("rescore.changed", f"{changed} of {len(records)} samples have another score")
    _report_steps(records, pairs, findings)
    _report_advantages(records, pairs, config, findings)
    for difference in _differences(stored, pairs, "stored"):
        findings.info("rescore.sample", difference)
    return findings


def chosen_files(run: Path, steps: str | None) -> list[Path]:
    """Return the files of the steps that were named, else of some from the first to the last."""
    files = records_of(run, "rollouts")
    if not files:
        raise ConfigError(f"{run} has no samples", fix="trainer.rollout_data_dir keeps them, and is set by default")
    if steps is None:
        evenly = np.linspace(0, len(files) - 1, min(STEPS, len(files))).round().astype(int)
        return [list(files.values())[place] for place in evenly]
    parts = [part.strip() for part in steps.split(",")]
    if missing := [part for part in parts if not part.isdecimal() or int(part) not in files]:
        fix = f"name some of {min(files)} to {max(files)}"
        raise ConfigError(f"--steps={steps}: no samples of step {missing[0]}", fix=fix)
    return [files[int(part)] for part in parts]


def run_config(run: Path, findings: Findings, overrides: Sequence[str]) -> PPOConfig | None:
    """Return the run's configuration with overrides; None if it left none that can be read, as verl's runs do."""
    if not (run / "config.yaml").is_file():
        return None
    try:
        return config_of_run(run, overrides, offline=True)
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


def _stored(record: SampleRecord, rows: Rows | None, prompt_key: str) -> Stored:
    episode, extra, prompt = record.episode, None, record.prompt
    row, sample, source = episode.get("row"), episode.get("sample"), str(episode.get("data_source", ""))
    if rows is not None and row is not None and row < len(rows):  # the data may have changed since
        extra = as_object(rows[row].values.get("extra_info"))
        messages = rows[row].values.get(prompt_key)
        if isinstance(messages, list) and prompt == prompt_text(messages):  # a judge reads them
            prompt = messages
    extra = (extra or {}) | conversation_facts(episode)
    place = f"row {row}, sample {sample}" if row is not None else f"prompt {record.prompt[:40]!r}"
    request = ScoringRequest(source, record.response, record.truth, extra, prompt=prompt)
    return Stored(f"step {record.step}, {place}", request, record.score, _length(episode), record.group)


def _report_steps(records: Sequence[SampleRecord], pairs: Sequence[Pair], findings: Findings) -> None:
    for step in sorted({record.step for record in records}):
        of_step = [pair for record, pair in zip(records, pairs, strict=True) if record.step == step]
        new, old = ([value for value in values if value is not None] for values in zip(*of_step, strict=True))
        means = " -> ".join(f"{np.mean(values):.3f}" if values else "none" for values in (old, new))
        changed = sum(_differ(*pair) for pair in of_step)
        findings.info("rescore.step", f"step {step}: mean reward {means}, {changed} changed")


def _report_advantages(
    records: Sequence[SampleRecord],
    pairs: Sequence[Pair],
    config: PPOConfig | None,
    findings: Findings,
) -> None:
    """Compare the advantages by the run's estimator, or by GRPO's if the run's needs more than rewards."""
    both = [(record, *pair) for record, pair in zip(records, pairs, strict=True) if None not in pair]
    if not both:
        return
    name, estimator = "grpo", bind(find_estimator("grpo")[1], {"norm_adv_by_std_in_grpo": True})
    if config is not None and not find_estimator(config.algorithm.adv_estimator)[0].reads:
        name, estimator = config.algorithm.adv_estimator, build_algorithm(config).estimator
    scored, *scores = zip(*both, strict=True)
    batches = [as_batch(scored, values) for values in scores]
    new, old = (batch.trained_mean(estimator(batch)[0]) for batch in batches)
    moved, turned = int(((old - new).abs() > MOVED).sum()), int(((old * new) < 0).sum())
    flat = [int((values == 0).sum()) for values in (old, new)]
    findings.info(
        "rescore.advantages",
        f"by {name}: {moved} of {len(both)} advantages change by more than {MOVED}, {turned} of them their sign; "
        f"{flat[0]} were 0, {flat[1]} would be 0",
    )


def as_batch(records: Sequence[SampleRecord], scores: Sequence[float]) -> Batch:
    """Return samples as rows of their lengths, with what an estimator of rewards alone reads."""
    groups = {key: number for number, key in enumerate(dict.fromkeys(record.group for record in records))}
    group = torch.tensor([groups[record.group] for record in records])
    lengths = torch.tensor([_length(record.episode) for record in records])
    batch = scored_batch(lengths, group, torch.arange(len(records)), torch.tensor(scores, dtype=torch.float32))
    return replace(batch, truncated=torch.tensor([record.episode.get("stop") in TRUNCATED for record in records]))
