"""docs/doctor.md lists every code of the doctor's findings."""

import re
from pathlib import Path

TOP = Path(__file__).parents[2]
CODES = r'\b(?:error|warn|info|report|gathered)\(\s*f?"([a-z]+\.[\w.-]+)'


def test_the_page_lists_every_code() -> None:
    full = TOP / "hybridrl" / "doctor" / "full.py"
    modules = re.findall(r"from hybridrl\.doctor\.(\w+) import", full.read_text(encoding="utf-8"))
    modules += re.findall(
        r"from hybridrl\.doctor\.(\w+) import", full.with_name("start.py").read_text(encoding="utf-8")
    )
    files = [full, *(full.with_name(f"{name}.py") for name in modules), TOP / "hybridrl" / "runs" / "reward_trial.py"]
    codes = {code.rstrip(".") for file in files for code in re.findall(CODES, file.read_text(encoding="utf-8"))}
    table = (TOP / "docs" / "doctor.md").read_text(encoding="utf-8").split("## Codes")[1]
    listed = {code for row in re.findall(r"^\| (`.+?`) \|", table, re.M) for code in re.findall(r"`([^`]+)`", row)}
    assert codes == {code.removesuffix(".*") for code in listed}
