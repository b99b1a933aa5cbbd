"""Write the tables of docs/configuration.md and docs/metrics.md, which tests compare."""

import argparse
from pathlib import Path

from hybridrl.config.compose import shipped
from hybridrl.config.findings import show
from hybridrl.config.keys import Entry, verl_keys
from hybridrl.config.values import MISSING, value_of
from hybridrl.tracking.glossary import MetricEntry, sections

DOCS = Path(__file__).parent.parent / "docs"
MARK = "<!-- from here on: scripts/generated_pages.py -->\n"


def page(name: str) -> str:
    """The full page: the text above the mark, and the generated tables."""
    written = (DOCS / name).read_text(encoding="utf-8").partition(MARK)[0]
    return written + MARK + PAGES[name]()


def configuration() -> str:
    table = verl_keys()
    values = shipped("ppo_trainer").values
    parts = [
        "\n## Other names\n\nOlder names of verl, and those of SkyRL and AReaL.\n",
        _rows(
            ("name there", "name in hybridrl"),
            [(f"`{old}`", f"`{new}`") for old, new in sorted(table.moved.items()) if old != new],
        ),
        "\n## Keys that count together\n\n`ceil` divides and rounds up. What a command sets by its name here stays.\n",
        _rows(
            ("key there", "sets in hybridrl", "no effect at"), [_translated(entry) for entry in _of_kind("combined")]
        ),
        "\n## Keys that set others\n",
        _rows(
            ("key there", "sets in hybridrl", "no effect at"), [_translated(entry) for entry in _of_kind("translated")]
        ),
        "\n## Keys that have no effect\n\nThey cannot change training: one warning, except at the values named.\n",
        _rows(("keys there", "why", "silent at"), [_entry_row(entry) for entry in _of_kind("ignored")]),
        "\n## Keys that are rejected\n",
        _rows(("keys there", "why", "accepted at"), [_entry_row(entry) for entry in _of_kind("rejected")]),
        "\n## Defaults that differ from verl's\n",
        _rows(
            ("key", "in hybridrl", "in verl"),
            [
                (f"`{key}`", _code(value_of(values, key)), _code(theirs))
                for key, theirs in table.defaults["verl"].items()
            ],
        ),
    ]
    return "".join(parts)


def _of_kind(kind: str) -> list[Entry]:
    return [entry for entry in verl_keys().entries if entry.kind == kind]


def _translated(entry: Entry) -> tuple[str, str, str]:
    sets = " ".join(f"`{name}={show(value)}`" for name, value in entry.sets.items())
    return _keys(entry), sets, _silent(entry)


def _entry_row(entry: Entry) -> tuple[str, str, str]:
    return _keys(entry), _cell(entry.why), _silent(entry)


def _keys(entry: Entry) -> str:
    return " ".join(f"`{key}`" for key in entry.keys)


def _silent(entry: Entry) -> str:
    limited = f" (applies to values like `{_cell(entry.when)}`)" if entry.when else ""
    limited += "".join(f" (applies with `{key}={show(value)}`)" for key, value in entry.only.items())
    limited += f" (accepted at `{entry.follows}`)" if "{" in (entry.follows or "") else ""
    return " ".join(f"`{show(value)}`" for value in ("null", *entry.silent)) + limited


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
