"""Compare the configuration of a checkpoint with the present one, and decide whether the run can resume.

Almost every key may change. Changes that make it a different run must be allowed; impossible ones are rejected.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hybridrl.config import ConfigError
from hybridrl.config.findings import show

Verdict = Literal["free", "needs_allow", "impossible"]

# Not reported: where a run is stored, how it is displayed, and how it resumes.
UNREPORTED = {
    "trainer.default_local_dir",
    "trainer.logger",
    "trainer.resume_mode",
    "trainer.resume_from_path",
    "trainer.resume_allow",
    "trainer.reset_optimizer",
}

# Section of a model -> its name in a checkpoint.
MODELS = {"actor_rollout_ref.model": "actor", "critic.model": "critic", "model": "actor"}

# Changes that must be allowed, and the effect of each.
ROWS, OPTIMIZER = "data.train_files", "optim.optimizer"
OTHER_ROWS = "the rows differ from the saved ones, so the saved position in the data is meaningless"
REORDERED = "the order of prompts changes: in the current epoch some repeat and some never come"
RESET = "its moments cannot be carried over; trainer.reset_optimizer=true starts them at zero"
RESCALED = "the adapter is scaled by lora_alpha / lora_rank, so the model would change at once"
GUARDED = {
    ROWS: OTHER_ROWS,
    "data.seed": REORDERED,
    "data.shuffle": REORDERED,
    "data.train_weights": REORDERED,
    "data.sampler.class_path": REORDERED,
    "data.sampler.class_name": REORDERED,
    "data.custom_cls.name": OTHER_ROWS,
    "trainer.seed": "every random draw changes",
    "algorithm.adv_estimator": "the meaning of the advantages changes",
    OPTIMIZER: RESET,
    f"actor_rollout_ref.actor.{OPTIMIZER}": RESET,
    f"critic.{OPTIMIZER}": RESET,
    **{f"{model}.lora_alpha": RESCALED for model in MODELS},
}

# Settings of a model that determine its tensors' shapes.
SHAPES = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "tie_word_embeddings",
)


@dataclass(frozen=True)
class Change:
    """A key's value in the saved and in the present configuration; None where it is absent. Equal values are a change
    if what they name has changed, such as files with other rows."""

    key: str
    old: Any
    new: Any
    verdict: Verdict = "free"
    why: str = ""

    def __str__(self) -> str:
        values = f": {show(self.old)} -> {show(self.new)}" if self.old != self.new else f"={show(self.new)}"
        return self.key + values + (f" ({self.why})" if self.why else "")


def config_changes(saved: dict[str, Any], present: dict[str, Any], *, step: Path, same_rows: bool) -> list[Change]:
    """Return the changes of a resolved configuration since a checkpoint was saved. `step` is the checkpoint's
    directory, whose models are compared with the present ones; `same_rows`: whether the data's fingerprint is
    unchanged."""
    old, new = _flatten(saved), _flatten(present)
    unused = () if new.get("critic.enable") else ("critic.",)
    impossible = _model_mismatches(step, new) | _adapter_mismatches(old, new)
    impossible = {key: why for key, why in impossible.items() if not key.startswith(unused)}
    # A key that did not exist when the checkpoint was saved counts as empty there.
    differing = [
        key
        for key in {**new, **old}
        if key not in UNREPORTED and old.get(key) != new.get(key) and (key in old or new[key] not in (None, [], ""))
    ]
    changes = []
    for key in dict.fromkeys([*differing, *impossible, *([] if same_rows else [ROWS])]):
        verdict, why = ("impossible", impossible[key]) if key in impossible else _verdict(key, same_rows, unused)
        changes.append(Change(key, old.get(key), new.get(key), verdict, why))
    return changes


def check_changes(changes: list[Change], allow: list[str], reset_optimizer: bool, log: Callable[[str], None]) -> None:
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
        lines.append(
            f"if {'the other changes are' if impossible else 'this is'} intended: "
            f"trainer.resume_allow=[{','.join(names)}]"
        )
    lines.append("otherwise restore the old values, or start from scratch: trainer.resume_mode=disable")
    raise ConfigError("\n".join(lines))


def _verdict(key: str, same_rows: bool, unused: tuple[str, ...]) -> tuple[Verdict, str]:
    if key.startswith(unused):
        return "free", ""
    if key == ROWS and same_rows:
        return "free", "the same rows"
    if key.removesuffix(".path") in MODELS:
        return "free", "the weights are the saved ones"
    return ("needs_allow", GUARDED[key]) if key in GUARDED else ("free", "")


def _flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= _flatten(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return flat


def _model_mismatches(step: Path, present: dict[str, Any]) -> dict[str, str]:
    """Return the keys that require a model which the checkpoint lacks, each with the reason."""
    mismatches = {} if (step / "critic").is_dir() else {"critic.enable": "no critic was saved"}
    for section, name in MODELS.items():
        if f"{section}.path" not in present:
            continue
        saved = _shapes(step / name / "huggingface", {})
        now = _shapes(Path(present[f"{section}.path"]), present, f"{section}.override_config.")
        values = [
            f"{key} {show(now[key])}, saved {show(saved[key])}"
            for key in saved
            if key in now and saved[key] != now[key]
        ]
        if values:
            mismatches[f"{section}.path"] = f"its tensors do not fit the saved ones: {'; '.join(values)}"
    return mismatches


def _adapter_mismatches(old: dict[str, Any], new: dict[str, Any]) -> dict[str, str]:
    """Return the keys that require another adapter than the saved one, each with the reason."""
    mismatches = {}
    for section in MODELS:
        saved, now = (values.get(f"{section}.lora_rank") or 0 for values in (old, new))
        if saved != now:
            reason = f"an adapter of rank {saved} was saved" if saved else "no adapter was saved"
            mismatches[f"{section}.lora_rank"] = reason
        elif saved:
            keys = (f"{section}.target_modules", f"{section}.exclude_modules")
            mismatches |= {key: "the saved adapter is on other layers" for key in keys if old.get(key) != new.get(key)}
    return mismatches


def _shapes(model: Path, overrides: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the shape settings of a model's config.json with overrides applied; empty if it cannot be read."""
    try:
        settings = json.loads((model / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(settings, dict):
        return {}
    settings |= {key: overrides[prefix + key] for key in SHAPES if prefix + key in overrides}
    return {key: settings[key] for key in SHAPES if key in settings}
