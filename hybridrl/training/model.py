"""A Hugging Face causal language model that answers one question: the log-probs of given tokens.

Knows nothing of rewards or losses. Logits are formed in chunks of tokens and formed again in the backward pass, so that
[tokens, vocabulary] never exists as a whole.
"""

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from hybridrl.batch import Batch
from hybridrl.config.families import why_unsupported
from hybridrl.config.schema import ModelConfig
from hybridrl.training import attention
from hybridrl.training.packing import ModelInputs, lay_out

# Of float32 logits. On CUDA few large chunks: each adds its share to the head's gradient in that gradient's own type.
CHUNK_BYTES = {"cpu": 64 << 20, "cuda": 1 << 30}
# The largest difference of a log-prob, our way against the model's own, by the type that parameters are stored in.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.3, torch.float16: 0.1}


class LanguageModel(nn.Module):
    """Log-probs, and entropies where asked for, of the target tokens of packed rows [response tokens], in float32."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: ModelInputs, temperature: float, with_entropy: bool) -> tuple[Tensor, Tensor | None]:
        hidden = self.model.base_model(
            input_ids=inputs.input_ids,
            position_ids=inputs.position_ids,
            boundaries=inputs.boundaries,
            longest=inputs.longest,
            use_cache=False,
        ).last_hidden_state
        hidden = hidden.flatten(0, 1)[inputs.predictors]
        size = max(CHUNK_BYTES[hidden.device.type] // (4 * self.model.config.vocab_size), 1)
        head = self.model.get_output_embeddings()
        if len(hidden) <= size:
            log_probs, entropies = _token_log_probs(head, hidden, inputs.targets, temperature, with_entropy)
        else:
            chunks = zip(hidden.split(size), inputs.targets.split(size), strict=True)
            parts = [
                checkpoint(_token_log_probs, head, *chunk, temperature, with_entropy, use_reentrant=False)
                for chunk in chunks
            ]
            log_probs, entropies = (torch.cat(items) for items in zip(*parts, strict=True))
        return log_probs, entropies if with_entropy else None


def _token_log_probs(
    head: nn.Module, hidden: Tensor, targets: Tensor, temperature: float, with_entropy: bool
) -> tuple[Tensor, Tensor]:
    """Log-prob of each target [N] and entropy of its distribution [N] (empty where not asked for)."""
    logits = head(hidden).float() / temperature
    normaliser = logits.logsumexp(-1)
    log_probs = logits.gather(-1, targets[:, None]).squeeze(-1) - normaliser
    if not with_entropy:
        return log_probs, log_probs.new_empty(0)
    return log_probs, normaliser - ((logits - normaliser[:, None]).exp() * logits).sum(-1)


def load_language_model(config: ModelConfig, dtype: torch.dtype) -> LanguageModel:
    """The model of a directory or hub name, weights included, in host memory."""
    overrides = {"trust_remote_code": config.trust_remote_code, **config.override_config}
    settings = AutoConfig.from_pretrained(config.path, **overrides)
    reason = why_unsupported(settings.to_dict())
    if reason:
        raise ValueError(f"{config.path}: {reason}")
    model = AutoModelForCausalLM.from_pretrained(
        config.path,
        config=settings,
        dtype=dtype,
        attn_implementation=attention.NAME,
        trust_remote_code=config.trust_remote_code,
    )
    buffers = set(model.state_dict()) - {name for name, _ in model.named_parameters(remove_duplicate=False)}
    if buffers:
        raise ValueError(f"{config.path}: trained buffers are not handed over yet ({', '.join(sorted(buffers)[:3])})")
    if config.enable_gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return LanguageModel(model)


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
    ours, _ = language_model(lay_out(batch, padded), 1.0, with_entropy=False)
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
