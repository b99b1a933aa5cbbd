"""Generalised advantage estimation: the critic's values are the baseline (GAE, Schulman et al. 2016)."""

from torch import Tensor

from hybridrl.algorithms.estimators.discount import discounted_sums, following
from hybridrl.algorithms.estimators.written import placed, whitened, written_tokens
from hybridrl.algorithms.settings import AdvantageSettings
from hybridrl.batch import Batch


def gae(batch: Batch, settings: AdvantageSettings) -> tuple[Tensor, Tensor]:
    """Sums of the residuals r + gamma * V(next) - V, each discounted by gamma * lam a token; then whitened.

    As in verl, "next" is the next token that the policy wrote, a reward on a token that it did not write is not seen,
    and whitening is over all written tokens of the step. Returns are the advantages before whitening plus the values.
    """
    written, lengths = written_tokens(batch)
    values = batch.values[written]
    residuals = following(values, lengths).mul_(settings.gamma).add_(batch.token_rewards[written]).sub_(values)
    advantages = discounted_sums(residuals, lengths, settings.gamma * settings.lam)
    return placed(batch, whitened(advantages)), placed(batch, advantages + values)
