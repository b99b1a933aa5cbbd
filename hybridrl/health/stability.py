"""Rules about the updates of a run: how far they move the policy, and what grows or collapses by them."""

from collections.abc import Callable
from statistics import median

from hybridrl.health.history import WINDOW, Diagnosis, History

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
REFERENCE_KL = {"actor/kl_loss": f"{ACTOR}.kl_loss_coef", "actor/reward_kl_penalty": "algorithm.kl_ctrl.kl_coef"}


def policy_jump(history: History) -> Diagnosis | None:
    """One update moves the policy further than any clipping window means to allow."""
    kl = history.now("actor/ppo_kl", 1)
    if kl is None or abs(kl) < 0.5:
        return None
    return Diagnosis(
        f"the update changed the log-prob of a sampled token by {abs(kl):.2g} on average",
        f"set {_narrower(history)}{ACTOR}.optim.lr={rate(history, 10)} and start from a checkpoint before this step",
    )


def kl_jump(history: History) -> Diagnosis | None:
    """The distance to the reference is large, and ten times what it was."""
    for name in REFERENCE_KL:
        values = history.last(name, 21)
        if values and values[-1] > max(1.0, 10 * median(values[:-1] or [0.0])):
            return _far_from_reference(history, name, f"rose to {values[-1]:.2g} nats per token")
    return None


def kl_drift(history: History) -> Diagnosis | None:
    """The distance to the reference has become large, at whatever pace, or that to the policy before each update is."""
    for name in REFERENCE_KL:
        if rose := history.rose(name, lambda _, now: now >= 1, by_factors=False):
            change = f"rose from {max(rose[0], 0):.2g} to {rose[1]:.2g} nats per token"
            return _far_from_reference(history, name, change)
    kl = history.sustained("actor/ppo_kl", 5, 0.1)
    if kl is None:
        return None
    return Diagnosis(
        f"each of the last 5 steps moved the policy by 0.1 nats per sampled token or more, the last one by {kl:.2g}",
        f"set {_narrower(history)}{ACTOR}.optim.lr={rate(history, 3)}",
    )


def _far_from_reference(history: History, name: str, change: str) -> Diagnosis:
    fix = f"raise {REFERENCE_KL[name]}, or set {_narrower(history)}{ACTOR}.optim.lr={rate(history, 3)}"
    return Diagnosis(f"{name} {change}: the policy leaves its reference", fix)


def rate(history: History, divisor: int) -> str:
    """Return the largest learning rate of the last steps over a divisor: the present one may be that of a warm-up."""
    return f"{max(history.last('actor/lr', WINDOW), default=0.0) / divisor:.1g}"


def _narrower(history: History) -> str:
    """Return the override of a clip range that is too wide: updates move the policy, and hardly a token is clipped."""
    share, kl = history.now("actor/pg_clipfrac", 1), history.now("actor/ppo_kl", 1) or 0.0
    return f"{ACTOR}.clip_ratio=0.1 and " if share is not None and share < 0.05 and abs(kl) >= 1e-3 else ""


def clipping(history: History) -> Diagnosis | None:
    share = history.sustained("actor/pg_clipfrac", 5, 0.3)
    if share is None:
        return None
    return Diagnosis(
        f"{share:.0%} of the tokens are clipped in every one of the last 5 steps, and teach nothing",
        f"lower {ACTOR}.optim.lr or {ACTOR}.ppo_epochs, or raise {ACTOR}.ppo_mini_batch_size",
    )


def not_finite(history: History) -> Diagnosis | None:
    """An update had a loss or gradient that is not finite, and was skipped."""
    skipped = sum(history.now(f"{model}/skipped_updates", 1) or 0.0 for model in ("actor", "critic", "train"))
    if not skipped:
        return None
    return Diagnosis(
        f"{skipped:.0f} update{'s' * (skipped > 1)} had a loss or gradient that is not finite, and changed nothing",
        "see skipped_updates/ for the rows and the module at fault; lower optim.lr or grad_clip, or set dtype=fp32",
    )


def rising(names: tuple[str, ...], factor: float, cause: str, fix: str) -> Callable[[History], Diagnosis | None]:
    """Return the rule that one of the metrics is `factor` times its lowest level or more."""

    def rule(history: History) -> Diagnosis | None:
        for name in names:
            if rose := history.rose(name, lambda low, now: now >= factor * low):
                return Diagnosis(f"{name} rose from {rose[0]:.2g} to {rose[1]:.2g}: {cause}", fix)
        return None

    return rule


def entropy_collapse(history: History) -> Diagnosis | None:
    fell = history.collapsed("actor/entropy", 0.1)
    if fell is None:
        return None
    return Diagnosis(
        f"entropy fell from {fell[0]:.2g} to {fell[1]:.2g} and the score did not rise: the policy repeats itself",
        f"lower {ACTOR}.optim.lr, raise {ACTOR}.clip_ratio_high, or set {ACTOR}.entropy_coeff=0.001",
    )


def length_collapse(history: History) -> Diagnosis | None:
    fell = history.collapsed("response_length/mean", 0.2)
    if fell is None:
        return None
    return Diagnosis(
        f"responses shrank from {fell[0]:.0f} to {fell[1]:.0f} tokens and the score did not rise",
        f"lower {ACTOR}.optim.lr; see whether the reward favours short responses",
    )
