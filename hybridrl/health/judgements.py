"""The judgements of the rules: on the learning signal of a run, on the size of its updates, and on growth and collapse
of metrics."""

import math
from collections.abc import Callable
from itertools import pairwise
from statistics import fmean, median

from hybridrl.health.history import FIRST, NORMAL, SCORE, WINDOW, Diagnosis, History, varies

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
REFERENCE_KL = {"actor/kl_loss": f"{ACTOR}.kl_loss_coef", "actor/reward_kl_penalty": "algorithm.kl_ctrl.kl_coef"}
# Limits of multi-turn episodes, by their logged stop reason.
EPISODE_LIMITS = {
    "stop/max_tokens": (
        "all tokens after an episode's first prompt",
        "raise data.max_response_length, or the max_tokens of an agent's requests",
    ),
    "stop/max_turn_tokens": (
        "the tokens of one response",
        f"raise {ROLLOUT}.multi_turn.max_assistant_response_length",
    ),
    "stop/context_overflow": (
        "what tools or the environment add",
        f"lower {ROLLOUT}.multi_turn.max_tool_response_length, or raise data.max_response_length",
    ),
}
FLAT_STEPS = 50  # steps without a higher score
VALIDATION_NOISE = 8  # times the noise below the best score, which is high by chance; the noise is a rough estimate


# Updates.


def policy_jump(history: History) -> Diagnosis | None:
    """One update moves the policy further than any clipping window is meant to allow."""
    kl = history.now("actor/ppo_kl", 1)
    if kl is None or abs(kl) < 0.5:
        return None
    return Diagnosis(
        f"the update changed the log-prob of a sampled token by {abs(kl):.2g} on average",
        f"set {_narrower(history)}{ACTOR}.optim.lr={rate(history, 10)} and start from a checkpoint before this step",
    )


def kl_jump(history: History) -> Diagnosis | None:
    """The distance to the reference is large, and ten times its earlier value."""
    for name in REFERENCE_KL:
        values = history.last(name, 21)
        if values and values[-1] > max(1.0, 10 * median(values[:-1] or [0.0])):
            return _far_from_reference(history, name, f"rose to {values[-1]:.2g} nats per token")
    return None


def kl_drift(history: History) -> Diagnosis | None:
    """The distance to the reference has become large, at any pace, or each update moves the policy far."""
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
    """Return the largest learning rate of the last steps over a divisor; the present rate may belong to a warm-up."""
    return f"{max(history.last('actor/lr', WINDOW), default=0.0) / divisor:.1g}"


def _narrower(history: History) -> str:
    """Return the override for an overly wide clip range: updates move the policy, and hardly any token is clipped."""
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


# Responses, their scores and their lengths.


def truncation(history: History) -> Diagnosis | None:
    share, longest = history.sustained("response_length/clip_ratio", 2, 0.3), history.now("response_length/max", 1) or 0
    if share is None:
        return None
    if stop := _stop(history):
        limited = EPISODE_LIMITS[stop][0]
        cause = f"{share:.0%} of the episodes are cut off by a limit of tokens, {history.now(stop, 1):.0%} by that of "
        return Diagnosis(cause + limited, _longer(history))
    return Diagnosis(
        f"{share:.0%} of the responses are cut off at {longest:.0f} tokens, before the model ended them",
        f"set data.max_response_length={2 * longest:.0f}, or shape the reward towards shorter responses",
    )


def _stop(history: History) -> str:
    """Return the name of the limit that cuts most episodes of the step; empty for single responses."""
    shares = {name: history.now(name, 1) or 0.0 for name in EPISODE_LIMITS}
    return max(shares, key=lambda name: shares[name]) if any(shares.values()) else ""


def _longer(history: History) -> str:
    """Return the fix for responses that are cut off."""
    stop = _stop(history)
    return EPISODE_LIMITS[stop][1] if stop else "raise data.max_response_length"


