"""`hybridrl doctor [--config-only] [--json] key=value ...`: reports what `hybridrl train` would report at its start;
`hybridrl explain KEY`: what a key is set to and means, or a search for keys; and the table of commands like these.

Imports nothing heavy: the checks that need torch are in full.py, and other modules are imported by their commands.
"""

import argparse
import pkgutil
import shutil
import sys
import textwrap
import types
import typing
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from hybridrl import project_file
from hybridrl.config import ConfigError, PPOConfig
from hybridrl.config.compose import CONF, PRESET, SHIPPED, nearest_keys, presets, shipped
from hybridrl.config.findings import Findings
from hybridrl.config.findings import show as as_text
from hybridrl.config.load import WHOLE_WORDS, ResolvedConfig, batch_arithmetic, key_meanings
from hybridrl.config.values import EXPECTED, MISSING, Range, tree, value_keys, value_of
from hybridrl.doctor import DIRECTORY, KEYS, Command, Result, argument, directory, resolve
from hybridrl.plugins import PLUGINS, additions, load, names
from hybridrl.runtime import EXIT_REJECTED
from hybridrl.runtime.environment import reject_foreign_builds
from hybridrl.runtime.guard import guarded
from hybridrl.tracking.console import print_text
from hybridrl.tracking.secrets import remember
from hybridrl.tracking.sink import entries as metric_entries
from hybridrl.tracking.sink import entry_of as metric_entry
from hybridrl.tracking.sink import nearest_metrics

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


def check(options: argparse.Namespace) -> Findings:
    """Check the command of a run without starting it."""
    resolved = resolve(options, offline=options.config_only)
    findings = resolved.findings
    if resolved.config is not None and not findings.errors:
        remember(asdict(resolved.config))
        findings.info("batch", batch_arithmetic(resolved.config))
        if not options.config_only:
            reject_foreign_builds()
            examine = pkgutil.resolve_name("hybridrl.doctor.full:examine")
            examine(resolved.config, findings, with_reward=not options.no_reward)
    return findings


def explain(options: argparse.Namespace) -> Result | dict[str, str] | str:
    """Return a key's value, its origin, its default and its meaning, or the meaning of a metric. Any other word is
    searched for in the names and meanings of all of them."""
    if "/" in options.key:
        return explain_metric(options.key)
    key, renamed = options.key.lstrip("+~"), []
    if key not in (keys := value_keys(PPOConfig)):
        key, effect = load("translation").described(key, PPOConfig)
        renamed = [f"{options.key} is now {key}"] if key != options.key else []
        if effect:
            return "\n".join([*renamed, f"{key} {effect}"])
        if key not in keys:
            return search(options.key, resolve(options, offline=True))
    result = _explained(key, resolve(options, offline=True), f"the file {options.config_name}.yaml")
    return result._replace(shown=[*renamed, *result.shown])


def search(word: str, resolved: ResolvedConfig) -> Result:
    """Search keys, presets, metrics, and verl's other keys by name and meaning; matches of the name come first. Raises
    ConfigError if there are none."""
    if not word:
        raise ConfigError("there is no word to search for", fix="hybridrl explain lr")
    pattern, values = word.lower(), (resolved.values or shipped(NAME)).values
    keys = [
        (f"{key} = {'(must be set)' if (value := value_of(values, key)) == MISSING else as_text(value)}", meaning)
        for key, meaning in key_meanings(CONF / f"{NAME}.yaml").items()
    ]
    keys += [(f"+{PRESET}={name}", meaning) for name, meaning in presets().items()]
    keys += [(entry.name, entry.meaning) for entry in metric_entries()] + load("translation").listed()
    matches = [item for item in keys if pattern in item[0].lower()]
    matches += [item for item in keys if pattern in item[1].lower() and item not in matches]
    if not matches:
        raise ConfigError(f"unknown key {word}; {nearest_keys(word, PPOConfig)}")
    width = min(shutil.get_terminal_size((100, 24)).columns, 120)
    indented = {"initial_indent": "    ", "subsequent_indent": "    ", **WHOLE_WORDS}
    texts = [f"{head}\n{textwrap.fill(meaning, width, **indented)}" for head, meaning in matches]
    return Result([{"key": head, "meaning": meaning} for head, meaning in matches], texts)


def _explained(key: str, resolved: ResolvedConfig, file: str) -> Result:
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
    fields = {
        "key": key,
        "value": "must be set" if value == MISSING else as_text(value),
        "set by": source,
        "default": f"follows {follows}" if follows else "none" if default == MISSING else as_text(default),
        "takes": _accepted(tree(PPOConfig)[key]),
        "unit": next((unit for ends, unit in UNITS.items() if key.endswith(ends)), ""),
        "meaning": key_meanings(CONF / f"{NAME}.yaml")[key],
    }
    findings = [finding for finding in resolved.findings.items if key in finding.keys or key in finding.text]
    lines = (f"{finding.severity:<9}[{finding.code}] {finding.text}" for finding in findings)
    failed = key in resolved.written and any(finding.severity == "error" for finding in findings)
    return Result({**fields, "findings": list(map(asdict, findings))}, [fields, *lines], failed)


