"""Rollout: token ids in, sampled token ids out. Knows neither text nor rewards nor the trainer.

The client in the driver gives requests to the least loaded server, retries those of a server that died on the others
while it is rebuilt, and holds requests between `interrupt` and `resume`. A server is an actor around one engine
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
