"""Judges each step of a run by the rules, and reports a diagnosis once when it begins and once when it is over."""

from collections.abc import Callable, Mapping, Sequence

from hybridrl.health.history import WINDOW, Diagnosis, History
from hybridrl.health.rules import RULES, Rule
from hybridrl.tracking.console import info, warn

OVER = 5  # steps in a row without a diagnosis after which it is over


class Unhealthy(RuntimeError):
    """A diagnosis that ends the run; with `rollback` it continues from its last healthy checkpoint."""

    code = "unhealthy"

    def __init__(self, message: str, *, rollback: bool) -> None:
        super().__init__(message)
        self.rollback = rollback


class HealthMonitor:
    """The diagnoses of a run. `earlier` are the metrics of the steps that a resumed run has done, by step; `actions`
    say by code what a diagnosis does: off, warn (also without one), stop, rollback, rebuild."""

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
        self.new: list[str] = []  # what began with the last step
        self._quiet: dict[str, int] = {}
        done = {step: metrics for step, metrics in (earlier or {}).items() if step > 0}
        for number, (step, metrics) in enumerate(done.items()):
            if number < len(done) - WINDOW:
                self.history.add(step, metrics)
            else:
                self._advance(step, metrics)
        before: set[str] = set()
        for step, metrics in done.items():
            held = {name.removeprefix("health/") for name in metrics if name.startswith("health/") and metrics[name]}
            self.begun |= dict.fromkeys(held - before, step)
            before = held

    def judge(self, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """Judge a step and report what begins or is over; returns `health/<code>`, 1 or 0, for every code so far."""
        self.new, over = self._advance(step, metrics)
        for code in self.new:
            diagnosis = self.active[code]
            self.warn(f"step {step}: {diagnosis.cause}; {diagnosis.fix}", code)
        for code in over:
            self.info(f"step {step}: {code} of step {self.begun[code]} is over")
        return {f"health/{code}": float(code in self.active) for code in self.begun}

    def problem(self) -> str:
        """Return why a run should not resume from the weights as they are; empty: no reason."""
        damaging = {rule.code for rule in self.rules if rule.damages or self.actions.get(rule.code) == "rollback"}
        return next((self.active[code].cause for code in self.active if code in damaging), "")

    @property
    def shows(self) -> bool:
        """Whether responses make plain what began with the last step."""
        return any(rule.shows and rule.code in self.new for rule in self.rules)

    @property
    def rebuilds(self) -> bool:
        """Whether what began with the last step is to be answered by new rollout servers."""
        return any(self.actions.get(code) == "rebuild" for code in self.new)

    def act(self) -> None:
        """Raise Unhealthy if what began with the last step is to end the run."""
        for code in self.new:
            action, diagnosis = self.actions.get(code), self.active[code]
            if action in ("stop", "rollback"):
                cause = f"trainer.on_diagnosis.{code}={action}: {diagnosis.cause}; {diagnosis.fix}"
                raise Unhealthy(cause, rollback=action == "rollback")

    def _advance(self, step: int, metrics: Mapping[str, float]) -> tuple[list[str], list[str]]:
        """Add a step; returns the codes that begin with it and those that are over."""
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
