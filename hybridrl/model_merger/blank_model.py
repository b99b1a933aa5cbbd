"""The model that a directory's configuration describes, without memory for its weights (meta device)."""

from pathlib import Path

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForTokenClassification,
    PreTrainedConfig,
    PreTrainedModel,
)

from hybridrl.config import ConfigError

CONFIG = "config.json"
VALUE_HEADS = ("score.weight", "classifier.weight")
# How the name of an architecture ends -> the class that makes it; all others (GPT2LMHeadModel) are language models.
AUTO = {
    "ForConditionalGeneration": AutoModelForImageTextToText,
    "ForTokenClassification": AutoModelForTokenClassification,
}


def blank_model(directory: Path, saved: dict[str, Tensor], *, value_model: bool, trusted: bool) -> PreTrainedModel:
    """A value model where it is said to be one, or where a value model's head is among the tensors that were saved:
    verl leaves the language model's architecture in a critic's configuration."""
    settings = _settings(directory, trusted)
    heads = [name for name in VALUE_HEADS if name in saved]
    architecture = (settings.architectures or [""])[0]
    if value_model or heads:
        architecture = "ForTokenClassification"
    if heads:
        settings.num_labels = saved[heads[0]].shape[0]
    kind = next((auto for ending, auto in AUTO.items() if architecture.endswith(ending)), AutoModelForCausalLM)
    with torch.device("meta"):
        try:
            return kind.from_config(settings, trust_remote_code=trusted)
        except ValueError as error:
            raise ConfigError(f"{directory / CONFIG}: {_first_line(error)}") from error


def _settings(directory: Path, trusted: bool) -> PreTrainedConfig:
    file = directory / CONFIG
    if not file.is_file():
        raise ConfigError(
            f"{file} is missing, which says what model it is; copy it from the model that training began with"
        )
    try:
        return AutoConfig.from_pretrained(directory, trust_remote_code=trusted)
    except (OSError, ValueError, KeyError) as error:
        way_out = "" if trusted else "; code that the model brings is run with --trust-remote-code"
        raise ConfigError(f"{file}: {_first_line(error)}{way_out}") from error


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0][:200]
