"""Pages: docs/doctor.md lists every code of the doctor's findings, docs/machines.md how many GPUs a model takes."""

import re
import runpy
from pathlib import Path

from hybridrl.doctor.__main__ import COMMANDS

TOP = Path(__file__).parents[2]
CODES = r'\b(?:error|warn|info|report|gathered)\(\s*f?"([a-z]+\.[\w.-]+)'


def test_the_page_lists_every_code() -> None:
    full = TOP / "hybridrl" / "doctor" / "full.py"
    imports = full.read_text(encoding="utf-8") + full.with_name("start.py").read_text(encoding="utf-8")
    modules = re.findall(r"from hybridrl\.doctor\.(\w+) import", imports)
    files = [full, *(full.with_name(f"{name}.py") for name in modules), TOP / "hybridrl" / "runs" / "reward_trial.py"]
    text = "".join(file.read_text(encoding="utf-8") for file in [*files, full.with_name("reward.py")])
    codes = {code.rstrip(".") for code in re.findall(CODES, text)} | {item.rejection for item in COMMANDS.values()}
    codes = {code for code in codes if code and not code.startswith("rescore.")}
    table = (TOP / "docs" / "doctor.md").read_text(encoding="utf-8").split("## Codes")[1]
    listed = {code for row in re.findall(r"^\| (`.+?`) \|", table, re.M) for code in re.findall(r"`([^`]+)`", row)}
    assert codes == {code.removesuffix(".*") for code in listed}


def test_rows_of_the_page_are_those_of_the_plan() -> None:
    script = runpy.run_path(str(TOP / "scripts" / "sizing.py"))
    mixtures = [("Qwen3-30B-A3B", 8), ("Qwen3-235B-A22B", 32), ("DeepSeek-V3", 8)]
    made = [*script["rows"](["0.5B", "3B"]), *script["mixture_rows"](mixtures)]
    made += script["long_rows"](["stage3_32k"])
    page = "".join((TOP / "docs" / f"{name}.md").read_text(encoding="utf-8") for name in ("machines", "long_reasoning"))
    assert [row for row in made if row not in page] == [], "run: python scripts/sizing.py"


def test_more_memory_or_an_adapter_never_takes_more_gpus() -> None:
    page = (TOP / "docs" / "machines.md").read_text(encoding="utf-8")
    for line in page.partition("<!-- scripts/sizing.py -->")[2].partition("<!-- end -->")[0].splitlines()[3:]:
        cells = [cell.split("/") for cell in line.strip("|").split("|")[1:]]
        numbers = [[1024 if part.strip() == "-" else int(part) for part in cell] for cell in cells]
        assert all(cell == sorted(cell, reverse=True) for cell in numbers), line
        assert all(list(way) == sorted(way, reverse=True) for way in zip(*numbers, strict=True)), line
