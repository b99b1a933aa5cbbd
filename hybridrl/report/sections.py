"""The parts of the page that need no script: head, health, time, configuration, checkpoints, log."""

import math
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from hybridrl.health.history import Diagnosis, History
from hybridrl.health.rules import RULES, VALIDATION, Rule
from hybridrl.report.contents import Contents, LogExcerpt, Setting, environment, log_excerpts, settings
from hybridrl.report.curves import PHASE_ORDER
from hybridrl.report.markup import code, command, folded, section, size, table, text
from hybridrl.report.samples import ChosenSamples
from hybridrl.report.verdicts import WORDS, Light, duration, number, series, validation_mean
from hybridrl.tracking.faults import ACTOR, BEGUN, FINISHED, Fault, fault_kind
from hybridrl.tracking.report import change_of, ranges

SYMBOLS = {"good": "✓", "fair": "!", "bad": "✕"}
SLOWEST = 8
ERROR = 4000  # characters of the error that ended a run


def light_list(lights: Sequence[Light]) -> str:
    items = "".join(
        f'<li class="light {light.state}"><span class="sign" aria-label="{light.state}">{SYMBOLS[light.state]}</span>'
        f"<div><strong>{text(light.question)}</strong><p>{text(light.reason)}</p></div></li>"
        for light in lights
    )
    return f'<ul class="lights">{items}</ul>' if items else ""


def light(light: Light | None) -> str:
    """A light without its text, for a table."""
    if light is None:
        return ""
    sign = f'<span class="sign">{SYMBOLS[light.state]}</span>'
    return f'<span class="light {light.state}" title="{text(light.reason)}">{sign}</span>'


def failure(contents: Contents) -> str:
    """The end of a failed run, on top of the page, after the first failure."""
    end, first = contents.end, next(iter(contents.failures), None)
    if not contents.crashed:
        return ""
    before = "" if first is None or first == end else _failed("The run failed first", first)
    if end is None:
        why = "faults.jsonl has no end: it was killed by hand, by a scheduler or the kernel, or the machine crashed"
        ask = f"hybridrl why {shlex.quote(str(contents.path))}"
        return f'{before}<div class="failure"><h2>The run was killed</h2><p>{why}.</p>{command(ask)}</div>'
    excerpt = None if end.tail else traceback_of(contents, end)
    trace = f"<h3>{text(excerpt.name)}</h3><pre>{text(excerpt.text)}</pre>" if excerpt else ""
    return before + _failed("Then the run failed" if before else "The run failed", end, trace)


def _failed(title: str, fault: Fault, trace: str = "") -> str:
    where = f"in step {fault.step}" if fault.step else "before the first step"
    trace = f"<pre>{text(chr(10).join(map(str, fault.tail)))}</pre>" if fault.tail else trace
    cause = f'<pre class="cause">{text(fault.text[:ERROR])}</pre>'
    return f'<div class="failure"><h2>{title} {where} <code>{text(fault.code)}</code></h2>{cause}{trace}</div>'


def traceback_of(contents: Contents, end: Fault) -> LogExcerpt | None:
    """Return the traceback of the process that the end names, else the oldest traceback. Exceptions of rewards are
    usually caught: their logs count only if the end is about a reward."""
    tracebacks = [excerpt for excerpt in log_excerpts(contents) if excerpt.is_traceback]
    if not re.search("reward|scor", end.code):
        tracebacks = [excerpt for excerpt in tracebacks if not excerpt.name.startswith(("reward", "scoring"))]
    named = ACTOR.search(end.text)
    own = [excerpt for excerpt in tracebacks if named and excerpt.name == f"{named[1]}-{named[2]}.log"]
    return next(iter([*own, *tracebacks]), None)


@dataclass(frozen=True)
class HealthRow:
    """A rule: its metric with the value at the start and now, its threshold, the steps in which it fired, and the fix.
    A fact is not a rule, and is neither good nor bad."""

    code: str
    metric: str
    start: float | None
    now: float | None
    limit: str
    fired: str  # steps
    cause: str = ""
    fix: str = ""
    holds_now: bool = False
    is_fact: bool = False

    @property
    def sign(self) -> str:
        """Class of the rule's dot; empty if the rule was not tried."""
        if self.fired:
            return "bad" if self.holds_now else "fair"
        return "" if self.is_fact or not self.metric else "good"


def health_rows(contents: Contents, samples: ChosenSamples) -> list[HealthRow]:
    """Return the rules that fired, then the others, then figures of the samples. A supervised run gets only rules that
    fired: most of the others are about metrics that it does not have."""
    fired = contents.held
    diagnoses = _diagnoses(contents, {code: steps[0] for code, steps in fired.items()})
    rows = []
    for rule in RULES if contents.trained else ():
        metric, values = _measured(contents, rule)
        diagnosis, steps = diagnoses.get(rule.code), fired.get(rule.code, [])
        change = change_of(metric, values) if values else None
        row = HealthRow(
            rule.code,
            metric,
            change.before if change else None,
            change.after if change else None,
            rule.limit,
            ranges(steps, 4),
            diagnosis.cause if diagnosis else "",
            diagnosis.fix if diagnosis else "",
            contents.last_step in steps,
        )
        if row.fired or not contents.supervised:
            rows.append(row)
    codes = {rule.code for rule in RULES}
    for name, steps in fired.items():  # custom rules: their code is not run here
        if name not in codes:
            rows.append(HealthRow(name, "", None, None, "", ranges(steps, 4), holds_now=contents.last_step in steps))
    rows.sort(key=lambda row: not row.fired)
    return rows + _sample_rows(contents, samples)


