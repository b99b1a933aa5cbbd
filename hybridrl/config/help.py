"""The keys as `--help` prints them, from the comments in conf/*.yaml; what a configuration changes; its batch sizes."""

import textwrap
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from hybridrl.config.compose import CONF, SHIPPED, shipped
from hybridrl.config.findings import ConfigError, nearest, show
from hybridrl.config.schema import PPOConfig, SFTConfig
from hybridrl.config.schema_parts import RolloutConfig
from hybridrl.config.values import MISSING, Plain, leaves, value_keys, value_of

COLUMN = 46  # where meanings begin


def explain_keys(config_name: str, wanted: str, first: tuple[str, ...], width: int) -> str:
    """The keys of a shipped configuration with value and meaning: of the section `wanted`, of `all`, or if it is empty
    those in `first`, with a list of the sections. Raises ConfigError if there is no such section."""
    values, meanings = shipped(config_name).values, key_meanings(CONF / f"{config_name}.yaml")
    sections: dict[str, list[str]] = {}
    for key in meanings:
        sections.setdefault(key.rpartition(".")[0], []).append(key)
    if not wanted:
        lines = ["keys to begin with:", *(_entry(key, value_of(values, key), meanings[key], width) for key in first)]
        names = ", ".join(filter(None, sections))
        listed = textwrap.fill(f"all, {names}", width, initial_indent="  ", subsequent_indent="  ")
        more = "hybridrl doctor explain KEY explains one key, hybridrl doctor checks a command."
        return "\n".join([*lines, "\nmore keys, by section (--help SECTION):", listed, f"\n{more}"])
    inside = {name: keys for name, keys in sections.items() if f"{name}.".startswith(f"{wanted}.") or wanted == "all"}
    if not inside:
        near = nearest(wanted, [name for name in sections if name])
        raise ConfigError(f"--help {wanted}: there is no such section", fix=f"choose {' | '.join(near or ['all'])}")
    lines = []
    for section, keys in inside.items():
        lines.append(f"\n{section or 'outside the sections'}:")
        lines += [_entry(key.rpartition(".")[2], value_of(values, key), meanings[key], width) for key in keys]
    return "\n".join(lines).lstrip("\n")


def changed_values(config: PPOConfig | SFTConfig, plain: Plain) -> str:
    """The keys that differ from the shipped values, a line each as a command takes it, without those that merely follow
    another: first those that were set, on the command line or in a file, then those that were chosen here, for model,
    machine and the others. `plain` are the values before they were resolved."""
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


def hyperparameters(config: PPOConfig | SFTConfig) -> dict[str, bool | int | float | str]:
    """The single values that differ from the shipped ones, by key: in what one run differs from another. Without
    directories."""
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
    """The sampling in training and in validation, side by side; neither follows the other."""
    validation, texts = rollout.val_kwargs, []
    for sampling, greedy in ((rollout, not rollout.do_sample), (validation, False)):
        shown = {"temperature": 0.0 if greedy else sampling.temperature}
        shown |= {"top_p": sampling.top_p, "top_k": sampling.top_k, "n": sampling.n}
        texts.append(" ".join(f"{name}={value:g}" for name, value in shown.items()))
    return f"sampling in training: {texts[0]}; in validation: {texts[1]}"


def key_meanings(file: Path, package: str = "") -> dict[str, str]:
    """The comment above every key of a configuration file and of those it lists, by full key, in their order."""
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
    """The comment above each key of one file that has a value there."""
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
    lines = textwrap.wrap(meaning, max(width - COLUMN, 20), break_on_hyphens=False)
    first = head.ljust(COLUMN) + lines.pop(0) if len(head) < COLUMN - 1 else head
    return "\n".join([first, *(" " * COLUMN + line for line in lines)])
