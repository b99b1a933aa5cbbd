"""The mathematics: pure functions of tensors. Imports torch and the batch, nothing else of ours.

`Algorithm` says what a step needs and turns scored answers into advantages; a policy loss turns log-probs into a loss.
"""

from hybridrl.algorithms.algorithm import Algorithm

__all__ = ["Algorithm"]
