"""`hybridrl migrate run.sh`: reads a launch script or YAML file of verl, SkyRL or AReaL, reports what
differs in hybridrl, and prints the command.
"""

import argparse
import itertools
import re
from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from hybridrl.compat.translation import SYSTEMS, VERL
from hybridrl.config import PPOConfig
from hybridrl.config.compose import SHIPPED, Overrides, as_override, key_of, parse_overrides, read_argument, shipped
from hybridrl.config.findings import ConfigError, Finding, Findings, show
from hybridrl.config.load import resolve_config
from hybridrl.config.values import holds, tree, value_of
from hybridrl.doctor import Command, Result, argument
from hybridrl.doctor.launches import MARK, TrainingLaunch, launches_of, quoted, readable

# Values for keys that a command does not set in a usable way.
PLACEHOLDERS = {"data.train_files": "path/to/train.parquet", "actor_rollout_ref.model.path": "path/to/model"}
PLACEHOLDERS |= {"model.path": "path/to/model"}
ROUNDS = 30  # most attempts to remove rejected overrides
# Ends of keys that are not reported if verl has another default: training does not depend on it, or a run needs it.
MINOR = (".dtype", ".async_save", "_megabytes", ".num_workers", "_name", "_dir", ".device")
GROUPED = ("ignored-key", "unsupported")  # findings that name the first few of their keys


def run(options: argparse.Namespace) -> Result:
    """Read a launch script or YAML file of verl, SkyRL or AReaL, report what differs here, and return the command."""
    script: Path = options.script
    if not script.is_file():
        raise ConfigError(f"there is no script {script}")
    try:
        migrated = [_migrate(launch) for launch in launches_of(script, options.arguments)]
    except RecursionError:
        raise ConfigError(f"{script} has parentheses, brackets or quotes nested too deeply to be read") from None
    data = [{"findings": list(map(asdict, findings.items)), "command": command} for findings, command in migrated]
    texts = [text for findings, command in migrated for text in (*map(_line, findings.items), command)]
    return Result(data, texts, failed=any(findings.errors for findings, _ in migrated))


MIGRATE = Command(
    "run.sh: reads a launch script for verl, reports every difference and prints the command for hybridrl",
    [
        argument("script", type=Path, help="or a YAML file; also of SkyRL or AReaL"),
        argument("arguments", nargs=argparse.REMAINDER, help="of the script"),
    ],
    run,
)


def _migrate(launch: TrainingLaunch) -> tuple[Findings, str]:
    schema, findings = launch.schema, launch.findings
    written = launch.overrides = _quoted_values(launch)
    if launch.system != "verl":
        launch.overrides = [*_other_defaults(launch), *launch.overrides]
    _accept(launch)
    overrides = launch.overrides
    for key in (text.lstrip("+").partition("=")[0] for text in overrides if text.endswith("=")):
        if not any(key in finding.keys or key in finding.text for finding in findings.items):
            cause = f"{key} is empty: a variable that is not set here, or the output of a program, as none was run"
            findings.warn("empty-value", cause, keys=key)
    if launch.system == "verl":
        _other_defaults(launch)
    # The overrides with current names, quoted, without those that are ignored or rejected.
    settings = [text.lstrip("+").partition("=") for text in _parsed([*overrides, *launch.computed], launch).arguments]
    last = {key: value for key, _, value in settings if holds(tree(schema), key.lstrip("~"))}
    _report_left_out(written, last, launch)
    words = [quoted(key if key.startswith("~") else f"{key}={value}") for key, value in last.items()]
    program = "train" if schema is PPOConfig else "sft"
    return findings, " \\\n    ".join([f"hybridrl {program}", *words]) + "\n"


def _accept(launch: TrainingLaunch) -> None:
    """Remove what is rejected, and put placeholders for required keys, until the command is accepted."""
    schema, system = launch.schema, SYSTEMS[launch.system]
    for _ in range(ROUNDS):
        result = resolve_config(schema, launch.overrides, SHIPPED[schema], offline=True, translation=system).findings
        remaining, computed = launch.overrides, []
        for finding in result.errors:
            texts = [text for text in remaining if MARK.search(text) and {*finding.keys} & {*_keys(text, launch)}]
            if finding.code == "value" and texts:  # bash computes it when the command below runs
                computed.append(finding)
                launch.computed += texts
                cause = f"{texts[-1]}: a program computes the value, so it is not checked, and stays in the command"
                launch.findings.warn("computed", cause, keys=finding.keys)
            remaining = _without(remaining, finding, launch)
        shown = (item for item in result.items if item not in computed)
        launch.findings.add(*(item for item in shown if item.severity != "info" or item.code == "own-key"))
        if remaining == launch.overrides:
            break
        launch.overrides = remaining


