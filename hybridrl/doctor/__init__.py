"""The doctor: checks a run without starting it, tests resuming and rewards, and explains configuration keys.

`__main__.py` has the command line and what needs the configuration only; further commands are in modules of their
own, or plug-ins. Here is what they share.
"""

import argparse
import json
import tempfile
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path

from rich.text import Text

from hybridrl.config import ConfigError, PPOConfig
from hybridrl.config.compose import CONF, SHIPPED
from hybridrl.config.findings import Finding, Findings, Severity
from hybridrl.config.load import resolve_config
from hybridrl.tracking.console import Terminal
from hybridrl.tracking.secrets import mask_text, mask_values, remember

STYLES: dict[Severity, str] = {"error": "bold red", "warning": "yellow", "info": "cyan"}


def add_run_arguments(parser: argparse.ArgumentParser, overrides: str = "as for hybridrl.main_ppo") -> None:
    """Add the keys of a run and its configuration file; `overrides` says what the keys are for."""
    parser.add_argument("overrides", nargs="*", metavar="key=value", help=overrides)
    parser.add_argument("-cp", "--config-path", type=Path, default=CONF, metavar="DIR", help="as for hybridrl.main_ppo")
    parser.add_argument("-cn", "--config-name", default=SHIPPED[PPOConfig], metavar="NAME", help="likewise")


def directory_parser(command: str, description: str, *, epilog: str = "", as_json: str = "") -> argparse.ArgumentParser:
    """Return the parser of a command that reads a run's directory; `as_json` names the output of --json."""
    prog = f"python -m hybridrl.doctor {command}"
    parser = argparse.ArgumentParser(prog=prog, description=description, epilog=epilog, allow_abbrev=False)
    parser.add_argument("directory", type=_directory, metavar="DIR", help="the run's trainer.default_local_dir")
    if as_json:
        parser.add_argument("--json", action="store_true", help=f"print {as_json} as JSON")
    return parser


def _directory(text: str) -> Path:
    path = Path(text).expanduser().absolute()
    if not path.is_dir():
        cause = f"{text}: there is no such directory (a run whose configuration is rejected makes none)"
        raise argparse.ArgumentTypeError(f"{cause}; name a run's trainer.default_local_dir")
    return path


def load_config(directory: Path, *, offline: bool = False) -> PPOConfig:
    """Return a run's configuration; keys that are newer than the run have their defaults. `offline`: whether or not
    this machine could run it."""
    with tempfile.TemporaryDirectory() as place:
        try:
            text = (directory / "config.yaml").read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ConfigError(f"{directory / 'config.yaml'} cannot be read: {error}") from error
        Path(place, "config.yaml").write_text(f"defaults: [{SHIPPED[PPOConfig]}, _self_]\n{text}", encoding="utf-8")
        resolved = resolve_config(PPOConfig, [], "config", Path(place), offline=offline)
    resolved.findings.close()
    assert resolved.config is not None
    remember(asdict(resolved.config))
    return resolved.config


def show(findings: Findings, *, as_json: bool, verdict: bool = False) -> int:
    """Print findings for people, by the first part of their codes, or for programs. Returns the exit status: 1 if there
    are errors, else 0."""
    failed = len(findings.errors)
    if as_json:
        print(
            json.dumps({"refused": bool(failed), "findings": mask_values(list(map(asdict, findings.items)))}, indent=2)
        )
        return int(failed > 0)
    console, groups = Terminal(highlight=False), defaultdict[str, list[Finding]](list)
    for finding in findings.items:  # codes of configuration keys have only one part
        groups[finding.code.partition(".")[0] if "." in finding.code else "configuration"].append(finding)
    worst = {group: min(map(_rank, members)) for group, members in groups.items()}
    for group, members in sorted(groups.items(), key=lambda item: -worst[item[0]]):  # errors last: next to the prompt
        _print(console, 0, Text(group, "bold"))
        for finding in sorted(members, key=_rank, reverse=True):
            severity = (finding.severity, STYLES[finding.severity])
            _print(console, 2, Text.assemble(severity, f" [{finding.code}] {mask_text(finding.statement)}"))
            if finding.fix:
                _print(console, 6, Text(f"-> {finding.fix}"))
    if verdict:
        warnings = sum(finding.severity == "warning" for finding in findings.items)
        counts = [f"{failed} error{'s' * (failed > 1)}" if failed else "no errors"]
        counts += [f"{warnings} warning{'s' * (warnings > 1)}"] if warnings else []
        _print(console, 0, Text(", ".join(counts), "bold red" if failed else "bold green"))
    return int(failed > 0)


def _rank(finding: Finding) -> int:
    return [*STYLES].index(finding.severity)


def _print(console: Terminal, indent: int, text: Text) -> None:
    """Wrap between words and indent on a terminal; elsewhere keep one line per line."""
    if console.is_terminal:
        for line in text.wrap(console, console.width - indent, overflow="ignore"):  # a long path stays in one piece
            console.print(Text(" " * indent) + line, soft_wrap=True)
    else:
        separator = Text("\n" + " " * (indent + 2))
        console.print(Text(" " * indent) + separator.join(text.split("\n")), soft_wrap=True)
