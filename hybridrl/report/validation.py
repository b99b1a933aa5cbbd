"""Intervals of validation scores, and the paired difference of two runs, from the files of validation samples."""

from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np

from hybridrl.evaluation.statistics import compare, mean
from hybridrl.report.contents import Contents
from hybridrl.report.curves import INTERVAL, Points
from hybridrl.report.markup import table, text
from hybridrl.report.samples import evenly, is_number
from hybridrl.report.verdicts import validations
from hybridrl.runs.directory import UNREADABLE
from hybridrl.tracking.records import read_records

MOST_BYTES, MOST_STEPS = 12 << 20, 20
VARIABLES = ("acc", "reward")  # in the order in which runs are compared by them
Question = dict[int, np.ndarray]  # hash of a question, which may be long -> the values of its samples
Tables = dict[str, dict[str, Question]]  # variable -> data source, empty in files of verl -> questions


def intervals(contents: Contents) -> dict[str, Points]:
    """Return the ends of the 95% interval of each validation score, for questions like these, as series."""
    ends: dict[str, list[tuple[int, float, float]]] = defaultdict(list)
    names, room = list(validations(contents)), MOST_BYTES
    for step in evenly(list(contents.validation), MOST_STEPS) if names else ():
        parts = {name: name.removeprefix("val-core/").rpartition("/")[0].rpartition("/") for name in names}
        tables, room = _tables(contents, step, {part[2] for part in parts.values()}), room - _size(contents, step)
        for name, (source, _, variable) in parts.items():
            # Samples of verl do not name their source, so several cannot be separated.
            unnamed = tables[variable].get("", {}) if len(names) == 1 else {}
            questions = list(tables[variable].get(source, unnamed).values())
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
    """Return a table of the last validation of each run against that of the first, by data source and question. All are
    compared by one variable: `acc` where every run that validated has it, else the reward."""
    tables = [_tables(run, max(run.validation), VARIABLES) if run.validation else {} for run in runs]
    if not any(tables):
        return "<p>The runs have no validation samples.</p>"
    known = [each for each in tables if each]
    sources = dict.fromkeys(source for each in known for variable in VARIABLES for source in each[variable])
    variables = {
        source: next((one for one in VARIABLES if all(source in each[one] for each in known)), VARIABLES[-1])
        for source in sources
    }
    first, *others = zip(runs, tables, strict=True)
    rows = [row for other in others for row in _compared(variables, first, other)]
    columns = ("last validation, paired by question", "compared", ">difference", ">95% interval", ">p", "questions")
    return f"<h3>Validation</h3>{table(columns, rows)}"


def _compared(
    variables: dict[str, str], first: tuple[Contents, Tables], other: tuple[Contents, Tables]
) -> list[tuple[str, str, str, str, str, str]]:
    """Return the rows of one run against the first, one per data source."""
    name = f"{text(other[0].name)} - {text(first[0].name)}"
    rows = []
    for source, variable in variables.items():
        before, after = (tables.get(variable, {}).get(source, {}) for _, tables in (first, other))
        common = [key for key in before if key in after]
        if not common:
            continue
        result = compare([before[key] for key in common], [after[key] for key in common])
        low, high = result.alike or (float("nan"), float("nan"))
        counts = f"{result.up} up, {result.down} down, {result.same} the same of {len(common)} questions"
        shown = (
            f"<b>{result.difference:+.3f}</b>",
            f"[{low:+.3f}, {high:+.3f}]",
            "&lt; 0.001" if result.p < 0.001 else f"{result.p:.3f}",
        )
        steps = f"step {max(other[0].validation)} - step {max(first[0].validation)}"
        rows.append((name, text(f"{variable}{f' of {source}' * bool(source)}, {steps}"), *shown, counts))
    return rows or [(name, "", "", "", "", "no question in common")]


def _tables(contents: Contents, step: int, variables: Iterable[str]) -> Tables:
    """Return the values of one validation, of which nothing else is kept; faults are left out."""
    values: dict[str, dict[str, dict[int, list[float]]]] = {
        variable: defaultdict(lambda: defaultdict(list)) for variable in variables
    }
    try:
        for record in read_records(contents.validation[step]):
            source, question = str(record.episode.get("data_source") or ""), hash(record.prompt)
            for variable, sources in values.items():
                value = record.components.get(variable, None if variable == "acc" else record.score)
                if isinstance(value, bool | int | float) and is_number(value):
                    sources[source][question].append(float(value))
    except UNREADABLE:
        pass  # choosing samples has reported it
    return {
        variable: {
            source: {key: np.array(each) for key, each in questions.items()} for source, questions in sources.items()
        }
        for variable, sources in values.items()
    }


def _size(contents: Contents, step: int) -> int:
    try:
        return contents.validation[step].stat().st_size
    except OSError:
        return 0
