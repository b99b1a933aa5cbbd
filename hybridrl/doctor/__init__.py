"""The doctor: checks a run without starting it, tests resuming and rewards, and explains configuration keys.

`__main__.py` has the table of commands; they run in modules of their own, or in those of other distributions:

    MINE = Command("RUN [--least N]: its purpose", [DIRECTORY, argument("--least", type=int)], run)

with the entry point `"doctor.mine" = "my_package.checks:MINE"` (hybridrl/plugins.py). Here is what they share.
"""

import argparse
import json
import pkgutil
import re
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from rich.table import Table
from rich.text import Text

from hybridrl.config import ConfigError, PPOConfig
from hybridrl.config.compose import CONF, SHIPPED
from hybridrl.config.findings import Finding, Findings, Severity
from hybridrl.config.load import ResolvedConfig, resolve_config
from hybridrl.runtime import EXIT_INTERRUPTED, EXIT_REJECTED
from hybridrl.runtime.guard import ended_by_closed_pipe
from hybridrl.tracking.console import Terminal, print_text
from hybridrl.tracking.secrets import mask_text, mask_values, remember

RENAME = "give every machine a name of its own, or list addresses"
STYLES: dict[Severity, str] = {"error": "bold red", "warning": "yellow", "info": "cyan"}


class Result(NamedTuple):
    """The result of a command: `data` for --json, the parts that are `shown` otherwise (texts, dicts, findings, what
    rich prints, or functions of its console), and whether it `failed`."""

    data: Any
    shown: Sequence[Any]
    failed: bool = False


CommandArgument = tuple[tuple[str, ...], dict[str, Any]]


@dataclass(frozen=True)
class Command:
    """A command, under its name in a table. `use`: a line, "arguments: purpose", which `about` continues in --help.

    `run`: a function of the parsed arguments, or its place "module:function", to import it only then. It returns a
    text, a dict, a table, findings or a `Result`; what it prints goes to standard error. The exit status is 1 if that
    failed or has errors. A ConfigError is printed, with status 2, or is a finding of the code `rejection`.
    """

    use: str
    arguments: Sequence[CommandArgument]
    run: Callable[[argparse.Namespace], Any] | str
    about: str = ""
    status: str = "0 no errors, 1 errors"
    rejection: str = ""

    def parse(self, name: str, words: Sequence[str]) -> argparse.Namespace:
        """Parse the words after `hybridrl NAME`."""
        purpose = self.use.partition(": ")[2]
        parser = argparse.ArgumentParser(
            prog=f"hybridrl {name}",
            description=f"{purpose[:1].upper()}{purpose[1:]}. {self.about}",
            epilog=f"exit status: {self.status}, 2 the command cannot be carried out",
            formatter_class=argparse.RawDescriptionHelpFormatter if name == "doctor" else argparse.HelpFormatter,
            allow_abbrev=False,
        )
        for names, options in (*self.arguments, argument("--json", action="store_true", help="print data as JSON")):
            parser.add_argument(*names, **options)
        parsed, further = parser.parse_known_args(words)
        if unknown := [word for word in further if word.startswith("-") or "overrides" not in parsed]:
            parser.error(f"unknown option {unknown[0]}; the command takes {self.use.partition(':')[0]}")
        if "overrides" in parsed:
            parsed.overrides = [*parsed.overrides, *further]  # keys may be between options
        return parsed

    def main(self, name: str, words: Sequence[str]) -> int:
        """Parse, run and print the result; return the exit status."""
        options = self.parse(name, words)
        try:
            with redirect_stdout(sys.stderr):
                run = pkgutil.resolve_name(self.run) if isinstance(self.run, str) else self.run
                result = run(options)
        except ConfigError as error:
            result = Findings([replace(finding, code=self.rejection or finding.code) for finding in error.findings])
            if not self.rejection:
                print_text(f"error: {error}", error=True)
                if options.json:
                    print_result(result, as_json=True)
                return EXIT_REJECTED
        except KeyboardInterrupt:
            print("stopped", file=sys.stderr)
            return EXIT_INTERRUPTED
        with ended_by_closed_pipe():
            return print_result(result, as_json=options.json)


def argument(*names: str, **options: Any) -> CommandArgument:
    """Return an argument of a command; the parameters are those of `ArgumentParser.add_argument`."""
    return names, options


