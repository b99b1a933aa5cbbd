"""From a command line to a typed configuration, with all findings at once.

`resolve_config` collects them; `load_config`, for the start of a run, raises. In addition: the keys for `--help`, from
the comments in conf/*.yaml; the changed values of a configuration; and its batch sizes.
"""

import functools
import re
import sys
import textwrap
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import yaml

from hybridrl import plugins
from hybridrl.config.checks import resolve_ppo, resolve_sft
from hybridrl.config.checks.training import Machine, this_machine
from hybridrl.config.compose import (
    CONF,
    PRESET,
    SHIPPED,
    as_override,
    custom_values,
    nearest_keys,
    parse_overrides,
    plain_values,
    shipped,
    usual_value,
)
from hybridrl.config.findings import ConfigError, Findings, nearest, show
from hybridrl.config.reading import Plain, Reading
from hybridrl.config.schema import PPOConfig, SFTConfig, TrainingConfig
from hybridrl.config.schema_parts import RolloutConfig
from hybridrl.config.values import MISSING, holds, leaves, tree, value_keys, value_of

T = TypeVar("T")
Report = Callable[[str], None]
WHOLE_WORDS: Any = {"break_on_hyphens": False, "break_long_words": False}  # for wrapped keys and paths
COLUMN = 46  # column of meanings
# Files in verl's commands, with --config-path=config or without; their values are in the table of verl's keys.
RUN = "trainer.default_local_dir"
WITHIN = ("trainer.rollout_data_dir", "trainer.validation_data_dir", "reward.judge.cache")
VERL_FILES = re.compile(r"((fully_async_|one_step_off_)?ppo|dapo)_(megatron_)?trainer|sft_trainer(_engine)?")


@dataclass
class ResolvedConfig(Generic[T]):
    """`config` may be used if there are no errors; `written` maps each key set on the command line to its argument.
    `rejected`: keys with shipped values in place of invalid ones."""

    findings: Findings
    config: T | None = None
    values: Plain | None = None
    written: dict[str, str] = field(default_factory=dict)
    rejected: set[str] = field(default_factory=set)

    def cross_check(self, check: Callable[[T, Findings], None]) -> None:
        """Add the findings of a check of keys against each other, except consequences of rejected values."""
        assert self.config is not None
        crossed = Findings()
        check(self.config, crossed)
        self.findings.add(*(finding for finding in crossed.items if not self.rejected & {*finding.keys}))

    def accept(self, report: Report | None = None, show: Report | None = None) -> T:
        """Pass warnings to `report` and information to `show`, and return the configuration. Raises ConfigError."""
        for finding in self.findings.items:
            to = {"warning": report, "info": show}.get(finding.severity)
            if to is not None:
                to(finding.text)
        self.findings.close(self.config)
        assert self.config is not None
        return self.config


def load_config(
    schema: type[T],
    overrides: list[str],
    *,
    config_name: str = "",
    config_dir: Path = CONF,
    report: Report | None = None,
    show: Report | None = None,
) -> T:
    """Load the configuration of a run. Warnings go to `report`, information and differences from the default
    configuration to `show`. Raises ConfigError."""
    result = resolve_config(schema, overrides, config_name or SHIPPED[schema], config_dir)
    config = result.accept(report, show)
    if show is not None and result.values is not None:
        show(changed_values(config, result.values))
    return config


load_ppo_config = functools.partial(load_config, PPOConfig)
load_sft_config = functools.partial(load_config, SFTConfig)


def existing(name: str, directory: Path) -> Path:
    if not directory.is_dir():
        raise ConfigError(f"--config-path={directory}: there is no such directory")
    file = directory / f"{name.removesuffix('.yaml')}.yaml"
    if not file.is_file():
        names = ", ".join(sorted(other.stem for other in directory.glob("*.yaml"))) or "none"
        raise ConfigError(f"--config-name={name}: there is no {file}", fix=f"files there: {names}")
    return file.resolve()