def no_signal(history: History) -> Diagnosis | None:
    """Every advantage is 0 for three steps, or in ten steps nearly all groups have responses of equal score. A policy
    that learns from a teacher alone needs neither."""
    if history.now("distillation/kl", 1) is not None and history.now("actor/pg_loss", 1) is None:
        return None
    best, worst = history.last("critic/score/max", 3), history.last("critic/score/min", 3)
    if len(best) == 3 and best == worst:
        cause = f"every response of the last 3 steps has the score {best[-1]:g}, so there is nothing to learn from"
        if unparsed := history.now("reward/unparsed", 1):
            cause += f", and in {unparsed:.0%} the reward function found no answer"
        fix = "see what the reward gives to right and wrong responses: hybridrl rescore RUN"
        solved = best[-1] > min(history.last("critic/score/min", WINDOW))
        return Diagnosis(cause, "use harder data: these prompts are solved" if solved else fix)
    if history.last("critic/advantages/max", 3) + history.last("critic/advantages/min", 3) == [0.0] * 6:
        cause = "every advantage of the last 3 steps is 0: no two responses to the same prompt differ in score"
        fix = f"raise {ROLLOUT}.n, or use data of other difficulty; {ACTOR}.optim.skip_zero_gradient=true keeps such "
        return Diagnosis(cause, f"{fix}steps from moving the weights")
    share = history.now("critic/zero_signal_share", 10)
    if share is None or share < 0.9:
        return None
    cause = f"{share:.0%} of the prompts of the last 10 steps have responses of equal score"
    score, lowest, highest = (history.now(name) or 0.0 for name in (SCORE, "critic/score/min", "critic/score/max"))
    usual_fix = f"raise {ROLLOUT}.n, use data of other difficulty, or set algorithm.filter_groups.enable=true"
    solved = score > lowest + 0.9 * (highest - lowest)
    fix = "use harder data: nearly all of these prompts are solved" if solved else usual_fix
    return Diagnosis(f"{cause}, at a mean score of {score:.2g}", fix)


def teacher_far(history: History) -> Diagnosis | None:
    """In the first two steps the teacher finds the sampled tokens improbable: it expects another format."""
    probs = history.last("distillation/teacher_log_prob", 3)
    if len(probs) != 2 or max(probs) > -5:
        return None
    cause = f"the teacher gives the sampled tokens a log-prob of {probs[-1]:.1f} on average"
    return Diagnosis(cause, "compare its chat template with the policy's, or choose a teacher of the same format")


def teacher_unreached(history: History) -> Diagnosis | None:
    """The teacher's mass on tokens that the policy does not sample has not fallen for ten steps."""
    masses = history.last("distillation/unreached", 10)
    if len(masses) < 10 or fmean(masses[5:]) < max(0.01, 0.9 * fmean(masses[:5])):
        return None
    cause = f"the teacher gives {fmean(masses[5:]):.1%} of its probability to tokens that the policy does not sample"
    fix = "set distillation.distillation_loss.loss_mode=forward_kl, which teaches them; if it is, raise "
    return Diagnosis(f"{cause}, and this has not fallen for 10 steps", f"{fix}{ACTOR}.optim.lr")


def no_context(history: History) -> Diagnosis | None:
    """No row of three steps has a context for its teacher."""
    if history.last("distillation/without_context", 3) != [1.0] * 3:
        return None
    fix = "name further sources in distillation.teacher_models.NAME.context, or raise "
    cause = "no row of the last 3 steps had a context for its teacher, so nothing was learned from it"
    return Diagnosis(cause, f"{fix}{ROLLOUT}.n, so that a response has right siblings")


def score_fall(history: History) -> Diagnosis | None:
    """The mean score has lost half of its distance to the lowest score of a response, in a usual step."""
    lowest, highest = (median(history.last(f"critic/score/{end}", WINDOW) or [0.0]) for end in ("min", "max"))
    lowest = min(lowest, history.start(SCORE) or lowest)  # once a task is solved, no response has a low score

    def half_lost(best: float, now: float) -> bool:
        return best - now >= max((best - lowest) / 2, (highest - lowest) / 20, abs(best) / 20)

    fell = history.fell(SCORE, half_lost, by_factors=False)
    if fell is None:
        return None
    return Diagnosis(
        f"the mean score fell from {fell[0]:.2g} to {fell[1]:.2g}",
        f"set {ACTOR}.optim.lr={rate(history, 3)} and start from a checkpoint before the fall; if the reward or its "
        "services may have changed, see what it gives: hybridrl rescore RUN",
    )


