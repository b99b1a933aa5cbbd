"""Write the tables of docs/coming_from.md and docs/metrics.md, which tests compare."""

import argparse
from pathlib import Path

from hybridrl.compat.translation import VERL
from hybridrl.config.compose import shipped
from hybridrl.config.findings import show
from hybridrl.config.values import MISSING, value_of
from hybridrl.tracking.sink import MetricEntry, MetricSection, sections

DOCS = Path(__file__).parent.parent / "docs"
MARK = "<!-- from here on: scripts/generated_pages.py -->\n"


def page(name: str) -> str:
    """The full page: the text above the mark, and the generated tables."""
    written = (DOCS / name).read_text(encoding="utf-8").partition(MARK)[0]
    return written + MARK + PAGES[name]()


def differing_defaults() -> str:
    values = shipped("ppo_trainer").values
    defaults = VERL.table["defaults"].items()
    return "\n## Defaults that differ from verl's\n" + _rows(
        ("key", "in hybridrl", "in verl"),
        [(f"`{key}`", _code(value_of(values, key)), _code(theirs)) for key, theirs in defaults],
    )


def _code(value: object) -> str:
    return "must be set" if value == MISSING else f"`{show(value)}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _rows(titles: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [titles, tuple("---" for _ in titles), *rows]
    return "\n" + "\n".join(f"| {' | '.join(cells)} |" for cells in lines) + "\n"


def metrics() -> str:
    return "".join(map(_section, sections()))


def _section(section: MetricSection) -> str:
    """A table of the metrics that can look wrong, and a list of the others."""
    judged = [_metric_row(entry) for entry in section.entries if _advice(entry) or entry.healthy]
    others = [entry for entry in section.entries if not (_advice(entry) or entry.healthy)]
    text = f"\n## {section.title}\n" + (f"\n{section.text}\n" if section.text else "")
    text += _rows(("metric", "what it is", "in a run that learns", "otherwise"), judged)
    return text + ("\nAlso:\n\n" if others else "") + "".join(f"- `{one.name}`: {one.meaning}\n" for one in others)


def _metric_row(entry: MetricEntry) -> tuple[str, ...]:
    return (f"`{entry.name}`", *map(_cell, (entry.meaning, entry.healthy, _advice(entry))))


def _advice(entry: MetricEntry) -> str:
    """Return the diagnoses that read a metric, which say what to try, or what to do by itself."""
    return " ".join(f"[{code}](health.md)" for code in entry.diagnoses) or entry.otherwise


PAGES = {"coming_from.md": differing_defaults, "metrics.md": metrics}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=DOCS, help="directory of the pages that are written")
    out = parser.parse_args().out
    for name in PAGES:
        (out / name).write_text(page(name), encoding="utf-8")
