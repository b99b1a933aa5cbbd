"""Which metric names answer which question a reader has; no sink and no file is known here."""

# Phase of a step -> the `timing_s/` timers in it. The timers of one line do not overlap.
PHASES = {
    "start-up": ("start_up",),
    "rollout": ("gen", "gen_max"),
    "reward": ("reward",),
    "log-probs": ("old_log_prob", "ref", "values"),
    "update": ("adv", "update_actor", "update_critic"),
    "switch": ("switch", "update_weights"),
    "validation": ("testing",),
    "saving": ("save_checkpoint",),
}
STEP_SECONDS = "timing_s/step"

REWARD = ("critic/rewards/mean", "critic/score/mean")  # the first that is logged
RESPONSE_LENGTH = "response_length/mean"
LOSSES = ("train/loss", "val/loss")


def is_validation_score(name: str) -> bool:
    """`val-core/<data_source>/<acc|reward>/mean@n`; a data source may have slashes of its own."""
    return name.startswith("val-core/") and name.rsplit("/", 1)[1].startswith("mean@")


def phase_seconds(metrics: dict[str, float]) -> dict[str, float]:
    """Seconds of each phase that this line has a timer of."""
    timers = {
        phase: [metrics[f"timing_s/{name}"] for name in names if f"timing_s/{name}" in metrics]
        for phase, names in PHASES.items()
    }
    return {phase: sum(seconds) for phase, seconds in timers.items() if seconds}


def line_seconds(metrics: dict[str, float]) -> float:
    """The seconds that a line accounts for; one without a step (the first validation) has only phases."""
    return max(metrics.get(STEP_SECONDS, 0.0), sum(phase_seconds(metrics).values()))