def verl_file(name: str, directory: Path, findings: Findings) -> bool:
    """Whether a command names a file of verl that hybridrl does not have; the shipped file is used instead."""
    stem = name.removesuffix(".yaml")
    absent = not (directory / f"{stem}.yaml").is_file() and directory in (CONF, Path("config"))
    if absent and VERL_FILES.fullmatch(stem):
        cause = f"--config-name={name} is verl's, and not read: keys that the command leaves out have hybridrl's values"
        findings.warn("ignored-key", f"{cause}, and training runs on FSDP2" if "megatron" in name else cause)
        return True
    return False


def resolve_config(
    schema: type[T],
    overrides: list[str],
    name: str,
    directory: Path = CONF,
    *,
    offline: bool = False,
    translation: Any = None,
) -> ResolvedConfig[T]:
    """Compose, read and check a configuration, and fill in derived values. `offline`: for another machine, so that the
    devices, files and directories of this one do not count. `translation`: translation of other systems' keys."""
    result = read_config(schema, overrides, name, directory, offline=offline, translation=translation)
    if result.config is None:
        return result
    machine = None
    if offline:  # another machine, which has all requested devices
        gpus = _gpus(result.config)
        machine = Machine(gpus, gpus, sys.maxsize, here=False) if gpus else replace(this_machine(), here=False)
    resolve: Any = resolve_ppo if schema is PPOConfig else resolve_sft
    result.cross_check(functools.partial(resolve, machine=machine))
    if isinstance(result.config, PPOConfig) and directory == CONF and not result.findings.errors:
        _report_defaults(result.config, result.written, result.findings)
    return result


def _report_defaults(config: PPOConfig, written: dict[str, str], findings: Findings) -> None:
    """Report the defaults of a command that sets no estimator. `written`: its arguments by key."""
    trainer, estimator = config.trainer, "algorithm.adv_estimator"
    if {estimator, PRESET} & {*written} or trainer.val_only or not config.critic.enable:
        return
    epochs, steps = "trainer.total_epochs", "trainer.total_training_steps"
    parts = ["PPO with a critic"]
    parts += [f"{config.data.train_batch_size:,} prompts per step"] * ("data.train_batch_size" not in written)
    parts += [f"{trainer.total_epochs} epochs"] * (not {epochs, steps} & {*written})
    cause = f"{estimator} is not set, so the defaults apply: {', '.join(parts)}"
    findings.info("setting", cause, f"+{PRESET}=grpo or {estimator}=grpo trains without a critic", keys=estimator)


def read_config(
    schema: type[T],
    overrides: list[str],
    name: str = "",
    directory: Path = CONF,
    *,
    offline: bool = False,
    translation: Any = None,
) -> ResolvedConfig[T]:
    """Compose and read a configuration; only single values are checked. A schema may have a part of the sections and
    keys of PPOConfig: the others may be set, and are not read."""
    whole: type = schema if schema in SHIPPED else PPOConfig
    name, findings, around = name or SHIPPED[whole], Findings(), {}
    if verl_file(name, directory, findings):
        name, directory = SHIPPED[whole], CONF
    with findings.gathered("file"):
        around = custom_values(existing(name, directory))
    parsed = parse_overrides(overrides, whole, findings, around, translation)
    result: ResolvedConfig[T] = ResolvedConfig(findings, written=parsed.written)
    with findings.gathered("file"):
        file = existing(name, directory)
        arguments = [*parsed.arguments, *_followers(around, parsed.written)]
        result.values = plain_values(file, whole, arguments, findings, translation, schema)
    if result.values is None:
        return result
    # The shipped values are composed only if one is needed: it takes as long as everything else.
    reading = Reading(schema, result.values, functools.partial(usual_value, whole), offline=offline)
    findings.add(*reading.findings.items)
    reported, keys = result.values.faults, tree(whole)
    foreign = {key: value for key, value in reading.foreign.items() if key not in reported and not holds(keys, key)}
    if foreign:  # from the command line or the file
        translation = translation or plugins.load("translation")
        problems, unknown = translation.check(foreign, leaves(result.values.values), whole)
        for key in unknown:
            findings.error("unknown-key", f"unknown key {key} in {file}", nearest_keys(key, whole), keys=key)
        findings.add(*problems)
    result.config, result.rejected = reading.config, reading.rejected
    return result


