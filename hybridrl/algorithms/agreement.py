"""Whether engine and trainer agree about the sampled tokens: both compute the same log-probs from the same weights."""

from dataclasses import dataclass
from math import inf

from hybridrl.batch import Batch

# The largest accepted mean difference of a token's log-prob, by the coarser type of engine and trainer.
LIMITS = {"float32": 1e-2, "bfloat16": 0.2, "float16": 0.1}
KEY = "actor_rollout_ref.rollout.max_log_prob_gap"


class Disagreement(RuntimeError):
    """The training log-probs of the sampled tokens are not those that they were sampled with."""


@dataclass(frozen=True)
class Agreement:
    """At most this mean difference of a sampled token's log-prob, both computed in `dtype`."""

    limit: float
    dtype: str

    def check(self, batch: Batch) -> None:
        """Raise Disagreement if rows differ by more. A log-prob that is not finite is left to the updates, which skip
        it."""
        trainer, engine, written = batch.old_log_probs, batch.rollout_log_probs, batch.response_mask
        if trainer is None or engine is None or not written.any():
            return
        gap = float((trainer - engine)[written].double().abs().mean())
        if self.limit < gap < inf:
            raise Disagreement(
                f"the trainer's log-probs of the sampled tokens differ from the engine's by {gap:.2g} on average, with "
                f"equal weights in {self.dtype} (at most {self.limit:g}): the loss would correct for a policy that did "
                "not sample. Likely causes: dropout or another random operation in a model's own code, model code that "
                "engine and trainer read differently, a dtype of engine or trainer that the model does not support "
                "(rollout.dtype, fsdp_config.dtype), or a quantized engine or one with logits processors "
                f"(rollout.engine_kwargs). Set {KEY} higher if the difference is intended"
            )
