"""Findings, shown to people and to programs."""

import json
from dataclasses import asdict

from rich.console import Console
from rich.text import Text

from hybridrl.config.findings import Finding, Findings, Severity

STYLES: dict[Severity, str] = {"refused": "bold red", "warning": "yellow", "information": "cyan"}


def show(findings: Findings, *, as_json: bool, verdict: bool = False) -> int:
    """Print findings, with a verdict in one line if asked for; the exit status: 1 where anything is refused, else 0."""
    if as_json:
        print(json.dumps({"refused": bool(findings.refused), "findings": list(map(asdict, findings.found))}, indent=2))
        return int(bool(findings.refused))
    console = Console(soft_wrap=True, highlight=False)
    for finding in findings.found:
        console.print(_line(finding))
    if verdict:
        console.print(_verdict(findings))
    return int(bool(findings.refused))


def _line(finding: Finding) -> Text:
    return Text.assemble((finding.severity, STYLES[finding.severity]), f" [{finding.code}] {finding.text}")


def _verdict(findings: Findings) -> Text:
    if findings.refused:
        return Text(f"refused: {len(findings.refused)} of {len(findings.found)} findings must be mended", "bold red")
    return Text("accepted", "bold green")
