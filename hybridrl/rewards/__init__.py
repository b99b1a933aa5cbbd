"""Rewards: the user's function or a built-in one, in own processes. Knows no tokens and no tensors."""
