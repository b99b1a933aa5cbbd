"""`python -m hybridrl.doctor [--config-only] [--json] key=value ...`: reports what main_ppo would report at its start;
`explain KEY` and `keys PATTERN`: what a key is set to and means, and a search for keys; and the commands of COMMANDS.

Imports nothing heavy: the checks that need torch are in full.py, and other modules are imported by their commands.
"""

import argparse
import pkgutil
import shutil
import sys
import textwrap
import types
import typing
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict
from typing import Annotated, Any, Literal, get_args, get_origin

from hybridrl.config import PPOConfig
from hybridrl.config.compose import CONF, PRESET, SHIPPED, nearest_keys, shipped
from hybridrl.config.findings import show as as_text
from hybridrl.config.load import WHOLE_WORDS, ResolvedConfig, batch_arithmetic, key_meanings, resolve_config
from hybridrl.config.values import EXPECTED, MISSING, Range, tree, value_keys, value_of
from hybridrl.doctor import add_run_arguments, show
from hybridrl.plugins import load
from hybridrl.runtime.guard import ended_by_closed_pipe, guarded
from hybridrl.tracking.secrets import remember
from hybridrl.tracking.sink import entry_of as metric_entry
from hybridrl.tracking.sink import nearest_metrics

INTERRUPTED = 130
FULL = "hybridrl.doctor.full:examine"
STATUS = "exit status: 0 no errors, 1 errors, 2 the command cannot be parsed"
NAME = SHIPPED[PPOConfig]
# Ends of names -> the unit of their values.
UNITS = {
    ("timeout", "_secs"): "seconds",
    ("_length", "_len", "token_len_per_gpu", "max_model_len", "min_tokens", "num_batched_tokens"): "tokens",
    ("train_batch_size", "mini_batch_size", "gen_batch_size"): "prompts",
    ("micro_batch_size", "micro_batch_size_per_gpu", "max_samples"): "rows",
    ("_megabytes",): "MB",
    ("_freq", "total_training_steps", "critic_warmup", "fault_steps", "lr_warmup_steps"): "steps",
    ("epochs",): "passes over the data",
}


def check(argv: list[str]) -> int:
    """Check a command without starting it."""
    parser = argparse.ArgumentParser(
        prog="python -m hybridrl.doctor",
        usage="python -m hybridrl.doctor [--config-only] [--no-reward] [--json] key=value ...",
        description="Check a run of hybridrl.main_ppo without starting it.",
        epilog="\n  ".join(["commands, instead of key=value:", *USES]) + f"\n\n{STATUS}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--config-only", action="store_true", help="check the keys only, as if for another machine")
    parser.add_argument("--no-reward", action="store_true", help="do not call the reward on a few rows")
    parser.add_argument("--json", action="store_true", help="print findings as JSON")
    add_run_arguments(parser)
    options, further = parser.parse_known_args(argv)
    if unknown := [item for item in further if item.startswith("-")]:
        parser.error(f"unknown option {unknown[0]}; configuration keys are given as key=value")
    options.overrides += further
    resolved = _resolve(options, offline=options.config_only)
    findings = resolved.findings
    if resolved.config is not None and not findings.errors:
        remember(asdict(resolved.config))
        findings.info("batch", batch_arithmetic(resolved.config))
        if not options.config_only:
            pkgutil.resolve_name(FULL)(resolved.config, findings, with_reward=not options.no_reward)
    return show(findings, as_json=options.json, verdict=True)


def _resolve(options: argparse.Namespace, *, offline: bool) -> ResolvedConfig[PPOConfig]:
    return resolve_config(PPOConfig, options.overrides, options.config_name, options.config_path, offline=offline)


