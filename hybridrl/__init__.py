"""Reinforcement learning of language models: Ray places the processes, vLLM answers, FSDP2 trains.

Knows its version and imports nothing: every part can be used without the rest.
"""

__version__ = "0.1.0"
