"""The reward of the prompt's greedy answer is the baseline (ReMax, Li et al. 2023)."""

from torch import Tensor

from hybridrl.algorithms.estimators.discount import discounted_sums
from hybridrl.algorithms.estimators.written import placed, written_tokens
from hybridrl.algorithms.settings import AdvantageSettings
from hybridrl.batch import Batch


def remax(batch: Batch, settings: AdvantageSettings) -> tuple[Tensor, Tensor]:
    """Returns are the rewards to come, undiscounted; advantages are these less the greedy answer's whole reward.

    A reward on a token that the policy did not write is not seen.
    """
    written, lengths = written_tokens(batch)
    returns = discounted_sums(batch.token_rewards[written], lengths, 1.0)
    baselines = batch.greedy_rewards.repeat_interleave(lengths)
    return placed(batch, returns - baselines), placed(batch, returns)
