"""What a check has to say, for people and for programs."""

import json
from dataclasses import asdict, dataclass
from typing import Literal

from rich.console import Console
from rich.text import Text

Severity = Literal["refused", "warning", "information"]
STYLES: dict[Severity, str] = {"refused": "bold red", "warning": "yellow", "information": "cyan"}


@dataclass(frozen=True)
class Finding:
    """One thing that a check found: `cause` says what is and why it matters, `fix` what to set or do (may be empty).

    `code` is stable: scripts may rely on it.
    """

    code: str
    severity: Severity
    cause: str
    fix: str = ""


def show(findings: list[Finding], *, as_json: bool) -> int:
    """Print findings; the exit status: 1 where anything is refused, otherwise 0."""
    refused = any(finding.severity == "refused" for finding in findings)
    if as_json:
        print(json.dumps({"refused": refused, "findings": [asdict(finding) for finding in findings]}, indent=2))
        return int(refused)
    console = Console(soft_wrap=True, highlight=False)
    for finding in findings:
        head = Text.assemble((finding.severity, STYLES[finding.severity]), f" {finding.code} ")
        console.print(head + Text("; ".join(part for part in (finding.cause, finding.fix) if part)))
    return int(refused)
