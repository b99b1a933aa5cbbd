"""Whether engine and trainer agree about the sampled tokens: both compute the same numbers from the same weights."""

from dataclasses import dataclass
from math import inf

from hybridrl.batch import Batch

# The largest mean difference of a token's log-prob that is let pass, by the coarser type of engine and trainer.
LIMITS = {"float32": 1e-2, "bfloat16": 0.2, "float16": 0.1}
KEY = "actor_rollout_ref.rollout.max_log_prob_gap"


class Disagreement(RuntimeError):
    """The trainer's log-probs of the sampled tokens are not those that they were sampled with."""


@dataclass(frozen=True)
class Agreement:
    """At most this mean difference of a sampled token's log-prob, where both compute in `dtype`."""

    limit: float
    dtype: str

    def check(self, batch: Batch) -> None:
        """Raise Disagreement for rows that differ by more. A log-prob that is not finite is left to the updates, which
        skip it."""
        trainer, engine, written = batch.old_log_probs, batch.rollout_log_probs, batch.response_mask
        if trainer is None or engine is None or not written.any():
            return
        gap = float((trainer - engine)[written].double().abs().mean())
        if self.limit < gap < inf:
            raise Disagreement(
                f"the trainer's log-probs of the sampled tokens differ from the engine's by {gap:.2g} on average, with "
                f"equal weights in {self.dtype} (at most {self.limit:g}): the loss would correct for a policy that did "
                "not sample. Likely causes: dropout or another disturbance in a model's own code, code of the model "
                "that engine and trainer read differently, a type of engine or trainer that the model does not bear "
                "(rollout.dtype, fsdp_config.dtype), or a quantised engine or one with logits processors "
                f"(rollout.engine_kwargs). Set {KEY} higher where the difference is wanted"
            )
