"""The table of docs/machines.md: how many GPUs a model takes."""

import runpy
from pathlib import Path

TOP = Path(__file__).parents[2]


def test_rows_of_the_page_are_those_of_the_plan() -> None:
    made = runpy.run_path(str(TOP / "scripts" / "sizing.py"))["rows"](["0.5B", "3B"])
    page = (TOP / "docs" / "machines.md").read_text(encoding="utf-8")
    assert [row for row in made if row not in page] == [], "run: python scripts/sizing.py"


def test_more_memory_or_an_adapter_never_takes_more_gpus() -> None:
    page = (TOP / "docs" / "machines.md").read_text(encoding="utf-8")
    for line in page.partition("<!-- scripts/sizing.py -->")[2].partition("<!-- end -->")[0].splitlines()[3:]:
        cells = [cell.split("/") for cell in line.strip("|").split("|")[1:]]
        numbers = [[1024 if part.strip() == "-" else int(part) for part in cell] for cell in cells]
        assert all(cell == sorted(cell, reverse=True) for cell in numbers), line
        assert all(list(way) == sorted(way, reverse=True) for way in zip(*numbers, strict=True)), line
