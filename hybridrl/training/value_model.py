"""A Hugging Face model with a number for every token: what the state is worth in which the token was chosen.

Knows nothing of returns or losses. It is transformers' token classification with one label, so that a saved value model
loads there as such, and starts from any causal language model.
"""

import torch
from torch import Tensor, nn
from transformers import MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING, MODEL_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.modeling_layers import GenericForTokenClassification

from hybridrl.config.schema import ModelConfig
from hybridrl.training.model import hidden_states, load_pretrained, load_settings, refuse_missing
from hybridrl.training.packing import ModelInputs


class ValueModel(nn.Module):
    """Values of the states in which the response tokens of packed rows were chosen [response tokens], in float32."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        self.head_name = next(name for name, child in model.named_children() if isinstance(child, nn.Linear))

    def forward(self, inputs: ModelInputs) -> Tensor:
        hidden = hidden_states(self.model, inputs)
        head = self.model.get_submodule(self.head_name)
        # Past transformers' dropout, which would make values noise; in float32, as bfloat16 rounds 0.9 by up to 0.002.
        values = hidden.float() @ head.weight[0].float()
        return values if head.bias is None else values + head.bias.float()


def load_value_model(config: ModelConfig, dtype: torch.dtype) -> ValueModel:
    """The value model that was saved in a directory, or a language model with a new head; in host memory."""
    settings = load_settings(config, num_labels=1)
    model, missing = load_pretrained(_token_classification(settings, config.path), settings, config, dtype)
    value_model = ValueModel(model)
    fresh = {name for name in missing if name.startswith(f"{value_model.head_name}.")}
    refuse_missing(missing - fresh, config)
    for name in fresh:
        # Values then start at 0 however large the hidden states are, and alike on every rank whatever its seed. With
        # one output there is no symmetry to break: its gradient is the hidden state, so the first update teaches it.
        nn.init.zeros_(model.get_parameter(name))
    model.config.architectures = [type(model).__name__]
    return value_model


def _token_classification(settings: PreTrainedConfig, path: str) -> type[PreTrainedModel]:
    """The family's class with a head for every token: transformers' own, or its generic one on the family's base."""
    if type(settings) in MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING:
        return MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING[type(settings)]
    if type(settings) not in MODEL_MAPPING:
        raise ValueError(
            f"critic.model.path={path}: transformers has no base of the family {settings.model_type} for a value head; "
            f"name a model of another family"
        )
    family = MODEL_MAPPING[type(settings)].__bases__[0]  # which knows the names of the layers to shard
    name = family.__name__.removesuffix("PreTrainedModel") + "ForTokenClassification"
    return type(name, (GenericForTokenClassification, family), {})
