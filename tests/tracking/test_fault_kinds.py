"""Kinds of faults: each is declared once, other distributions declare further ones, and messages explain them."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from hybridrl import plugins
from hybridrl.config.findings import Findings
from hybridrl.core.rollout import RequestFault
from hybridrl.data.prompts import Prompt
from hybridrl.evaluation import tables
from hybridrl.report.samples import ChosenSamples
from hybridrl.report.sections import health_rows
from hybridrl.report.show import facts
from hybridrl.rewards.score import FaultGuard, RewardFaults, Score
from hybridrl.runs.reward_trial import TrialResponse, TrialRow, report_faults
from hybridrl.tracking.faults import FAULT_KINDS, fault_kind
from hybridrl.tracking.records import SampleRecord

TOP = Path(__file__).parent.parent.parent
FILES = {path.relative_to(TOP).as_posix(): path.read_text(encoding="utf-8") for path in TOP.glob("hybridrl/**/*.py")}
REFEREE = """
from hybridrl.tracking.faults import FaultKind

REFEREE = FaultKind("the referee gave no verdict", "raise reward.judge.retries", rejects=True)
"""
REFEREED = "referee:429 (the referee gave no verdict; raise reward.judge.retries)"
UNSCORED = Score(None, fault="referee:429", detail="Too Many Requests")


def names_of_faults(tree: ast.Module) -> Iterator[ast.expr]:
    """Yield each expression that becomes a fault: an argument or a field `fault`, a variable or the second argument of
    a function of this name, and a text that a fault is compared with."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield from (keyword.value for keyword in node.keywords if keyword.arg == "fault")
            yield from node.args[1:2] if isinstance(node.func, ast.Name) and node.func.id == "_fault" else []
        elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                pairs = [(target, node.value)]
                if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                    pairs = [*zip(target.elts, node.value.elts, strict=True)]
                yield from (value for name, value in pairs if ast.unparse(name).rpartition(".")[2] == "fault")
        elif isinstance(node, ast.Compare) and ast.unparse(node.left).endswith(".fault"):
            yield from (
                name for other in node.comparators for name in ast.walk(other) if isinstance(name, ast.Constant)
            )


def test_every_fault_in_the_code_is_declared():
    kinds = {kind.kind for kind in RequestFault.__subclasses__()}
    for text in FILES.values():
        for name in names_of_faults(ast.parse(text)) if "fault" in text else ():
            first = name.values[0] if isinstance(name, ast.JoinedStr) else name
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                kinds.add(first.value.partition(":")[0])
    kinds.remove("killed")  # within rewards/process.py, until the response is scored once more
    assert kinds == FAULT_KINDS.keys()


def test_the_page_explains_every_kind():
    rows = [f"| `{name}` | {kind.sentence} | {kind.advice} |\n" for name, kind in FAULT_KINDS.items()]
    assert "".join(rows) in (TOP / "docs" / "rewards.md").read_text(encoding="utf-8")


def stopped_run(tmp_path: Path, capsys) -> str:
    guard, scores = FaultGuard("exclude", max_fault_rate=0.4, max_fault_steps=2), [UNSCORED, Score(1.0)]
    assert guard.check(scores) == {"reward/faults": 1, "reward/faults/referee:429": 1}
    with pytest.raises(RewardFaults) as raised:
        guard.check(scores)
    return str(raised.value)


def evaluation(tmp_path: Path, capsys) -> str:
    sample = SimpleNamespace(fault="referee:429", detail="", dataset="maths", id="7")
    assert tables.explain_faults(SimpleNamespace(name="m", samples=[sample], directory=tmp_path)) == 1.0
    return capsys.readouterr().out


def shown_sample(tmp_path: Path, capsys) -> str:
    return facts(SampleRecord("2+2?", "4", "4", None, 7, {}, {"fault": "referee:429"}))


def page(tmp_path: Path, capsys) -> str:
    samples = ChosenSamples(read=2)
    samples.faults["referee:429"] = 1
    return str(health_rows(SimpleNamespace(trained={}, held={}), samples))


@pytest.mark.parametrize("printer", [stopped_run, evaluation, shown_sample, page])
def test_a_kind_of_another_distribution_is_explained_where_a_fault_is_of_it(distribution, tmp_path, capsys, printer):
    fault_kind("timeout")
    assert "kinds_of_others" not in sys.modules
    assert REFEREED in " ".join(printer(tmp_path, capsys).replace('"', "").split())
    assert "kinds_of_others" in sys.modules


def test_a_trial_rejects_a_reward_whose_faults_are_all_of_such_kinds(distribution, tmp_path):
    rows = [TrialRow("data.train_files", Prompt(0, [1], "?", "7", "maths", {}), [TrialResponse(0, "4", UNSCORED)])]
    findings = Findings()
    report_faults("maths", rows, tmp_path / "log", findings, rejects=True)
    (finding,) = findings.items
    assert (finding.code, finding.severity) == ("reward.fault.referee", "error")
    assert "the referee gave no verdict: Too Many Requests" in finding.cause
    assert finding.fix.startswith("raise reward.judge.retries, or set reward.on_error=zero")


def test_a_stored_fault_of_a_kind_that_is_not_declared_is_shown(tmp_path, capsys):
    assert "no score: referee:429 (its kind is not declared here; " in shown_sample(tmp_path, capsys)


@pytest.fixture
def distribution(tmp_path: Path, monkeypatch) -> Iterator[None]:
    """Install a distribution that declares the kind `referee`."""
    about = tmp_path / "site" / "kinds_of_others-1.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: kinds_of_others\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[hybridrl.plugins]\nfault.referee = kinds_of_others:REFEREE\n")
    (about.parent / "kinds_of_others.py").write_text(REFEREE)
    monkeypatch.syspath_prepend(str(about.parent))
    monkeypatch.delitem(sys.modules, "kinds_of_others", raising=False)
    plugins.installed.cache_clear()
    yield
    monkeypatch.undo()
    plugins.installed.cache_clear()
