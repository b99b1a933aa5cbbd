"""What differs between the configuration that a step was saved with and the present one, and whether a run can go on.

Nearly everything may change. What would make it another run has to be meant; what cannot work is refused.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hybridrl.config import ConfigError
from hybridrl.config.read import show

Verdict = Literal["free", "needs_allow", "impossible"]

# Where a run lies, how it is shown and that it goes on at all: nothing of what it learns.
UNTOLD = {
    "trainer.default_local_dir",
    "trainer.logger",
    "trainer.resume_mode",
    "trainer.resume_from_path",
    "trainer.resume_allow",
    "trainer.reset_optimizer",
}

# Section of a model -> its name in a saved step.
MODELS = {"actor_rollout_ref.model": "actor", "critic.model": "critic", "model": "actor"}

# Changes that have to be meant, and what each does to the run.
ROWS, OPTIMIZER = "data.train_files", "optim.optimizer"
OTHER_ROWS = "not the rows it was saved with, so the place it had reached means nothing"
REORDERED = "the prompts come in another order: of the epoch begun some again, some never"
RESET = "its moments cannot be carried over; trainer.reset_optimizer=true starts them at zero"
RESCALED = "the adapter counts lora_alpha / lora_rank times, so the model would be another at once"
GUARDED = {
    ROWS: OTHER_ROWS,
    "data.seed": REORDERED,
    "data.shuffle": REORDERED,
    "data.train_weights": REORDERED,
    "data.sampler.class_path": REORDERED,
    "data.sampler.class_name": REORDERED,
    "data.custom_cls.name": OTHER_ROWS,
    "trainer.seed": "every random draw is another",
    "algorithm.adv_estimator": "the advantages mean something else than those learnt from so far",
    OPTIMIZER: RESET,
    f"actor_rollout_ref.actor.{OPTIMIZER}": RESET,
    f"critic.{OPTIMIZER}": RESET,
    **{f"{model}.lora_alpha": RESCALED for model in MODELS},
}

# The settings of a model that say how large its tensors are.
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
    """One key's value in the saved and in the present configuration (None where it is absent there).

    Equal values are a change too where what they name is another thing: files with other rows.
    """

    key: str
    old: Any
    new: Any
    verdict: Verdict = "free"
    why: str = ""

    def __str__(self) -> str:
        values = f": {show(self.old)} -> {show(self.new)}" if self.old != self.new else f"={show(self.new)}"
        return self.key + values + (f" ({self.why})" if self.why else "")


def changes(saved: dict[str, Any], present: dict[str, Any], *, step: Path, same_rows: bool) -> list[Change]:
    """The changes of a resolved configuration since a step was saved, each judged.

    `step` is the saved step's directory, whose models are held against the present ones whatever their paths;
    `same_rows` says whether the data has the fingerprint it had.
    """
    old, new = _flat(saved), _flat(present)
    idle = () if new.get("critic.enable") else ("critic.",)
    misfits = _misfits(step, new) | _other_adapters(old, new)
    misfits = {key: why for key, why in misfits.items() if not key.startswith(idle)}
    differing = [key for key in {**new, **old} if _differs(old, new, key) and key not in UNTOLD]
    told = dict.fromkeys([*differing, *misfits, *([] if same_rows else [ROWS])])
    found = []
    for key in told:
        verdict, why = ("impossible", misfits[key]) if key in misfits else _judged(key, same_rows, idle)
        found.append(Change(key, old.get(key), new.get(key), verdict, why))
    return found


def decide(found: list[Change], allow: list[str], reset_optimizer: bool, say: Callable[[str], None]) -> None:
    """Say every change; raise ConfigError for all that cannot work, or are not meant, together.

    Meant are the keys in `allow` (trainer.resume_allow), and another optimizer with `reset_optimizer` too.
    """
    if found:
        say("changed in the configuration since the save:")
    for change in found:
        say(f"  {change}")
    if needless := [key for key in allow if key not in GUARDED]:
        say(f"trainer.resume_allow has no effect on {', '.join(needless)}; it is for {', '.join(GUARDED)}")
    meant = {*allow, *(key for key in GUARDED if reset_optimizer and key.endswith(OPTIMIZER))}
    impossible = [change for change in found if change.verdict == "impossible"]
    unmeant = [change for change in found if change.verdict == "needs_allow" and change.key not in meant]
    if not impossible and not unmeant:
        return
    lines = ["the saved step and the configuration do not go together:"]
    lines += [f"  {change}" for change in (*impossible, *unmeant)]
    if unmeant:
        names = dict.fromkeys([*allow, *(change.key for change in unmeant)])
        lines.append(
            f"if {'the others are' if impossible else 'this is'} meant: trainer.resume_allow=[{','.join(names)}]"
        )
    raise ConfigError("\n".join([*lines, "otherwise set the old values, or start anew: trainer.resume_mode=disable"]))


def _differs(old: dict[str, Any], new: dict[str, Any], key: str) -> bool:
    """A key that a step knows nothing of, as it was saved before there was such a key, was as good as empty."""
    return old.get(key) != new.get(key) and (key in old or new[key] not in (None, [], ""))


def _judged(key: str, same_rows: bool, idle: tuple[str, ...]) -> tuple[Verdict, str]:
    if key.startswith(idle):
        return "free", ""
    if key == ROWS and same_rows:
        return "free", "the same rows"
    if key.removesuffix(".path") in MODELS:
        return "free", "the weights are the saved ones"
    return ("needs_allow", GUARDED[key]) if key in GUARDED else ("free", "")


def _flat(values: dict[str, Any], place: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in values.items():
        found |= _flat(value, f"{place}{name}.") if isinstance(value, dict) else {place + name: value}
    return found


def _misfits(step: Path, present: dict[str, Any]) -> dict[str, str]:
    """Keys that ask for a model which the saved step does not have, and why it has not."""
    found = {} if (step / "critic").is_dir() else {"critic.enable": "no critic was saved"}
    for section, name in MODELS.items():
        if f"{section}.path" not in present:
            continue
        saved = _shapes(step / name / "huggingface", {})
        now = _shapes(Path(present[f"{section}.path"]), present, f"{section}.override_config.")
        differing = [key for key in saved if key in now and saved[key] != now[key]]
        if differing:
            values = (f"{key} {show(now[key])}, saved {show(saved[key])}" for key in differing)
            found[f"{section}.path"] = f"its tensors do not fit the saved ones: {'; '.join(values)}"
    return found


def _other_adapters(old: dict[str, Any], new: dict[str, Any]) -> dict[str, str]:
    """Keys that ask for another adapter than was saved, or for one where the model itself was, and why that is not
    there."""
    found = {}
    for section in MODELS:
        saved, now = (values.get(f"{section}.lora_rank") or 0 for values in (old, new))
        if saved != now:
            found[f"{section}.lora_rank"] = f"an adapter of rank {saved} was saved" if saved else "no adapter was saved"
        elif saved:
            keys = (f"{section}.target_modules", f"{section}.exclude_modules")
            found |= {key: "the saved adapter is on other layers" for key in keys if old.get(key) != new.get(key)}
    return found


def _shapes(model: Path, overrides: dict[str, Any], place: str = "") -> dict[str, Any]:
    """What a model's config.json says of shapes, overridden; nothing where there is none that can be read."""
    try:
        settings = json.loads((model / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(settings, dict):
        return {}
    settings |= {key: overrides[place + key] for key in SHAPES if place + key in overrides}
    return {key: settings[key] for key in SHAPES if key in settings}