def _followers(around: dict[str, Any], written: dict[str, str]) -> list[str]:
    """Return overrides for places within a stored run's directory, in the configuration `around`: they
    follow where the command names another directory, as the new run would write into those of the stored one."""
    run = around.get(RUN)
    if not isinstance(run, str) or RUN not in written:
        return []
    names = {key: around.get(key) for key in WITHIN}
    inside = {key: name for key, name in names.items() if isinstance(name, str) and key not in written}
    parts = {key: Path(name).relative_to(run) for key, name in inside.items() if Path(name).is_relative_to(run)}
    return [f"++{key}={as_override(f'${{{RUN}}}/{part}')}" for key, part in parts.items()]


def _gpus(config: object) -> int:
    """The GPUs per machine that a configuration requests, at least those of one engine; 0 if unknown."""
    assert isinstance(config, TrainingConfig)
    width = config.actor_rollout_ref.rollout.tensor_model_parallel_size if isinstance(config, PPOConfig) else 1
    return config.trainer.n_gpus_per_node or (width if width > 1 else 0)


def explain_keys(config_name: str, chosen: str, first: tuple[str, ...], width: int) -> str:
    """The keys of a shipped configuration with value and meaning: of the section `chosen`, or of `all`; if it is empty,
    the keys in `first` and a list of the sections. Raises ConfigError if there is no such section."""
    values, meanings = shipped(config_name).values, key_meanings(CONF / f"{config_name}.yaml")
    sections: dict[str, list[str]] = {}
    for key in meanings:
        sections.setdefault(key.rpartition(".")[0], []).append(key)
    if not chosen:
        lines = ["keys to begin with:", *(_entry(key, value_of(values, key), meanings[key], width) for key in first)]
        names = ", ".join(filter(None, sections))
        listed = textwrap.fill(f"all, {names}", width, initial_indent="  ", subsequent_indent="  ", **WHOLE_WORDS)
        commands = "hybridrl explain KEY explains one key, hybridrl doctor checks a command."
        return "\n".join([*lines, "\nmore keys, by section (--help SECTION):", listed, f"\n{commands}"])
    inside = {name: keys for name, keys in sections.items() if f"{name}.".startswith(f"{chosen}.") or chosen == "all"}
    if not inside:
        near = nearest(chosen, [name for name in sections if name])
        raise ConfigError(f"--help {chosen}: there is no such section", fix=f"choose {' | '.join(near or ['all'])}")
    lines = []
    for section, keys in inside.items():
        lines.append(f"\n{section or 'outside the sections'}:")
        lines += [_entry(key.rpartition(".")[2], value_of(values, key), meanings[key], width) for key in keys]
    return "\n".join(lines).lstrip("\n")


def changed_values(config: TrainingConfig, plain: Plain) -> str:
    """The keys that differ from the shipped values, a line each in the form of a command, without keys that only follow
    another: first the user's, from command line or file, then those chosen here for model, machine and other keys.
    `plain`: the values before they were resolved."""
    values, usual = asdict(config), shipped(SHIPPED[type(config)])
    yours: list[str] = []
    chosen: list[str] = []
    unused = () if not isinstance(config, PPOConfig) or config.critic.enable else ("critic.",)
    for key in value_keys(type(config)):
        if key.startswith(unused):
            continue
        value, source = value_of(values, key), usual.follows.get(key)
        default = value_of(usual.values, key)
        expected = value_of(values, source) if source else default
        if value != expected and value != (expected or []):
            part = chosen if value_of(plain.values, key) == default else yours
            part.append(f"  {key}={show(value)}")
    parts = (
        ["set by you:", *yours] if yours else [],
        ["chosen for this model and machine:", *chosen] if chosen else [],
    )
    return "\n".join(line for part in parts for line in part)


