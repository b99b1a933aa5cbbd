"""The choice of samples that a page shows, and measurements of the steps from a run's sample files."""

import math
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean, quantiles, stdev

from hybridrl.report.contents import LARGEST, Contents
from hybridrl.report.curves import GROUPS, POINTS, Points
from hybridrl.runs.directory import UNREADABLE
from hybridrl.tracking.records import SampleRecord, by_group, read_records

READ_BYTES = 24 << 20  # read from all files of a run; if they are larger, steps at equal distances are read
LEAST_PER_FILE = 4 << 20  # characters read from one file at least
KINDS_PER_STEP = 6  # best, worst, median, longest, random, largest advantage
GROUP_MEMBERS = 16  # most members of a group that is shown whole
VALIDATIONS, ROWS = 8, 5  # steps at which the same rows are shown, and number of rows
LAST_STEPS = 5  # steps with judged samples

SampleGroup = list[SampleRecord]


@dataclass(eq=False)
class Shown:
    """A sample on the page, with the reasons for its choice. `advantage` is taken from the record, or computed from its
    group if the record has none."""

    record: SampleRecord
    kind: str  # training, validation
    group: SampleGroup
    why: list[str] = field(default_factory=list)

    @property
    def advantage(self) -> float | None:
        return advantage_of(self.record, self.group)


@dataclass
class ChosenSamples:
    """The chosen samples in order, and measurements of all samples that were read."""

    shown: list[Shown] = field(default_factory=list)
    bands: dict[str, Points] = field(default_factory=dict)  # mean rewards of the middle 80% of the prompts
    read: int = 0
    steps_read: int = 0
    steps: int = 0  # steps with a file
    identical: float | None = None  # share of the last responses that equal another one to the same prompt
    length_correlation: float | None = None  # correlation of reward and length in the last steps
    solved: float | None = None  # share of the last groups in which all scores are equal and near the best of all
    stuck: float = 0.0  # share of the last groups in which all scores are equal and lower
    faults: Counter = field(default_factory=Counter)  # count of each fault in all samples that were read
    last_faults: float | None = None  # share of faults in the last training steps
    rewards: dict[int, float] = field(default_factory=dict)  # mean score of each training step that was read
    notes: list[str] = field(default_factory=list)