def search(argv: list[str]) -> int:
    """Print the keys with a pattern in their name or meaning, and verl's other keys; matches of the name come first."""
    parser = argparse.ArgumentParser(
        prog="python -m hybridrl.doctor keys", description="Search the keys by a part of their name or meaning."
    )
    parser.add_argument("pattern")
    pattern, values = parser.parse_args(argv).pattern.lower(), shipped(NAME).values
    keys = [
        (f"{key} = {'(must be set)' if (value := value_of(values, key)) == MISSING else as_text(value)}", meaning)
        for key, meaning in key_meanings(CONF / f"{NAME}.yaml").items()
    ]
    keys += load("translation").listed()
    matches = [item for item in keys if pattern in item[0].lower()]
    matches += [item for item in keys if pattern in item[1].lower() and item not in matches]
    width = min(shutil.get_terminal_size((100, 24)).columns, 120)
    for head, meaning in matches:
        print(head)
        print(textwrap.fill(meaning, width, initial_indent="    ", subsequent_indent="    ", **WHOLE_WORDS))
    if not matches:
        print("nothing found")
    return 0 if matches else 1


def explain(argv: list[str]) -> int:
    """Print a key's value, its origin, its default and its meaning, or the meaning of a metric."""
    parser = argparse.ArgumentParser(
        prog="python -m hybridrl.doctor explain",
        description="A key's value, what set it, its default and its meaning; or a metric's meaning, how it looks in a "
        "run that learns, and what to do if it does not.",
    )
    parser.add_argument("key", metavar="KEY|METRIC")
    add_run_arguments(parser, "a command, whose value of it is shown")
    options = parser.parse_args(argv)
    if "/" in options.key:
        return explain_metric(options.key)
    key = options.key.lstrip("+~")
    if key not in (keys := value_keys(PPOConfig)):
        key, effect = load("translation").described(key, PPOConfig)
        if key != options.key:
            print(f"{options.key} is now {key}")
        if effect:
            print(f"{key} {effect}")
            return 0
        if key not in keys:
            parser.error(f"unknown key {key}; {nearest_keys(key, PPOConfig)}")
    return _explain_key(key, _resolve(options, offline=True), f"the file {options.config_name}.yaml")


def _explain_key(key: str, resolved: ResolvedConfig, file: str) -> int:
    usual = shipped(NAME)
    values, default, follows = resolved.values, value_of(usual.values, key), usual.follows.get(key)
    value = value_of(values.values, key) if values else default
    source = resolved.written.get(PRESET, file)
    if written := resolved.written.get(key):
        old = written.lstrip("+~").partition("=")[0]
        source = f"the command line: {written}" + " (an old name)" * (old != key)
    elif value == default:
        source = "default"
    elif values and (followed := values.follows.get(key)):
        source = f"{followed}, which it follows"
    lines = [
        ("key", key),
        ("value", "must be set" if value == MISSING else as_text(value)),
        ("set by", source),
        ("default", f"follows {follows}" if follows else "none" if default == MISSING else as_text(default)),
        ("takes", _accepted(tree(PPOConfig)[key])),
        ("unit", next((unit for ends, unit in UNITS.items() if key.endswith(ends)), "")),
        ("meaning", key_meanings(CONF / f"{NAME}.yaml")[key]),
    ]
    findings = [finding for finding in resolved.findings.items if key in finding.keys or key in finding.text]
    lines += [(finding.severity, f"[{finding.code}] {finding.text}") for finding in findings]
    print("\n".join(f"{title:<9}{text}" for title, text in lines if text))
    return 0


def explain_metric(name: str) -> int:
    """Print the meaning of a metric, its healthy values, and what to do otherwise."""
    entry = metric_entry(name)
    if entry is None:
        near = "; nearest: ".join(["", ", ".join(nearest_metrics(name))]) if nearest_metrics(name) else ""
        print(f"unknown metric {name}{near}; docs/metrics.md lists all", file=sys.stderr)
        return 2
    lines = [
        ("metric", name if name == entry.name else f"{name} (of {entry.name})" if "<" in entry.name else name),
        ("meaning", entry.meaning),
        ("healthy", entry.healthy),
        ("otherwise", entry.otherwise),
        ("diagnoses", ", ".join(f"health/{code}" for code in entry.diagnoses)),
    ]
    print("\n".join(f"{title:<11}{text}" for title, text in lines if text))
    return 0