def directory(text: str) -> Path:
    """Return the path of a directory that exists, for an argument's `type`."""
    path = Path(text).expanduser().absolute()
    if not path.is_dir():
        cause = f"{text}: there is no such directory (a run whose configuration is rejected makes none)"
        raise argparse.ArgumentTypeError(f"{cause}; name a run's trainer.default_local_dir")
    return path


DIRECTORY = argument("directory", type=directory, metavar="RUN", help="the run's trainer.default_local_dir")
# The keys of a run, and its configuration file.
KEYS = [
    argument("overrides", nargs="*", default=(), metavar="key=value", help="as for hybridrl train"),
    argument("-cp", "--config-path", type=Path, default=CONF, metavar="DIR", help="as for hybridrl train"),
    argument("-cn", "--config-name", default=SHIPPED[PPOConfig], metavar="NAME", help="likewise"),
]


def resolve(options: argparse.Namespace, *, offline: bool = False) -> ResolvedConfig[PPOConfig]:
    """Return the configuration of KEYS."""
    return resolve_config(PPOConfig, options.overrides, options.config_name, options.config_path, offline=offline)


def config_of_run(directory: Path, overrides: Sequence[str] = (), *, offline: bool = False) -> PPOConfig:
    """Return a run's configuration, changed by `overrides`; keys that are newer than the run have their defaults.
    `offline`: whether or not this machine could run it."""
    with tempfile.TemporaryDirectory() as place:
        try:
            text = (directory / "config.yaml").read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ConfigError(f"{directory / 'config.yaml'} cannot be read: {error}") from error
        Path(place, "config.yaml").write_text(f"defaults: [{SHIPPED[PPOConfig]}, _self_]\n{text}", encoding="utf-8")
        resolved = resolve_config(PPOConfig, [*overrides], "config", Path(place), offline=offline)
    config = resolved.accept()
    remember(asdict(config))
    return config


def read_hosts(file: Path) -> list[str]:
    """Return the hosts of a file: a name or an address per line, each once, with comments after #. Raises
    ConfigError."""
    try:
        lines = [line.partition("#")[0].strip() for line in file.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError) as error:
        raise ConfigError(f"--hosts {file}: it cannot be read: {error}", fix="name a file of UTF-8") from error
    hosts = [line for line in lines if line]
    for host in hosts:
        if not re.fullmatch(r"\w[\w.:-]*", host):
            raise ConfigError(f"--hosts {file}: {host!r} is not a name or an address", fix="list a host per line")
        if hosts.count(host) > 1:
            raise ConfigError(f"--hosts {file}: {host} is in it more than once", fix=f"list it once; {RENAME}")
    if not hosts:
        raise ConfigError(f"--hosts {file}: it names no host", fix="list a host per line")
    return hosts


def print_result(result: Any, *, as_json: bool) -> int:
    """Print a result for people or for programs, and return the exit status."""
    if isinstance(result, Findings):
        data = {"refused": bool(result.errors), "findings": mask_values(list(map(asdict, result.items)))}
        result = Result(data, [result], failed=bool(result.errors))
    elif isinstance(result, Table):
        rows = zip(*(column.cells for column in result.columns), strict=True)
        result = Result({"columns": [column.header for column in result.columns], "rows": [*rows]}, [result])
    elif not isinstance(result, Result):
        result = Result(result, [result])
    if as_json:
        print(json.dumps(result.data, indent=2))
    for part in () if as_json else result.shown:
        if isinstance(part, Findings):
            _show_findings(part)
        elif isinstance(part, dict):
            width = max(map(len, part), default=0) + 2
            print_text("\n".join(f"{name:<{width}}{text}" for name, text in part.items() if text != ""))
        elif isinstance(part, str):
            print_text(part)
        else:
            console = Terminal(highlight=False)
            console.print(part(console) if callable(part) else part, soft_wrap=not isinstance(part, Table))
    return int(result.failed)


def _show_findings(findings: Findings) -> None:
    """Print findings by the first part of their codes, and their number."""
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
    failed, warnings = len(findings.errors), sum(finding.severity == "warning" for finding in findings.items)
    counts = [f"{failed} error{'s' * (failed > 1)}" if failed else "no errors"]
    counts += [f"{warnings} warning{'s' * (warnings > 1)}"] if warnings else []
    _print(console, 0, Text(", ".join(counts), "bold red" if failed else "bold green"))


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