def _measured(contents: Contents, rule: Rule) -> tuple[str, list[float]]:
    """Return the metric of a rule and its values; a share counts as 0 in steps without it."""
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
    """Return the diagnosis of each rule when it first fired, by judging the steps up to then again."""
    diagnoses: dict[str, Diagnosis] = {}
    if not first:
        return diagnoses
    history, last = History(), max(first.values())
    for step, metrics in contents.trained.items():
        if step > last:
            break
        history.add(step, metrics)
        for rule in RULES:
            if first.get(rule.code) == step and (diagnosis := rule.judge(history)):
                diagnoses[rule.code] = diagnosis
    return diagnoses


def _sample_rows(contents: Contents, samples: ChosenSamples) -> list[HealthRow]:
    rows = []
    if samples.read:
        share = sum(samples.faults.values()) / samples.read
        kinds = ", ".join(f"{fault} ({fault_kind(fault)}): {count}" for fault, count in samples.faults.most_common(4))
        rows.append(HealthRow("faults", "share of all samples that were read", None, share, "0", kinds))
    mismatch = series(contents, "training/log_probs_diff_max")[1]
    facts = {
        "identical": ("equal responses to a prompt, share", None, samples.identical),
        "length-reward": ("correlation of reward and length", None, samples.length_correlation),
        "mismatch": ("training/log_probs_diff_max, largest", mismatch[:1], max(mismatch, default=None)),
    }
    for name, (what, start, now) in facts.items():
        if now is not None:
            rows.append(HealthRow(name, what, start[0] if start else None, now, "", "", is_fact=True))
    return rows


def shown(value: float | None) -> str:
    return "" if value is None or not math.isfinite(value) else number(value) if abs(value) >= 0.005 else f"{value:.2g}"


def health(contents: Contents, samples: ChosenSamples) -> str:
    rows = health_rows(contents, samples)
    fired = sum(bool(row.fired) and row.code != "faults" for row in rows)
    about = "No rule fired." if not fired else f"{fired} of the rules fired; those come first."
    if not contents.trained:
        about = "No step was finished, so no rule could be tried."
    columns = ("rule", "what is measured", ">start", ">now", "threshold", "fired")
    inside = table(columns, map(_health_cells, rows), "health") if rows else ""
    return section("health", "Health", inside, about)


def _health_cells(row: HealthRow) -> tuple[str, ...]:
    cause = f'<p class="cause">{text(row.cause)}</p><p class="fix">→ {text(row.fix)}</p>' if row.cause else ""
    never = "" if row.is_fact or not row.metric else '<span class="faint">never</span>'
    return (
        f'<span class="dot {row.sign}"></span><code>{text(row.code)}</code>',
        f"{text(row.metric) or '<span class=faint>not logged</span>'}{cause}",
        shown(row.start),
        shown(row.now),
        text(row.limit),
        text(row.fired) or never,
    )


def times(contents: Contents, advice: Sequence[str]) -> str:
    """The time of a run: shares of phases, the slowest steps with their cause, tokens per second, memory."""
    phases = contents.phases
    if not phases:
        return section("time", "Time", "", "No times were logged.")
    totals = {name: sum(spent.get(name, 0.0) for spent in phases.values()) for name in PHASE_ORDER}
    totals = {name: seconds for name, seconds in totals.items() if seconds > 0}
    whole = sum(totals.values())
    bars = "".join(
        f'<span class="p{PHASE_ORDER.index(name)}" style="width:{100 * seconds / whole:.2f}%" '
        f'title="{name}: {duration(seconds)}"></span>'
        for name, seconds in totals.items()
    )
    key = "".join(
        f'<li><i class="p{PHASE_ORDER.index(name)}"></i>{WORDS.get(name, name)} <b>{seconds / whole:.0%}</b> '
        f'<span class="faint">{duration(seconds)}</span></li>'
        for name, seconds in totals.items()
    )
    inside = f'<div class="shares">{bars}</div><ul class="key">{key}</ul>{_figures(contents)}'
    inside += "".join(f'<p class="advice">→ {text(line)}</p>' for line in advice)
    columns = ("step", ">seconds", "what took longer than usual")
    inside += f"<h3>Slowest steps</h3>{table(columns, _slowest(contents), 'slowest')}"
    return section("time", "Time", inside)


