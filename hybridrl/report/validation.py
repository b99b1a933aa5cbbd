"""Intervals of validation scores, and the paired difference of two runs, from the files of validation samples."""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from hybridrl.evaluation.statistics import compare, mean
from hybridrl.report.contents import UNREADABLE, Contents
from hybridrl.report.curves import INTERVAL, Points
from hybridrl.report.markup import table, text
from hybridrl.report.samples import evenly, is_number
from hybridrl.report.verdicts import validations
from hybridrl.tracking.records import SampleRecord, read_records

MOST_BYTES, MOST_STEPS = 12 << 20, 20
Question = dict[str, np.ndarray]  # question -> the scores of its samples


def intervals(contents: Contents) -> dict[str, Points]:
    """Return the ends of the 95% interval of each validation score, for questions like these, as series."""
    ends: dict[str, list[tuple[int, float, float]]] = defaultdict(list)
    names, room = list(validations(contents)), MOST_BYTES
    for step in evenly(list(contents.validation), MOST_STEPS) if names else ():
        records, room = _records(contents, step), room - _size(contents, step)
        for name in names:
            source, _, variable = name.removeprefix("val-core/").rpartition("/")[0].rpartition("/")
            questions = list(_questions(records, source, variable).values())
            if len(questions) > 1 and (interval := mean(questions).alike):
                ends[name].append((step, *interval))
        if room < 0:
            break
    series: dict[str, Points] = {}
    for name, points in ends.items():
        steps = [step for step, _, _ in points]
        series[f"{INTERVAL}{name}/low"] = (steps, [low for _, low, _ in points])
        series[f"{INTERVAL}{name}/high"] = (steps, [high for _, _, high in points])
    return series


def compare_runs(runs: Sequence[Contents]) -> str:
    """Return a table of the last validation of each run against that of the first, question by question."""
    first, *others = runs
    rows = []
    tables = [_last_validation(run) for run in runs]
    for run, questions in zip(others, tables[1:], strict=True):
        common = [key for key in tables[0] if key in questions]
        if not common:
            rows.append((f"{text(run.name)} - {text(first.name)}", "", "", "", "no question in common"))
            continue
        result = compare([tables[0][key] for key in common], [questions[key] for key in common])
        low, high = result.alike or (float("nan"), float("nan"))
        counts = f"{result.up} up, {result.down} down, {result.same} the same of {len(common)} questions"
        shown = f"<b>{result.difference:+.3f}</b>", f"[{low:+.3f}, {high:+.3f}]", f"{result.p:.3f}"
        rows.append((f"{text(run.name)} - {text(first.name)}", *shown, counts))
    columns = ("last validation, paired by question", ">difference", ">95% interval", ">p", "questions")
    return (
        f"<h3>Validation</h3>{table(columns, rows)}" if any(tables) else "<p>The runs have no validation samples.</p>"
    )


def _last_validation(contents: Contents) -> Question:
    """Return the scores of the last validation by question."""
    if not contents.validation:
        return {}
    records = _records(contents, max(contents.validation))
    variable = "acc" if any("acc" in one.components for one in records) else "score"
    return _questions(records, "", variable)


def _questions(records: Sequence[SampleRecord], source: str, variable: str) -> Question:
    """Return the values of a variable by question, of one data source if samples name theirs; faults are left out."""
    values: dict[str, list[float]] = defaultdict(list)
    for record in records:
        own = record.episode.get("data_source")
        value = record.components.get(variable, record.score if variable != "acc" else None)
        number = isinstance(value, bool | int | float) and is_number(value)
        if number and (own in (None, source) or not source):
            values[record.prompt].append(float(value))
    return {key: np.array(each) for key, each in values.items()}


def _records(contents: Contents, step: int) -> list[SampleRecord]:
    try:
        return list(read_records(contents.validation[step]))
    except UNREADABLE:
        return []  # choosing samples has reported it


def _size(contents: Contents, step: int) -> int:
    try:
        return contents.validation[step].stat().st_size
    except OSError:
        return 0
