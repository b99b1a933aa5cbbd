"""The documentation builds as a site, and no link in it or in the other pages leads nowhere."""

import os
import re
import subprocess
import sys
from html import unescape
from importlib.util import find_spec
from pathlib import Path

import pytest

from hybridrl.core.experience.asynchronous import QUEUED

TOP = Path(__file__).parent.parent
PAGES = [TOP / "README.md", TOP / "CONTRIBUTING.md", *sorted(TOP.glob("recipes/**/*.md"))]
# A measured figure in a sentence, and what names a command or a test that gives it.
UNITS = r"(?:s|seconds|minutes|ms|GiB|GB|MiB|kB|bytes|times)"
FIGURE = rf"\b\d[\d,.]*(?: to [\d,.]+)? {UNITS}\b"
MEASURED = re.compile(rf"\b(?:took|takes?|grew|gained|measured)\b[^.;:|]{{0,60}}?{FIGURE}")
# Of words (`wc -w`), tables included: of a page that is read from its beginning, and of all pages together.
WORDS_OF_A_PAGE, WORDS = 2_500, 46_266
REFERENCES = {"algorithms", "configuration", "errors", "metrics"}
PROOF = re.compile(r"(?:python|bash) scripts/|hybridrl [a-z]+ |python -m|pytest|tests/\w")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The documentation as mkdocs builds it, without a dead link or anchor."""
    for package in ("mkdocs", "material", "latex2mathml"):
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    place = tmp_path_factory.mktemp("docs") / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(place)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}  # an advertisement of the theme
    built = subprocess.run(command, cwd=TOP, capture_output=True, text=True, env=environment)
    assert (built.returncode, built.stdout + built.stderr) == (0, "")
    return place


def page_text(site: Path, name: str) -> str:
    return (site / f"{name}.html").read_text(encoding="utf-8")


def test_every_page_of_the_site_leads_to_every_other(site: Path) -> None:
    names = {path.stem for path in (TOP / "docs").glob("*.md")}
    for name in names:
        links = {*re.findall(r'href="([\w-]+)\.html"', page_text(site, name))}
        assert names - {name} <= links, name


def test_the_site_loads_nothing_from_elsewhere_and_colours_code(site: Path) -> None:
    page = page_text(site, "start")
    loaded = re.findall(r'<(?:script|img|iframe)\b[^>]*src="([^"]+)"|<link\b[^>]*href="([^"]+)"', page)
    assert loaded and [name for names in loaded for name in names if re.match("(?:https?:)?//", name)] == []
    assert '<span class="k">def</span>' in page and 'data-md-color-scheme="slate"' in page
    assert (site / "search" / "search_index.json").stat().st_size > 100_000


def test_formulas_of_the_site_are_mathml_and_code_stays_as_it_is(site: Path) -> None:
    page = page_text(site, "algorithms")
    outside = re.sub(r"<(pre|code|script|annotation)\b.*?</\1>", "", page, flags=re.DOTALL)
    assert "$" not in outside and "\\frac" not in outside
    assert page.count('<math xmlns="http://www.w3.org/1998/Math/MathML" display="block">') >= 20
    assert "<mi>\N{GREEK SMALL LETTER SIGMA}</mi>" in unescape(page) and "&amp;#x" not in page
    assert "$PBS_NODEFILE" in page_text(site, "machines")  # a variable of a shell, within code


def test_keys_in_tables_can_end_a_line_and_wide_tables_scroll(site: Path) -> None:
    assert "<code>actor/<wbr>grad_<wbr>norm</code>" in page_text(site, "metrics")
    css = (site / "site.css").read_text(encoding="utf-8")
    assert re.search(r"table:not\(\[class\]\) \{[^}]*max-width: 100%[^}]*overflow-x: auto", css)
    assert "site.css" in page_text(site, "metrics")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(TOP).as_posix())
def test_relative_links_lead_to_files_and_their_headings(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    targets = [target for target in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in target]
    missing = []
    for target in targets:
        path, _, anchor = target.partition("#")
        file = (page.parent / path) if path else page
        headings = re.findall(r"^#+ (.+)$", file.read_text(encoding="utf-8"), re.M) if file.suffix == ".md" else []
        anchors = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
        if not file.exists() or (anchor and anchor not in anchors):
            missing.append(target)
    assert missing == []


@pytest.mark.parametrize("page", [*PAGES, *sorted(TOP.glob("docs/*.md"))], ids=lambda page: page.name)
def test_a_section_with_a_measured_figure_names_a_command_that_gives_it(page: Path) -> None:
    sections = re.split(r"^(?=#+ )", page.read_text(encoding="utf-8"), flags=re.M)
    measured = {section: MEASURED.search(" ".join(section.split())) for section in sections}
    assert [found[0] for section, found in measured.items() if found and not PROOF.search(section)] == []


@pytest.mark.parametrize(("name", "number"), [("README.md", 3), ("docs/performance.md", 1)])
def test_the_figures_of_a_page_are_those_of_the_page_that_it_names(name: str, number: int) -> None:
    text = (TOP / name).read_text(encoding="utf-8")
    parts = re.findall(r"<!-- figures: (\S+\.md) -->(.*?)<!-- /figures -->", text, re.S)
    assert len(parts) == number
    for source, text in parts:
        known = [float(number) for number in numbers((TOP / source).read_text(encoding="utf-8"))]
        prose = re.sub(r"\(\S+\.md\S*\)|TRL \d\S+", "", text)
        assert [shown for shown in numbers(prose) if not any(is_rounded(exact, shown) for exact in known)] == []


def numbers(text: str) -> list[str]:
    return re.findall(r"(?<![\w.])\d+(?:\.\d+)?(?![\w.]*\d)", text)


def is_rounded(exact: float, shown: str) -> bool:
    """Whether the figure is a known one, to its digits after the point."""
    return round(exact, len(shown.partition(".")[2])) == float(shown)


def test_the_readme_begins_with_what_has_run_on_a_gpu_and_links_what_a_newcomer_compares() -> None:
    text = (TOP / "README.md").read_text(encoding="utf-8")
    first = " ".join(text.split("\n")[:10])
    assert "one H100 has run" in first and "have not run yet" in first
    assert "(docs/comparison.md)" in text and "(docs/extensions.md)" in text


def test_pages_are_within_their_budgets_of_words_and_the_readme_of_lines() -> None:
    words = {path.stem: len(path.read_text(encoding="utf-8").split()) for path in (TOP / "docs").glob("*.md")}
    over = {name: count for name, count in words.items() if count > WORDS_OF_A_PAGE and name not in REFERENCES}
    assert over == {} and sum(words.values()) <= WORDS
    assert len((TOP / "README.md").read_text(encoding="utf-8").splitlines()) <= 90


def test_commands_have_one_name_and_verl_s_is_said_once() -> None:
    """`python -m hybridrl...` is the way of those who come from verl."""
    pages = [TOP / "README.md", TOP / "CONTRIBUTING.md", *sorted(TOP.glob("docs/*.md"))]
    lines = [(page.name, line) for page in pages for line in page.read_text(encoding="utf-8").splitlines()]
    assert [name for name, line in lines if "python -m hybridrl" in line] == ["coming_from.md"]


def test_a_figure_has_one_place() -> None:
    """The duration of the quickstart is in its recipe, and in the README's figures, which are compared with it."""
    pages = [*sorted(TOP.glob("docs/*.md")), TOP / "CONTRIBUTING.md"]
    texts = {page.name: " ".join(page.read_text(encoding="utf-8").split()) for page in pages}
    duration = re.compile(
        r"quickstart[^.|]{0,80} (?:takes?|took|in) (?:\w+ )?(?:\d+|two|three|four|five) (?:s|minutes)\b"
    )
    assert {name: found[0] for name, text in texts.items() if (found := duration.search(text))} == {}


def test_the_page_about_asynchronous_rollout_names_its_loss_and_how_much_is_started() -> None:
    page = " ".join((TOP / "docs" / "asynchronous.md").read_text(encoding="utf-8").split())
    assert "decoupled PPO" in page and "proximal policy" in page and "behaviour policy" in page
    assert f"fewer responses are open than {1 + QUEUED:g} times what can run at once" in page


def test_the_reading_path_has_files_that_exist_and_names_that_are_in_them() -> None:
    rows = re.findall(r"(?m)^\| \d+ \| `(\S+)` \| (.*) \|$", (TOP / "docs" / "reading.md").read_text(encoding="utf-8"))
    assert len(rows) == 25
    for file, text in rows:
        source = (TOP / "hybridrl" / file).read_text(encoding="utf-8")
        missing = [name for name in re.findall(r"`([\w.]+)`", text) if name.split(".")[-1] not in source]
        assert not missing, (file, missing)
