"""What talks to the policy over several turns: environments, tools and agents."""
