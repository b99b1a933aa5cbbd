"""docs/doctor.md lists the codes that the whole doctor can say."""

import re
from pathlib import Path

TOP = Path(__file__).parents[2]
SAID = r'(?:\.(?:refuse|warn|inform)|Finding)\(\s*f?"([a-z]+\.[\w.-]+)'


def test_the_page_lists_every_code() -> None:
    full = TOP / "hybridrl" / "doctor" / "full.py"
    asked = re.findall(r"from hybridrl\.doctor\.(\w+) import", full.read_text(encoding="utf-8"))
    files = [full, *(full.with_name(f"{name}.py") for name in asked)]
    said = {code.rstrip(".") for file in files for code in re.findall(SAID, file.read_text(encoding="utf-8"))}
    table = (TOP / "docs" / "doctor.md").read_text(encoding="utf-8").split("| code |")[1]
    listed = {code for row in re.findall(r"^\| (`.+?`) \|", table, re.M) for code in re.findall(r"`([^`]+)`", row)}
    assert said == {code.removesuffix(".*") for code in listed}
