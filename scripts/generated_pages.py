"""Write the tables of docs/configuration.md and docs/metrics.md, which tests compare."""

import argparse
from pathlib import Path

from hybridrl.compat.entries import Entry
from hybridrl.compat.translation import SYSTEMS, VERL
from hybridrl.config.compose import shipped
from hybridrl.config.findings import show
from hybridrl.config.values import MISSING, value_of
from hybridrl.tracking.glossary import MetricEntry, sections

DOCS = Path(__file__).parent.parent / "docs"
MARK = "<!-- from here on: scripts/generated_pages.py -->\n"


def page(name: str) -> str:
    """The full page: the text above the mark, and the generated tables."""
    written = (DOCS / name).read_text(encoding="utf-8").partition(MARK)[0]
    return written + MARK + PAGES[name]()


def configuration() -> str:
    values = shipped("ppo_trainer").values
    moved = {old: new for system in SYSTEMS.values() for old, new in system.table["moved"].items()}
    effects = ("key there", "becomes here", "no effect at")
    parts = [
        "\n## Other names\n\nOlder names of verl, and those of SkyRL and AReaL.\n",
        _rows(("name there", "name in hybridrl"), [(f"`{old}`", f"`{new}`") for old, new in sorted(moved.items())]),
        "\n## Keys that count together\n\nWhat a command sets by its name here stays.\n",
        _entries("combined", effects),
        "\n## Keys that set others\n",
        _entries("translated", effects),
        "\n## Keys that have no effect\n\nThey cannot change training: one warning, except at the values named.\n",
        _entries("ignored", ("keys there", "why", "silent at")),
        "\n## Keys that are rejected\n",
        _entries("rejected otherwise", ("keys there", "why", "accepted at")),
        "\n## Defaults that differ from verl's\n",
        _rows(
            ("key", "in hybridrl", "in verl"),
            [
                (f"`{key}`", _code(value_of(values, key)), _code(theirs))
                for key, theirs in VERL.table["defaults"].items()
            ],
        ),
    ]
    return "".join(parts)


def _entries(kinds: str, titles: tuple[str, ...]) -> str:
    entries = [(kind, entry) for kind in kinds.split() for system in SYSTEMS.values() for entry in system.entries]
    return _rows(titles, [_entry_row(entry) for kind, entry in entries if entry.kind == kind])


def _entry_row(entry: Entry) -> tuple[str, str, str]:
    sets = " ".join(f"`{name}={show(value)}`" for name, value in entry.sets.items())
    effect = sets if entry.kind == "translated" or not entry.why else _cell(entry.why)
    limited = f" (applies to values like `{_cell(entry.when)}`)" if entry.when else ""
    silent = " ".join(f"`{show(value)}`" for value in ("null", *entry.silent))
    return " ".join(f"`{key}`" for key in entry.keys), effect, silent + limited


def _code(value: object) -> str:
    return "must be set" if value == MISSING else f"`{show(value)}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _rows(titles: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [titles, tuple("---" for _ in titles), *rows]
    return "\n" + "\n".join(f"| {' | '.join(cells)} |" for cells in lines) + "\n"


def metrics() -> str:
    return "".join(
        f"\n## {section.title}\n"
        + (f"\n{section.text}\n" if section.text else "")
        + _rows(
            ("metric", "what it is", "in a run that learns", "otherwise"), [_metric_row(one) for one in section.entries]
        )
        for section in sections()
    )


def _metric_row(entry: MetricEntry) -> tuple[str, ...]:
    diagnoses = " ".join(f"[{code}](health.md)" for code in entry.diagnoses)
    texts = (entry.meaning, entry.healthy, f"{entry.otherwise} {diagnoses}".strip())
    return (f"`{entry.name}`", *map(_cell, texts))


PAGES = {"configuration.md": configuration, "metrics.md": metrics}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=DOCS, help="directory of the pages that are written")
    out = parser.parse_args().out
    for name in PAGES:
        (out / name).write_text(page(name), encoding="utf-8")
