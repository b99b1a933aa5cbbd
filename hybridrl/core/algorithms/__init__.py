"""The mathematics: functions of tensors without state, but for the adaptive weight of the KL.

`Algorithm` states what a step needs and turns scored responses into advantages; a policy loss turns log-probs into a
loss per token. `find_estimator` and `find_policy_loss` find the function of a name.
"""

from hybridrl.core.algorithms.algorithm import Algorithm

__all__ = ["Algorithm"]
