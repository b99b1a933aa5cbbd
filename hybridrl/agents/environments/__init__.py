"""Episodes of several turns: environments, tools, and the processes that run them."""
