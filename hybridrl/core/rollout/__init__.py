"""Rollout: token ids in, sampled token ids out. Independent of text, rewards and the trainer.

The client in the driver gives requests to the least loaded server, and pauses them between `interrupt` and `resume`.
While a dead server is rebuilt, its requests are retried on the others. A server is an actor around one engine
(`engine.RolloutEngine`); only `vllm` imports vLLM. An engine that runs out of memory is built again with less
(`ladder`).
"""

from hybridrl.core.rollout.client import ModeError, RolloutClient, RolloutFailure
from hybridrl.core.rollout.engine import Completion, Goal, Request, RequestFault, Sampling, request_seed

__all__ = [
    "Completion",
    "Goal",
    "ModeError",
    "Request",
    "RequestFault",
    "RolloutClient",
    "RolloutFailure",
    "Sampling",
    "request_seed",
]
