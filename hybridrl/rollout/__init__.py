"""Rollout: token ids in, sampled token ids out. Knows neither text nor rewards nor the trainer."""

from hybridrl.rollout.client import ModeError, RolloutClient, RolloutFailure
from hybridrl.rollout.types import Completion, Goal, Request, RequestFault, Sampling, request_seed

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
