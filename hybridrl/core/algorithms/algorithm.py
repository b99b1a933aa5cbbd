"""The needs of a step of the algorithm, and the way from scored responses to advantages."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from hybridrl.config.catalog import Estimator
from hybridrl.core.algorithms.objective import KLWeight, penalized
from hybridrl.core.algorithms.rollout_correction import RolloutCorrection
from hybridrl.core.batch import Batch
from hybridrl.core.required import required


@dataclass
class Algorithm:
    """The part of a step between the rewards and the update.

    `estimator` is a function of the step's rows, its parameters bound, and `entry` its facts. `kl_in_reward` and
    `kl_in_loss` are forms of a KL penalty, or None. `bypass` uses the rollout engine's log-probs as the old ones;
    otherwise `correction` weights and masks tokens by the difference of the two.
    """

    estimator: Callable[[Batch], tuple[Tensor, Tensor]]
    entry: Estimator = field(default_factory=lambda: Estimator("", ""))
    uses_critic: bool = False
    kl_in_reward: str | None = None
    kl_weight: KLWeight = field(default_factory=lambda: KLWeight(0.0))
    kl_in_loss: str | None = None
    correction: RolloutCorrection | None = None
    bypass: bool = False

    @property
    def uses_reference(self) -> bool:
        return self.kl_in_reward is not None or self.kl_in_loss is not None

    @property
    def needs_reference_log_probs(self) -> bool:
        """The exact KL compares full distributions instead of the log-probs of the sampled tokens."""
        return bool({self.kl_in_reward, self.kl_in_loss} - {None, "full"})

    @property
    def needs_reference_kl(self) -> bool:
        return self.kl_in_reward == "full"

    @property
    def needs_old_log_probs(self) -> bool:
        """Return whether advantages depend on a forward pass of the policy, then computed before the update."""
        if self.needs_reference_kl:
            return True
        corrects = self.correction is not None and not self.correction.fits_update
        reads = self.kl_in_reward is not None or corrects or self.entry.reads_probabilities
        return reads and not self.bypass

    def advantages(self, batch: Batch) -> tuple[Batch, dict[str, float]]:
        """Fill token rewards, advantages and returns; metrics of the KL penalty, the correction and the
        estimator, if any. Without old log-probs the update computes the importance weights.

        An episode counts once, whatever the number of its rows: the estimator sees its tokens as one row.
        """
        token_rewards, whole = batch.token_rewards, batch.by_episode()
        if token_rewards is None:
            token_rewards = torch.zeros(batch.response_ids.shape).index_add_(
                0, whole.last_tokens, required(whole.rewards)
            )
        batch = replace(batch, token_rewards=token_rewards)
        metrics: dict[str, float] = {}
        if self.kl_in_reward is not None:
            weight = self.kl_weight.value
            token_rewards, kl = penalized(batch.by_episode(), self.kl_in_reward, weight)
            self.kl_weight.update(kl, len(whole))
            batch = replace(batch, token_rewards=token_rewards)
            metrics = {"actor/reward_kl_penalty": kl, "actor/reward_kl_penalty_coeff": weight}
        corrected = batch
        if self.correction is not None and not self.bypass and batch.old_log_probs is not None:
            corrected, correction_metrics = self.correction.apply(batch)
            metrics |= correction_metrics
        # A rejected token is not trained on; its reward and its value still belong to the tokens before it.
        written = replace(corrected, response_mask=batch.response_mask)
        advantages, returns, *logged = self.estimator(written.by_episode())
        metrics |= {f"algorithm/{name}": float(value) for more in logged for name, value in more.items()}
        rejected = required(batch.response_mask) & ~required(corrected.response_mask)
        advantages, returns = advantages.masked_fill(rejected, 0), returns.masked_fill(rejected, 0)
        return replace(corrected, advantages=advantages, returns=returns), metrics

    def state_dict(self) -> dict[str, Any]:
        return {"kl_weight": self.kl_weight.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.kl_weight.value = state["kl_weight"]
