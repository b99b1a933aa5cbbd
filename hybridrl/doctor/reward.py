"""`python -m hybridrl.doctor reward`: scores stored responses as a run does, and compares two rewards.

Also tries the reward on a few real rows of a run: does a response with the ground truth score more than an empty one?
All rewards run in the scorer pool, so that an exception or a hanging call ends nothing here.
"""

import argparse
import itertools
import shutil
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import wait
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from hybridrl.config import ConfigError, PPOConfig
from hybridrl.config.compose import SHIPPED
from hybridrl.config.findings import Findings
from hybridrl.config.load import resolve_config
from hybridrl.config.schema_algorithm import RewardConfig
from hybridrl.data.prompts import Prompt
from hybridrl.data.rows import Faults, Row, load_rows
from hybridrl.doctor import show
from hybridrl.rewards.built_in import check_data_sources, scorer_of
from hybridrl.rewards.load import uses_built_in
from hybridrl.rewards.pool import ScorerPool
from hybridrl.rewards.score import Score, ScoringRequest

KEY = "--rows"
SHOWN = 5  # rows that differ
RESPONSE_COLUMNS = ("output", "solution_str", "response", "prediction")
TRUTH_COLUMNS = ("gts", "ground_truth")
MAX_VALUES = 8  # more values are summarized by quantiles
CUSTOM = "reward.custom_reward_function"
# Keys that a configuration needs; these values are never used.
PLACEHOLDERS = ("data.train_files=path/to/rows.jsonl", "actor_rollout_ref.model.path=path/to/model")

ROWS = 8
SECONDS = 20.0
# How a response states its result, by the built-in scorer that reads it.
FORMS = {
    "gsm8k": "#### {}",
    "math": r"\boxed{{{}}}",
    "math_dapo": r"Answer: \boxed{{{}}}",
    "multiple_choice": r"\boxed{{{}}}",
    "search_qa": "<answer>{}</answer>",
}
# Scorers whose ground truth is a task or tests, from which no response can be made.
UNANSWERED = ("code", "countdown")
# A custom function may read any of these.
USUAL = ("{}", FORMS["gsm8k"], FORMS["math_dapo"], FORMS["search_qa"])


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
            compared.append((name, other, *_score(config, requests)))
    _, _, scores, seconds = compared[0]
    _summarize(scores, seconds, findings)
    for name, other, given, _ in compared:
        for fault, count, first in _faults(given):
            cause = f"{count} of {len(stored)} responses have no score from {name}: "
            cause += f'fault "{fault}", first at {stored[first].place}'
            findings.warn(f"reward.fault.{fault.partition(':')[0]}", cause, given[first].detail)
        values = [row.score for row in stored] if given is scores else [score.value for score in given]
        _compare(stored, scores, other, values, findings)


def _faults(scores: Sequence[Score | None]) -> Iterator[tuple[str, int, int]]:
    """Each fault, how many scores have it, and the index of the first."""
    faults = [score and score.fault for score in scores]
    for fault, count in Counter(filter(None, faults)).items():
        yield fault, count, faults.index(fault)


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
    judgement = resolve_config(PPOConfig, [*PLACEHOLDERS, *overrides], SHIPPED[PPOConfig], offline=True)
    judgement.findings.close()
    return judgement.config.reward


def _parse(row: Row, data_source: str, bad_rows: Faults) -> Stored | None:
    values, model = row.values, row.values.get("reward_model")
    response = next((values[name] for name in RESPONSE_COLUMNS if isinstance(values.get(name), str)), None)
    truths = [*map(values.get, TRUTH_COLUMNS), model.get("ground_truth") if isinstance(model, dict) else None]
    truth = next((truth for truth in truths if truth is not None), None)
    if response is None or truth is None:
        missing = f"no response ({', '.join(RESPONSE_COLUMNS)})" if response is None else "no ground truth"
        bad_rows.add(row.place, f"{missing}; the row has {', '.join(values)}")
        return None
    source, extra_info, score = values.get("data_source"), values.get("extra_info"), values.get("score")
    return Stored(
        row.place.rpartition(", ")[2],  # without the file, which is the same for all
        ScoringRequest(str(source or data_source), response, truth, extra_info if isinstance(extra_info, dict) else {}),
        float(score) if isinstance(score, int | float) else None,
    )


def _score(
    config: RewardConfig,
    requests: list[ScoringRequest],
    tokenizer: PreTrainedTokenizerBase | None = None,
    log: Path | None = None,
    limit: float | None = None,
) -> tuple[list[Any], float]:
    """Return the scores in order, None for those not there within `limit` seconds, and the seconds that scoring took
    without the start of the processes. A reward that takes tokens gets those of the tokenizer."""
    with ScorerPool(config, log, {request.data_source for request in requests}) as pool:
        began = time.monotonic()
        if tokenizer and pool.takes_tokens:
            ids = [tokenizer(request.solution, add_special_tokens=False)["input_ids"] for request in requests]
            requests = [replace(request, response_ids=tokens) for request, tokens in zip(requests, ids, strict=True)]
        futures = pool.submit(requests)
        wait(futures, timeout=limit)
        return [future.result() if future.done() else None for future in futures], time.monotonic() - began


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


