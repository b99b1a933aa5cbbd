"""Training: FSDP2 workers and what they compute. Knows only tokens, neither text nor the rollout engine."""
