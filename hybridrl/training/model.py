"""A Hugging Face causal language model that answers for given tokens: log-probs, and what a loss may ask beside them.

Knows nothing of rewards or losses. Logits are formed in chunks of tokens and formed again in the backward pass, so that
[tokens, vocabulary] never exists as a whole. `hidden_states` and the loading serve the value model too.
"""

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.utils import GENERATION_CONFIG_NAME

from hybridrl.batch import Batch
from hybridrl.checkpoint.read import open_tensors
from hybridrl.config.families import why_unsupported
from hybridrl.config.model_directory import is_sharded, resolve_model
from hybridrl.config.schema import ModelConfig
from hybridrl.training import attention
from hybridrl.training.packing import ModelInputs, lay_out

# Of float32 logits. On CUDA few large chunks: each adds its share to the head's gradient in that gradient's own type.
CHUNK_BYTES = {"cpu": 64 << 20, "cuda": 1 << 30}
# The largest difference of a log-prob, our way against the model's own, by the type that parameters are stored in.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.3, torch.float16: 0.1}


# Named tuples: FSDP2 looks for tensors in what a model takes and returns, and not in every torch inside dataclasses.
class TokenOutputs(NamedTuple):
    """What a language model says of each response token, in float32; None where not asked for."""

    log_probs: Tensor  # [response tokens]
    entropies: Tensor | None = None  # [response tokens]
    sum_pi_squared: Tensor | None = None  # [response tokens] of all tokens' squared probabilities; without a gradient
    reference_kl: Tensor | None = None  # [response tokens] KL(policy || reference), exact


class ReferenceOutputs(NamedTuple):
    """From which a reference's logits of the same response tokens are formed: what its head sees, and the head."""

    hidden: Tensor  # [response tokens, width]
    head: Tensor  # [vocabulary, width], whole
    bias: Tensor | None = None  # [vocabulary]


class LanguageModel(nn.Module):
    """Answers for the response tokens of packed rows. Logits, the reference's too, are divided by the temperature."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

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
            temperature=temperature,
            entropies=entropies,
            entropy_gradient=entropy_gradient,
            sum_pi_squared=sum_pi_squared,
        )
        logits_at_once = 1 if against is None else 2
        size = max(CHUNK_BYTES[hidden.device.type] // (4 * logits_at_once * self.model.config.vocab_size), 1)
        if len(hidden) <= size:
            return form(hidden, inputs.targets, against)
        hiddens, targets = hidden.split(size), inputs.targets.split(size)
        references = [None] * len(targets)
        if against is not None:
            references = [against._replace(hidden=part) for part in against.hidden.split(size)]
        chunks = zip(hiddens, targets, references, strict=True)
        parts = [checkpoint(form, *chunk, use_reentrant=False) for chunk in chunks]
        return TokenOutputs(*(None if items[0] is None else torch.cat(items) for items in zip(*parts, strict=True)))

    def hidden_states(self, inputs: ModelInputs) -> Tensor:
        """What the head sees where it predicts the response tokens [response tokens, width]."""
        return hidden_states(self.model, inputs)


def hidden_states(model: PreTrainedModel, inputs: ModelInputs) -> Tensor:
    """The base model's output at the predictors [response tokens, width]."""
    hidden = model.base_model(
        input_ids=inputs.input_ids,
        position_ids=inputs.position_ids,
        boundaries=inputs.boundaries,
        longest=inputs.longest,
        use_cache=False,
    ).last_hidden_state
    return hidden.flatten(0, 1)[inputs.predictors]


def _token_outputs(
    head: nn.Module,
    hidden: Tensor,
    targets: Tensor,
    against: ReferenceOutputs | None,
    *,
    temperature: float,
    entropies: bool,
    entropy_gradient: bool,
    sum_pi_squared: bool,
) -> TokenOutputs:
    logits = head(hidden).float()
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
            reference = F.linear(against.hidden, against.head, against.bias).float() / temperature
        expected_gap = (probabilities * (logits - reference)).sum(-1)
        outputs = outputs._replace(reference_kl=expected_gap - normaliser + reference.logsumexp(-1))
    if entropies:
        with torch.set_grad_enabled(training and entropy_gradient):
            outputs = outputs._replace(entropies=normaliser - (probabilities * logits).sum(-1))
    if sum_pi_squared:
        # The norm, squared, takes no second tensor of the vocabulary's size.
        outputs = outputs._replace(sum_pi_squared=torch.linalg.vector_norm(probabilities.detach(), dim=-1).square())
    return outputs


