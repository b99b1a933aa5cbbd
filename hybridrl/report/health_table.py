"""Every health rule of a run with what it read, its threshold, and when it held; and what the samples show."""

import math
from dataclasses import dataclass
from statistics import fmean

from hybridrl.health.rules import RULES, Diagnosis, History
from hybridrl.report.contents import Contents
from hybridrl.report.samples import Samples
from hybridrl.report.verdicts import number, series

# What each rule is about; it may read more.
READS = {
    "policy-jump": "actor/ppo_kl",
    "kl-jump": "actor/kl_loss",
    "truncation": "response_length/clip_ratio",
    "no-signal": "critic/zero_signal_share",
    "not-finite": "actor/skipped_updates",
    "unknown-tokens": "sampling/unknown_tokens",
    "clipping": "actor/pg_clipfrac",
    "entropy-collapse": "actor/entropy",
    "length-collapse": "response_length/mean",
    "repetition": "response/repeated_ngrams",
    "memory-full": "perf/host_memory_free_gb",
    "flat-score": "critic/score/mean",
}


@dataclass(frozen=True)
class HealthRow:
    """One rule: what is measured, its value at the start and now, the threshold, when it held, and what to do."""

    code: str
    metric: str
    start: float | None
    now: float | None
    limit: str
    held: str
    cause: str = ""
    fix: str = ""
    holds_now: bool = False


def health_rows(contents: Contents, samples: Samples) -> list[HealthRow]:
    """Return rules that held first, then the others, then figures of the samples."""
    held = contents.held
    diagnoses = _diagnoses(contents, {code: steps[0] for code, steps in held.items()})
    rows = []
    for rule in RULES:
        values = series(contents, READS.get(rule.code, ""))[1]
        diagnosis, steps = diagnoses.get(rule.code), held.get(rule.code, [])
        start, now = (fmean(values[:5]), fmean(values[-5:])) if values else (None, None)
        rows.append(
            HealthRow(
                rule.code,
                READS.get(rule.code, "") if values else "",
                start,
                now,
                rule.limit,
                ranges(steps),
                diagnosis.cause if diagnosis else "",
                diagnosis.fix if diagnosis else "",
                contents.last_step in steps,
            )
        )
    rows.sort(key=lambda row: not row.held)
    return rows + _sample_rows(contents, samples)


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
        rows.append(HealthRow("faults", "share of samples that were read", None, share, "0", kinds))
    if samples.identical is not None:
        limit = "expected once a task is solved"
        rows.append(HealthRow("identical", "equal responses to a prompt, share", None, samples.identical, limit, ""))
    if samples.length_correlation is not None:
        what = "correlation of reward and length"
        rows.append(HealthRow("length-reward", what, None, samples.length_correlation, "0.5 either way", ""))
    mismatch = series(contents, "training/log_probs_diff_max")[1]
    if mismatch:
        what, limit = "training/log_probs_diff_max, largest", "rounding; a mean beyond it stops the run"
        rows.append(HealthRow("mismatch", what, mismatch[0], max(mismatch), limit, ""))
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
