"""The core: the training loop, and the parts that its steps call. docs/reading.md leads through it.

`trainer` requests a batch of scored episodes from `experience`. `rollout` samples them with the weights that
`hybrid_engine` has sent through `weights`; `algorithms` turns rewards into advantages, and `training` updates the
model. All random numbers derive from the run's seed and a place in the run, so no random state is saved: the order of
prompts from the epoch, a response from prompt, sample and turn, dropout from step and rank, shuffled mini-batches from
step and epoch.
"""
