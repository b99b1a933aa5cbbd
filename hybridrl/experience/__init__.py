"""What a training step learns from: prompts, responses, rewards, groups, and the batch made of them."""
