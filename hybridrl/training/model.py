"""A Hugging Face causal language model that answers for given tokens: log-probs, and what a loss may ask beside them.

Knows nothing of rewards or losses. `hidden_states` serves the value model too.
"""

from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from hybridrl.batch import Batch
from hybridrl.config.schema import ModelConfig
from hybridrl.training import attention
from hybridrl.training.linear_log_probs import token_outputs
from hybridrl.training.loading import blank_model, fill, load_settings
from hybridrl.training.packing import ModelInputs, lay_out
from hybridrl.training.rows_apart import take_rows_apart
from hybridrl.training.sequence_parallel import of_all_slices, slice_of
from hybridrl.training.token_outputs import Asked, Foresight, Head, LogitRule, ReferenceOutputs, TokenOutputs

HOST = torch.device("cpu")
MIXED = 0.1  # of a hidden state: by so much at least a row that sees another differs, and rounding makes less
# The largest difference of a log-prob, our way against the model's own, by the type of the computation.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.3, torch.float16: 0.1}


def logit_rule(settings: PreTrainedConfig) -> LogitRule:
    """As the model's configuration has it: Cohere multiplies, Granite divides, Gemma caps."""
    told = settings.to_dict()
    scale = (told.get("logit_scale") or 1.0) / (told.get("logits_scaling") or 1.0)
    return LogitRule(scale, told.get("final_logit_softcapping"))


class LanguageModel(nn.Module):
    """Answers for the response tokens of packed rows. Logits, the reference's too, are divided by the temperature."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        self.rule = logit_rule(model.config)
        take_rows_apart(model)

    def forward(
        self,
        inputs: ModelInputs,
        temperature: float,
        *,
        entropies: bool = False,
        entropy_gradient: bool = False,
        sum_pi_squared: bool = False,
        against: ReferenceOutputs | None = None,
        foresight: Foresight | None = None,
    ) -> TokenOutputs:
        """With a loss's foresight the gradient of just this loss takes less time."""
        if inputs.shared is not None:
            foresight = None  # a slice's outputs are not all that its rows' loss wants
        asked = Asked(temperature, entropies, entropy_gradient, sum_pi_squared, against, foresight)
        found = token_outputs(hidden_states(self.model, inputs), self.head, inputs.targets, asked)
        return TokenOutputs(*(of_all_slices(column, inputs.shared) for column in found))

    @property
    def head(self) -> Head:
        """Whole only while the model's own parameters are."""
        linear = self.model.get_output_embeddings()
        return Head(linear.weight, linear.bias, self.rule)

    def hidden_states(self, inputs: ModelInputs) -> Tensor:
        """What the head sees where it predicts the response tokens [response tokens, width]."""
        return hidden_states(self.model, inputs)

    def own_log_probs(self, row: Tensor) -> Tensor:
        """Log-probs of a row's tokens after the first, in the model's own forward pass."""
        logits = self.model(input_ids=row[None], use_cache=False).logits[0, :-1].float()
        return logits.log_softmax(-1).gather(-1, row[1:, None]).squeeze(-1)


def hidden_states(model: PreTrainedModel, inputs: ModelInputs) -> Tensor:
    """The base model's output at the predictors [response tokens, width], of a slice at its own."""
    hidden = model.base_model(
        input_ids=inputs.input_ids,
        position_ids=inputs.position_ids,
        line=inputs.line,
        use_cache=False,
    ).last_hidden_state
    return hidden.flatten(0, 1)[inputs.predictors]


def blank_language_model(config: ModelConfig, dtype: torch.dtype) -> LanguageModel:
    """The model of a directory or hub name without its weights, which `fill` reads once it is sharded."""
    settings = load_settings(config)
    make = partial(AutoModelForCausalLM.from_config, trust_remote_code=config.trust_remote_code)
    return LanguageModel(blank_model(make, settings, config, dtype))


def load_language_model(config: ModelConfig, dtype: torch.dtype) -> LanguageModel:
    """The model of a directory or hub name, whole, in host memory."""
    blank = blank_language_model(config, dtype)
    fill(blank.model, config.path, HOST)
    return blank


@torch.no_grad()
def rows_mix(model: nn.Module, device: torch.device = HOST) -> bool:
    """Whether rows that lie in one line see one another, as with attention that takes no boundaries; collective, of a
    sharded model. Of hidden states, since a new value head makes zeros of all."""
    settings, training = model.model.config, model.training
    batch = _two_rows(_some_tokens(settings))
    model.eval()
    in_line, apart = (model.hidden_states(lay_out(batch, padded).to(device)).float() for padded in (False, True))
    model.train(training)
    return bool(((in_line - apart).norm(dim=-1) > MIXED * apart.norm(dim=-1)).any())


@torch.no_grad()
def check_log_probs(
    language_model: LanguageModel,
    dtype: torch.dtype,
    device: torch.device = HOST,
    *,
    padded: bool,
    group: ProcessGroup | None = None,
) -> None:
    """Refuse a model that computes in this type and whose log-probs come out otherwise here than in its own forward
    pass, one row at a time; collective, of a sharded one.

    So it is with families that do to their logits what no `LogitRule` knows, and with attention that takes more than
    masks, windows, caps and sinks.
    """
    model = language_model.model
    ids = _some_tokens(model.config)
    batch = _two_rows(ids)
    training = model.training
    language_model.eval()
    ours = language_model(slice_of(lay_out(batch, padded), group).to(device), 1.0).log_probs
    model.set_attn_implementation("eager")
    theirs = [language_model.own_log_probs(row) for row in ids.to(device).split([5, 9])]
    model.set_attn_implementation(attention.NAME)
    language_model.train(training)
    gap = float((ours - torch.cat(theirs)).abs().max())
    if not gap <= TOLERANCE[dtype]:
        together = ""
        if group is not None:
            together = f" by {group.size()} ranks together; set ulysses_sequence_parallel_size=1"
        raise ValueError(
            f"{model.config.model_type}: the trainer's log-probs differ by {gap:.2g} from the model's own, so this "
            f"family cannot be trained here{together}"
        )


def _some_tokens(settings: PreTrainedConfig) -> Tensor:
    return torch.arange(14) * 37 % min(settings.get_text_config().vocab_size, 4096)


def _two_rows(ids: Tensor) -> Batch:
    """Rows of 5 and 9 tokens, of each of which the first is the prompt."""
    numbers = torch.arange(2)
    return Batch(
        prompt_lengths=torch.ones(2, dtype=torch.int64),
        response_lengths=torch.tensor([4, 8]),
        prompt_ids=ids[[0, 5]],
        response_ids=torch.cat([ids[1:5], ids[6:]]),
        group=numbers,
        position=numbers,
        sample=numbers,
    )
