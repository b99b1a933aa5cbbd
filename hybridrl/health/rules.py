"""Rules on the metrics of a run: what goes wrong in training although nothing fails.

A rule is a function of the History: None if all is well, or a Diagnosis with the measured figures and an override to
try. The functions keep no state, so a run, its resumption and a reader of metrics.jsonl come to the same diagnoses.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean, median, stdev

from hybridrl.tracking.sink import is_validation_score

Metrics = Mapping[str, float]

FIRST, WINDOW = 10, 100  # training steps kept from the start of a run, and up to now
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
SCORE = "critic/score/mean"
VALIDATION = "validation"  # the mean of the validation scores, which is no metric by itself
REFERENCE_KL = ("actor/kl_loss", "actor/reward_kl_penalty")
FREE_MEMORY = {
    "perf/host_memory_free_gb": ("host memory", "set trainer.max_restarts=1: a run that is killed is then continued"),
    "perf/device_free_gb": ("device memory", f"lower {ROLLOUT}.gpu_memory_utilization"),
}
LEAST_STEPS, HORIZON = 20, 5  # steps of a trend, and how many times its own length it is extended


@dataclass(frozen=True)
class Diagnosis:
    """What was measured, and what to set."""

    cause: str
    fix: str


@dataclass(frozen=True)
class Validation:
    """Mean score of one validation, and the mean training score of the steps before it."""

    step: int
    score: float
    training: float


@dataclass
class History:
    """The training steps of a run as its rules read them: the first ones, the last ones, and every validation."""

    first: list[Metrics] = field(default_factory=list)
    recent: deque[Metrics] = field(default_factory=lambda: deque(maxlen=WINDOW))
    validations: list[Validation] = field(default_factory=list)
    steps: int = 0
    step: int = 0

    def add(self, step: int, metrics: Metrics) -> None:
        self.steps, self.step = self.steps + 1, step
        self.recent.append(metrics)
        if len(self.first) < FIRST:
            self.first.append(metrics)
        scores = [value for name, value in metrics.items() if is_validation_score(name)]
        if scores:
            self.validations.append(Validation(step, fmean(scores), _mean(self.last(SCORE, 5)) or 0.0))

    def last(self, name: str, count: int) -> list[float]:
        """Return a metric's values in the last `count` steps, fewer if it has fewer."""
        return _values(name, list(self.recent)[-count:])

    def now(self, name: str, count: int = 5) -> float | None:
        """Return a metric's mean over the last `count` steps; None as long as there are fewer."""
        values = self.last(name, count)
        return fmean(values) if len(values) == count else None

    def start(self, name: str) -> float | None:
        """Return a metric's mean over the first steps."""
        return _mean(_values(name, self.first))

    def sustained(self, name: str, count: int, least: float) -> float | None:
        """Return a metric's value now if it was at least `least` in each of the last `count` steps."""
        values = self.last(name, count)
        return values[-1] if len(values) == count and min(values) >= least else None

    def fell(self, name: str, share: float) -> tuple[float, float] | None:
        """Return a metric's start and its value now if it fell to `share` or less while the score did not rise."""
        start, now = self.start(name), self.now(name)
        return (start, now) if start is not None and now is not None and now <= share * start and self.flat() else None

    def flat(self, count: int = 5) -> bool:
        """Return whether the mean score of the last steps is not above that of the first ones by its standard error."""
        now, scores = self.now(SCORE, count), _values(SCORE, self.first)
        if now is None or len(scores) < 2:
            return False
        return now <= fmean(scores) + stdev(scores) / math.sqrt(len(scores))


@dataclass(frozen=True)
class Rule:
    """A judgement with a stable code. While it holds, the codes in `explains` are its consequences and not reported.

    `limit`: its threshold for people. `reads`: the metrics that it is mainly about, the first that is logged counts;
    `share_of`: what it is a share of. `damages`: the weights of such a step are not what a run should resume from.
    `shows`: responses make it plain.
    """

    code: str
    judge: Callable[[History], Diagnosis | None]
    limit: str = ""
    reads: tuple[str, ...] = ()
    share_of: str = ""
    explains: tuple[str, ...] = ()
    damages: bool = False
    shows: bool = False


def truncation(history: History) -> Diagnosis | None:
    share, longest = history.sustained("response_length/clip_ratio", 2, 0.3), history.now("response_length/max", 1) or 0
    if share is None:
        return None
    return Diagnosis(
        f"{share:.0%} of the responses are cut off at {longest:.0f} tokens, before the model ended them",
        f"set data.max_response_length={2 * longest:.0f}, or shape the reward towards shorter responses",
    )


