"""What a rollout engine is given and what it returns."""

import hashlib
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Sampling:
    """How responses are sampled; temperature 0 is greedy. Any of `stop_ids` ends a response, and so does a text of
    `stop`, with the token that completes it."""

    max_tokens: int
    stop_ids: tuple[int, ...]
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()


@dataclass(frozen=True)
class Request:
    """One response wanted to one prompt. Requests with the same `prompt` number share a prefix, and `sample` counts
    them; a later `turn` of an episode continues what a server has cached."""

    prompt: int
    sample: int
    prompt_ids: list[int]
    seed: int
    sampling: Sampling
    turn: int = 0


@dataclass(frozen=True)
class Completion:
    """One response: its tokens [T] int64, the end token included, and their log-probs [T] float32 as sampled.

    `versions` is the weight version that each token was sampled with: [T] int64, or one number for all of them.
    """

    token_ids: np.ndarray
    log_probs: np.ndarray
    truncated: bool
    versions: np.ndarray | int


def request_seed(run_seed: int, *keys: int | str) -> int:
    """Derive the seed of one response from the run's seed and its place in the run, such as position and sample."""
    text = "/".join(map(str, (run_seed, *keys)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "big") & 0x7FFFFFFF
