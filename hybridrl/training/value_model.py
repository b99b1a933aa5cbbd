"""A Hugging Face model with a number for every token: what the state is worth in which the token was chosen.

Knows nothing of returns or losses. It is transformers' token classification with one label, so that a saved value model
loads there as such, and starts from any causal language model.
"""

import torch
from torch import Tensor, nn
from transformers import MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING, MODEL_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.modeling_layers import GenericForTokenClassification

from hybridrl.config.schema import ModelConfig
from hybridrl.training.loading import blank_model, fill, load_settings
from hybridrl.training.model import HOST, hidden_states
from hybridrl.training.packing import ModelInputs
from hybridrl.training.rows_apart import take_rows_apart
from hybridrl.training.sequence_parallel import of_all_slices


class ValueModel(nn.Module):
    """Values of the states in which the response tokens of packed rows were chosen [response tokens], in float32."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        take_rows_apart(model)
        self.head_name = next(name for name, child in model.named_children() if isinstance(child, nn.Linear))

    def forward(self, inputs: ModelInputs) -> Tensor:
        hidden = self.hidden_states(inputs)
        head = self.model.get_submodule(self.head_name)
        # Past transformers' dropout, which would make values noise; in float32, as bfloat16 rounds 0.9 by up to 0.002.
        values = hidden.float() @ head.weight[0].float()
        values = values if head.bias is None else values + head.bias.float()
        return of_all_slices(values, inputs.shared)

    def hidden_states(self, inputs: ModelInputs) -> Tensor:
        """What the head sees of a slice's or all rows' states [response tokens, width]."""
        return hidden_states(self.model, inputs)


def blank_value_model(config: ModelConfig, dtype: torch.dtype) -> ValueModel:
    """The value model of a directory, or a language model with a new head, without its weights."""
    settings = load_settings(config, num_labels=1)
    family = _token_classification(settings, config.path)
    model = ValueModel(blank_model(family._from_config, settings, config, dtype))
    model.model.config.architectures = [family.__name__]
    return model


def new_head(model: ValueModel) -> dict[str, Tensor]:
    """What stands for the head of a directory that has none: zeros.

    Values then start at 0 however large the hidden states are, and alike on every rank whatever its seed. With one
    output there is no symmetry to break: its gradient is the hidden state, so the first update teaches it.
    """
    head = model.model.get_submodule(model.head_name)
    return {f"{model.head_name}.{name}": torch.zeros(p.shape) for name, p in head.named_parameters()}


def load_value_model(config: ModelConfig, dtype: torch.dtype) -> ValueModel:
    """The value model that was saved in a directory, or a language model with a new head; whole, in host memory."""
    blank = blank_value_model(config, dtype)
    fill(blank.model, config.path, HOST, new_head(blank))
    return blank


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
