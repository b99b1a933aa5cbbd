"""`python -m hybridrl.doctor reward`: stored answers scored as in a run, and two reward files compared."""

import argparse
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hybridrl.config import ConfigError, PPOConfig
from hybridrl.config.compose import SHIPPED
from hybridrl.config.findings import Finding, Findings
from hybridrl.config.load import judge
from hybridrl.config.schema_reward import RewardConfig
from hybridrl.data.rows import Faults, Row, load_rows
from hybridrl.doctor.findings import show
from hybridrl.rewards.built_in import check_data_sources
from hybridrl.rewards.load import uses_built_in
from hybridrl.rewards.pool import ScorerPool
from hybridrl.rewards.score import Answer, Score

_KEY = "--rows"
_SHOWN = 5  # rows of a kind
_ANSWER_COLUMNS = ("output", "solution_str", "response", "prediction")
_TRUTH_COLUMNS = ("gts", "ground_truth")
_MOST_VALUES = 8
_CUSTOM = "reward.custom_reward_function"
# Keys that a run must have.
_NOT_READ = ("data.train_files=rows.jsonl", "actor_rollout_ref.model.path=model")


@dataclass(frozen=True)
class Stored:
    """A row's answer with its place, and the score that was stored beside it."""

    place: str
    answer: Answer
    score: float | None


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m hybridrl.doctor reward",
        description="Rows hold an answer (output, solution_str, response or prediction), its ground truth (gts, "
        "ground_truth or reward_model) and may hold data_source, extra_info and score: the samples that "
        "trainer.rollout_data_dir keeps are such rows.",
        allow_abbrev=False,
    )
    parser.add_argument("--rows", required=True, metavar="FILE", help=".jsonl, .json or .parquet")
    parser.add_argument("--reward", metavar="FILE.py[:NAME]", help="the reward; left out: built in, by data_source")
    parser.add_argument("--against", metavar="FILE.py[:NAME]", help="a second reward, for the same answers")
    parser.add_argument("--data-source", metavar="NAME", default="", help="of rows that name none")
    parser.add_argument("--json", action="store_true", help="findings for programs")
    parser.add_argument("overrides", nargs="*", metavar="reward.key=value")
    arguments = parser.parse_intermixed_args(argv)
    try:
        findings = examine(arguments)
    except ConfigError as error:
        findings = [Finding("reward.refused", "refused", line) for line in error.lines]
    return show(Findings(findings), as_json=arguments.json)


def examine(arguments: argparse.Namespace) -> list[Finding]:
    """What there is to say of the rows' answers; ConfigError where they cannot be scored at all."""
    rows = load(arguments.rows, arguments.data_source)
    scores, seconds = score(reward_config(arguments.reward, arguments.overrides), rows)
    findings = [*summary(scores, seconds), *faults(rows, scores), *differences(rows, scores, "stored", _stored(rows))]
    if arguments.against:
        others, _ = score(reward_config(arguments.against, arguments.overrides), rows)
        findings += [*faults(rows, others, arguments.against), *differences(rows, scores, arguments.against, others)]
    return findings


def reward_config(file: str | None, overrides: Sequence[str]) -> RewardConfig:
    """The shipped section `reward` with keys set by hand, and the custom function in `file`."""
    for override in overrides:
        if not override.lstrip("+").startswith("reward."):
            raise ConfigError(f"{override}: give keys of rewards, as in reward.timeout=5")
    if file is not None:
        path, colon, name = file.rpartition(":")
        path, name = (path, name) if colon and not name.startswith("//") else (file, "")
        overrides = [*overrides, f"{_CUSTOM}.path={_quoted(path)}", *([f"{_CUSTOM}.name={name}"] if name else [])]
    judgement = judge(PPOConfig, [*_NOT_READ, *overrides], SHIPPED[PPOConfig], elsewhere=True)
    judgement.findings.close()
    return judgement.config.reward


