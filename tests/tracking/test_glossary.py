"""Every metric that a run can log has an entry, and the entries name metrics, keys and diagnoses that exist.

The names in metrics.jsonl of real runs are checked where these run (tests/integration/test_run.py).
"""

import ast
import re
import runpy
from pathlib import Path

import pytest

from hybridrl.config import PPOConfig
from hybridrl.config.values import value_keys
from hybridrl.health.rules import RULES
from hybridrl.tracking.sink import entries, entry_of

TOP = Path(__file__).parents[2]
ENTRIES = list(entries())
HEADS = {re.split(r"[/<{]", entry.name)[0] for entry in ENTRIES}
# Packages whose texts with a slash are names of metrics, not of files.
LOGGING = ("core", "evaluation", "runs")
ANY = "ANY"


def metric_names() -> set[str]:
    """Texts in the source that begin like a metric; what is formatted into one is ANY."""
    files = [path for package in LOGGING for path in TOP.glob(f"hybridrl/{package}/**/*.py")]
    names = set()
    for tree in (ast.parse(path.read_text(encoding="utf-8")) for path in [*files, *TOP.glob("hybridrl/*.py")]):
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                names.add(node.value)
            elif isinstance(node, ast.JoinedStr):
                names.add("".join(part.value if isinstance(part, ast.Constant) else ANY for part in node.values))
    return {name for name in names if name.split("/")[0] in HEADS and re.fullmatch(r"[\w-]+/[\w@/-]*\w", name)}


def has_entry(name: str) -> bool:
    """Whether a name, or one that begins with it, is in the glossary."""
    begin = name.partition(ANY)[0]
    complete = ANY not in name and entry_of(name) is not None
    return complete or any(
        entry.name.startswith((f"{name}/", begin if begin != name else f"{name}/")) for entry in ENTRIES
    )


def test_every_name_in_the_source_has_an_entry() -> None:
    names = metric_names()
    assert len(names) > 60
    assert {name for name in names if not has_entry(name)} == set()


def test_no_entry_is_of_a_metric_that_is_never_logged() -> None:
    source = "".join(path.read_text(encoding="utf-8") for path in TOP.glob("hybridrl/**/*.py"))
    words = {word for entry in ENTRIES for word in re.findall(r"\w+", re.sub(r"<[^>]*>", "", entry.name))}
    # Parts of names that the source joins: rollout_is_ + mean, ratio_fraction + _high, seconds_p + 90, a term + _loss.
    parts = {word: re.sub(r"^rollout_(is|rs)_|_high$|_low$|_loss$|\d+$", "", word) for word in words}
    assert {word for word, part in parts.items() if part not in source} == set()


@pytest.mark.parametrize(
    ("name", "entry"),
    [
        ("actor/entropy", "actor/entropy"),
        ("critic/score/max", "critic/score/{mean,max,min}"),
        (
            "val-core/gsm8k/main/acc/mean@8",
            "val-core/<data source>/{acc,reward}/{mean@<n>,best@<n>/{mean,std},maj@<n>/{mean,std}}",
        ),
        ("val-aux/gsm8k/acc/worst@4/std", "val-aux/<data source>/<variable>/{mean,std,best,worst,maj}@<n>"),
        ("val-aux/reward/faults", "val-aux/reward/faults"),
        ("reward/faults/raised:KeyError", "reward/faults/<kind>"),
        ("tools/search/seconds_p90", "tools/<name>/{seconds_p50,seconds_p90}"),
    ],
)
def test_a_name_has_the_most_specific_entry(name: str, entry: str) -> None:
    found = entry_of(name)
    assert found is not None and found.name == entry


@pytest.mark.parametrize("name", ["actor/entropie", "critic/score", "critic/score/median", "score", "health/"])
def test_other_names_have_none(name: str) -> None:
    assert entry_of(name) is None


def test_every_key_that_is_named_exists() -> None:
    keys = value_keys(PPOConfig)
    words = {word for entry in ENTRIES for word in re.findall(r"`([\w.]+)[=`]", f"{entry.meaning} {entry.otherwise}")}
    named = {word for word in words if "." in word and not word.endswith(".log")}
    assert len(named) > 20
    assert {word for word in named if not any(f".{key}.".find(f".{word}.") >= 0 for key in keys)} == set()


def test_every_diagnosis_exists() -> None:
    assert {code for entry in ENTRIES for code in entry.diagnoses} == {rule.code for rule in RULES}


def test_the_page_is_up_to_date() -> None:
    made = runpy.run_path(str(TOP / "scripts" / "generated_pages.py"))["page"]("metrics.md")
    assert (TOP / "docs" / "metrics.md").read_text(encoding="utf-8") == made, "run: python scripts/generated_pages.py"
