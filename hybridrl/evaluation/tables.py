"""The results of evaluations as tables: for a terminal, and as Markdown."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

Numbers = Mapping[str, Any]

# AReaL's columns first, by its names.
COLUMNS = ("dataset", "num_questions", "greedy_length", "sample_length", "greedy_acc", "sample_pass@1")
INTERVALS = {"this benchmark again": "again", "questions like these": "alike"}  # as in results.json
COMPARED = ("dataset", "A", "B", "B - A", *INTERVALS, "p (paired)", "up / down / same", "flips")
LEGEND = """sample_pass@1 is the mean over all samples (avg@n), with two 95% intervals: of the same questions with new
samples (this benchmark again), and of other questions (questions like these). pass@k is unbiased, maj@k is without
replacement. Whether two models differ is not seen from their intervals: compare them with `eval.compare`."""


def columns(datasets: Mapping[str, Numbers], ks: Sequence[int] = ()) -> list[str]:
    """Return the columns of the table: pass@k and maj@k of these `ks`; if there are none pass@8, pass@16 and maj@8 as
    in AReaL where there are as many samples, else the largest k."""
    sizes = {int(k) for numbers in datasets.values() for k in numbers["pass@k"]}
    shown = [k for k in ks or (8, 16) if k in sizes] or [k for k in [max(sizes, default=1)] if k > 1]
    voted = {int(k) for numbers in datasets.values() for k in numbers["maj@k"]}
    votes = [k for k in ks or (8,) if k in voted] or [k for k in [max(voted, default=1)] if k > 1]
    passes, majorities = [f"pass@{k}" for k in shown], [f"maj@{k}" for k in votes]
    return [*COLUMNS, *INTERVALS, *passes, *majorities, "truncated", "faults"]


def rows(datasets: Mapping[str, Numbers], names: Sequence[str]) -> list[list[str]]:
    """Return the cells of these columns, a row per dataset."""
    return [[_cell(name, dataset, numbers) for name in names] for dataset, numbers in datasets.items()]


def _cell(column: str, dataset: str, numbers: Numbers) -> str:
    average = numbers["avg"]
    kind, _, k = column.partition("@")
    if column == "dataset":
        return dataset
    if column == "sample_pass@1":
        notes = " (mean score)" * (not numbers["binary"]) + " (n too small)" * bool(average and average["few"])
        return _share(average and average["value"]) + notes
    if column in INTERVALS:
        return interval(average and average[INTERVALS[column]])
    if column == "greedy_acc":
        return _share(numbers["greedy_acc"] and numbers["greedy_acc"]["value"])
    if kind in ("pass", "maj"):
        found = numbers[f"{kind}@k"].get(k)
        return _share(found and found["value"])
    if column == "faults" and numbers["fault_bounds"]:
        return f"{numbers['faults']} (all wrong {interval(numbers['fault_bounds'])} all right)"
    value = numbers[column]
    return "-" if value is None else f"{value:.1f}" if isinstance(value, float) else str(value)


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def interval(ends: Sequence[float] | None, sign: str = "") -> str:
    return "-" if ends is None else f"[{ends[0]:{sign}.4f}, {ends[1]:{sign}.4f}]"


def compared_rows(compared: Mapping[str, Numbers]) -> list[list[str]]:
    """Return the cells of the table of a comparison, a row per dataset."""
    cells = []
    for dataset, one in compared.items():
        if "p" not in one:
            cells.append([f"{dataset} (no question in common)", *["-"] * (len(COMPARED) - 1)])
            continue
        p = f"{one['p']:.4f}" + (f" (Holm {one['p_holm']:.4f})" if one.get("p_holm", one["p"]) != one["p"] else "")
        p += f", McNemar {one['mcnemar']:.4f}" if one["mcnemar"] is not None else ""
        ends = [interval(one[name], "+") for name in INTERVALS.values()]
        moved = f"{one['up']} / {one['down']} / {one['same']}"
        means = [f"{one['a']:.4f}", f"{one['b']:.4f}", f"{one['difference']:+.4f}{' (n too small)' * one['few']}"]
        cells.append([dataset, *means, *ends, p, moved, str(one["flips"])])
    return cells


def changes(compared: Mapping[str, Numbers]) -> list[str]:
    """Return a line per dataset with the questions that changed most."""
    lines = []
    for dataset, one in compared.items():
        if some := one.get("largest"):
            named = ", ".join(f"{identity} ({a:.2f} -> {b:.2f})" for identity, a, b in some)
            lines.append(f"{dataset}, largest changes: {named}")
    return lines


def markdown(names: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    lines = [names, ["---"] * len(names), *cells]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines) + "\n"


def rich_table(title: str, names: Sequence[str], cells: Sequence[Sequence[str]], width: int) -> Table:
    """Return a table for a terminal of this width; where its columns do not fit, they become lines."""
    needed = sum(max(map(len, column)) + 3 for column in zip(names, *cells, strict=True))
    if needed >= width:
        names, *cells = zip(names, *cells, strict=True)
    table = Table(title=title, title_justify="left")
    for index, name in enumerate(names):
        table.add_column(name, justify="right" if index else "left", overflow="fold")
    for line in cells:
        table.add_row(*line)
    return table
