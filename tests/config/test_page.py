"""docs/coming_from.md is what its script generates from the tables, and docs/configuration.md lists every code."""

import re
import runpy
from pathlib import Path

TOP = Path(__file__).parents[2]
PAGE, OTHERS = (TOP / "docs" / name for name in ("configuration.md", "coming_from.md"))


def test_the_page_s_tables_are_up_to_date() -> None:
    made = runpy.run_path(str(TOP / "scripts" / "generated_pages.py"))["page"](OTHERS.name)
    assert OTHERS.read_text(encoding="utf-8") == made, "run: python scripts/generated_pages.py"


def test_the_page_lists_every_code() -> None:
    files = ("doctor/__main__.py", "compat/translation.py")
    sources = [*TOP.glob("hybridrl/config/**/*.py"), *(TOP / "hybridrl" / file for file in files)]
    text = "".join(path.read_text(encoding="utf-8") for path in sources)
    codes = set(re.findall(r'(?:\.(?:error|warn|info|gathered)|Finding)\(\s*"([\w-]+)"', text))
    listed = set(
        re.findall(r"^\| `([\w-]+)` \|", PAGE.read_text(encoding="utf-8").split("| code |")[1].split("\n\n")[0], re.M)
    )
    assert codes == listed
