"""The page of one run or of several: read, measured and written as one file that needs nothing else."""

import base64
import hashlib
import json
import os
import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hybridrl.health.advice import advise
from hybridrl.report import sections
from hybridrl.report.contents import NO_METRICS, Contents, differing_keys
from hybridrl.report.curves import POINTS, Curves, Panel, as_json, curves_of, panel_json
from hybridrl.report.markup import SamplePool, code, folded, section, table, text
from hybridrl.report.samples import ChosenSamples, choose_samples
from hybridrl.report.verdicts import QUESTIONS, Light, compare_runs, intervals, lights, sentence
from hybridrl.tracking.report import CURVES
from hybridrl.tracking.sink import REWARD, entry_of

FOLDER = Path(__file__).parent
PLAIN_SIZE = 400_000  # characters that are not compressed
MOST_RUNS = 8  # the number of colors


@dataclass
class ReportedRun:
    """A run with everything that the page shows about it, measured at first use."""

    contents: Contents
    count: int  # samples to choose
    points: int = POINTS  # points per curve

    def __post_init__(self) -> None:
        """Without logged metrics, as in a directory of verl's files, take the rewards of the samples."""
        self.samples: ChosenSamples = choose_samples(self.contents, self.count)
        if not self.contents.steps and self.samples.rewards:
            steps = {step: {REWARD[-1]: reward} for step, reward in self.samples.rewards.items()}
            notes = [note for note in self.contents.notes if note != NO_METRICS]
            self.contents.notes = ["no metrics were logged: the reward is the mean score of the samples", *notes]
            self.contents.take_steps(steps)

    @cached_property
    def intervals(self) -> dict:
        return intervals(self.contents)

    @cached_property
    def curves(self) -> Curves:
        return curves_of(self.contents, self.samples.bands | self.intervals, self.points)

    @cached_property
    def lights(self) -> list[Light]:
        return [light for light in lights(self.contents, self.samples) if light.state != "unknown"]

    @cached_property
    def sentence(self) -> str:
        return sentence(self.contents, self.intervals)


def write_report(run_dirs: Sequence[Path], out: Path, samples: int = 200) -> Path:
    """Write the page of one run, or of several next to each other, and return its path. The page lists missing and
    damaged files. Raises OSError if the page cannot be written."""
    out = Path(out)
    if out.exists() and not out.is_file():
        raise OSError(f"{out} is {'a directory' if out.is_dir() else 'no regular file'}")
    page = render_page(run_dirs, samples)
    temporary = out.with_name(f".{out.name}.writing")  # a reader never sees half a page
    try:
        temporary.write_text(page, encoding="utf-8", errors="xmlcharrefreplace")
        os.replace(temporary, out)
    except OSError:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    return out


def render_page(run_dirs: Sequence[Path], samples: int = 200, *, served: bool = False, live: str = "") -> str:
    """Return the page. `served`: a server has all samples; `live`: its version, so that the page follows the run."""
    names = _names([Path(path) for path in run_dirs])
    runs = [
        ReportedRun(Contents(path, name), samples // len(names), max(POINTS // len(names), 100))
        for path, name in names.items()
    ]
    data = _data(runs) | {"served": served, "live": live}
    script = (FOLDER / "logic.js").read_text(encoding="utf-8") + (FOLDER / "page.js").read_text(encoding="utf-8")
    style = (FOLDER / "page.css").read_text(encoding="utf-8")
    parts = [_head(runs), _curves(runs), *([_comparison(runs)] if len(runs) > 1 else []), _samples(runs)]
    parts += _of_one(runs[0]) if len(runs) == 1 else _of_several(runs)
    title = runs[0].contents.title if len(runs) == 1 else " · ".join(run.contents.name for run in runs)
    links = "".join(f'<a href="#{name}">{shown}</a>' for name, shown in _links(runs))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; "
    policy += "connect-src 'self'; img-src data:"
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{text(title)} · run report</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta name="description" content="{text(" ".join(run.sentence for run in runs))}">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}"><style>{style}</style></head><body>'
        f'<nav aria-label="Sections"><span class="brand">hybridrl</span>{links}</nav><main>{"".join(parts)}</main>'
        f"<footer>Made by <code>hybridrl report</code>. Keys: <kbd>j</kbd> <kbd>k</kbd> sample, "
        f"<kbd>[</kbd> <kbd>]</kbd> step, <kbd>/</kbd> search.</footer>"
        f'<script type="application/json" id="data">{_json(data)}</script><script>{script}</script></body></html>\n'
    )


