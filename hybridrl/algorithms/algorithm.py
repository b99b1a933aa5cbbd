"""What a step of the algorithm needs, and how scored answers become advantages."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from hybridrl.algorithms.grpo import grpo
from hybridrl.algorithms.kl import KLWeight, penalised
from hybridrl.batch import Batch

# (rows with token rewards, normalise by the group's deviation) -> advantages and returns a response token.
Estimator = Callable[[Batch, bool], tuple[Tensor, Tensor]]


@dataclass
class Algorithm:
    """The part of a step between the rewards and the update.

    `kl_in_reward` is the form of a KL penalty taken off the reward, or None; `kl_in_loss` whether the loss has one.
    """

    estimator: Estimator
    normalise: bool = True
    kl_in_reward: str | None = None
    kl_weight: KLWeight = field(default_factory=lambda: KLWeight(0.0))
    kl_in_loss: bool = False

    @property
    def uses_reference(self) -> bool:
        return self.kl_in_reward is not None or self.kl_in_loss

    @property
    def penalises_reward(self) -> bool:
        """Whether the reward depends on the policy's own log-probs, so that they are needed before the update."""
        return self.kl_in_reward is not None

    def advantages(self, batch: Batch) -> tuple[Batch, dict[str, float]]:
        """Fill token rewards, advantages and returns; metrics of the KL penalty where there is one."""
        token_rewards = torch.zeros(batch.response_ids.shape).index_add_(0, batch.last_tokens, batch.rewards)
        batch = replace(batch, token_rewards=token_rewards)
        metrics: dict[str, float] = {}
        if self.kl_in_reward is not None:
            weight = self.kl_weight.value
            token_rewards, kl = penalised(batch, self.kl_in_reward, weight)
            self.kl_weight.update(kl, len(batch))
            batch = replace(batch, token_rewards=token_rewards)
            metrics = {"actor/reward_kl_penalty": kl, "actor/reward_kl_penalty_coeff": weight}
        advantages, returns = self.estimator(batch, self.normalise)
        return replace(batch, advantages=advantages, returns=returns), metrics


ESTIMATORS: dict[str, Estimator] = {"grpo": grpo}