def _accepted(hint: Any) -> str:
    """Describe the values that a type accepts."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:  # a rule describes the valid range in its message about an invalid value
        limits = [rule.requirement for rule in arguments[1:] if isinstance(rule, Range)]
        return ", ".join([_accepted(arguments[0]), *limits])
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_accepted(item) for item in arguments if item is not type(None)) + ", or null"
    if origin is Literal:
        return " | ".join(map(as_text, arguments))
    if origin is list:
        return f"a list: {_accepted(arguments[0])}"
    return "names and values" if origin is dict else EXPECTED[hint]


# A function that takes argv: here, in a module of this package, or a plug-in by its name; and its use.
COMMANDS: dict[str, tuple[Callable[[list[str]], int] | str, str]] = {
    "explain": (
        explain,
        "KEY|METRIC [key=value ...]: a key's value, who set it and what it means; what a metric means",
    ),
    "keys": (search, "PATTERN: the keys with the pattern in their name or meaning"),
    "reward": (
        "reward:main",
        "--rows FILE [--reward FILE.py] [--against OTHER.py]: scores stored responses and compares two rewards",
    ),
    "rescore": (
        "reward:rescore_main",
        "DIR --reward FILE.py: a run's stored samples under another reward, and their advantages",
    ),
    "algorithm": (
        "algorithm",
        "FILE.py:NAME [key=value ...]: calls a custom estimator or loss with made-up groups, next to grpo or ppo",
    ),
    "template": (
        "rows:show_template",
        "MODEL [--format FORMAT]: checks a model's chat template for several turns, and shows a conversation's mask",
    ),
    "cluster": ("cluster:main", "[key=value ...]: tries the machines of a Ray cluster together, without a run"),
    "migrate": (
        "migrate",
        "run.sh: reads a launch script for verl, reports every difference and prints the command for hybridrl",
    ),
    "why": ("why:main", "DIR: how the run of a directory is, or why it ended, and the command to continue with"),
    "checkpoints": ("leftovers:checkpoints", "DIR: every checkpoint of a run with age, size, health and score"),
    "bundle": ("leftovers:bundle", "DIR [--samples]: packs what a bug report needs of a run, secrets masked"),
    "replay": (
        "replay:main",
        "DIR [--step N]: computes a step of a run again, and names the rows that moved the gradient",
    ),
    "clean": ("leftovers:clean", "[DIR ...] [--yes]: lists, or removes, what dead runs have left on this machine"),
    "selftest-resume": (
        "selftest_resume:main",
        "key=value ...: kills a short run repeatedly and compares it with one that was not killed",
    ),
}
FORMER = {"report": "bundle"}
USES = [f"{name} {use}" for name, (_, use) in COMMANDS.items()]


def main(argv: list[str] | None = None) -> int:
    """Return the exit status: 0, 1 (an error, or a failed test), 2 (usage), 130 (Ctrl-C)."""
    arguments = sys.argv[1:] if argv is None else argv
    first = FORMER.get(arguments[0], arguments[0]) if arguments else ""
    if first not in COMMANDS and "=" not in first and not first.startswith(("-", "~")):
        print("expected key=value, or one of the commands:")
        print("\n".join(f"  python -m hybridrl.doctor {use}" for use in USES))
        return 2
    command, _ = COMMANDS.get(first, (check, ""))
    if isinstance(command, str):  # some import torch, most do not
        command = pkgutil.resolve_name(f"hybridrl.doctor.{command}") if ":" in command else load(command)
    try:
        with ended_by_closed_pipe() if command in (explain, search) else nullcontext():
            return command(arguments[1:] if first in COMMANDS else arguments)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(guarded(main))