def _names(paths: Sequence[Path]) -> dict[Path, str]:
    """Return a short name for each directory; equal names are prefixed with the parent directory's."""
    absolute = list(dict.fromkeys(path.expanduser().absolute() for path in paths))
    last = [path.name for path in absolute]
    return {path: path.name if last.count(path.name) == 1 else f"{path.parent.name}/{path.name}" for path in absolute}


def _links(runs: Sequence[ReportedRun]) -> list[tuple[str, str]]:
    links = {"curves": "Curves"} | ({"comparison": "Comparison"} if len(runs) > 1 else {}) | {"samples": "Samples"}
    if len(runs) == 1:
        links |= {name: name.capitalize() for name in ("health", "time", "configuration", "checkpoints", "log")}
    return list(links.items())


def _head(runs: Sequence[ReportedRun]) -> str:
    if len(runs) > 1:
        columns = ("", "run", "in one sentence", *QUESTIONS.values())
        rows = [
            (
                f'<i class="swatch r{number % 8}"></i>',
                f"<b>{text(run.contents.name)}</b>",
                text(run.sentence),
                *(
                    sections.light(next((o for o in run.lights if o.question == question), None))
                    for question in QUESTIONS
                ),
            )
            for number, run in enumerate(runs)
        ]
        notes = "".join(sections.notes(run.contents, run.samples) for run in runs)
        return f"<header><h1>{len(runs)} runs</h1>{table(columns, rows, 'runs')}{folded('Notes', notes)}</header>"
    run = runs[0]
    began = run.contents.started[:16].replace("T", " ")
    where = f"{text(_shown(run.contents.path))}{f' · started {text(began)} UTC' * bool(began)}"
    return (
        f'<header><h1>{text(run.contents.title)}</h1><p class="kicker">{where}</p>'
        f'<p class="sentence">{text(run.sentence)}</p>'
        f"{sections.light_list(run.lights)}{sections.failure(run.contents)}"
        f"{sections.notes(run.contents, run.samples)}</header>"
    )


def _shown(directory: Path) -> Path:
    """A directory relative to the working directory, if it is below it."""
    return directory.relative_to(Path.cwd()) if directory.is_relative_to(Path.cwd()) else directory


def _curves(runs: Sequence[ReportedRun]) -> str:
    """The toolbar and the panels, which the script fills; without scripts, the picture that the run drew."""
    curves = runs[0].curves
    marks = f'<p class="about">Vertical lines: {text(_marks(curves))}.</p>' if curves.marks else ""
    absent = f'<p class="about">Not logged: {", ".join(text(name) for name in curves.absent)}.</p>'
    empty = '<p class="about">There are no steps, so there are no curves.</p>'
    pictures = "".join(_picture(run) for run in runs)
    without = f"<noscript><p>Panels of all curves need JavaScript.</p>{pictures}</noscript>"
    body = f'<div id="toolbar"></div><div class="panels" id="panels"></div>{without}'
    inside = body + marks + absent * bool(curves.absent) if curves.panels else empty
    return section("curves", "Curves", inside)


def _picture(run: ReportedRun) -> str:
    """A run's curves.png, if there is one."""
    with suppress(OSError):
        data = base64.b64encode((run.contents.path / CURVES).read_bytes()).decode()
        return f'<img alt="Curves of {text(run.contents.name)}" src="data:image/png;base64,{data}">'
    return ""


def _marks(curves: Curves) -> str:
    """Explain the vertical lines of the panels."""
    resumed = ", ".join(str(mark.step) for mark in curves.marks if mark.kind == "resume")
    skipped = [mark.step for mark in curves.marks if mark.kind == "skip"]
    texts = [f"resumed at step {resumed}"] if resumed else []
    texts += [f"{mark.text} from step {mark.step}" for mark in curves.marks if mark.kind == "diagnosis"][:6]
    texts += (
        [f"updates skipped in {len(skipped)} step{'s' * (len(skipped) > 1)}, first in {skipped[0]}"] if skipped else []
    )
    return "; ".join(texts)


