"""What a step of the algorithm needs, and how scored answers become advantages."""

from dataclasses import dataclass, field, replace

import torch

from hybridrl.algorithms.estimators import Estimator
from hybridrl.algorithms.kl import KLWeight, penalised
from hybridrl.algorithms.rollout_correction import RolloutCorrection
from hybridrl.algorithms.settings import AdvantageSettings
from hybridrl.batch import Batch


@dataclass
class Algorithm:
    """The part of a step between the rewards and the update.

    `needs` is the field of the batch that the estimator reads beyond rewards; `kl_in_reward` and `kl_in_loss` are forms
    of a KL penalty, or None. `bypass` takes the rollout engine's log-probs for the old ones; otherwise `correction`
    weighs and narrows what is learnt from by the difference of the two.
    """

    estimator: Estimator
    settings: AdvantageSettings = field(default_factory=AdvantageSettings)
    needs: str | None = None
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
        """The exact KL compares whole distributions rather than the log-probs of what was sampled."""
        return bool({self.kl_in_reward, self.kl_in_loss} - {None, "full"})

    @property
    def needs_reference_kl(self) -> bool:
        return self.kl_in_reward == "full"

    @property
    def needs_old_log_probs(self) -> bool:
        """Whether advantages depend on what the trainer makes of the rows, which is then computed before the update."""
        if self.needs_reference_kl:
            return True
        own = self.kl_in_reward is not None or self.correction is not None or self.needs == "sum_pi_squared"
        return own and not self.bypass

    def advantages(self, batch: Batch) -> tuple[Batch, dict[str, float]]:
        """Fill token rewards, advantages and returns; metrics of the KL penalty and the correction where there are."""
        token_rewards = batch.token_rewards
        if token_rewards is None:
            token_rewards = torch.zeros(batch.response_ids.shape).index_add_(0, batch.last_tokens, batch.rewards)
        batch = replace(batch, token_rewards=token_rewards)
        metrics: dict[str, float] = {}
        if self.kl_in_reward is not None:
            weight = self.kl_weight.value
            token_rewards, kl = penalised(batch, self.kl_in_reward, weight)
            self.kl_weight.update(kl, len(batch))
            batch = replace(batch, token_rewards=token_rewards)
            metrics = {"actor/reward_kl_penalty": kl, "actor/reward_kl_penalty_coeff": weight}
        corrected = batch
        if self.correction is not None and not self.bypass:
            corrected, of_correction = self.correction.apply(batch)
            metrics |= of_correction
        # A rejected token is not learnt from; its reward and its value still belong to the tokens before it.
        written = replace(corrected, response_mask=batch.response_mask)
        advantages, returns = self.estimator(written, self.settings)
        rejected = batch.response_mask & ~corrected.response_mask
        advantages, returns = advantages.masked_fill(rejected, 0), returns.masked_fill(rejected, 0)
        return replace(corrected, advantages=advantages, returns=returns), metrics
