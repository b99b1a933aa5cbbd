"""The driver's part of a run's state: what it takes to go on, beside the models, as plain values for state.json."""

from typing import Any

from hybridrl.algorithms import Algorithm
from hybridrl.checkpoint.resume import code_fingerprint
from hybridrl.experience.collector import Experience
from hybridrl.experience.sample_log import Records
from hybridrl.training.worker_group import TrainWorkers


class RunState:
    """Takes the state after a step, and puts a saved one back. `fingerprint` is what the run is recognised by, `bases`
    are those of the models that adapters are trained on, by their keys."""

    def __init__(
        self,
        algorithm: Algorithm,
        experience: Experience,
        workers: TrainWorkers,
        records: Records,
        *,
        fingerprint: str,
        data: str,
        bases: dict[str, str],
    ) -> None:
        self.algorithm, self.experience, self.workers, self.records = algorithm, experience, workers, records
        self.fixed = {"fingerprint": fingerprint, "data": data, "bases": bases, "code": code_fingerprint()}
        self.metrics: dict[str, float] = {}

    def note(self, metrics: dict[str, float]) -> None:
        """Keep what a saved step may be chosen by."""
        self.metrics = {name: value for name, value in metrics.items() if name.startswith(("val-", "critic/rewards"))}

    def take(self, step: int, *, recovery: bool) -> dict[str, Any]:
        reason = self._why_unhealthy()
        return self.fixed | {
            "step": step,
            "prompts": self.experience.position,
            "kl_weight": self.algorithm.kl_weight.value,
            "fault_steps": self.experience.guard.steps_above,
            "skipped_in_a_row": self.workers.skipped_in_a_row,
            "sinks": self.records.tracker.state(),
            "metrics": self.metrics,
            "recovery": recovery,
            "healthy": not reason,
            "reason": reason,
        }

    def put(self, state: dict[str, Any]) -> None:
        self.experience.position = state["prompts"]
        self.algorithm.kl_weight.value = state["kl_weight"]
        self.experience.guard.steps_above = state["fault_steps"]
        self.workers.skipped_in_a_row = dict(state["skipped_in_a_row"])

    def _why_unhealthy(self) -> str:
        skipped = [name for name, count in self.workers.skipped_in_a_row.items() if count]
        if skipped:
            return f"the last update of {' and '.join(skipped)} was not finite"
        if self.experience.guard.steps_above:
            return "the reward function failed on too many of the step's answers"
        return ""
