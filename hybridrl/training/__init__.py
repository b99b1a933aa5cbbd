"""Training: FSDP2 workers and what they compute. Knows rows of tokens; neither text nor the rollout engine."""
