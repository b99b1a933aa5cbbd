"""The tables of an evaluation and its comparisons, for a terminal and as Markdown, and the messages with them."""

import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from rich.table import Table

from hybridrl.config.schema_parts import EvalConfig
from hybridrl.evaluation.model import Evaluated
from hybridrl.evaluation.results import add_to_results, comparisons, corrected, publish_text, selection_biases
from hybridrl.evaluation.samples import TABLE, Sample
from hybridrl.evaluation.scoring import REWARD_LOG
from hybridrl.tracking.console import Terminal, console, info, on_terminal, warn
from hybridrl.tracking.faults import count_faults, fault_kind

LOG_WIDTH = 240
# AReaL's columns first, by its names.
COLUMNS = ("dataset", "num_questions", "greedy_length", "sample_length", "greedy_acc", "sample_pass@1")
INTERVALS = {"this benchmark again": "again", "questions like these": "alike"}  # as in results.json
COMPARED = ("dataset", "A", "B", "B - A", *INTERVALS, "p (paired)", "up / down / same", "flips")
LEGEND = """sample_pass@1 is the mean over all samples (avg@n), with two 95% intervals: of the same questions with new
samples (this benchmark again), and of other questions (questions like these). pass@k is unbiased, maj@k is without
replacement. Whether two models differ is not seen from their intervals: compare them with `eval.compare`."""


def report(evaluated: Sequence[Evaluated], settings: EvalConfig, baseline: Evaluated | None = None) -> float:
    """Write and print the tables of all models and their comparisons; return the largest share of faults."""
    new, ks = [*evaluated, *([baseline] if baseline and baseline.is_new else [])], settings.k
    for model in new:
        write_table(model, ks)
    _show("results", [(model.name, model.datasets) for model in new], partial(columns, ks=ks), rows)
    if baseline:
        _report_comparisons(evaluated, baseline, ks)
    for model in new:
        info(f"samples and results of {model.name}: {model.directory}")
    if settings.responses:
        info(str(test_scores(evaluated[0].samples)))
    for name, bias in selection_biases([model.samples for model in evaluated]).items():
        count = len(evaluated)
        info(
            f"{name}: the best of {count} evaluations of one unchanged model looks at most {100 * bias:.1f} points "
            "better by chance; choose on one set and report on another"
        )
    return max(explain_faults(model) for model in new)


def _report_comparisons(evaluated: Sequence[Evaluated], baseline: Evaluated, ks: Sequence[int]) -> None:
    """Write and print the differences of each model from the baseline."""
    compared = [comparisons(baseline.samples, model.samples) for model in evaluated]
    corrected(compared)
    pairs = [(model.name, comparison) for model, comparison in zip(evaluated, compared, strict=True)]
    names = f"A = {baseline.name}, B = {evaluated[0].name if len(evaluated) == 1 else 'the model of the row'}"
    _show(f"comparison, {names}", pairs, lambda _: [*COMPARED], lambda datasets, _: compared_rows(datasets))
    for model, comparison in zip(evaluated, compared, strict=True):
        write_table(model, ks, baseline, comparison)
        _warn_of_differences(baseline, model)
        for dataset, numbers in comparison.items():
            if numbers["other_prompt"]:
                cause = f"{dataset}: {numbers['other_prompt']} questions have the same id and another prompt in"
                warn(f"{cause} {baseline.name} and {model.name}; they are not compared")
        if lines := changes(comparison):
            info("\n".join(f"{model.name}, {line}" for line in lines))


def explain_faults(model: Evaluated) -> float:
    """Warn of each kind of fault with its first detail; return their share."""
    for fault, count, index in count_faults(model.samples):
        first, kind = model.samples[index], fault_kind(fault)
        cause = f"{model.name}: {count} of {len(model.samples)} responses have no score: {fault} ({kind}), first "
        warn(f"{cause}{first.dataset}/{first.id}: {first.detail or 'no detail'}; see {model.directory / REWARD_LOG}")
    return sum(sample.fault is not None for sample in model.samples) / max(len(model.samples), 1)


def write_table(
    model: Evaluated,
    ks: Sequence[int],
    baseline: Evaluated | None = None,
    comparison: Mapping[str, Any] | None = None,
) -> None:
    """Write table.md of a model. A comparison is added to it and to results.json."""
    names = columns(model.datasets, ks)
    texts = [f"# {model.name}\n", markdown(names, rows(model.datasets, names)), LEGEND + "\n"]
    if "sampling" in model.results:
        facts = {name: value for name, value in model.results["sampling"].items() if value not in (None, (), [])}
        listed = ", ".join(f"{name}={value}" for name, value in facts.items())
        texts.append(f"{model.results['model']['path']}: {listed}, responses per question: {model.results['n']}\n")
    if baseline and comparison:
        texts += [f"## A = {baseline.name}, B = {model.name}\n", markdown(COMPARED, compared_rows(comparison))]
        texts += changes(comparison)
        add_to_results(model.directory, {"comparison": {"a": str(baseline.directory), "datasets": comparison}})
    publish_text(model.directory / TABLE, "\n".join(texts) + "\n")


