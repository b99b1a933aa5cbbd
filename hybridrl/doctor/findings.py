"""Findings, shown to people and to programs."""

import json
from dataclasses import asdict

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from hybridrl.config.findings import Finding, Findings, Severity

STYLES: dict[Severity, str] = {"refused": "bold red", "warning": "yellow", "information": "cyan"}


def show(findings: Findings, *, as_json: bool, verdict: bool = False) -> int:
    """Print findings, with a verdict in one line if asked for; the exit status: 1 where anything is refused, else 0."""
    if as_json:
        print(json.dumps({"refused": bool(findings.refused), "findings": list(map(asdict, findings.found))}, indent=2))
        return int(bool(findings.refused))
    console = Console(highlight=False)
    for group in dict.fromkeys(map(_group, findings.found)):
        _print(console, 0, Text(group, "bold"))
        for finding in sorted(
            (f for f in findings.found if _group(f) == group), key=lambda f: [*STYLES].index(f.severity)
        ):
            _print(console, 2, _said(finding))
            if finding.fix:
                _print(console, 6, Text(f"-> {finding.fix}"))
    if verdict:
        _print(console, 0, _verdict(findings))
    return int(bool(findings.refused))


def _group(finding: Finding) -> str:
    """What a finding is about: the first part of its code. Those of keys have but one part."""
    first, apart, _ = finding.code.partition(".")
    return first if apart else "configuration"


def _said(finding: Finding) -> Text:
    return Text.assemble((finding.severity, STYLES[finding.severity]), f" [{finding.code}] {finding.cause}")


def _print(console: Console, indent: int, text: Text) -> None:
    """On a terminal folded, with every line indented; elsewhere in one line."""
    if console.is_terminal:
        console.print(Padding.indent(text, indent))
    else:
        further = Text("\n" + " " * (indent + 2))
        console.print(Text(" " * indent) + further.join(text.split("\n")), soft_wrap=True)


def _verdict(findings: Findings) -> Text:
    if findings.refused:
        return Text(f"refused: {len(findings.refused)} of {len(findings.found)} findings must be mended", "bold red")
    warnings = sum(finding.severity == "warning" for finding in findings.found)
    more = f", with {warnings} warning{'s' * (warnings > 1)}" if warnings else ""
    return Text(f"accepted{more}", "bold green")
