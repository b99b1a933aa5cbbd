"""REINFORCE++ (Hu et al. 2025): advantages whitened over all written tokens of the step, without or with groups."""

from torch import Tensor

from hybridrl.algorithms.estimators.discount import discounted_sums
from hybridrl.algorithms.estimators.groups import centred, scores
from hybridrl.algorithms.estimators.written import placed, spread, whitened, written_tokens
from hybridrl.algorithms.settings import AdvantageSettings
from hybridrl.batch import Batch


def reinforce_plus_plus(batch: Batch, settings: AdvantageSettings) -> tuple[Tensor, Tensor]:
    """Rewards to come, discounted by gamma a token; advantages are these returns whitened.

    As in verl, tokens that the policy did not write are passed over: they take no discount, and rewards on them are
    seen by nobody.
    """
    written, lengths = written_tokens(batch)
    returns = discounted_sums(batch.token_rewards[written], lengths, settings.gamma)
    return placed(batch, whitened(returns)), placed(batch, returns)


def reinforce_plus_plus_baseline(batch: Batch, settings: AdvantageSettings) -> tuple[Tensor, Tensor]:
    """Score less the group's mean, on every written token, then whitened; returns are the same."""
    distances = spread(batch, centred(scores(batch), batch.group))
    advantages = placed(batch, whitened(distances[batch.response_mask]))
    return advantages, advantages
