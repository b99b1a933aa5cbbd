"""Verdicts on a run. From its metrics: a sentence, and five lights with reasons. From its validation samples: intervals
of scores, and the paired difference of two runs."""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, stdev
from typing import Literal

import numpy as np

from hybridrl.evaluation.statistics import compare, mean
from hybridrl.health.rules import RULES
from hybridrl.report.contents import Contents
from hybridrl.report.curves import INTERVAL, Points
from hybridrl.report.markup import table, text
from hybridrl.report.samples import ChosenSamples, evenly, is_number
from hybridrl.runs.directory import UNREADABLE
from hybridrl.tracking.faults import FINISHED
from hybridrl.tracking.records import read_records
from hybridrl.tracking.report import change_of
from hybridrl.tracking.sink import REWARD, is_validation_score

Rating = Literal["good", "fair", "bad", "unknown"]
Limits = tuple[tuple[float, Rating], ...]

FEW = 4  # with fewer steps no trend is reported
SHARES: Limits = ((0.3, "bad"), (0.05, "fair"))  # shares of samples that are cut off or repeat themselves
FAULTS: Limits = ((0.05, "bad"), (0.0, "fair"))  # shares of samples that could not be graded
TIMED = 3  # times are judged from this number of steps: the first are slower
BUSY, TAIL = 0.8, 0.4  # least share of a step in useful phases; largest share of a rollout with few requests
WORDS = {"switch": "switch (engine and trainer)"}
QUESTIONS = {
    "Does it learn?": "learns",
    "Is it stable?": "stable",
    "Are the samples usable?": "usable",
    "Are the devices busy?": "busy",
    "Is it resumable?": "resumable",
}


@dataclass(frozen=True)
class Light:
    """An answer to one question about a run."""

    question: str
    state: Rating
    reason: str


def sentence(contents: Contents, intervals: dict[str, Points]) -> str:
    """Summarise the run in one sentence: reward, validation, time and end."""
    parts = []
    name, points = headline(contents)
    if points:
        change = change_of(name, points[1])
        many = f"{len(points[0]):,} step{'s' * (len(points[0]) > 1)}"
        shown = f"{number(change.before)} → {number(change.after)}" if len(points[0]) > 1 else number(change.after)
        parts.append(f"{name} {shown} over {many}")
    else:
        parts.append("no step was finished")
    steps, scores = validation_mean(contents)
    if steps:
        names = list(validations(contents))
        what = f"validation (mean of {len(names)} sources)" if len(names) > 1 else "validation"
        change = change_of(names[0], scores)
        shown = " → ".join(dict.fromkeys([number(change.before), number(change.after)]))
        low, high = (intervals.get(f"interval/{names[0]}/{end}", ([], [])) for end in ("low", "high"))
        shows_interval = len(names) == 1 and bool(low[0]) and low[0][-1] == steps[-1]
        interval = f" [{number(low[1][-1])}, {number(high[1][-1])}]" if shows_interval else ""
        parts.append(f"{what} {shown}{interval}")
    if contents.seconds:
        parts.append(duration(contents.seconds))
    parts.append(contents.ending)
    text = "; ".join(parts)
    return f"{text[0].upper()}{text[1:]}."


def lights(contents: Contents, samples: ChosenSamples) -> list[Light]:
    return [_learns(contents), _stable(contents), _usable(contents, samples), _busy(contents), _resumable(contents)]


def headline(contents: Contents) -> tuple[str, Points | None]:
    """Return the main curve: the reward, or the loss of a supervised run."""
    for name in (*REWARD, "train/loss"):
        points = series(contents, name)
        if points[0]:
            return ("loss" if name == "train/loss" else "reward"), points
    return "reward", None


def validations(contents: Contents) -> dict[str, Points]:
    names = sorted(filter(is_validation_score, {name for metrics in contents.steps.values() for name in metrics}))
    return {name: points for name in names if (points := series(contents, name, contents.steps))[0]}


def series(contents: Contents, name: str, steps: dict | None = None) -> Points:
    """Return the finite values of a metric in training steps."""
    inside = contents.trained if steps is None else steps
    points = [(step, metrics[name]) for step, metrics in inside.items() if math.isfinite(metrics.get(name, math.nan))]
    return [step for step, _ in points], [value for _, value in points]


def validation_mean(contents: Contents) -> Points:
    """Return the mean over the data sources, for each validation with scores of all sources."""
    curves = [dict(zip(*points, strict=True)) for points in validations(contents).values()]
    steps = sorted(set.intersection(*map(set, curves))) if curves else []
    return steps, [fmean(curve[step] for curve in curves) for step in steps]


