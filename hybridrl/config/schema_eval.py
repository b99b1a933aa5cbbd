"""The section `eval`, which `main_eval` alone reads, and the sampling that its presets stand for."""

from typing import Annotated, Any

from hybridrl.config.files import RowNames
from hybridrl.config.values import Fault, Natural, NonNegative, Positive, Section, ShareAboveZero, TopK, choices

# name -> the keys of this section that it sets, unless they are set themselves
PRESETS: dict[str, dict[str, Any]] = {
    "deepseek": {"temperature": 0.6, "top_p": 0.95, "top_k": -1, "max_tokens": 32768},
    "qwen3-thinking": {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "max_tokens": 38912},
    "dapo": {"temperature": 1.0, "top_p": 0.7, "top_k": -1},
    "greedy": {"temperature": 0.0, "top_p": 1.0, "top_k": -1},
}


def preset_name(value: str) -> Fault | None:
    """A rule: a name of a preset."""
    return None if value in PRESETS else choices(value, list(PRESETS), list(PRESETS))


class EvalConfig(Section):
    files: RowNames
    models: list[str]
    n: Positive | None
    greedy: bool
    k: list[Positive]
    preset: Annotated[str, preset_name] | None
    temperature: NonNegative | None
    top_p: ShareAboveZero | None
    top_k: TopK | None
    max_tokens: Positive | None
    seed: Natural
    output_dir: str | None
    compare: str | None
    resume: bool
    concurrency: Positive
    served_model: str | None
    responses: RowNames
    response_key: str
    reward_model_key: str
