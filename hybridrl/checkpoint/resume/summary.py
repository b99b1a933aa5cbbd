"""Summary of a resume: what was restored, what was not, and why."""

from collections.abc import Mapping, Sequence
from pathlib import Path


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
    """Return a block of lines. What the arguments lack is listed as not restored, with the reason in `missing`
    ("optimizer of actor": why) or as not saved.

    `weights` and `optimizers` name models (actor, critic, reference); `updates` has the position of each learner's
    schedule; `prompts` were used, of `rows` per epoch. `kl_weight` is None if it is not part of the run's state.
    """
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
