"""A Hugging Face causal language model that answers one question: the log-probs of given tokens.

Knows nothing of rewards or losses. Logits are formed in chunks of tokens and formed again in the backward pass, so that
[tokens, vocabulary] never exists as a whole.
"""

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from hybridrl.config.families import why_unsupported
from hybridrl.config.schema import ModelConfig
from hybridrl.training import attention
from hybridrl.training.packing import ModelInputs

CHUNK_BYTES = 64 << 20  # of float32 logits


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
        size = max(CHUNK_BYTES // (4 * self.model.config.vocab_size), 1)
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
    if config.enable_gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return LanguageModel(model)


def layer_classes(model: PreTrainedModel, named: str | list[str] | None) -> set[str]:
    """Class names of the layers to shard one by one: those named, or those the model says must not be split."""
    if named:
        return {named} if isinstance(named, str) else set(named)
    return set(model._no_split_modules or [])
