"""The merged directory loaded by transformers, against the same model filled with the checkpoint's own tensors."""

from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hybridrl.checkpoint.tensors import UNREADABLE
from hybridrl.model_merger.source import CheckFailed, Source

TOKENS = 64
ATTENTION = "eager"  # the one that computes every family as it is: others leave out the caps of Gemma 2


def check_in_transformers(source: Source, directory: Path) -> str:
    """Refuse a directory that answers otherwise for fixed tokens. Returns what was found, in words."""
    ids = torch.arange(TOKENS) * 37 % source.model.config.get_text_config().vocab_size
    expected = answers(own_model(source), ids)
    try:
        merged = type(source.model).from_pretrained(directory, dtype="auto", attn_implementation=ATTENTION)
    except UNREADABLE as error:
        raise CheckFailed(f"transformers cannot load what was written ({str(error).splitlines()[0]})") from error
    gap = float((answers(merged, ids) - expected).abs().max())
    kind = "values" if source.gives_values else "log-probs"
    if gap != 0:
        raise CheckFailed(f"in transformers {kind} differ by up to {gap:.2g} from those of the checkpoint")
    return f"{kind} for {TOKENS} tokens equal"


def own_model(source: Source) -> PreTrainedModel:
    """The checkpoint's model in memory, past all that was written."""
    tensors = {name: source.read(name) for name in source.names}
    kind, settings = type(source.model), source.model.config
    options = {"dtype": source.dtype, "attn_implementation": ATTENTION}
    return kind.from_pretrained(None, config=settings, state_dict=tensors, **options)


@torch.no_grad()
def answers(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Log-probs of all but the first token, or a value model's values of all, in float32."""
    logits = model.eval()(input_ids=ids[None], use_cache=False).logits[0].float()
    if not model.can_generate():
        return logits
    return logits[:-1].log_softmax(-1).gather(-1, ids[1:, None]).squeeze(-1)