def explain_metric(name: str) -> dict[str, str]:
    """Return the meaning of a metric, its healthy values, and what to do otherwise."""
    entry = metric_entry(name)
    if entry is None:
        near = "; nearest: ".join(["", ", ".join(nearest_metrics(name))]) if nearest_metrics(name) else ""
        raise ConfigError(f"unknown metric {name}{near}; {project_file('docs/metrics.md')} lists all")
    return {
        "metric": name if name == entry.name else f"{name} (of {entry.name})" if "<" in entry.name else name,
        "meaning": entry.meaning,
        "healthy": entry.healthy,
        "otherwise": entry.otherwise,
        "diagnoses": ", ".join(f"health/{code}" for code in entry.diagnoses),
    }


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


RUN = [
    argument("--config-only", action="store_true", help="check the keys only, as if for another machine"),
    argument("--no-reward", action="store_true", help="do not call the reward on a few rows"),
    *KEYS,
]
# Modules that are named by a text are imported when the command runs: some import torch.
COMMANDS = {
    "explain": Command(
        "KEY|METRIC|WORD [key=value ...]: a key's value, who set it and what it means, or the keys with a word",
        [argument("key", metavar="KEY|METRIC|WORD"), *KEYS],
        explain,
    ),
    "rescore": Command(
        "RUN|FILE [--reward FILE.py] [reward.key=value ...]: scores stored responses again and compares the scores",
        [
            argument("source", metavar="RUN|FILE", help="the directory of a run, or rows: .jsonl, .csv, .parquet ..."),
            argument(
                "--reward",
                metavar="FILE.py[:NAME]",
                help="the reward; default: that of the run, or for rows the built-in one of data_source or reward.name",
            ),
            argument("--against", metavar="FILE.py[:NAME]", help="for rows: a second reward, for the same responses"),
            argument("--data-source", metavar="NAME", default="", help="for rows that name none"),
            argument("--steps", metavar="N,N", help="for a run: steps to score; default: up to 10, evenly"),
            argument("overrides", nargs="*", default=(), metavar="reward.key=value"),
        ],
        "hybridrl.doctor.reward:rescore",
        "Rows hold a response (output, solution_str, response or prediction), its ground truth (gts, ground_truth or "
        "reward_model) and may hold data_source, extra_info and score: the samples that trainer.rollout_data_dir keeps "
        "are such rows. Of a run, advantages are compared too. Its weights learned from the old reward, so this shows "
        "what the new one would have rewarded there, and not where it would have led.",
        rejection="rescore.rejected",
    ),
    "algorithm": Command(
        "FILE.py:NAME [key=value ...]: calls a custom estimator or loss with made-up groups, next to grpo or ppo",
        [
            argument("name", metavar="FILE.py:NAME", help="an estimator, or a loss: its first parameter is log_probs"),
            argument(
                "overrides",
                nargs="*",
                default=(),
                metavar="key=value",
                help="keys of the run: parameters, rollout.n, own",
            ),
        ],
        "hybridrl.runs.trials:show_function",
        rejection="algorithm.rejected",
    ),
    "template": Command(
        "MODEL [--format FORMAT]: checks a model's chat template for several turns, and shows a conversation's mask",
        [
            argument("model", metavar="MODEL", help="a directory, or a name on the Hugging Face hub"),
            argument("--format", default="auto", help="of tool calls, as actor_rollout_ref.rollout.multi_turn.format"),
            argument("--template", metavar="FILE", help="another template, as model.custom_chat_template"),
        ],
        "hybridrl.doctor.rows:show_template",
        rejection="template.rejected",
    ),
    "cluster": Command(
        "[--wait SECONDS --hosts FILE --logs DIR] [key=value ...]: tries the machines of a Ray cluster together",
        [
            argument("--wait", type=float, default=0.0, metavar="SECONDS", help="for hosts that have not joined yet"),
            argument(
                "--hosts", type=Path, metavar="FILE", help="a host per line; default: any, as many as the run needs"
            ),
            argument("--logs", type=Path, metavar="DIR", help="of the hosts, DIR/HOST.log, for those that do not join"),
            *KEYS,
        ],
        "hybridrl.doctor.cluster:run",
        "The cluster of RAY_ADDRESS or ray_kwargs.ray_init.address: hosts, versions, the files of a run, the network.",
    ),
    "why": Command(
        "RUN: how a run is, or why it ended, and the command to continue with",
        [DIRECTORY],
        "hybridrl.doctor.why:run",
        status="0 it runs or has finished, 1 otherwise",
    ),
    "checkpoints": Command(
        "RUN: every checkpoint of a run with age, size, health and score",
        [DIRECTORY],
        "hybridrl.doctor.leftovers:checkpoints",
        "All files are compared with their checksums.",
        status="0 a run could resume, 1 there is no checkpoint to resume from",
    ),
    "bundle": Command(
        "RUN [--samples]: packs what a bug report needs of a run, secrets masked",
        [
            DIRECTORY,
            argument("--samples", action="store_true", help="also the newest samples and the reward's log"),
            argument("--out", type=Path, metavar="FILE", help="default: bundle-<time>.tar.gz in this directory"),
        ],
        "hybridrl.doctor.leftovers:bundle",
        "There are no weights and no data in it. Look through it before you send it.",
    ),
    "replay": Command(
        "RUN [--step N]: computes a step of a run again, and names the rows that moved the gradient",
        [
            DIRECTORY,
            argument("--step", type=int, help="one of which the batch was kept; default: the last"),
            argument("--rows", type=int, default=10, help="how many rows to show"),
        ],
        "hybridrl.doctor.replay:run",
        "A run keeps the batch of a step with which a diagnosis begins, in RUN/replay. It must have ended, as its "
        "devices are used again. Weights are those before the step if that checkpoint was retained.",
    ),
    "clean": Command(
        "[RUN ...] [--yes]: lists, or removes, what dead runs have left on this machine",
        [
            argument("directories", nargs="*", type=directory, metavar="RUN", help="the directory of a run"),
            argument("--shared-memory", action="store_true", help="also shared memory that no process has mapped"),
            argument("--yes", action="store_true", help="remove what is listed"),
        ],
        "hybridrl.doctor.leftovers:clean",
        "These are private directories with their processes, and unfinished checkpoints in the directories that are "
        "named. Shared memory is not for a container that shares /dev/shm with another.",
        status="0 nothing is left (any more), 1 something is left",
    ),
    "selftest-resume": Command(
        "key=value ...: kills a short run repeatedly and compares it with one that was not killed",
        [
            *KEYS,
            argument("--steps", type=int, default=4, help="length of the run"),
            argument("--kills", type=int, default=3, help="number of kills"),
            argument("--seed", type=int, default=0, help="of the moments and processes of the kills"),
            argument("--dir", help="of both runs, kept; default: a temporary directory, deleted if the test passes"),
        ],
        "hybridrl.doctor.selftest_resume:run",
        "They are compared bit for bit. Reports how many complete steps each kill cost.",
    ),
}
# Commands of the first level, hybridrl NAME; the others are hybridrl doctor NAME. And former names.
FIRST_LEVEL = ("why", "checkpoints", "bundle", "clean", "explain", "rescore", "migrate")
FORMER = {"keys": "explain", "report": "bundle", "reward": "rescore"}


