"""verl's reward managers by name, as what they come to here: how a function is called, how often and how many at once.

naive, prime, remote and gdpo are one thing here: every function runs in processes of its own, with a time limit.
"""

from hybridrl.config.schema_reward import RewardConfig

# The coroutines that a process has under way at once. Other functions are called one after the other.
COROUTINES = 64


def in_one_call(config: RewardConfig) -> bool:
    """Whether the function takes all answers of a step in one call."""
    return config.reward_manager.source == "register" and config.reward_manager.name == "batch"


def processes(config: RewardConfig) -> int:
    """How many scoring processes have something to do; 0: none is wanted."""
    most = 1 if in_one_call(config) else config.max_concurrent if _is_limited(config) else config.num_workers
    return min(config.num_workers, most)


def calls_at_once(config: RewardConfig, waits: bool) -> int:
    """Calls under way at once in each process; `waits`: the function is a coroutine function."""
    if _is_limited(config):
        return max(config.max_concurrent // max(processes(config), 1), 1)
    return COROUTINES if waits else 1


def seconds_between_calls(config: RewardConfig) -> float:
    """Of each process, so that all together keep to the limits of `rate_limited`."""
    if not _is_limited(config):
        return 0.0
    by_tokens = config.max_tpm / config.estimated_tokens_per_request if config.max_tpm else None
    rates = [rate for rate in (config.max_rpm, by_tokens) if rate]
    return max(processes(config), 1) * 60 / min(rates) if rates else 0.0


def _is_limited(config: RewardConfig) -> bool:
    return config.reward_manager.source == "register" and config.reward_manager.name == "rate_limited"
