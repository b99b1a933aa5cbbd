"""`python -m hybridrl.doctor [--config-only] [--json] key=value ...`: reports what main_ppo would report at its start.

Imports nothing heavy: the checks that need torch are in full.py.
"""

import argparse
import importlib
import json
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from hybridrl.config import PPOConfig
from hybridrl.config.compose import CONF, SHIPPED
from hybridrl.config.findings import Finding, Findings, Severity
from hybridrl.config.help import batch_arithmetic
from hybridrl.config.load import resolve_config
from hybridrl.doctor.__main__ import COMMANDS

FULL = "hybridrl.doctor.full"
STATUS = "exit status: 0 no errors, 1 errors, 2 the command cannot be parsed"
STYLES: dict[Severity, str] = {"error": "bold red", "warning": "yellow", "info": "cyan"}


def main(argv: list[str]) -> int:
    arguments = _arguments(argv)
    judgement = resolve_config(
        PPOConfig, arguments.overrides, arguments.config_name, arguments.config_path, offline=arguments.config_only
    )
    findings = judgement.findings
    if judgement.config is not None and not findings.errors:
        findings.info("batch", batch_arithmetic(judgement.config))
        if not arguments.config_only:
            examine = importlib.import_module(FULL).examine
            examine(judgement.config, findings, with_reward=not arguments.no_reward)
    return show(findings, as_json=arguments.json, verdict=True)


def show(findings: Findings, *, as_json: bool, verdict: bool = False) -> int:
    """Print findings for people or programs. Returns the exit status: 1 if there are errors, else 0."""
    failed = bool(findings.errors)
    if as_json:
        print(json.dumps({"refused": failed, "findings": list(map(asdict, findings.items))}, indent=2))
        return int(failed)
    console = Console(highlight=False)
    for group in dict.fromkeys(map(_group, findings.items)):
        _print(console, 0, Text(group, "bold"))
        members = [finding for finding in findings.items if _group(finding) == group]
        for finding in sorted(members, key=lambda finding: [*STYLES].index(finding.severity)):
            severity = (finding.severity, STYLES[finding.severity])
            _print(console, 2, Text.assemble(severity, f" [{finding.code}] {finding.statement}"))
            if finding.fix:
                _print(console, 6, Text(f"-> {finding.fix}"))
    if verdict:
        warnings = sum(finding.severity == "warning" for finding in findings.items)
        counts = [_count(len(findings.errors), "error") if failed else "no errors"]
        counts += [_count(warnings, "warning")] if warnings else []
        _print(console, 0, Text(", ".join(counts), "bold red" if failed else "bold green"))
    return int(failed)


def _group(finding: Finding) -> str:
    """The first part of the finding's code; codes of configuration keys have only one part."""
    first, dot, _ = finding.code.partition(".")
    return first if dot else "configuration"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number > 1)}"


def _print(console: Console, indent: int, text: Text) -> None:
    """Wrap and indent on a terminal; elsewhere keep one line per line."""
    if console.is_terminal:
        console.print(Padding.indent(text, indent))
    else:
        separator = Text("\n" + " " * (indent + 2))
        console.print(Text(" " * indent) + separator.join(text.split("\n")), soft_wrap=True)


def _arguments(argv: list[str]) -> argparse.Namespace:
    commands = (f"{name} {use}" for name, (_, use) in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="python -m hybridrl.doctor",
        usage="python -m hybridrl.doctor [--config-only] [--no-reward] [--json] key=value ...",
        description="Check a run of hybridrl.main_ppo without starting it.",
        epilog="\n  ".join(["commands, instead of key=value:", *commands]) + f"\n\n{STATUS}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="as for hybridrl.main_ppo")
    parser.add_argument("--config-only", action="store_true", help="check the keys only, as if for another machine")
    parser.add_argument("--no-reward", action="store_true", help="do not call the reward on a few rows")
    parser.add_argument("--json", action="store_true", help="print findings as JSON")
    parser.add_argument("-cp", "--config-path", type=Path, default=CONF, metavar="DIR", help="as for hybridrl.main_ppo")
    parser.add_argument("-cn", "--config-name", default=SHIPPED[PPOConfig], metavar="NAME", help="likewise")
    arguments, more = parser.parse_known_args(argv)
    if options := [item for item in more if item.startswith("-")]:
        parser.error(f"unknown option {options[0]}; configuration keys are given as key=value")
    arguments.overrides += more
    return arguments