def _show(title: str, parts: Sequence[tuple[str, Mapping[str, Any]]], name_columns: Any, make_rows: Any) -> None:
    """Print one table for all models, in a log as wide as it is; with several, a column names them."""
    items = [(f"{name} {dataset}", numbers) for name, datasets in parts for dataset, numbers in datasets.items()]
    names = name_columns(dict(items))
    cells = [[name, *cells] for name, datasets in parts for cells in make_rows(datasets, names)]
    head = ["model", *names] if len(parts) > 1 else names
    cells = cells if len(parts) > 1 else [line[1:] for line in cells]
    title = title if len(parts) > 1 else f"{parts[0][0]}: {title}"
    wide = console if on_terminal() else Terminal(file=console.file, width=LOG_WIDTH)
    wide.print(rich_table(title, head, cells, wide.width))


def _warn_of_differences(a: Evaluated, b: Evaluated) -> None:
    """Warn if two evaluations sampled differently: their difference is then not due to the models alone."""
    first, second = (json.loads(json.dumps(model.results.get("sampling", {}), default=str)) for model in (a, b))
    names = [name for name in first if name not in ("seed", "preset") and first[name] != second.get(name, first[name])]
    if names:
        texts = ", ".join(f"{name}: {first[name]} and {second[name]}" for name in names)
        warn(f"{a.name} and {b.name} were sampled differently ({texts})")


def test_scores(samples: Sequence[Sample]) -> dict[str, float]:
    """Return the numbers that verl's main_eval prints: the mean score of each row's responses, over the rows."""
    scores: dict[str, dict[str, list[float]]] = {}
    for sample in samples:
        if sample.score is not None:
            scores.setdefault(sample.dataset, {}).setdefault(sample.id, []).append(sample.score)
    means = {name: [sum(row) / len(row) for row in rows.values()] for name, rows in scores.items()}
    return {f"test_score/{name}": sum(rows) / len(rows) for name, rows in means.items()}


# -- cells -------------------------------------------------------------------------------------------------------------


def columns(datasets: Mapping[str, Mapping[str, Any]], ks: Sequence[int] = ()) -> list[str]:
    """Return the columns of the table, with pass@k and maj@k of these `ks`. Without any: pass@8, pass@16 and maj@8, as
    in AReaL, if there are enough samples, else the largest k."""
    sizes = {int(k) for numbers in datasets.values() for k in numbers["pass@k"]}
    shown = [k for k in ks or (8, 16) if k in sizes] or [k for k in [max(sizes, default=1)] if k > 1]
    voted = {int(k) for numbers in datasets.values() for k in numbers["maj@k"]}
    votes = [k for k in ks or (8,) if k in voted] or [k for k in [max(voted, default=1)] if k > 1]
    passes, majorities = [f"pass@{k}" for k in shown], [f"maj@{k}" for k in votes]
    return [*COLUMNS, *INTERVALS, *passes, *majorities, "truncated", "faults"]


def rows(datasets: Mapping[str, Mapping[str, Any]], names: Sequence[str]) -> list[list[str]]:
    """Return the cells of these columns, a row per dataset."""
    return [[_cell(name, dataset, numbers) for name in names] for dataset, numbers in datasets.items()]


def _cell(column: str, dataset: str, numbers: Mapping[str, Any]) -> str:
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
        at_k = numbers[f"{kind}@k"].get(k)
        return _share(at_k and at_k["value"])
    if column == "faults" and numbers["fault_bounds"]:
        return f"{numbers['faults']} (all wrong {interval(numbers['fault_bounds'])} all right)"
    value = numbers[column]
    return "-" if value is None else f"{value:.1f}" if isinstance(value, float) else str(value)


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def interval(ends: Sequence[float] | None, sign: str = "") -> str:
    return "-" if ends is None else f"[{ends[0]:{sign}.4f}, {ends[1]:{sign}.4f}]"


def compared_rows(compared: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    """Return the cells of the table of a comparison, a row per dataset."""
    cells = []
    for dataset, row in compared.items():
        if "p" not in row:
            cells.append([f"{dataset} (no question in common)", *["-"] * (len(COMPARED) - 1)])
            continue
        p = f"{row['p']:.4f}" + (f" (Holm {row['p_holm']:.4f})" if row.get("p_holm", row["p"]) != row["p"] else "")
        p += f", McNemar {row['mcnemar']:.4f}" if row["mcnemar"] is not None else ""
        ends = [interval(row[name], "+") for name in INTERVALS.values()]
        moved = f"{row['up']} / {row['down']} / {row['same']}"
        means = [f"{row['a']:.4f}", f"{row['b']:.4f}", f"{row['difference']:+.4f}{' (n too small)' * row['few']}"]
        cells.append([dataset, *means, *ends, p, moved, str(row["flips"])])
    return cells


def changes(compared: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return a line per dataset with the questions that changed most."""
    lines = []
    for dataset, numbers in compared.items():
        if largest := numbers.get("largest"):
            named = ", ".join(f"{identity} ({a:.2f} -> {b:.2f})" for identity, a, b in largest)
            lines.append(f"{dataset}, largest changes: {named}")
    return lines


def markdown(names: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    lines = [names, ["---"] * len(names), *cells]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines) + "\n"


def rich_table(title: str, names: Sequence[str], cells: Sequence[Sequence[str]], width: int) -> Table:
    """Return a table for a terminal of this width; columns that do not fit become lines."""
    needed = sum(max(map(len, column)) + 3 for column in zip(names, *cells, strict=True))
    if needed >= width:
        names, *cells = zip(names, *cells, strict=True)
    table = Table(title=title, title_justify="left")
    for index, name in enumerate(names):
        table.add_column(name, justify="right" if index else "left", overflow="fold")
    for line in cells:
        table.add_row(*line)
    return table
