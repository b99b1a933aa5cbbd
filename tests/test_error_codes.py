"""Every code that ends a run or is recorded during it has a section in docs/errors.md, and the page has no other."""

import ast
import re
from pathlib import Path

from hybridrl.doctor import why
from hybridrl.tracking import faults

TOP = Path(__file__).parent.parent
TREES = [ast.parse(path.read_text(encoding="utf-8")) for path in sorted(TOP.glob("hybridrl/**/*.py"))]
# Exceptions that never reach the end of a run: caught where they are raised, or of commands that are no run.
CAUGHT = {
    "ActorLost", "NoScore", "OutOfTime", "SandboxError", "_MemoryExceeded", "NoMessage", "CheckFailed", "RunFailed",
    "CommandFailed", "Unreadable", "EpisodeFault", "ToolError", "TagError", "RequestFault", "UserCodeError",
    "PictureFault",
}  # fmt: skip


def nodes(kind: type) -> list:
    return [node for tree in TREES for node in ast.walk(tree) if isinstance(node, kind)]


def code_of_class(node: ast.ClassDef) -> set[str]:
    assigned = [one for one in node.body if isinstance(one, ast.Assign) and ast.unparse(one.targets[0]) == "code"]
    return {one.value.value for one in assigned if isinstance(one.value, ast.Constant)}


def reported() -> set[str]:
    """Codes of console.warn(text, code), and of log records (extra={"code": ...})."""
    codes = set()
    for call in nodes(ast.Call):
        if ast.unparse(call.func) == "warn" and len(call.args) == 2:
            codes |= {call.args[1].value} if isinstance(call.args[1], ast.Constant) else set()
        for word in call.keywords:
            if word.arg == "extra" and not isinstance(word.value, ast.Constant):
                codes.add(ast.literal_eval(word.value)["code"])
    return codes


def test_every_exception_that_can_end_a_run_has_a_code() -> None:
    exceptions = [
        node
        for node in nodes(ast.ClassDef)
        if any(re.search(r"Error|Exception|Failure|Died", ast.unparse(base)) for base in node.bases)
    ]
    assert len(exceptions) > 15
    assert {node.name for node in exceptions if not code_of_class(node)} == CAUGHT


def test_the_page_has_a_section_for_every_code_and_no_other() -> None:
    codes = {code for node in nodes(ast.ClassDef) for code in code_of_class(node)} | reported()
    codes |= {*faults.SIGNS, *why.ENDS, faults.UNEXPECTED, "warning"}
    codes |= {faults.BEGUN, faults.FINISHED, faults.STOPPED, faults.RESTART, faults.REQUESTED}
    verdicts = [call.args[0] for call in nodes(ast.Call) if ast.unparse(call.func) == "Verdict"]
    codes |= {why.RUNNING} | {code.value for code in verdicts if isinstance(code, ast.Constant)}
    page = (TOP / faults.PAGE).read_text(encoding="utf-8")
    sections = re.findall(r"^## ([\w-]+)\n\n(\S.+)", page, re.M)
    assert len(sections) == len({name for name, _ in sections}) == len(re.findall(r"^## ", page, re.M))
    assert {name for name, _ in sections} == codes