def _quoted(text: str) -> str:
    """A text as a value for Hydra, whatever is in it."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def load(file: str, data_source: str) -> list[Stored]:
    wrong = Faults(_KEY)
    rows = load_rows([file], wrong, key=_KEY, max_samples=-1, shuffle=False, seed=0)
    stored = [_parse(row, data_source, wrong) for row in rows]
    wrong.close()
    return [row for row in stored if row is not None]


def score(config: RewardConfig, rows: list[Stored]) -> tuple[list[Score], float]:
    """The scores in order, and the seconds that scoring took without the start of the processes."""
    sources = {row.answer.data_source for row in rows}
    if uses_built_in(config):
        check_data_sources(sources)
    with ScorerPool(config, None, sources) as pool:
        began = time.monotonic()
        scores = [future.result() for future in pool.submit([row.answer for row in rows])]
        return scores, time.monotonic() - began


def summary(scores: list[Score], seconds: float) -> list[Finding]:
    values = [value for found in scores if (value := found.value) is not None]
    rate = f"{len(scores)} answers in {seconds:.2f} s ({len(scores) / max(seconds, 1e-9):,.0f}/s)"
    if not values:
        return [Finding("reward.scores", "warning", f"{rate}: none could be scored")]
    findings = [
        Finding("reward.scores", "information", f"{rate}: mean {statistics.fmean(values):.4f}; {spread(values)}")
    ]
    if len(values) > 1 and len(set(values)) == 1:
        told = f"every score is {values[0]:g}: a run learns nothing from answers that are all alike"
        findings.append(Finding("reward.constant", "warning", told, "look at a row and at how the answer is read"))
    return findings


def spread(values: list[float]) -> str:
    """Each value with its count, or quantiles where there are many."""
    counts = Counter(values)
    if len(counts) <= _MOST_VALUES:
        return ", ".join(f"{value:g}: {count}" for value, count in sorted(counts.items()))
    quarters = statistics.quantiles(values, n=4)
    points = [min(values), *quarters, max(values)]
    return "least, quarters, greatest: " + ", ".join(f"{point:.4g}" for point in points)


def faults(rows: list[Stored], scores: list[Score], file: str = "the reward") -> list[Finding]:
    findings = []
    for fault, count in Counter(found.fault for found in scores if found.fault).items():
        row, first = next((row, found) for row, found in zip(rows, scores, strict=True) if found.fault == fault)
        told = f'{count} of {len(rows)} answers have no score from {file}: fault "{fault}", first at {row.place}'
        findings.append(Finding(f"reward.fault.{fault.partition(':')[0]}", "warning", told, first.detail))
    return findings


def differences(rows: list[Stored], scores: list[Score], name: str, others: list[Score]) -> list[Finding]:
    """Where two scores of the same answer differ; a score that is missing on either side is not compared."""
    both = [
        (row, mine.value, other.value)
        for row, mine, other in zip(rows, scores, others, strict=True)
        if mine.value is not None and other.value is not None
    ]
    if not both:
        return []
    apart = [item for item in both if abs(item[1] - item[2]) > 1e-6]
    told = f"{len(both) - len(apart)} of {len(both)} scores agree with {name}"
    findings = [Finding("reward.agreement", "information", told)]
    for row, mine, other in apart[:_SHOWN]:
        told = f"{row.place}: {mine:g} here, {other:g} {name}; ground truth {_short(row.answer.ground_truth)}"
        findings.append(Finding("reward.differs", "information", f"{told}; answer ends {_short(row.answer.solution)}"))
    if len(apart) > _SHOWN:
        findings.append(Finding("reward.differs", "information", f"... and {len(apart) - _SHOWN} more"))
    return findings


def _stored(rows: list[Stored]) -> list[Score]:
    return [Score(row.score) for row in rows]


def _parse(row: Row, data_source: str, wrong: Faults) -> Stored | None:
    values = row.values
    answer = next((values[name] for name in _ANSWER_COLUMNS if isinstance(values.get(name), str)), None)
    truth = _truth(values)
    if answer is None or truth is None:
        missing = f"no answer ({', '.join(_ANSWER_COLUMNS)})" if answer is None else "no ground truth"
        wrong.add(row.place, f"{missing}; the row has {', '.join(values)}")
        return None
    source, extra_info, found = values.get("data_source"), values.get("extra_info"), values.get("score")
    return Stored(
        row.place.rpartition(", ")[2],  # all are of one file
        Answer(str(source or data_source), answer, truth, extra_info if isinstance(extra_info, dict) else {}),
        float(found) if isinstance(found, int | float) else None,
    )


def _truth(values: dict[str, Any]) -> Any:
    model = values.get("reward_model")
    given = [values.get(name) for name in _TRUTH_COLUMNS] + [
        model.get("ground_truth") if isinstance(model, dict) else None
    ]
    return next((truth for truth in given if truth is not None), None)


def _short(value: Any) -> str:
    text = " ".join(str(value).split())
    return repr(text if len(text) <= 60 else "..." + text[-60:])