def _figures(contents: Contents) -> str:
    figures = {
        "perf/throughput": "tokens per second and device",
        "rollout/tokens_per_s": "response tokens per second in the rollout",
        "perf/max_memory_reserved_gb": "GiB that torch held at most",
        "perf/cpu_memory_used_gb": "GiB of the largest training rank",
        "perf/host_memory_free_gb": "GiB of host memory free at the end",
        "rollout/kv_cache_usage/max": "of the KV cache in use at most",
    }
    items = []
    for name, what in figures.items():
        values = series(contents, name)[1]
        if values:
            value = (
                values[-1] if "free" in name else max(values) if "max" in name or "memory" in name else median(values)
            )
            items.append(f'<li><b>{number(value)}</b><span class="faint">{what}</span></li>')
    return f'<ul class="figures">{"".join(items)}</ul>' if items else ""


def _slowest(contents: Contents) -> list[tuple[str, ...]]:
    phases = contents.phases
    usual = {name: median(spent.get(name, 0.0) for spent in phases.values()) for name in PHASE_ORDER}
    ordered = sorted(phases.items(), key=lambda item: -sum(item[1].values()))[:SLOWEST]
    rows = []
    for step, spent in ordered:
        name = max(spent, key=lambda phase: spent[phase] - usual[phase])
        excess = spent[name] - usual[name]
        cause = (
            f"{name} {duration_exact(spent[name])}, usually {duration_exact(usual[name])}" if excess > 0 else "nothing"
        )
        longest = contents.steps[step].get("response_length/max")
        if name == "rollout" and longest:
            cause += f"; its longest response has {longest:,.0f} tokens"
        rows.append(
            (f'<a href="#step-{step}" data-step="{step}">{step}</a>', f"{sum(spent.values()):.2f}", text(cause))
        )
    return rows


def duration_exact(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds < 60 else duration(seconds)


def configuration(contents: Contents) -> str:
    rows, resumable = settings(contents), any(saved.resumable for saved in contents.checkpoints)
    inside = f"<h3>Continue this run</h3>{command(contents.resume_command())}" if resumable else ""
    if rows:
        columns = ("key", "value", "default")
        inside += f"<h3>Different from the default</h3>{table(columns, map(_setting_cells, rows), 'settings')}"
    if facts := environment(contents):
        items = "".join(f"<li><code>{text(key)}</code> {text(value)}</li>" for key, value in facts.items())
        inside += f'<h3>Environment</h3><ul class="environment">{items}</ul>'
    if contents.placement:
        places = (tuple(map(text, row)) for row in contents.placement)
        inside += f"<h3>Placement</h3>{table(('machine', 'device', 'processes'), places)}"
    if contents.config_text:
        inside += folded("The whole config.yaml", f"<pre>{text(contents.config_text)}</pre>")
    there = (contents.path / "config.yaml").exists()
    about = "config.yaml cannot be read." if there else "There is no config.yaml."
    return section("configuration", "Configuration", inside, "" if contents.config else about)


def _setting_cells(row: Setting) -> tuple[str, ...]:
    meaning = f'<p class="faint" title="{text(row.meaning)}">{text(row.meaning)}</p>' if row.meaning else ""
    key = f"{code(row.key)}{meaning}"
    source = f'<p class="faint">{text(row.source)}</p>' if row.source else ""
    return key, f"{code(row.value)}{source}", code(row.default)


def checkpoints(contents: Contents) -> str:
    about = "" if contents.checkpoints else "No checkpoint was saved."
    rows = []
    for saved in contents.checkpoints:
        path = saved.path.name
        sign = "bad" if saved.problem else "good"
        state = text(saved.problem) or ("files are as saved, by size" if saved.kind != "verl" else "saved by verl")
        use = saved.lacks or saved.misses
        use += f"{'; ' * bool(use)}a run resumes here" * (saved is contents.newest)
        kind = saved.kind if saved.kind != "kept" else ""
        rows.append((f'<span class="dot {sign}"></span><code>{text(path)}</code>', size(saved.size), kind, state, use))
    columns = ("checkpoint", ">size", "kind", "state", "")
    return section("checkpoints", "Checkpoints", table(columns, rows) if rows else "", about)


def log(contents: Contents) -> str:
    """The records of faults.jsonl, and the ends of the logs."""
    faults = [fault for fault in contents.faults if fault.code not in (BEGUN, FINISHED)][-40:]
    rows = [
        (
            f'<span class="nowrap">{text(fault.time[:19].replace("T", " "))}</span>',
            str(fault.step),
            text(fault.code),
            text(fault.text[:2000]),
        )
        for fault in faults
    ]
    inside = table(("time (UTC)", ">step", "code", "text"), rows) if rows else ""
    for excerpt in log_excerpts(contents)[:24]:
        title = f"{text(excerpt.name)}{' (traceback)' * excerpt.is_traceback}"
        inside += folded(title, f"<pre>{text(excerpt.text)}</pre>")
    about = "" if rows else "No warning and no fault was recorded."
    return section("log", "Log", inside, about)


def notes(contents: Contents, samples: ChosenSamples) -> str:
    """The list of missing and unreadable data."""
    items = [*contents.notes, *samples.notes[:10]]
    if samples.steps and samples.steps_read < samples.steps:
        items.append(
            f"samples of {samples.steps_read:,} of {samples.steps:,} files were read; --serve reaches the others"
        )
    return f'<ul class="notes">{"".join(f"<li>{text(item)}</li>" for item in items)}</ul>' if items else ""
