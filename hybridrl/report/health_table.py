"""Every health rule of a run with what it read, its threshold, and when it held; and what the samples show."""

import math
from dataclasses import dataclass

from hybridrl.health.history import Diagnosis, History
from hybridrl.health.rules import RULES, VALIDATION, Rule
from hybridrl.report.contents import Contents
from hybridrl.report.samples import Samples
from hybridrl.report.verdicts import number, series, validation_mean
from hybridrl.tracking.change import change_of


@dataclass(frozen=True)
class HealthRow:
    """One rule: what is measured, its value at the start and now, the threshold, when it held, and what to do. A fact
    is no rule, and so neither good nor bad."""

    code: str
    metric: str
    start: float | None
    now: float | None
    limit: str
    held: str
    cause: str = ""
    fix: str = ""
    holds_now: bool = False
    is_fact: bool = False

    @property
    def sign(self) -> str:
        """Empty where the rule was not tried."""
        if self.held:
            return "bad" if self.holds_now else "fair"
        return "" if self.is_fact or not self.metric else "good"


def health_rows(contents: Contents, samples: Samples) -> list[HealthRow]:
    """Return rules that held first, then the others, then figures of the samples. Of a supervised run only rules that
    held: most are about what it does not have."""
    held = contents.held
    diagnoses = _diagnoses(contents, {code: steps[0] for code, steps in held.items()})
    rows = []
    for rule in RULES if contents.trained else ():
        metric, values = _measured(contents, rule)
        diagnosis, steps = diagnoses.get(rule.code), held.get(rule.code, [])
        change = change_of(metric, values) if values else None
        row = HealthRow(
            rule.code,
            metric,
            change.before if change else None,
            change.after if change else None,
            rule.limit,
            ranges(steps),
            diagnosis.cause if diagnosis else "",
            diagnosis.fix if diagnosis else "",
            contents.last_step in steps,
        )
        if row.held or not contents.supervised:
            rows.append(row)
    known = {rule.code for rule in RULES}
    for code, steps in held.items():  # of custom rules, whose code a reader of the files does not run
        if code not in known:
            rows.append(HealthRow(code, "", None, None, "", ranges(steps), holds_now=contents.last_step in steps))
    rows.sort(key=lambda row: not row.held)
    return rows + _sample_rows(contents, samples)


def _measured(contents: Contents, rule: Rule) -> tuple[str, list[float]]:
    """Return the metric that a rule is about and its values; of a share also those steps in which it was not logged."""
    if rule.reads == (VALIDATION,):
        scores = validation_mean(contents)[1]
        return "validation score" if scores else "", scores
    name = next((name for name in rule.reads if series(contents, name)[0]), "")
    if not rule.share_of:
        return name, series(contents, name)[1]
    wholes = zip(*series(contents, rule.share_of), strict=True)
    shares = [contents.trained[step].get(rule.reads[0], 0.0) / whole for step, whole in wholes if whole]
    return f"{rule.reads[0]}, share" if shares else "", shares


def _diagnoses(contents: Contents, first: dict[str, int]) -> dict[str, Diagnosis]:
    """Return what each rule reported when it first held, by judging the steps up to then again."""
    found: dict[str, Diagnosis] = {}
    if not first:
        return found
    history, last = History(), max(first.values())
    for step, metrics in contents.trained.items():
        if step > last:
            break
        history.add(step, metrics)
        for rule in RULES:
            if first.get(rule.code) == step and (diagnosis := rule.judge(history)):
                found[rule.code] = diagnosis
    return found


def _sample_rows(contents: Contents, samples: Samples) -> list[HealthRow]:
    rows = []
    if samples.read:
        share = sum(samples.faults.values()) / samples.read
        kinds = ", ".join(f"{kind}: {count}" for kind, count in samples.faults.most_common(4))
        rows.append(HealthRow("faults", "share of all samples that were read", None, share, "0", kinds))
    mismatch = series(contents, "training/log_probs_diff_max")[1]
    facts = {
        "identical": ("equal responses to a prompt, share", None, samples.identical),
        "length-reward": ("correlation of reward and length", None, samples.length_correlation),
        "mismatch": ("training/log_probs_diff_max, largest", mismatch[:1], max(mismatch, default=None)),
    }
    for code, (what, start, now) in facts.items():
        if now is not None:
            rows.append(HealthRow(code, what, start[0] if start else None, now, "", "", is_fact=True))
    return rows


def ranges(steps: list[int]) -> str:
    """`steps 3 to 7, 12`."""
    if not steps:
        return ""
    inside = set(steps)
    begins = [step for step in steps if step - 1 not in inside]
    ends = [step for step in steps if step + 1 not in inside]
    texts = [f"{a} to {b}" if a < b else f"{a}" for a, b in zip(begins, ends, strict=True)]
    return f"steps {', '.join(texts[:4])}" + f" and {len(texts) - 4} more" * (len(texts) > 4)


def shown(value: float | None) -> str:
    return "" if value is None or not math.isfinite(value) else number(value) if abs(value) >= 0.005 else f"{value:.2g}"