def length_rise(history: History) -> Diagnosis | None:
    """Responses are 1.5 times as long as at first, and either the score has not risen or responses are cut off."""
    cut = fmean(history.last("response_length/clip_ratio", 3) or [0.0])
    harmful = cut >= 0.1 or history.flat(20)
    rose = history.rose("response_length/mean", lambda low, now: harmful and now >= 1.5 * low)
    if rose is None:
        return None
    result = f"{cut:.0%} of them are cut off" if cut >= 0.1 else "the score did not rise"
    return Diagnosis(
        f"responses grew from {rose[0]:.0f} to {rose[1]:.0f} tokens, and {result}",
        "see whether the reward favours long responses (hybridrl show RUN --sort length); "
        "reward.reward_manager.name=dapo with reward.reward_kwargs.overlong_buffer_cfg.enable=true lowers the score of "
        "long ones",
    )


def flat_score(history: History) -> Diagnosis | None:
    """After fifty steps the score only varies around its level in the first ten, and not at its upper end."""
    first, now = history.start(SCORE), history.now(SCORE, FLAT_STEPS // 2)
    highest = max(history.last("critic/score/max", WINDOW), default=0.0)
    if history.steps < FLAT_STEPS or now is None or now >= 0.9 * highest or not history.flat(FLAT_STEPS // 2):
        return None
    if not varies(history.last(SCORE, WINDOW)):
        return None
    # Further measurements, the most likely explanation first.
    candidates = (
        ("critic/zero_signal_share", 0.5, "of the prompts have responses of equal score", f"raise {ROLLOUT}.n"),
        ("response_length/clip_ratio", 0.2, "of the responses are cut off", _longer(history)),
        ("actor/pg_clipfrac", 0.1, "of the tokens are clipped", f"lower {ACTOR}.optim.lr"),
    )
    measured = ((history.now(name) or 0.0, least, what, fix) for name, least, what, fix in candidates)
    likely = [(f"; {share:.0%} {what}", fix) for share, least, what, fix in measured if share >= least]
    reason, fix = likely[0] if likely else ("", f"raise {ACTOR}.optim.lr or {ROLLOUT}.n, or use easier data")
    means = f"{first:.3g} in the first {FIRST}, {now:.3g} in the last {FLAT_STEPS // 2}"
    return Diagnosis(f"the mean score has not risen in {history.steps} steps: {means}{reason}", fix)


def overfitting(history: History) -> Diagnosis | None:
    """Three validations in a row are below the best one by a part of its gain, and by more than the usual variation,
    while the training score did not fall."""
    scores, last = [item.score for item in history.validations], history.validations[-3:]
    if len(scores) < 5:
        return None
    best = history.validations[scores.index(max(scores))]
    # For noise around a smooth course, the standard deviation of second differences is sqrt(6) times the noise's.
    changes = [after - before for before, after in pairwise(scores)]
    noise = NORMAL * median(abs(after - before) for before, after in pairwise(changes)) / math.sqrt(6)
    fallen = max(0.02, 0.25 * (best.score - scores[0]), VALIDATION_NOISE * noise)
    if max(item.score for item in last) > best.score - fallen or last[-1].training < best.training:
        return None
    return Diagnosis(
        f"the validation score fell from {best.score:.3g} (step {best.step}) to {last[-1].score:.3g} "
        f"while the training score went from {best.training:.3g} to {last[-1].training:.3g}",
        f"use the checkpoint of step {best.step}, or more data",
    )


def repetition(history: History) -> Diagnosis | None:
    first, now = history.start("response/repeated_ngrams"), history.now("response/repeated_ngrams")
    if first is None or now is None or now < first + 0.3:
        return None
    return Diagnosis(
        f"{now:.0%} of the 4-grams of a response are repeated, {first:.0%} at the start",
        f"lower {ACTOR}.optim.lr, or have the reward punish repetition",
    )


def unknown_tokens(history: History) -> Diagnosis | None:
    """In two steps in a row the policy samples ids without a text in its tokenizer (rows of a padded embedding). Any
    such model samples single ones at times; this is more."""
    last = list(history.recent)[-2:]
    shares = [row.get("sampling/unknown_tokens", 0.0) / row.get("perf/response_tokens", math.inf) for row in last]
    if len(shares) < 2 or not min(shares) >= 0.01:
        return None
    return Diagnosis(
        f"{shares[-1]:.0%} of the sampled tokens are not in the tokenizer, so the reward does not see them",
        "name the model's own tokenizer in data.tokenizer, or resize the model's embedding to the tokenizer",
    )
