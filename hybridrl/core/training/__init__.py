"""Training: FSDP2 workers and what they compute. Knows only tokens, neither text nor the rollout engine.

`TrainWorkers`, in the driver, plans everything from lengths: rows to ranks and to micro-batches. The divisors of a loss
are counted over the whole mini-batch before its first micro-batch, so the gradient does not depend on the cut. A loss
or gradient that is not finite never reaches the parameters. Logits are computed chunk by chunk. Ranks that share rows
exchange slices of the packed rows only in attention, so losses do not depend on it. Each rank reads its own part of a
model's files.
"""
