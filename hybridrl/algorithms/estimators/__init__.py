"""Advantage estimators, by verl's names: from a step's rewards to the advantage of each response token.

An estimator sees the whole step's batch, with `token_rewards` filled; a row's score is the sum of its token rewards.
An own one is any function of the same form, named path/to/file.py:function.
"""

from collections.abc import Callable

from torch import Tensor

from hybridrl.algorithms.estimators.gae import gae
from hybridrl.algorithms.estimators.gdpo import gdpo
from hybridrl.algorithms.estimators.gpg import gpg
from hybridrl.algorithms.estimators.grpo import grpo
from hybridrl.algorithms.estimators.grpo_passk import grpo_passk
from hybridrl.algorithms.estimators.opo import opo
from hybridrl.algorithms.estimators.optimal_token_baseline import optimal_token_baseline, tir_optimal_token_baseline
from hybridrl.algorithms.estimators.reinforce_plus_plus import reinforce_plus_plus, reinforce_plus_plus_baseline
from hybridrl.algorithms.estimators.remax import remax
from hybridrl.algorithms.estimators.rloo import rloo
from hybridrl.algorithms.settings import AdvantageSettings
from hybridrl.batch import Batch

# Advantages and returns [response tokens], float32, 0 on tokens that the policy did not write.
Estimator = Callable[[Batch, AdvantageSettings], tuple[Tensor, Tensor]]

ESTIMATORS: dict[str, Estimator] = {
    "gae": gae,
    "grpo": grpo,
    "grpo_vectorized": grpo,
    "grpo_passk": grpo_passk,
    "rloo": rloo,
    "rloo_vectorized": rloo,
    "reinforce_plus_plus": reinforce_plus_plus,
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
    "remax": remax,
    "opo": opo,
    "gpg": gpg,
    "gdpo": gdpo,
    "optimal_token_baseline": optimal_token_baseline,
    "tir_optimal_token_baseline": tir_optimal_token_baseline,
}

# The field that an estimator reads beyond the rewards. The optimal token baselines read old_log_probs as well.
NEEDS = {
    "gae": "values",
    "remax": "greedy_rewards",
    "gdpo": "reward_parts",
    "optimal_token_baseline": "sum_pi_squared",
    "tir_optimal_token_baseline": "sum_pi_squared",
}

__all__ = ["ESTIMATORS", "NEEDS", "Estimator"]
