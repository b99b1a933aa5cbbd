"""`python -m hybridrl.doctor [--config-only] [--json] key=value ...`: what main_ppo would say at its start.

Imports nothing heavy: what needs torch stands in full.py.
"""

import argparse
import importlib
from pathlib import Path

from hybridrl.config import PPOConfig
from hybridrl.config.arithmetic import batch_arithmetic
from hybridrl.config.compose import CONF, SHIPPED
from hybridrl.config.findings import Findings
from hybridrl.config.load import judge
from hybridrl.doctor.__main__ import COMMANDS
from hybridrl.doctor.findings import show

FULL = "hybridrl.doctor.full"
STATUS = "exit status: 0 nothing is refused, 1 something is, 2 the command cannot be read"


def main(argv: list[str]) -> int:
    arguments = _arguments(argv)
    further = {"config_only": arguments.config_only, "with_reward": not arguments.no_reward}
    findings = check(arguments.overrides, arguments.config_name, arguments.config_path, **further)
    return show(findings, as_json=arguments.json, verdict=True)


def check(
    overrides: list[str],
    name: str = SHIPPED[PPOConfig],
    directory: Path = CONF,
    *,
    config_only: bool,
    with_reward: bool = True,
) -> Findings:
    """All that is to be said of a command. `config_only`: of its keys alone, as if for another machine."""
    judgement = judge(PPOConfig, overrides, name, directory, elsewhere=config_only)
    findings = judgement.findings
    if judgement.config is None or findings.refused:
        return findings
    findings.inform("batch", batch_arithmetic(judgement.config))
    if not config_only:
        importlib.import_module(FULL).examine(judgement.config, findings, with_reward=with_reward)
    return findings


def _arguments(argv: list[str]) -> argparse.Namespace:
    commands = (f"{name} {words}" for name, words in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="python -m hybridrl.doctor",
        usage="python -m hybridrl.doctor [--config-only] [--no-reward] [--json] key=value ...",
        description="Everything that can be known of a run of hybridrl.main_ppo without starting it.",
        epilog="\n  ".join(["commands, instead of key=value:", *commands]) + f"\n\n{STATUS}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="as for hybridrl.main_ppo")
    parser.add_argument("--config-only", action="store_true", help="judge the keys alone, as if for another machine")
    parser.add_argument("--no-reward", action="store_true", help="do not call the reward on a few rows")
    parser.add_argument("--json", action="store_true", help="print findings as JSON")
    parser.add_argument("-cp", "--config-path", type=Path, default=CONF, metavar="DIR", help="as for hybridrl.main_ppo")
    parser.add_argument("-cn", "--config-name", default=SHIPPED[PPOConfig], metavar="NAME", help="likewise")
    arguments, more = parser.parse_known_args(argv)
    options = [item for item in more if item.startswith("-")]
    if options:
        parser.error(f"unknown option {options[0]}; configuration keys are given as key=value")
    arguments.overrides += more
    return arguments
