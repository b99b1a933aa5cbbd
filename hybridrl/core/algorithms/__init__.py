"""The mathematics: stateless functions of tensors, except for the adaptive weight of the KL.

`Algorithm` states the needs of a step and turns scored responses into advantages; a policy loss turns log-probs into a
loss per token. `find_estimator` and `find_policy_loss` look up functions by name.
"""

from hybridrl.core.algorithms.algorithm import Algorithm

__all__ = ["Algorithm"]