def load_language_model(config: ModelConfig, dtype: torch.dtype) -> LanguageModel:
    """The model of a directory or hub name, weights included, in host memory."""
    settings = load_settings(config)
    model, missing = load_pretrained(_causal_language_model(settings, config.path), settings, config, dtype)
    refuse_missing(missing, config)
    return LanguageModel(model)


def _causal_language_model(settings: PreTrainedConfig, path: str) -> type:
    """The class to load, which for weights in shards has to be the family's own."""
    if not is_sharded(path):
        return AutoModelForCausalLM
    if type(settings) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(
            f"{path}: {settings.model_type} brings its own code, and cannot be read from a saved step; merge it first "
            f"(python -m hybridrl.model_merger) and name the merged model"
        )
    return MODEL_FOR_CAUSAL_LM_MAPPING[type(settings)]


def load_settings(config: ModelConfig, **changes: object) -> PreTrainedConfig:
    """The model's own configuration; ValueError where the trainer would compute such a model wrongly."""
    overrides = {"trust_remote_code": config.trust_remote_code, **config.override_config, **changes}
    settings = AutoConfig.from_pretrained(str(resolve_model(config.path)), **overrides)
    reason = why_unsupported(settings.to_dict())
    if reason:
        raise ValueError(f"{config.path}: {reason}")
    return settings


def load_pretrained(
    model_class: type, settings: PreTrainedConfig, config: ModelConfig, dtype: torch.dtype
) -> tuple[PreTrainedModel, set[str]]:
    """The weights as a model of this class, and the names of the parameters that the directory has none for."""
    model, report = model_class.from_pretrained(
        **_source(config.path, dtype),
        config=settings,
        dtype=dtype,
        attn_implementation=attention.NAME,
        trust_remote_code=config.trust_remote_code,
        output_loading_info=True,
    )
    buffers = set(model.state_dict()) - {name for name, _ in model.named_parameters(remove_duplicate=False)}
    if buffers:
        raise ValueError(f"{config.path}: trained buffers are not handed over yet ({', '.join(sorted(buffers)[:3])})")
    if config.enable_gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model, set(report["missing_keys"])


def _source(path: str, dtype: torch.dtype) -> dict[str, Any]:
    """Where transformers finds weights and generation config: in a directory, or here where they lie in shards."""
    directory = resolve_model(path)
    if not is_sharded(path):
        return {"pretrained_model_name_or_path": str(directory)}
    saved = open_tensors(Path(path))
    settled = (directory / GENERATION_CONFIG_NAME).is_file()
    return {
        "pretrained_model_name_or_path": None,
        "state_dict": {name: saved.read(name).to(dtype) for name in saved.meta},
        "generation_config": GenerationConfig.from_pretrained(directory) if settled else None,
    }


def refuse_missing(names: Iterable[str], config: ModelConfig) -> None:
    """Refuse a directory that lacks weights of these names: they would be random numbers."""
    if names := sorted(names):
        raise ValueError(f"{config.path}: {len(names)} of the model's weights are not there ({', '.join(names[:3])})")


@torch.no_grad()
def check_log_probs(language_model: LanguageModel, *, padded: bool) -> None:
    """Refuse a model whose log-probs come out otherwise here than in its own forward pass, one row at a time.

    So it is with families that change logits after the head, with attention that takes more than masks and windows, and
    with layers that let rows which lie in one line see one another.
    """
    model = language_model.model
    ids = torch.arange(14) * 37 % min(model.config.vocab_size, 4096)
    batch = _two_rows(ids)
    training = model.training
    language_model.eval()
    ours = language_model(lay_out(batch, padded), 1.0).log_probs
    model.set_attn_implementation("eager")
    theirs = [_own_log_probs(model, row) for row in ids.split([5, 9])]
    model.set_attn_implementation(attention.NAME)
    language_model.train(training)
    gap = float((ours - torch.cat(theirs)).abs().max())
    if not gap <= TOLERANCE[model.dtype]:
        way_out = "" if padded else "; set model.use_remove_padding=false, which lays rows out apart"
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


def _own_log_probs(model: PreTrainedModel, row: Tensor) -> Tensor:
    logits = model(input_ids=row[None], use_cache=False).logits[0, :-1].float()
    return logits.log_softmax(-1).gather(-1, row[1:, None]).squeeze(-1)


def layer_classes(model: PreTrainedModel, named: str | list[str] | None) -> set[str]:
    """Class names of the layers to shard one by one: those named, or those the model says must not be split."""
    if named:
        return {named} if isinstance(named, str) else set(named)
    return set(model._no_split_modules or [])
