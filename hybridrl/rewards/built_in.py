"""The scorers that come along, by `data_source`. A new one is a file here and a line in the table."""

from collections.abc import Callable, Iterable

from hybridrl.config import ConfigError
from hybridrl.rewards import gsm8k

# Called like a user's function. Each must stand an empty answer and refuse options that it does not know.
SCORERS: dict[str, Callable[..., float]] = {
    "openai/gsm8k": gsm8k.compute_score,
    "gsm8k": gsm8k.compute_score,
}


def check_data_sources(names: Iterable[str]) -> None:
    """Refuse rows for which no scorer is built in; to be asked only where no custom function is set."""
    unknown = sorted({str(name) for name in names if name not in SCORERS})
    if unknown:
        raise ConfigError(
            f"no reward is built in for data_source {', '.join(unknown)} (built in: {', '.join(SCORERS)}); "
            "set reward.custom_reward_function.path to a .py file with your own function"
        )