def choose_samples(contents: Contents, count: int) -> ChosenSamples:
    """Choose about `count` samples of a run."""
    samples = ChosenSamples(steps=len(contents.training) + len(contents.validation))
    chosen = _Chosen()
    validated = list(_validation(contents, samples, chosen)) if contents.validation else []
    room = count - sum(len(rows) for rows in validated)
    read = _steps_to_read(contents.training)
    members = min(GROUP_MEMBERS, contents.samples_per_step or GROUP_MEMBERS)
    most = max(2, (room - 3 * members) // KINDS_PER_STEP)
    shown, whole = set(evenly(read, most)), set(evenly(read, 3))
    means: dict[int, list[float]] = {}
    last: dict[int, list[SampleRecord]] = {}
    for step in read:
        records = _read(contents.training[step], step, len(read), samples)
        groups = [*by_group(records).values()]
        if scored := [mean for group in groups if (mean := mean_score(group)) is not None]:
            means[step] = scored
            samples.rewards[step] = fmean(scores_of(records))
        if step in shown:
            _choose_of_step(records, groups, step, chosen)
        if step in whole and groups:
            _choose_group(groups, chosen)
        if records:
            last[step] = records
            for older in list(last)[:-LAST_STEPS]:
                del last[older]
    samples.bands = _bands(means)
    _judge(samples, list(last.values()))
    samples.shown = chosen.in_order(count + KINDS_PER_STEP)
    return samples


class _Chosen:
    """Samples by identity: a sample with two reasons, best and longest, is shown once."""

    def __init__(self) -> None:
        self._shown: dict[int, Shown] = {}

    def add(self, record: SampleRecord, kind: str, group: SampleGroup, why: str) -> None:
        shown = self._shown.setdefault(id(record), Shown(record, kind, group))
        if why not in shown.why:
            shown.why.append(why)

    def in_order(self, most: int) -> list[Shown]:
        ordered = sorted(self._shown.values(), key=lambda sample: (sample.kind, sample.record.step))
        return ordered if len(ordered) <= most else evenly(ordered, most)


def _choose_of_step(records: list[SampleRecord], groups: list[SampleGroup], step: int, chosen: _Chosen) -> None:
    """The default choice of a step: extremes, a random sample, the first of each fault, and a sample with tokens."""
    group_of = {id(record): group for group in groups for record in group}

    def add(record: SampleRecord, why: str) -> None:
        chosen.add(record, "training", group_of[id(record)], why)

    scored = sorted((record for record in records if is_number(record.score)), key=lambda record: record.score or 0.0)
    if scored:
        add(scored[-1], "best")
        add(scored[0], "worst")
        add(scored[len(scored) // 2], "median")
        add(max(scored, key=lambda record: abs(advantage_of(record, group_of[id(record)]) or 0.0)), "largest advantage")
    if records:
        add(max(records, key=length_of), "longest")
        add(random.Random(step).choice(records), "random")
    faults: dict[str, SampleRecord] = {}
    for record in records:
        if fault := grading_fault(record):
            faults.setdefault(fault, record)
    for fault, record in faults.items():
        add(record, f"fault: {fault}")
    if with_tokens := next((record for record in records if tokens_of(record)), None):
        add(with_tokens, "tokens")


def _choose_group(groups: list[SampleGroup], chosen: _Chosen) -> None:
    """Choose the whole group with the largest spread of rewards."""

    def spread(group: SampleGroup) -> float:
        scores = scores_of(group)
        return stdev(scores) if len(scores) > 1 else -1.0

    group = max(groups, key=spread)
    for record in group[:GROUP_MEMBERS]:
        chosen.add(record, "training", group, "whole group")


def _validation(contents: Contents, samples: ChosenSamples, chosen: _Chosen) -> Iterator[list[SampleRecord]]:
    """Choose the same rows at several validations: largest gain and loss, lowest score, and random ones."""
    steps = evenly(list(contents.validation), VALIDATIONS)
    by_step: dict[int, dict[str, SampleGroup]] = {}
    for step in steps:
        records = _read(contents.validation[step], step, len(steps), samples)
        by_step[step] = {group[0].prompt: group for group in by_group(records).values()}
    by_step = {step: groups for step, groups in by_step.items() if groups}
    if not by_step:
        return
    first, last = by_step[min(by_step)], by_step[max(by_step)]
    scores = {key: mean for key, group in last.items() if (mean := mean_score(group)) is not None}
    gains = {key: scores[key] - (mean_score(first[key]) or 0.0) for key in scores if key in first}
    reasons: dict[str, str] = {}
    if gains:
        reasons.setdefault(max(gains, key=gains.__getitem__), "gained most")
        reasons.setdefault(min(gains, key=gains.__getitem__), "gained least")
    if scores:
        reasons.setdefault(min(scores, key=scores.__getitem__), "lowest score")
    for key in random.Random(0).sample(sorted(last), min(ROWS, len(last))):
        if len(reasons) < ROWS:
            reasons.setdefault(key, "random")
    for key, why in reasons.items():
        rows = [(groups[key][0], groups[key]) for groups in by_step.values() if key in groups]
        for record, group in rows:
            chosen.add(record, "validation", group, why)
        yield [record for record, _ in rows]


def _read(path: Path, step: int, files: int, samples: ChosenSamples) -> list[SampleRecord]:
    """Return the samples of a file; of a very large file the first ones."""
    records: list[SampleRecord] = []
    room = max(LEAST_PER_FILE, READ_BYTES // max(files, 1))
    try:
        for record in read_records(path):
            records.append(replace(record, step=step, score=record.score if is_number(record.score) else None))
            room -= len(record.prompt) + len(record.response) + 1000 * bool(tokens_of(record))
            if room < 0:
                records = _whole_groups(records)
                samples.notes.append(f"of {path.parent.name}/{path.name} the first {len(records)} samples were read")
                break
        else:
            with path.open("rb") as file:
                torn = sum(1 for _ in file) - len(records)
            if torn:
                lines = f"{torn} line{'s' * (torn > 1)}"
                samples.notes.append(f"{lines} of {path.parent.name}/{path.name} cannot be read as a sample")
    except UNREADABLE as error:
        samples.notes.append(f"{path.parent.name}/{path.name} cannot be read: {type(error).__name__}: {error}"[:300])
    samples.read += len(records)
    samples.steps_read += 1
    for record in records:
        if fault := grading_fault(record):
            samples.faults[fault] += 1
    return records


def _whole_groups(records: list[SampleRecord]) -> list[SampleRecord]:
    """Return the samples without the last group, which may be incomplete; of a single group all."""
    return [record for record in records if record.group != records[-1].group] or records


def _steps_to_read(files: dict[int, Path]) -> list[int]:
    """Return as many steps at equal distances as READ_BYTES allow."""
    sizes = [size for path in evenly(list(files.values()), 50) if (size := _size(path)) is not None]
    usual = max(1.0, fmean(sizes)) if sizes else 1.0
    return evenly(list(files), min(POINTS, max(3, int(READ_BYTES / usual))))


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None


def _bands(means: dict[int, list[float]]) -> dict[str, Points]:
    wide = {step: quantiles(values, n=10, method="inclusive") for step, values in means.items() if len(values) > 4}
    if len(wide) < 2:
        return {}
    low, high = ([cuts[place] for cuts in wide.values()] for place in (0, -1))
    return {f"{GROUPS}p10": (list(wide), low), f"{GROUPS}p90": (list(wide), high)}


def _judge(samples: ChosenSamples, last: list[list[SampleRecord]]) -> None:
    """Measure the samples of the last steps: faults, copies, groups without a signal, and correlation with length."""
    if not last:
        return
    faults = [bool(grading_fault(record)) for records in last for record in records]
    samples.last_faults = sum(faults) / len(faults)
    groups = [group for records in last for group in by_group(records).values() if len(group) > 1]
    if groups:
        copies = [len(group) - len({record.response for record in group}) for group in groups]
        samples.identical = sum(copies) / sum(len(group) for group in groups)
        samples.solved, samples.stuck = _without_signal(groups)
    with_score = [record for records in last for record in records if is_number(record.score)]
    scored = [(record.score or 0.0, length_of(record)) for record in with_score]
    samples.length_correlation = correlation(scored)


def _without_signal(groups: list[SampleGroup]) -> tuple[float | None, float]:
    """Return the shares of groups without a training signal, since all responses have one score: solved groups, with a
    score in the highest tenth of all, and other groups. A group with an advantage (from a critic) does not count. None:
    all scores are equal, or no group has two."""
    judged = [group for group in groups if len(scores_of(group)) > 1]
    every = [score for group in judged for score in scores_of(group)]
    if not every or max(every) == min(every):
        return None, 0.0
    near_best = max(every) - 0.1 * (max(every) - min(every))
    flat = [group for group in judged if len(set(scores_of(group))) == 1]
    flat = [group for group in flat if not any(record.episode.get("advantage") for record in group)]
    solved = sum(scores_of(group)[0] >= near_best for group in flat)
    return solved / len(judged), (len(flat) - solved) / len(judged)


def correlation(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Pearson's correlation; None if one of the two does not vary, or for fewer than ten pairs."""
    if len(pairs) < 10:
        return None
    ones, others = zip(*pairs, strict=True)
    mean, other_mean = fmean(ones), fmean(others)
    over = sum((a - mean) * (b - other_mean) for a, b in pairs)
    under = math.sqrt(sum((a - mean) ** 2 for a in ones) * sum((b - other_mean) ** 2 for b in others))
    return over / under if under > 0 else None


def advantage_of(record: SampleRecord, group: SampleGroup) -> float | None:
    """The advantage in the record; else its reward minus the group's mean, over the group's standard deviation; None if
    the group has fewer than two scores."""
    stored = record.episode.get("advantage")
    if isinstance(stored, int | float) and is_number(stored):
        return stored
    scores = scores_of(group)
    if not is_number(record.score) or len(scores) < 2:
        return None
    deviation = stdev(scores)
    return (record.score - fmean(scores)) / deviation if deviation > 1e-9 else 0.0


def scores_of(group: SampleGroup) -> list[float]:
    return [record.score for record in group if record.score is not None and is_number(record.score)]


def mean_score(group: SampleGroup) -> float | None:
    scores = scores_of(group)
    return fmean(scores) if scores else None


def is_number(value: float | None) -> bool:
    return value is not None and -LARGEST < value < LARGEST


def length_of(record: SampleRecord) -> int:
    """The number of sampled tokens; if it is unknown, of characters."""
    sampled = record.episode.get("sampled_tokens")
    return sampled if isinstance(sampled, int) and is_number(sampled) else len(record.response)


def grading_fault(record: SampleRecord) -> str:
    """The kind of a grader's fault; in files of older versions it is next to verl's keys."""
    return str(record.episode.get("fault") or record.components.get("fault") or "")


def tokens_of(record: SampleRecord) -> dict[str, list] | None:
    tokens = record.episode.get("tokens")
    sound = isinstance(tokens, dict) and isinstance(tokens.get("ids"), list) and tokens["ids"]
    return tokens if sound else None


def evenly(items: list, count: int) -> list:
    """Return at most `count` items at equal distances, the first and the last among them."""
    if len(items) <= count:
        return items
    if count < 2:
        return items[-1:] if count else []
    return [items[round(place * (len(items) - 1) / (count - 1))] for place in range(count)]
