"""A Hugging Face causal language model that answers for given tokens: log-probs, and what a loss may ask beside them.

Knows nothing of rewards or losses. Logits are formed in chunks of tokens and formed again in the backward pass, so that
[tokens, vocabulary] never exists as a whole. `hidden_states` serves the value model too.
"""

from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from hybridrl.batch import Batch
from hybridrl.config.schema import ModelConfig
from hybridrl.training import attention
from hybridrl.training.loading import blank_model, fill, load_settings
from hybridrl.training.packing import ModelInputs, lay_out
from hybridrl.training.sequence_parallel import of_all_slices, slice_of

HOST = torch.device("cpu")
# Of float32 logits. On CUDA few large chunks: each adds its share to the head's gradient in that gradient's own type.
CHUNK_BYTES = {"cpu": 64 << 20, "cuda": 1 << 30}
# The largest difference of a log-prob, our way against the model's own, by the type of the computation.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.3, torch.float16: 0.1}


# Named tuples: FSDP2 looks for tensors in what a model takes and returns, and not in every torch inside dataclasses.
class TokenOutputs(NamedTuple):
    """What a language model says of each response token, in float32; None where not asked for."""

    log_probs: Tensor  # [response tokens]
    entropies: Tensor | None = None  # [response tokens]
    sum_pi_squared: Tensor | None = None  # [response tokens] of all tokens' squared probabilities; without a gradient
    reference_kl: Tensor | None = None  # [response tokens] KL(policy || reference), exact


class LogitRule(NamedTuple):
    """What a family does to its logits after the head: scales them, and bends them so that none exceeds a cap."""

    scale: float = 1.0
    cap: float | None = None

    def __call__(self, logits: Tensor) -> Tensor:
        if self.scale != 1:
            logits = logits * self.scale
        return logits if self.cap is None else self.cap * torch.tanh(logits / self.cap)


def logit_rule(settings: PreTrainedConfig) -> LogitRule:
    """As the model's configuration has it: Cohere multiplies, Granite divides, Gemma caps."""
    told = settings.to_dict()
    scale = (told.get("logit_scale") or 1.0) / (told.get("logits_scaling") or 1.0)
    return LogitRule(scale, told.get("final_logit_softcapping"))


class ReferenceOutputs(NamedTuple):
    """From which a reference's logits of the same response tokens are formed: what its head sees, and the head."""

    hidden: Tensor  # [response tokens, width]
    head: Tensor  # [vocabulary, width], whole
    bias: Tensor | None = None  # [vocabulary]
    rule: LogitRule = LogitRule()


class LanguageModel(nn.Module):
    """Answers for the response tokens of packed rows. Logits, the reference's too, are divided by the temperature."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        self.rule = logit_rule(model.config)

    def forward(
        self,
        inputs: ModelInputs,
        temperature: float,
        *,
        entropies: bool = False,
        entropy_gradient: bool = False,
        sum_pi_squared: bool = False,
        against: ReferenceOutputs | None = None,
    ) -> TokenOutputs:
        hidden = hidden_states(self.model, inputs)
        form = partial(
            _token_outputs,
            self.model.get_output_embeddings(),
            self.rule,
            temperature=temperature,
            entropies=entropies,
            entropy_gradient=entropy_gradient,
            sum_pi_squared=sum_pi_squared,
        )
        logits_at_once = 1 if against is None else 2
        size = max(CHUNK_BYTES[hidden.device.type] // (4 * logits_at_once * self.model.config.vocab_size), 1)
        if len(hidden) <= size:
            return _of_all_slices(form(hidden, inputs.targets, against), inputs)
        hiddens, targets = hidden.split(size), inputs.targets.split(size)
        references = [None] * len(targets)
        if against is not None:
            references = [against._replace(hidden=part) for part in against.hidden.split(size)]
        chunks = zip(hiddens, targets, references, strict=True)
        parts = [checkpoint(form, *chunk, use_reentrant=False) for chunk in chunks]
        columns = (None if items[0] is None else torch.cat(items) for items in zip(*parts, strict=True))
        return _of_all_slices(TokenOutputs(*columns), inputs)

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
        boundaries=inputs.boundaries,
        longest=inputs.longest,
        sequence_group=inputs.shared and inputs.shared.group,
        use_cache=False,
    ).last_hidden_state
    return hidden.flatten(0, 1)[inputs.predictors]


def _of_all_slices(found: TokenOutputs, inputs: ModelInputs) -> TokenOutputs:
    return TokenOutputs(*(of_all_slices(column, inputs.shared) for column in found))


def _token_outputs(
    head: nn.Module,
    rule: LogitRule,
    hidden: Tensor,
    targets: Tensor,
    against: ReferenceOutputs | None,
    *,
    temperature: float,
    entropies: bool,
    entropy_gradient: bool,
    sum_pi_squared: bool,
) -> TokenOutputs:
    logits = rule(head(hidden).float())
    if temperature != 1:
        logits = logits / temperature
    normaliser = logits.logsumexp(-1)
    outputs = TokenOutputs(logits.gather(-1, targets[:, None]).squeeze(-1) - normaliser)
    if not entropies and not sum_pi_squared and against is None:
        return outputs
    training = torch.is_grad_enabled()
    with torch.set_grad_enabled(training and (entropy_gradient or against is not None)):
        probabilities = (logits - normaliser[:, None]).exp()
    if against is not None:
        with torch.no_grad():
            reference = against.rule(F.linear(against.hidden, against.head, against.bias).float()) / temperature
        expected_gap = (probabilities * (logits - reference)).sum(-1)
        outputs = outputs._replace(reference_kl=expected_gap - normaliser + reference.logsumexp(-1))
    if entropies:
        with torch.set_grad_enabled(training and entropy_gradient):
            outputs = outputs._replace(entropies=normaliser - (probabilities * logits).sum(-1))
    if sum_pi_squared:
        # The norm, squared, takes no second tensor of the vocabulary's size.
        outputs = outputs._replace(sum_pi_squared=torch.linalg.vector_norm(probabilities.detach(), dim=-1).square())
    return outputs


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

    So it is with families that do to their logits what no `LogitRule` knows, with attention that takes more than masks,
    windows and caps, and with layers that let rows which lie in one line see one another.
    """
    model = language_model.model
    ids = torch.arange(14) * 37 % min(model.config.vocab_size, 4096)
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
        way_out = "" if padded else "; set model.use_remove_padding=false, which lays rows out apart"
        if group is not None:
            way_out = f" by {group.size()} ranks together; set ulysses_sequence_parallel_size=1"
        raise ValueError(
            f"{model.config.model_type}: the trainer's log-probs differ by {gap:.2g} from the model's own, so this "
            f"family cannot be trained here{way_out}"
        )


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
