"""Write the tables of docs/configuration.md: `python scripts/configuration_page.py`. A test checks them."""

from pathlib import Path

from hybridrl.config.compose import shipped
from hybridrl.config.findings import show
from hybridrl.config.keys import Entry, verl_keys
from hybridrl.config.values import MISSING, value_of

PAGE = Path(__file__).parent.parent / "docs" / "configuration.md"
MARK = "<!-- from here on: scripts/configuration_page.py -->\n"


def page() -> str:
    """The full page: the text above the mark, and the generated tables."""
    written = PAGE.read_text(encoding="utf-8").partition(MARK)[0]
    return written + MARK + tables()


def tables() -> str:
    table = verl_keys()
    values = shipped("ppo_trainer").values
    parts = [
        "\n## Other names\n\nOlder names of verl, and those of SkyRL and AReaL.\n",
        _rows(
            ("name there", "name in hybridrl"),
            [(f"`{old}`", f"`{new}`") for old, new in sorted(table.moved.items()) if old != new],
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
    return " ".join(f"`{show(value)}`" for value in ("null", *entry.silent)) + limited


def _code(value: object) -> str:
    return "must be set" if value == MISSING else f"`{show(value)}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _rows(titles: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [titles, tuple("---" for _ in titles), *rows]
    return "\n" + "\n".join(f"| {' | '.join(cells)} |" for cells in lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
