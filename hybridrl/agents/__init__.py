"""Conversations of several turns with the policy: environments, tools and agents."""
