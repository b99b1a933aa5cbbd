"""Rollout: token ids in, sampled token ids out. Knows neither text nor rewards nor the trainer."""

from hybridrl.core.rollout.client import ModeError, RolloutClient, RolloutFailure
from hybridrl.core.rollout.types import Completion, Goal, Request, RequestFault, Sampling, request_seed

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