def _samples(runs: Sequence[ReportedRun]) -> str:
    shown = sum(len(run.samples.shown) for run in runs)
    if not shown:
        return section("samples", "Samples", "", "There are no samples in this run's directory.")
    read = sum(run.samples.read for run in runs)
    reasons = {why.partition(":")[0] for run in runs for sample in run.samples.shown for why in sample.why}
    kinds = [why for why in ("best", "worst", "median", "longest", "random", "largest advantage") if why in reasons]
    parts = [f"{shown:,} of {read:,} samples that were read"]
    parts += [f"of each step shown {', '.join(kinds)}"] * bool(kinds)
    parts += ["one of each fault"] * ("fault" in reasons) + ["one with its tokens"] * ("tokens" in reasons)
    parts += ["whole groups of some steps"] * ("whole group" in reasons)
    parts += ["the same rows of every validation"] * any(len(run.contents.validation) > 1 for run in runs)
    about = f"{'; '.join(parts)}."
    without = "<noscript><p>The samples need JavaScript; their files are in rollouts/ and samples/.</p></noscript>"
    return section("samples", "Samples", f'<div id="browser"></div>{without}', about)


def _of_one(run: ReportedRun) -> list[str]:
    contents = run.contents
    return [
        sections.health(contents, run.samples),
        sections.times(contents, _advice(contents)),
        sections.configuration(contents),
        sections.checkpoints(contents),
        sections.log(contents),
    ]


def _of_several(runs: Sequence[ReportedRun]) -> list[str]:
    """All sections of each run, folded, and without anchors, which would not be unique."""
    return [
        folded(
            f'<i class="swatch r{number % 8}"></i> {text(run.contents.name)}',
            sections.failure(run.contents) + "".join(_of_one(run)).replace(' id="', ' data-id="'),
        )
        for number, run in enumerate(runs)
    ]


def _comparison(runs: Sequence[ReportedRun]) -> str:
    """Differences of the configurations, and of the validation scores on the same questions."""
    names = [run.contents.name for run in runs]
    rows = differing_keys([run.contents for run in runs])
    columns = ("key", *(text(name) for name in names))
    cells = [(code(name), *map(code, values)) for name, values in rows]
    inside = compare_runs([run.contents for run in runs])
    if rows:
        inside += f"<h3>Configuration</h3>{table(columns, cells, 'settings')}"
    elif all(run.contents.config for run in runs):
        inside += "<p>The configurations agree.</p>"
    return section("comparison", "Comparison", inside)


def _advice(contents: Contents) -> list[str]:
    """Return the advice for the end of a run; none if the configuration lacks keys that it reads."""
    try:
        return advise(contents.steps, _namespace(contents.config))
    except (AttributeError, TypeError, ValueError):
        return []


def _namespace(value: Any) -> Any:
    """Nested mappings as the attributes that advice reads."""
    return SimpleNamespace(**{str(k): _namespace(v) for k, v in value.items()}) if isinstance(value, dict) else value


def _data(runs: Sequence[ReportedRun]) -> dict[str, Any]:
    """The data of the script; data that the panels do not need are compressed, unless they are short."""
    pool, shown, other_series = SamplePool(), [], []
    for number, run in enumerate(runs):
        pool.add(number, run.samples.shown)
        shown_series, others = as_json(run.curves)
        shown.append(shown_series | {"name": run.contents.name, "per_step": run.contents.samples_per_step})
        other_series.append(others)
    names = {name for run in runs for name in run.curves.series if "/" in name}
    entries = {name: entry for name in sorted(names) if (entry := entry_of(name))}
    rest = {"samples": pool.data(), "series": other_series}
    plain = json.dumps(rest, separators=(",", ":"), allow_nan=False)
    return {
        "runs": shown,
        "panels": [panel_json(panel) for panel in _joined([run.curves.panels for run in runs])],
        "meanings": {name: [entry.meaning, entry.healthy, entry.otherwise] for name, entry in entries.items()},
        "rest": rest if len(plain) <= PLAIN_SIZE else None,
        "packed": None if len(plain) <= PLAIN_SIZE else deflated(plain),
    }


def _joined(panels: Sequence[Sequence[Panel]]) -> list[Panel]:
    """Return the panels of all runs; panels with the same title become one, with all lines."""
    joined: dict[str, Panel] = {}
    for panel in (panel for each in panels for panel in each):
        present = joined.setdefault(panel.title, panel)
        names = {line.series for line in present.lines}
        added = tuple(line for line in panel.lines if line.series not in names)
        joined[panel.title] = replace(present, lines=present.lines + added)
    return list(joined.values())


def deflated(plain: str) -> str:
    """Raw deflate in base64, which DecompressionStream("deflate-raw") reads."""
    deflate = zlib.compressobj(6, zlib.DEFLATED, -15)
    return base64.b64encode(deflate.compress(plain.encode()) + deflate.flush()).decode()


def _json(data: dict[str, Any]) -> str:
    """JSON in ASCII for a script element: no text can end the element or begin a comment."""
    plain = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return plain.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