def hyperparameters(config: TrainingConfig) -> dict[str, bool | int | float | str]:
    """The single values that differ from the shipped ones, by key, without directories: the differences between
    runs."""
    usual = leaves(shipped(SHIPPED[type(config)]).values)
    return {
        key: value
        for key, value in leaves(asdict(config)).items()
        if isinstance(value, bool | int | float | str)
        and value != usual.get(key)
        and not key.endswith(("_dir", "_path"))
    }


def batch_arithmetic(config: PPOConfig) -> str:
    """Samples and updates of a step, in one line: `1024 prompts x 5 responses = 5120 samples per step, 4 mini-batches
    of ...`. The configuration must be resolved."""
    section, devices = config.actor_rollout_ref, config.trainer.devices
    actor, responses = section.actor, section.rollout.n
    prompts, size, rows = config.data.train_batch_size, actor.ppo_mini_batch_size, actor.ppo_micro_batch_size_per_gpu
    updates, uneven, by_tokens = -(-prompts // size), prompts % size > 0, actor.use_dynamic_bsz or rows is None
    most = f"{actor.ppo_max_token_len_per_gpu} tokens" if by_tokens else f"{rows} rows"
    return (
        f"{prompts} prompts x {responses} responses = {prompts * responses} samples per step, "
        f"{updates} mini-batch{'es' * (updates > 1)} of {'up to ' * uneven}{size} prompts "
        f"({size * responses} samples on {devices} device{'s' * (devices > 1)})"
        + (f" x {actor.ppo_epochs} epochs" if actor.ppo_epochs > 1 else "")
        + f", in micro-batches of up to {most} per device"
    )


def samplings(rollout: RolloutConfig) -> str:
    """The sampling in training and in validation, side by side; they are independent."""
    validation, texts = rollout.val_kwargs, []
    for sampling, greedy in ((rollout, not rollout.do_sample), (validation, False)):
        shown = {"temperature": 0.0 if greedy else sampling.temperature}
        shown |= {"top_p": sampling.top_p, "top_k": sampling.top_k, "n": sampling.n}
        texts.append(" ".join(f"{name}={value:g}" for name, value in shown.items()))
    return f"sampling in training: {texts[0]}; in validation: {texts[1]}"


def key_meanings(file: Path, package: str = "") -> dict[str, str]:
    """The comments above all keys of a configuration file and its defaults, by full key, in order."""
    meanings: dict[str, str] = {}
    for item in yaml.safe_load(file.read_text(encoding="utf-8")).get("defaults", ["_self_"]):
        if item == "_self_":
            meanings |= _comments(file, package)
        elif isinstance(item, str):
            meanings |= key_meanings(file.parent / f"{item}.yaml", package)
        else:
            ((group, name),) = item.items()
            folder, _, place = group.removeprefix("/").partition("@")
            inner = ".".join(part for part in (package, place or folder) if part)
            meanings |= key_meanings(CONF / folder / f"{name}.yaml", inner)
    return meanings


def _comments(file: Path, package: str) -> dict[str, str]:
    """The comments above the keys with a value in one file."""
    meanings: dict[str, str] = {}
    comment: list[str] = []
    parents = [package] if package else []
    depth = len(parents)
    for line in file.read_text(encoding="utf-8").splitlines():
        text = line.strip()
        if text.startswith("#"):
            comment.append(text.removeprefix("#").strip())
            continue
        key, colon, value = text.partition(":")
        level = (len(line) - len(line.lstrip())) // 2
        parents = [*parents[: depth + level], key]
        if colon and value and not key.startswith("-"):
            meanings[".".join(parents)] = " ".join(comment)
        comment = []
    return meanings


def _entry(name: str, value: Any, meaning: str, width: int) -> str:
    head = f"  {name} " + ("(must be set)" if value == MISSING else f"= {show(value)}")
    lines = textwrap.wrap(meaning, max(width - COLUMN, 20), **WHOLE_WORDS)
    first = head.ljust(COLUMN) + lines.pop(0) if len(head) < COLUMN - 1 else head
    return "\n".join([first, *(" " * COLUMN + line for line in lines)])
