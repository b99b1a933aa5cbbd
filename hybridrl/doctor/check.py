"""`python -m hybridrl.doctor [--config-only] [--json] key=value ...`: what main_ppo would say at its start."""

import argparse

from hybridrl.config import ConfigError, load_ppo_config
from hybridrl.doctor.findings import Finding, show


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m hybridrl.doctor", allow_abbrev=False)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--config-only", action="store_true", help="judge the configuration alone")
    parser.add_argument("--json", action="store_true", help="findings for programs")
    arguments = parser.parse_args(argv)
    notes: list[str] = []
    try:
        load_ppo_config(arguments.overrides, note=notes.append)
    except ConfigError as error:
        refusals = [Finding("config", "refused", line) for line in str(error).splitlines()]
    else:
        refusals = []
    return show([Finding("config", "warning", note) for note in notes] + refusals, as_json=arguments.json)
