"""The mathematics: pure functions of tensors. Imports torch, the batch and the catalog of names.

`Algorithm` states what a step needs and turns scored responses into advantages; a policy loss turns log-probs into a
loss per token. `lookup` finds the function of a name.
"""

from hybridrl.core.algorithms.algorithm import Algorithm

__all__ = ["Algorithm"]
