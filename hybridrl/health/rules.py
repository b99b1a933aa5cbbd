"""Rules on the metrics of a run, for problems of training without an exception; and the monitor that applies them to
each step, and reports a diagnosis once when it begins and once when it is over.

A rule is a function of the History: None if all is well, or a Diagnosis with the measured figures and an override to
try. The functions are stateless: a run, its resumption and a reader of metrics.jsonl get the same diagnoses.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hybridrl.config.custom_code import attempt, load_function
from hybridrl.config.values import rule_code
from hybridrl.health import judgements
from hybridrl.health.history import PARTS, SCORE, WINDOW, Diagnosis, History, levels, steady_rise
from hybridrl.health.judgements import ACTOR, REFERENCE_KL, ROLLOUT, rising
from hybridrl.tracking.console import info, warn

VALIDATION = "validation"  # stands for the mean of the validation scores
HOST_MEMORY = "perf/host_memory_free_gb"
RESTARTS = "set trainer.max_restarts=1: a run that is killed is then continued"
FREE_MEMORY = {
    HOST_MEMORY: ("host memory", RESTARTS),
    "perf/device_free_gb": ("device memory", f"lower {ROLLOUT}.gpu_memory_utilization"),
}
# Role (the prefix of log names) -> its processes, and the fix if their memory grows.
ROLES = {
    "reward": (
        "the processes of the reward function",
        f"see what the reward function keeps from call to call; {RESTARTS}",
    ),
    "rollout": ("the rollout servers", "set 'trainer.on_diagnosis={memory-full: rebuild}', which starts new ones then"),
    "episodes": ("the processes of environments", f"see what the environment or its tools keep; {RESTARTS}"),
    "train": ("the training ranks", RESTARTS),
    "driver": ("the driver", RESTARTS),
}
KEY = "trainer.health_rules"
FACTS = ("limit", "reads", "explains", "damages", "shows")  # fields of Rule, optional attributes of custom functions
LEAST_STEPS, HORIZON = 20, 5  # steps of a trend; it is extrapolated to this multiple of its length


@dataclass(frozen=True)
class Rule:
    """A judgement with a stable code. While it holds, the codes in `explains` are its consequences and not reported.

    `limit`: threshold as text. `reads`: its main metrics, of which the first logged one counts; `share_of`: the total,
    if this metric is counted as a share. `damages`: a run should not resume from the weights of such a step. `shows`:
    responses show the problem.
    """

    code: str
    judge: Callable[[History], Diagnosis | None]
    limit: str = ""
    reads: tuple[str, ...] = ()
    share_of: str = ""
    explains: tuple[str, ...] = ()
    damages: bool = False
    shows: bool = False


def memory_full(history: History) -> Diagnosis | None:
    """Free memory falls steadily, and will run out within HORIZON times the steps in which it fell."""
    for name, (what, fix) in FREE_MEMORY.items():
        free = history.last(name, WINDOW)
        if len(free) < LEAST_STEPS:
            continue
        fall = steady_rise([-level for level in levels(free)]) * PARTS / len(free)
        steps = free[-1] / fall if fall else math.inf
        if steps <= HORIZON * len(free):
            hours = steps * (history.now("timing_s/step", 1) or 0.0) / 3600
            grown, role_fix = _grown(history, len(free), fall * len(free) / 2) if name == HOST_MEMORY else ("", "")
            return Diagnosis(
                f"{what} falls by {1024 * fall:.0f} MiB per step{grown}, {free[-1]:.1f} GiB are left: it is full at "
                f"step {history.step + steps:.0f}, in {hours:.1f} h",
                role_fix or fix,
            )
    return None


def _grown(history: History, count: int, least: float) -> tuple[str, str]:
    """Return the processes that took `least` GiB or more in the last steps, and the fix; empty if there are none."""
    for role, (what, fix) in ROLES.items():
        sizes = history.last(f"perf/process_memory_gb/{role}", count)
        if len(sizes) == count and levels(sizes)[-1] - levels(sizes)[0] >= least:
            return f", most of it in {what} ({sizes[0]:.1f} to {sizes[-1]:.1f} GiB)", fix
    return "", ""


RULES = (
    Rule(
        "policy-jump",
        judgements.policy_jump,
        "0.5 on average in one step",
        reads=("actor/ppo_kl",),
        damages=True,
        explains=(
            "clipping",
            "no-signal",
            "kl-jump",
            "kl-drift",
            "score-fall",
            "entropy-rise",
            "length-rise",
            "gradient-rise",
            "flat-score",
        ),
    ),
    Rule(
        "kl-jump",
        judgements.kl_jump,
        "1, and ten times the median of 20 steps",
        reads=tuple(REFERENCE_KL),
        damages=True,
        explains=("kl-drift",),
    ),
    Rule(
        "kl-drift",
        judgements.kl_drift,
        "1 in 5 steps in a row; 0.1 of actor/ppo_kl",
        reads=(*REFERENCE_KL, "actor/ppo_kl"),
    ),
    Rule(
        "truncation",
        judgements.truncation,
        "30% in 2 steps in a row",
        reads=("response_length/clip_ratio",),
        explains=("no-signal", "flat-score"),
        shows=True,
    ),
    Rule(
        "no-signal",
        judgements.no_signal,
        "all scores or all advantages equal for 3 steps, or those of 90% of the prompts of 10",
        reads=("critic/zero_signal_share", "critic/score/max"),
        explains=("flat-score",),
        shows=True,
    ),
    Rule(
        "teacher-far",
        judgements.teacher_far,
        "-5 in the first two steps",
        reads=("distillation/teacher_log_prob",),
        explains=("teacher-diverges",),
        shows=True,
    ),
    Rule(
        "teacher-unreached",
        judgements.teacher_unreached,
        "1% without a fall for 10 steps",
        reads=("distillation/unreached",),
    ),
    Rule("no-context", judgements.no_context, "all rows of 3 steps", reads=("distillation/without_context",)),
    Rule(
        "teacher-diverges",
        rising(
            ("distillation/kl",),
            3,
            "the policy moves away from its teacher",
            f"lower {ACTOR}.optim.lr, or raise distillation.distillation_loss.distillation_loss_coef",
        ),
        "3 times its lowest",
        reads=("distillation/kl",),
    ),
    Rule(
        "score-fall",
        judgements.score_fall,
        "half of its best",
        reads=(SCORE,),
        explains=("length-rise", "flat-score"),
        shows=True,
    ),
    Rule(
        "not-finite",
        judgements.not_finite,
        "any update skipped",
        reads=tuple(f"{model}/skipped_updates" for model in ("actor", "critic", "train")),
    ),
    Rule(
        "unknown-tokens",
        judgements.unknown_tokens,
        "1% in 2 steps in a row",
        reads=("sampling/unknown_tokens",),
        share_of="perf/response_tokens",
        shows=True,
    ),
    Rule("clipping", judgements.clipping, "30% in 5 steps in a row", reads=("actor/pg_clipfrac",)),
    Rule(
        "entropy-collapse",
        judgements.entropy_collapse,
        "a tenth of the start, score not risen",
        reads=("actor/entropy",),
        damages=True,
        explains=("repetition",),
        shows=True,
    ),
    Rule(
        "length-collapse",
        judgements.length_collapse,
        "a fifth of the start, score not risen",
        reads=("response_length/mean",),
        damages=True,
        shows=True,
    ),
    Rule(
        "entropy-rise",
        rising(
            ("actor/entropy",),
            5,
            "the policy becomes random",
            f"lower {ACTOR}.entropy_coeff or {ACTOR}.optim.lr, and start from a checkpoint before the rise",
        ),
        "5 times its lowest",
        reads=("actor/entropy",),
        shows=True,
    ),
    Rule(
        "length-rise",
        judgements.length_rise,
        "1.5 times its lowest, score not risen or 10% cut off",
        reads=("response_length/mean",),
        explains=("truncation",),
        shows=True,
    ),
    Rule(
        "gradient-rise",
        rising(
            ("actor/grad_norm", "critic/grad_norm"),
            10,
            "updates have the length that grad_clip leaves, whatever they learn from",
            "lower the optim.lr of this model, and look at the rows: hybridrl doctor replay",
        ),
        "10 times its lowest",
        reads=("actor/grad_norm", "critic/grad_norm"),
    ),
    Rule(
        "value-loss-rise",
        rising(
            ("critic/vf_loss",),
            10,
            "advantages from such values are noise",
            "lower critic.optim.lr, or clip the rewards with reward.clip_range",
        ),
        "10 times its lowest",
        reads=("critic/vf_loss",),
    ),
    Rule("repetition", judgements.repetition, "0.3 above the start", reads=("response/repeated_ngrams",), shows=True),
    Rule("overfitting", judgements.overfitting, "3 validations clearly below the best", reads=(VALIDATION,)),
    Rule("memory-full", memory_full, "full within 5 times the steps seen", reads=tuple(FREE_MEMORY)),
    Rule("flat-score", judgements.flat_score, "no rise in 50 steps", reads=(SCORE,)),
)


def custom_rules(names: list[str]) -> list[Rule]:
    """Return the rules of these functions, path/to/file.py:function; raises ConfigError if a function is missing. If a
    rule fails during the run, it is turned off with a warning: rules only observe."""
    return [_rule(name, load_function(name, KEY)) for name in names]


def _rule(name: str, function: Callable[[History], Any]) -> Rule:
    failed: list[str] = []

    def judge(history: History) -> Diagnosis | None:
        if failed:
            return None
        diagnosis = attempt(lambda: function(history))
        if isinstance(diagnosis, Exception):
            failed.append(name)
            warn(f"{KEY}={name} fails at step {history.step} and is turned off: {diagnosis!r}", "rule-off")
            return None
        return diagnosis

    facts = {fact: getattr(function, fact) for fact in FACTS if hasattr(function, fact)}
    return Rule(rule_code(name), judge, **facts)


# -- the monitor -------------------------------------------------------------------------------------------------------


OVER = 5  # a diagnosis is over after this number of steps without it


class Unhealthy(RuntimeError):
    """A diagnosis that ends the run; with `rollback` the run continues from its last healthy checkpoint."""

    code = "unhealthy"

    def __init__(self, message: str, *, rollback: bool) -> None:
        super().__init__(message)
        self.rollback = rollback


class HealthMonitor:
    """The diagnoses of a run. `earlier`: metrics of the earlier steps of a resumed run, by step. `actions`: action of a
    diagnosis by code: off, warn (the default), stop, rollback, rebuild."""

    def __init__(
        self,
        earlier: Mapping[int, Mapping[str, float]] | None = None,
        rules: Sequence[Rule] = RULES,
        warn: Callable[[str, str], None] = warn,
        info: Callable[[str], None] = info,
        actions: Mapping[str, str] | None = None,
    ) -> None:
        self.actions = actions or {}
        self.rules = [rule for rule in rules if self.actions.get(rule.code) != "off"]
        self.warn, self.info = warn, info
        self.history = History()
        self.active: dict[str, Diagnosis] = {}
        self.begun: dict[str, int] = {}  # every code so far, with the step at which it last began
        self.new: list[str] = []  # codes that began with the last step
        self._quiet: dict[str, int] = {}
        done = {step: metrics for step, metrics in (earlier or {}).items() if step > 0}
        for number, (step, metrics) in enumerate(done.items()):
            if number < len(done) - WINDOW:
                self.history.add(step, metrics)
            else:
                self._advance(step, metrics)
        before: set[str] = set()
        for step, metrics in done.items():
            active = {name.removeprefix("health/") for name in metrics if name.startswith("health/") and metrics[name]}
            self.begun |= dict.fromkeys(active - before, step)
            before = active

    def judge(self, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """Judge a step and report beginnings and ends; return `health/<code>`, 1 or 0, for every code so far."""
        self.new, over = self._advance(step, metrics)
        for code in self.new:
            diagnosis = self.active[code]
            self.warn(f"step {step}: {diagnosis.cause}; {diagnosis.fix}", code)
        for code in over:
            self.info(f"step {step}: {code} of step {self.begun[code]} is over")
        return {f"health/{code}": float(code in self.active) for code in self.begun}

    def problem(self) -> str:
        """Return the reason why a run should not resume from the present weights; empty if there is none."""
        damaging = {rule.code for rule in self.rules if rule.damages or self.actions.get(rule.code) == "rollback"}
        return next((self.active[code].cause for code in self.active if code in damaging), "")

    @property
    def shows(self) -> bool:
        """Whether responses show a diagnosis that began with the last step."""
        return any(rule.shows and rule.code in self.new for rule in self.rules)

    @property
    def rebuilds(self) -> bool:
        """Whether a diagnosis that began with the last step requires new rollout servers."""
        return any(self.actions.get(code) == "rebuild" for code in self.new)

    def act(self) -> None:
        """Raise Unhealthy if a diagnosis that began with the last step ends the run."""
        for code in self.new:
            action, diagnosis = self.actions.get(code), self.active[code]
            if action in ("stop", "rollback"):
                cause = f"trainer.on_diagnosis.{code}={action}: {diagnosis.cause}; {diagnosis.fix}"
                raise Unhealthy(cause, rollback=action == "rollback")

    def _advance(self, step: int, metrics: Mapping[str, float]) -> tuple[list[str], list[str]]:
        """Add a step; return the beginning codes, and the codes that are over."""
        self.history.add(step, metrics)
        now = {rule.code: diagnosis for rule in self.rules if (diagnosis := rule.judge(self.history))}
        explained = {code for rule in self.rules if rule.code in {*now, *self.active} for code in rule.explains}
        begun = [code for code in now if code not in self.active and code not in explained]
        self.begun |= dict.fromkeys(begun, step)
        self.active |= {code: now[code] for code in begun} | {code: now[code] for code in self.active if code in now}
        self._quiet = {code: 0 if code in now else self._quiet.get(code, 0) + 1 for code in self.active}
        over = [code for code, steps in self._quiet.items() if steps >= OVER]
        for code in over:
            del self.active[code], self._quiet[code]
        return begun, over