def no_signal(history: History) -> Diagnosis | None:
    """Every advantage is 0, or every response has the same score, for three steps."""
    best, worst = history.last("critic/score/max", 3), history.last("critic/score/min", 3)
    if len(best) == 3 and best == worst:
        cause = f"every response of the last 3 steps has the score {best[-1]:g}, so there is nothing to learn from"
        fix = "see what the reward gives to right and wrong responses: python -m hybridrl.doctor reward"
        return Diagnosis(cause, fix)
    if history.last("critic/advantages/max", 3) + history.last("critic/advantages/min", 3) == [0.0] * 6:
        cause = "every advantage of the last 3 steps is 0: no two responses to the same prompt differ in score"
        fix = f"raise {ROLLOUT}.n, or use data of other difficulty; {ACTOR}.optim.skip_zero_gradient=true keeps such "
        return Diagnosis(cause, f"{fix}steps from moving the weights")
    return None


def policy_jump(history: History) -> Diagnosis | None:
    """One update moves the policy further than any clipping window means to allow."""
    kl = history.now("actor/ppo_kl", 1)
    if kl is None or abs(kl) < 0.5:
        return None
    rate = history.now("actor/lr", 1) or 0.0
    return Diagnosis(
        f"the update changed the log-prob of a sampled token by {abs(kl):.2g} on average",
        f"set {ACTOR}.optim.lr={rate / 10:.1g} and start from a checkpoint before this step",
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


def unknown_tokens(history: History) -> Diagnosis | None:
    """In two steps in a row the policy samples rows of its embedding that its tokenizer has no text for: more than the
    single ones that any model with a padded embedding samples at times."""
    last = list(history.recent)[-2:]
    shares = [row.get("sampling/unknown_tokens", 0.0) / row.get("perf/total_num_tokens", math.inf) for row in last]
    if len(shares) < 2 or not min(shares) >= 0.01:
        return None
    return Diagnosis(
        f"{shares[-1]:.0%} of all tokens were sampled and are not in the tokenizer, so the reward does not see them",
        "name the model's own tokenizer in data.tokenizer, or resize the model's embedding to the tokenizer",
    )


def clipping(history: History) -> Diagnosis | None:
    share = history.sustained("actor/pg_clipfrac", 5, 0.3)
    if share is None:
        return None
    return Diagnosis(
        f"{share:.0%} of the tokens are clipped in every one of the last 5 steps, and teach nothing",
        f"lower {ACTOR}.optim.lr or {ACTOR}.ppo_epochs, or raise {ACTOR}.ppo_mini_batch_size",
    )


def kl_jump(history: History) -> Diagnosis | None:
    """The distance to the reference is large, and ten times what it was."""
    for name in REFERENCE_KL:
        values = history.last(name, 21)
        if values and values[-1] > max(1.0, 10 * median(values[:-1] or [0.0])):
            return Diagnosis(
                f"{name} rose to {values[-1]:.2g} nats per token: the policy leaves its reference",
                f"raise {ACTOR}.kl_loss_coef (or algorithm.kl_ctrl.kl_coef), or lower {ACTOR}.optim.lr",
            )
    return None


def entropy_collapse(history: History) -> Diagnosis | None:
    fell = history.fell("actor/entropy", 0.1)
    if fell is None:
        return None
    return Diagnosis(
        f"entropy fell from {fell[0]:.2g} to {fell[1]:.2g} and the score did not rise: the policy repeats itself",
        f"lower {ACTOR}.optim.lr, raise {ACTOR}.clip_ratio_high, or set {ACTOR}.entropy_coeff=0.001",
    )


def length_collapse(history: History) -> Diagnosis | None:
    fell = history.fell("response_length/mean", 0.2)
    if fell is None:
        return None
    return Diagnosis(
        f"responses shrank from {fell[0]:.0f} to {fell[1]:.0f} tokens and the score did not rise",
        f"lower {ACTOR}.optim.lr; see whether the reward favours short responses",
    )


def repetition(history: History) -> Diagnosis | None:
    first, now = history.start("response/repeated_ngrams"), history.now("response/repeated_ngrams")
    if first is None or now is None or now < first + 0.3:
        return None
    return Diagnosis(
        f"{now:.0%} of the 4-grams of a response are repeated, {first:.0%} at the start",
        f"lower {ACTOR}.optim.lr, or have the reward punish repetition",
    )


def overfitting(history: History) -> Diagnosis | None:
    """Two validations in a row are clearly below the best one, while the training score did not fall."""
    best = max(history.validations, key=lambda one: one.score, default=None)
    last = history.validations[-2:]
    if best is None or any(one.step <= best.step for one in last) or len(last) < 2:
        return None
    gained = best.score - history.validations[0].score
    if max(one.score for one in last) > best.score - max(0.02, 0.25 * gained) or last[-1].training < best.training:
        return None
    return Diagnosis(
        f"the validation score fell from {best.score:.3g} (step {best.step}) to {last[-1].score:.3g} "
        f"while the training score went from {best.training:.3g} to {last[-1].training:.3g}",
        f"use the checkpoint of step {best.step}, or more data",
    )


def flat_score(history: History) -> Diagnosis | None:
    """After a hundred steps the score is where it was in the first ten, and not at its upper end."""
    first, now = history.start(SCORE), history.now(SCORE, 50)
    highest = max(history.last("critic/score/max", WINDOW), default=0.0)
    if history.steps < WINDOW or now is None or now >= 0.9 * highest or not history.flat(50):
        return None
    # What else was measured, in the order in which it would explain the most.
    candidates = (
        ("critic/zero_signal_share", 0.5, "of the prompts have responses of equal score", f"raise {ROLLOUT}.n"),
        ("response_length/clip_ratio", 0.2, "of the responses are cut off", "raise data.max_response_length"),
        ("actor/pg_clipfrac", 0.1, "of the tokens are clipped", f"lower {ACTOR}.optim.lr"),
    )
    measured = ((history.now(name) or 0.0, least, what, fix) for name, least, what, fix in candidates)
    likely = [(f"; {share:.0%} {what}", fix) for share, least, what, fix in measured if share >= least]
    reason, fix = likely[0] if likely else ("", f"raise {ACTOR}.optim.lr or {ROLLOUT}.n, or use easier data")
    means = f"{first:.3g} in the first {FIRST}, {now:.3g} in the last 50"
    return Diagnosis(f"the mean score has not risen in {history.steps} steps: {means}{reason}", fix)


def memory_full(history: History) -> Diagnosis | None:
    """Free memory has fallen steadily and will be gone within a few times the steps in which it fell."""
    for name, (what, fix) in FREE_MEMORY.items():
        free = history.last(name, WINDOW)
        quarter = len(free) // 4
        if len(free) < LEAST_STEPS:
            continue
        # Medians of quarters: one large allocation is a single fall, and noise does not fall three times alike.
        levels = [median(free[part * quarter : (part + 1) * quarter]) for part in range(4)]
        falls = [before - after for before, after in pairwise(levels)]
        fall = fmean(falls)
        if min(falls) < fall / 2 or fall <= 0:
            continue
        steps = levels[-1] / fall * quarter - quarter / 2
        if steps <= HORIZON * len(free):
            hours = steps * (history.now("timing_s/step", 1) or 0.0) / 3600
            return Diagnosis(
                f"{what} falls by {1024 * fall / quarter:.0f} MiB per step, {free[-1]:.1f} GiB are left: it is full at "
                f"step {history.step + steps:.0f}, in {hours:.1f} h",
                fix,
            )
    return None


RULES = (
    Rule(
        "policy-jump",
        policy_jump,
        "0.5 on average in one step",
        reads=("actor/ppo_kl",),
        damages=True,
        explains=("clipping", "no-signal", "kl-jump", "flat-score"),
    ),
    Rule("kl-jump", kl_jump, "1, and ten times the median of 20 steps", reads=REFERENCE_KL, damages=True),
    Rule(
        "truncation",
        truncation,
        "30% in 2 steps in a row",
        reads=("response_length/clip_ratio",),
        explains=("no-signal", "flat-score"),
        shows=True,
    ),
    Rule(
        "no-signal",
        no_signal,
        "all scores or all advantages equal for 3 steps",
        reads=("critic/zero_signal_share", "critic/score/max"),
        explains=("flat-score",),
        shows=True,
    ),
    Rule(
        "not-finite",
        not_finite,
        "any update skipped",
        reads=tuple(f"{model}/skipped_updates" for model in ("actor", "critic", "train")),
    ),
    Rule(
        "unknown-tokens",
        unknown_tokens,
        "1% in 2 steps in a row",
        reads=("sampling/unknown_tokens",),
        share_of="perf/total_num_tokens",
        shows=True,
    ),
    Rule("clipping", clipping, "30% in 5 steps in a row", reads=("actor/pg_clipfrac",)),
    Rule(
        "entropy-collapse",
        entropy_collapse,
        "a tenth of the start, score not risen",
        reads=("actor/entropy",),
        damages=True,
        explains=("repetition",),
        shows=True,
    ),
    Rule(
        "length-collapse",
        length_collapse,
        "a fifth of the start, score not risen",
        reads=("response_length/mean",),
        damages=True,
        shows=True,
    ),
    Rule("repetition", repetition, "0.3 above the start", reads=("response/repeated_ngrams",), shows=True),
    Rule("overfitting", overfitting, "2 validations clearly below the best", reads=(VALIDATION,)),
    Rule("memory-full", memory_full, "full within 5 times the steps seen", reads=tuple(FREE_MEMORY)),
    Rule("flat-score", flat_score, "no rise in 100 steps", reads=(SCORE,)),
)


def _values(name: str, rows: Iterable[Metrics]) -> list[float]:
    return [row[name] for row in rows if name in row and math.isfinite(row[name])]


def _mean(values: list[float]) -> float | None:
    return fmean(values) if values else None
