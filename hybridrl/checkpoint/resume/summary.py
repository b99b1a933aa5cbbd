"""What a run that goes on says of itself: what it took from the saved step, and what not and why."""

from collections.abc import Mapping, Sequence
from pathlib import Path

NOT_SAVED = "not in the saved step"
LEARNERS = ("actor", "critic")


def what_was_restored(
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
    """A block of lines. What is absent from the arguments is told as not restored, with the reason in `missing`
    ("optimizer of actor": why), or as not saved.

    `weights` and `optimizers` name models (actor, critic, reference), `updates` says how far each learner's schedule
    is; `prompts` were used, of `rows` in an epoch. `kl_weight` is None where it is no state of the run.
    """
    epoch, place = divmod(prompts or 0, rows)
    restored = {
        "weights": ", ".join(weights),
        "optimizer": ", ".join(optimizers),
        "schedule": ", ".join(f"update {count} of {name}" for name, count in updates.items()),
        "prompts": ""
        if prompts is None
        else f"{prompts} used: goes on at place {place} of {rows} in epoch {epoch} (from 0)",
        "KL weight": "" if kl_weight is None else f"{kl_weight:.6g}",
        "trackers": ", ".join(trackers),
    }
    learners = [name for name in weights if name in LEARNERS]
    absent = [f"optimizer of {name}" for name in learners if name not in optimizers]
    absent += [f"schedule of {name}" for name in learners if name not in updates]
    absent += [name for name in ("weights", "prompts", "trackers") if not restored[name]]
    lost = dict.fromkeys(absent, NOT_SAVED) | dict(missing)
    width = max(map(len, (*restored, *lost))) + 2
    lines = [f"goes on after step {step}, restored from {path}"]
    lines += [f"  {name:<{width}}{value}" for name, value in restored.items() if value]
    lines += ["not restored"] * bool(lost)
    lines += [f"  {name:<{width}}{why}" for name, why in lost.items()]
    return "\n".join(lines)
