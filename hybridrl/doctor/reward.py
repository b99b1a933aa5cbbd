"""`python -m hybridrl.doctor reward`: scores stored responses as a run does, and compares two rewards.

Also tries the reward on a few real rows of a run, as main_ppo does (runs/reward_trial.py). All rewards run in the
scorer pool, so that an exception or a hanging call ends nothing here.
"""

import argparse
import shutil
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from hybridrl.config import ConfigError, PPOConfig
from hybridrl.config.checks.algorithm import resolve_reward
from hybridrl.config.findings import Checker, Findings
from hybridrl.config.load import read_config
from hybridrl.config.schema_parts import RewardConfig
from hybridrl.config.values import Section
from hybridrl.data.prompts import PromptDataset
from hybridrl.data.rows import DataRow, Faults, load_rows
from hybridrl.doctor import show
from hybridrl.rewards.load import check_data_sources, uses_built_in
from hybridrl.rewards.pool import ScorerPool
from hybridrl.rewards.process import ScorerDied
from hybridrl.rewards.score import WRITTEN, Score, ScoringRequest
from hybridrl.runs.reward_trial import faults, try_reward
from hybridrl.tracking.records import OWN_KEY

KEY = "--rows"
SHOWN = 5  # rows that differ
RESPONSE_COLUMNS = ("output", "solution_str", "response", "prediction")
TRUTH_COLUMNS = ("gts", "ground_truth")
MAX_VALUES = 8  # more values are summarized by quantiles
CUSTOM = "reward.custom_reward_function"
SECONDS = 20.0


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
    parsed = [_parse(row, arguments.data_source, bad_rows) for row in rows]
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


def _parse(row: DataRow, data_source: str, bad_rows: Faults) -> Stored | None:
    values, model = row.values, row.values.get("reward_model")
    response = next((values[name] for name in RESPONSE_COLUMNS if isinstance(values.get(name), str)), None)
    truths = [*map(values.get, TRUTH_COLUMNS), model.get("ground_truth") if isinstance(model, dict) else None]
    truth = next((truth for truth in truths if truth is not None), None)
    if response is None or truth is None:
        missing = f"no response ({', '.join(RESPONSE_COLUMNS)})" if response is None else "no ground truth"
        bad_rows.add(row.place, f"{missing}; the row has {', '.join(values)}")
        return None
    source, extra_info, score = values.get("data_source"), values.get("extra_info"), values.get("score")
    episode = values.get(OWN_KEY)
    extra = (extra_info if isinstance(extra_info, dict) else {}) | written(episode if isinstance(episode, dict) else {})
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


# -- the reward on a run's rows ----------------------------------------------------------------------------------------


def try_on_rows(
    config: PPOConfig,
    tokenizer: PreTrainedTokenizerBase,
    datasets: Mapping[str, PromptDataset],
    findings: Findings,
    seconds: float = SECONDS,
) -> None:
    """Try the reward as a run does (runs/reward_trial.py), with more time. `seconds` limits all responses together;
    loading has its own limit."""
    directory = Path(tempfile.mkdtemp(prefix="hybridrl-doctor-"))
    log, limit = directory / "reward.log", config.reward.timeout
    try:
        with findings.gathered("reward.load"):
            if late := try_reward(
                config.reward, config.data.max_response_length, tokenizer, datasets, findings, log, seconds
            ):
                cause = f"{late} responses had no score after {seconds:g} s, and a run ends a call only after "
                cause += f"reward.timeout={limit:g} seconds"
                fix = "if scoring takes that long, skip this check: --no-reward"
                findings.warn("reward.slow", cause, fix, keys="reward.timeout")
    finally:
        if not any(str(log) in finding.text for finding in findings.items):
            shutil.rmtree(directory)