def _quoted_values(launch: TrainingLaunch) -> list[str]:
    """Return the overrides, with quotes around the values that Hydra cannot read: it takes few characters unquoted."""
    overrides = []
    for text in launch.overrides:
        key, _, value = text.partition("=")
        if not _is_read(text) and _is_read(safe := f"{key}={as_override(value)}"):
            launch.findings.info("quoted", f"{safe} has quotes in the command below, without which Hydra rejects it")
            text = safe
        overrides.append(text)
    return overrides


def _is_read(text: str) -> bool:
    with suppress(ConfigError):
        return bool(read_argument(text))
    return False


def _parsed(overrides: list[str], launch: TrainingLaunch) -> Overrides:
    return parse_overrides(overrides, launch.schema, Findings(), translation=SYSTEMS[launch.system])


def _report_left_out(written: list[str], remaining: Iterable[str], launch: TrainingLaunch) -> None:
    """Report in one line the overrides that are neither in the command below nor in another line."""
    items = launch.findings.items
    named = {*remaining, *itertools.chain(*(re.findall(r"[\w.]+", _line(finding)) for finding in items))}
    rejected = tuple(f"{key}." for finding in launch.findings.errors for key in finding.keys)  # sections too
    reasons = defaultdict[str, list[str]](list)
    for text in written:
        keys, value = _keys(text, launch), text.partition("=")[2]
        if not named & {*keys} and not keys[1].startswith(rejected):
            entry = SYSTEMS[launch.system].entry_of(keys[1], value)
            why = entry.why if entry and entry.kind == "ignored" else "nothing to set for it" if value else "no value"
            reasons[why].append(text.lstrip("+"))
    if reasons:
        groups = "; ".join(f"{', '.join(texts)} ({why})" for why, texts in reasons.items())
        launch.findings.info("left-out", f"what changes nothing here is left out of the command below: {groups}")


def _line(finding: Finding) -> str:
    """A finding as it is printed, with all of its keys."""
    others = [key for key in finding.keys if key not in finding.text] if finding.code in GROUPED else []
    text = f"# {finding.severity} [{finding.code}] {readable(finding.text)}"
    return text.replace("\n", "\n# ") + (f" (also {', '.join(others)})" if others else "")


def _other_defaults(launch: TrainingLaunch) -> list[str]:
    """Report the other system's defaults of keys that the script does not set, and return overrides for them."""
    written, overrides = _parsed(launch.overrides, launch).written, []
    usual, system = shipped(SHIPPED[launch.schema]).values, launch.system
    program = re.split(r"[./]", launch.program.removesuffix(".py"))[-1]
    supervised = VERL.table["sft_defaults"][program if "fsdp_" in program else "sft_trainer"]
    defaults = SYSTEMS[system].table["defaults"] if launch.schema is PPOConfig else supervised
    changed = []
    for key, theirs in defaults.items():
        matters = system != "verl" or not key.endswith(MINOR)
        if matters and key not in written and theirs != (here := value_of(usual, key)):
            changed.append(f"{key}={show(here)} here, {show(theirs)} in {system}")
            overrides.append(f"{key}={as_override(theirs)}")
    if changed and system == "verl":
        launch.findings.info("default", f"other defaults of keys that the script does not set: {'; '.join(changed)}")
    elif changed:
        launch.findings.info("default", f"{system}'s defaults are added to the command below: {'; '.join(changed)}")
    return overrides


def _without(overrides: list[str], finding: Finding, launch: TrainingLaunch) -> list[str]:
    """Remove the overrides that an error is about: all of them if they are unsupported, else those of its first key
    that the command sets."""
    names_of = {text: _keys(text, launch) for text in overrides}
    whole = {*itertools.chain(*names_of.values())}
    ranks = {  # findings may name the section that a key is in, unless the command sets it as a whole
        text: [
            n
            for n, key in enumerate(finding.keys)
            if key in names or (key not in whole and any(name.startswith(f"{key}.") for name in names))
        ]
        for text, names in names_of.items()
    }
    first = finding.keys[0] if finding.keys else ""
    if first in PLACEHOLDERS:
        return [*(text for text in overrides if not ranks[text]), f"{first}={PLACEHOLDERS[first]}"]
    least = min(itertools.chain(*ranks.values()), default=None)
    return [
        text for text in overrides if least not in ranks[text] and not (ranks[text] and finding.code == "unsupported")
    ]


def _keys(text: str, launch: TrainingLaunch) -> list[str]:
    """The keys by which findings may name an override: as written, its current name, and the keys that it sets."""
    name = key_of(text)
    return [name, SYSTEMS[launch.system].current_name(name), *map(key_of, _parsed([text], launch).arguments)]