class Trial(NamedTuple):
    """A row's responses, an empty one and those that state its ground truth; the score of the empty one, and the best
    of the others; None for a score that is not there."""

    prompt: Prompt
    responses: tuple[str, ...]
    empty: float | None
    right: float | None


def try_reward(
    config: RewardConfig,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    findings: Findings,
    seconds: float = SECONDS,
) -> None:
    """Score responses to a few rows. `seconds` limits all responses together; opening the pool has its own limit."""
    rows = [(prompt, _responses(prompt, uses_built_in(config))) for prompt in spread_rows(prompts, ROWS)]
    tried = [(prompt, text) for prompt, responses in rows for text in responses]
    requests = [ScoringRequest(row.data_source, text, row.ground_truth, row.extra_info) for row, text in tried]
    directory = Path(tempfile.mkdtemp(prefix="hybridrl-doctor-"))
    log = directory / "reward.log"
    try:
        with findings.gathered("reward.load"):
            # In processes even if the run would score in the driver: there nothing ends a call.
            used = replace(config, num_workers=min(max(config.num_workers, 1), 2), retries=0)
            scores, _ = _score(used, requests, tokenizer, log, seconds)
            if late := scores.count(None):
                cause = f"{late} of {len(scores)} responses had no score after {seconds:g} s, and a run ends a call "
                cause += f"only after reward.timeout={config.timeout:g} seconds"
                fix = "if scoring takes that long, skip this check: --no-reward"
                findings.warn("reward.slow", cause, fix, keys="reward.timeout")
            for fault, count, first in _faults(scores):
                prompt, text = tried[first]
                cause = f"{count} of {len(scores)} responses have no score: {scores[first].detail}, first on row "
                fix = f"see what it printed in {log}" if log.stat().st_size else ""
                cause += f"{prompt.row} with the response {text!r:.60}"
                findings.warn(f"reward.fault.{fault.partition(':')[0]}", cause, fix)
            rest, trials = iter(score and score.value for score in scores), []
            for prompt, responses in rows:
                empty, *others = itertools.islice(rest, len(responses))
                right = max((value for value in others if value is not None), default=None)
                trials.append(Trial(prompt, responses, empty, right))
            for source in sorted({prompt.data_source for prompt, _ in rows}):
                _compare_trials(source, [trial for trial in trials if trial.prompt.data_source == source], findings)
    finally:
        if not any(str(log) in finding.text for finding in findings.items):
            shutil.rmtree(directory)


def spread_rows(prompts: Sequence[Prompt], count: int) -> list[Prompt]:
    """Select rows of every data source, evenly spaced."""
    by_source: dict[str, list[int]] = {}
    for index, prompt in enumerate(prompts):
        by_source.setdefault(prompt.data_source, []).append(index)
    share = max(count // len(by_source), 1)
    chosen = [indices[:: -(-len(indices) // share)] for indices in by_source.values()]
    return [prompts[index] for indices in chosen for index in indices][: max(count, len(by_source))]


def _responses(prompt: Prompt, built_in: bool) -> tuple[str, ...]:
    """Make responses that state the ground truth as the scorer reads it."""
    module, truth = scorer_of(prompt.data_source) if built_in else None, prompt.ground_truth
    if module in UNANSWERED:
        return ("",)
    if module == "multiple_choice" and isinstance(truth, int):
        truth = chr(ord("A") + truth)
    truth = truth.get("target", truth) if isinstance(truth, dict) else truth
    truth = truth[0] if isinstance(truth, list) and truth else truth
    forms = (FORMS[module],) if module in FORMS else USUAL
    return ("", *dict.fromkeys(form.format(truth) for form in forms))


def _compare_trials(source: str, trials: list[Trial], findings: Findings) -> None:
    """Compare the ground truth with an empty response, for one data source."""
    comparable = [trial for trial in trials if trial.right is not None and trial.empty is not None]
    low = [trial for trial in comparable if trial.right <= trial.empty]
    if low:
        prompt, responses, empty, right = low[0]
        more = ", ..." if len(responses) > 4 else ""
        cause = f"{source}: on {len(low)} of {len(comparable)} rows the ground truth scores no more than an empty "
        cause += f"response: row {prompt.row}, ground truth {prompt.ground_truth!r:.60}, {right:g} against "
        cause += f"{empty:g} (tried as {', '.join(map(repr, responses[1:4]))}{more})"
        fix = "unless it expects another form, check how it reads response and truth"
        findings.warn("reward.ground-truth", cause, fix)
    elif comparable:
        pairs = Counter(f"{trial.right:g} against {trial.empty:g}" for trial in comparable)
        values = ", ".join(f"{pair} on {count} row{'s' * (count > 1)}" for pair, count in pairs.items())
        findings.info("reward.tried", f"{source}: the ground truth against an empty response: {values}")
    elif all(len(trial.responses) == 1 for trial in trials):
        cause = f"{source}: no response can be made from its ground truth, so only an empty one was tried"
        findings.info("reward.tried", cause)