def uses() -> dict[str, str]:
    """Return the use of each command of the doctor; for one of another distribution, which is not imported, its
    place."""
    others = additions("doctor", COMMANDS)
    own = {name: load(f"doctor.{name}").use for name in others if f"doctor.{name}" in PLUGINS}
    all_uses = {**{name: command.use for name, command in COMMANDS.items()}, **others, **own}
    return {name: use for name, use in all_uses.items() if name not in FIRST_LEVEL}


def command(name: str, words: list[str]) -> int:
    """Run a command of the table, or of another distribution, and return its exit status."""
    entry: Command = COMMANDS.get(name) or load(f"doctor.{name}")
    return entry.main(name if name in FIRST_LEVEL else f"doctor {name}", words)


def _without_rows(words: list[str]) -> list[str]:
    """Return the arguments of the former `doctor reward --rows FILE` as those of `rescore FILE`."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--rows")
    former, others = parser.parse_known_args(words)
    return [former.rows, *others] if former.rows else others


def main(argv: list[str] | None = None) -> int:
    """Return the exit status: 0, 1 (an error, or a failed test), 2 (usage), 130 (Ctrl-C)."""
    words = sys.argv[1:] if argv is None else argv
    first = FORMER.get(words[0], words[0]) if words else ""
    if first in FIRST_LEVEL:
        print_text(f"hybridrl doctor {words[0]} is now hybridrl {first}", error=True)
    if first in COMMANDS or first in names("doctor"):
        return command(first, _without_rows(words[1:]) if words[0] == "reward" else words[1:])
    listing = "\n".join(f"  {name} {use}" for name, use in uses().items())
    if "=" not in first and not first.startswith(("-", "~")):
        print(f"expected key=value, or one of the commands:\n{listing}")
        return EXIT_REJECTED
    use = "key=value ...: Check a command of hybridrl train without starting it"
    return Command(use, RUN, check, f"\n\nhybridrl doctor COMMAND, other checks:\n{listing}").main("doctor", words)


if __name__ == "__main__":
    sys.exit(guarded(main))
