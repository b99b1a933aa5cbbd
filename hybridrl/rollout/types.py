"""What is asked of an engine and what comes back."""

import hashlib
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Request:
    """One answer wanted to one prompt; `prompt` and `sample` name it wherever it travels."""

    prompt: int
    sample: int
    prompt_ids: list[int]
    seed: int


@dataclass(frozen=True)
class Completion:
    """One answer: its tokens [T] int64, the end token included, and their log-probs [T] float32 as sampled."""

    prompt: int
    sample: int
    token_ids: np.ndarray
    log_probs: np.ndarray
    truncated: bool


@dataclass(frozen=True)
class Sampling:
    """How answers are drawn; temperature 0 is greedy. `stop_ids` end an answer."""

    max_tokens: int
    stop_ids: tuple[int, ...]
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    ignore_eos: bool = False


def request_seed(run_seed: int, *place: int | str) -> int:
    """The seed of one draw, from the run's seed and its place in the run: the same wherever it is drawn."""
    text = "/".join(map(str, (run_seed, *place)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "big") & 0x7FFFFFFF
