"""Rollout: token ids in, sampled token ids out. Knows neither text nor rewards nor the trainer."""

from hybridrl.rollout.client import RolloutFailure, RolloutPool
from hybridrl.rollout.types import Completion, Request, Sampling, request_seed

__all__ = ["Completion", "Request", "RolloutFailure", "RolloutPool", "Sampling", "request_seed"]