def risen(values: Sequence[float]) -> int:
    """Compare the first and last values, a fifth of all each (at least 2, at most 10). Return 1 if the last are higher
    by more than two standard errors of the difference, -1 if they are lower by more, else 0."""
    count = max(2, min(10, len(values) // 5))
    rise = fmean(values[-count:]) - fmean(values[:count])
    error = math.sqrt((stdev(values[:count]) ** 2 + stdev(values[-count:]) ** 2) / count)
    return 0 if abs(rise) <= 2 * error else 1 if rise > 0 else -1


def _learns(contents: Contents) -> Light:
    question = "Does it learn?"
    name, points = headline(contents)
    if points is None:
        return Light(question, "unknown", "no reward or loss was logged")
    values = points[1]
    if len(values) < FEW:
        return Light(question, "unknown", f"{len(values)} steps are too few to say")
    change, better = change_of(name, values), -1 if name == "loss" else 1
    text = f"{name} {number(change.before)} → {number(change.after)} ({change.definition})"
    if max(values) == min(values):
        return Light(question, "bad", f"the {name} is the same in every step: {number(change.after)}")
    direction = risen(values) * better
    if direction * better * (change.after - change.before) < 0:  # the first step differs from the following ones
        direction = 0
    if direction > 0:
        return Light(question, "good", text)
    if direction < 0:
        return Light(question, "bad", f"{text}: it got worse")
    return Light(question, "fair", f"{text}: no clear change")


def _norms_and_entropy(contents: Contents) -> list[str]:
    norms = next(
        (points[1] for name in ("actor/grad_norm", "train/grad_norm") if (points := series(contents, name))[0]), []
    )
    entropy = series(contents, "actor/entropy")[1]
    parts = []
    if norms:
        parts.append(f"gradient norm {number(fmean(norms))} on average, at most {number(max(norms))}")
    if entropy:
        change = change_of("actor/entropy", entropy)
        parts.append(f"entropy {number(change.before)} → {number(change.after)}")
    return parts


def _stable(contents: Contents) -> Light:
    question = "Is it stable?"
    if not contents.trained:
        return Light(question, "unknown", "no step was finished")
    damaging = {rule.code for rule in RULES if rule.damages}
    fired = contents.held
    last = contents.last_step
    for code in [code for code in fired if code in damaging]:
        state: Rating = "bad" if last in fired[code] else "fair"
        return Light(question, state, f"{code} in {len(fired[code])} steps, from step {min(fired[code])}")
    counts = [f"{model}/skipped_updates" for model in ("actor", "critic", "train")]
    skipped = [step for step, metrics in contents.trained.items() if any(map(metrics.get, counts))]
    if skipped:
        text = f"{len(skipped)} step{'s' * (len(skipped) > 1)} with updates that were not finite, first {skipped[0]}"
        return Light(question, "bad" if last - skipped[-1] < 3 else "fair", text)
    parts = _norms_and_entropy(contents)
    if not parts and not any("skipped_updates" in name for metrics in contents.trained.values() for name in metrics):
        return Light(question, "unknown", "no gradient norm, no entropy and no diagnosis was logged")
    return Light(question, "good", "; ".join(parts) or "no diagnosis, no update was skipped")


def _usable(contents: Contents, samples: ChosenSamples) -> Light:
    question = "Are the samples usable?"
    measured: list[tuple[Rating, str]] = []
    for name, what in (("response_length/clip_ratio", "cut off"), ("response/repeated_ngrams", "repeated 4-grams")):
        values = series(contents, name)[1]
        if values:
            share = change_of(name, values).after
            measured.append((_graded(share, SHARES), f"{share:.0%} {what}"))
    faults = samples.last_faults
    if faults is not None:
        measured.append((_graded(faults, FAULTS), f"{faults:.1%} not graded" if faults else "all graded"))
    fired = contents.held
    for code in ("no-signal", "unknown-tokens"):
        if contents.last_step in fired.get(code, ()):
            is_solved = code == "no-signal" and (samples.solved or 0.0) > samples.stuck
            measured.append(("fair" if is_solved else "bad", code))
    if not measured:
        return Light(question, "unknown", "no samples and no metrics of responses")
    measured += _taught(samples)
    correlation = samples.length_correlation
    if correlation is not None and abs(correlation) > 0.5:
        longer = "longer" if correlation > 0 else "shorter"
        # Often rightly so: a fact to know when length grows, and no fault by itself.
        measured.append(("good", f"{longer} responses get more reward (correlation {correlation:+.2f})"))
    worst = max((state for state, _ in measured), key=("good", "fair", "bad").index)
    ordered = sorted(measured, key=lambda item: ("bad", "fair", "good").index(item[0]))
    return Light(question, worst, "in the last steps: " + ", ".join(text for _, text in ordered))


def _taught(samples: ChosenSamples) -> list[tuple[Rating, str]]:
    """Return the share of prompts without a training signal, if it is most of them. Solved prompts are not a fault."""
    solved, share = samples.solved or 0.0, (samples.solved or 0.0) + samples.stuck
    if share <= 0.5:
        return []
    if solved < share / 2:
        cause = "all their responses score the same, and most of them not well"
        return [("fair", f"{share:.0%} of the prompts teach nothing: {cause}")]
    return [("good", f"{solved:.0%} of the prompts are solved by every response and teach nothing more")]


def _busy(contents: Contents) -> Light:
    question = "Are the devices busy?"
    steps = [spent for step, spent in contents.phases.items()][1:] or list(contents.phases.values())
    if (count := len(contents.phases)) < TIMED:
        reason = f"not judged by {count} step{'s' * (count > 1)}, as the first are slower"
        return Light(question, "unknown", reason if steps else "no times were logged")
    total = sum(sum(spent.values()) for spent in steps) or 1.0
    names = {name for spent in steps for name in spent}
    shares = {name: sum(spent.get(name, 0.0) for spent in steps) / total for name in names}
    useful = sum(shares.pop(name, 0.0) for name in ("rollout", "log-probs", "update"))
    largest = sorted(((name, share) for name, share in shares.items() if share >= 0.03), key=lambda item: -item[1])[:2]
    text = f"{useful:.0%} of the time in {'update' if contents.supervised else 'rollout, log-probs and update'}"
    text += "".join(f", {WORDS.get(name, name)} {share:.0%}" for name, share in largest)
    tails = series(contents, "rollout/tail_share")[1]
    tail = fmean(tails) if tails else 0.0
    if tail > TAIL:
        text += f"; in {tail:.0%} of the rollout fewer than half of the requests ran"
    state: Rating = "good" if useful >= BUSY and tail <= TAIL else "fair" if useful >= 0.6 else "bad"
    return Light(question, state, text)


def _resumable(contents: Contents) -> Light:
    question = "Is it resumable?"
    good = [saved for saved in contents.checkpoints if saved.resumable]
    if not contents.checkpoints and not (contents.config or contents.faults):
        return Light(question, "unknown", "the directory holds no run")
    if not good:
        newest = next(reversed(contents.checkpoints), None)
        if newest and newest.lacks and contents.end is not None and contents.end.code == FINISHED:
            return Light(question, "fair", f"{newest.path.name}: {newest.lacks}")
        problem = newest and (newest.problem or newest.lacks)
        return Light(question, "bad", f"no good checkpoint: {problem}" if problem else "no checkpoint was saved")
    taken = contents.newest
    newest = taken if taken in good else max(good, key=lambda saved: saved.step)
    lost = contents.last_step - newest.step
    if contents.end is not None and contents.end.code == FINISHED and lost <= 0:
        return Light(question, "good", f"the last step is saved in {newest.path.name}")
    text = f"from step {newest.step}" + (f"; {lost} later steps would be repeated" if lost > 0 else "")
    text += f"; {newest.misses}" if newest.misses else ""
    close = lost <= max(10, contents.last_step // 10)
    return Light(question, "good" if close and not newest.misses else "fair", text)


def _graded(share: float, limits: Limits) -> Rating:
    return next((state for limit, state in limits if share > limit), "good")


def number(value: float) -> str:
    """Format with three digits and few decimals. Values below 1 are never rounded up to 1."""
    size = abs(value)
    if 0.985 <= size < 1:
        return f"{math.copysign(min(size, 0.999), value):.3f}".removesuffix("0")
    if value == 0 or 0.01 <= size < 10:
        return f"{value:.2f}"
    return f"{value:,.0f}" if 100 <= size < 1e6 else f"{value:.3g}"


def duration(seconds: float) -> str:
    """`3 min 40 s`, `2 h 5 min`, `4 d 3 h`."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    units = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))
    whole = round(seconds)
    for (large, size), (small, part) in pairwise(units):
        if whole >= size:
            rest = whole % size // part
            return f"{whole // size} {large}" + f" {rest} {small}" * (rest > 0)
    return f"{whole} s"


MOST_BYTES, MOST_STEPS = 12 << 20, 20
VARIABLES = ("acc", "reward")  # runs are compared by the first that they have
SampledValues = dict[int, np.ndarray]  # hash of a question, which may be long -> the values of its samples
Tables = dict[str, dict[str, SampledValues]]  # variable -> data source, empty in files of verl -> questions


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
    """Return a table of the last validation of each run against the first run's, by data source and question. The
    variable is `acc` if every run with a validation has it, else the reward."""
    tables = [_tables(run, max(run.validation), VARIABLES) if run.validation else {} for run in runs]
    if not any(tables):
        return "<p>The runs have no validation samples.</p>"
    validated = [each for each in tables if each]
    sources = dict.fromkeys(source for each in validated for variable in VARIABLES for source in each[variable])
    variables = {
        source: next((name for name in VARIABLES if all(source in each[name] for each in validated)), VARIABLES[-1])
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
    """Return the values of one validation, without faults. Its records are not kept in memory."""
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
