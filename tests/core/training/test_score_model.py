"""Scores of a reward model, against transformers' own classifier one row at a time."""

from copy import deepcopy
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, BertConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING

from hybridrl.config import ConfigError
from hybridrl.core.batch import token_rows
from hybridrl.core.training.loading import fill
from hybridrl.core.training.model import HOST, ValueModel, blank_score_model, new_head, packed_rows_interact
from hybridrl.core.training.packing import pack_rows
from tests.core.training.families import FAMILIES, SPECIAL, VOCABULARY, model_config

CLASSIFIED = {
    name: config
    for name, config in (FAMILIES | SPECIAL).items()
    if type(config) in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING
}
PADDING = 7  # the id that the models below pad with


@cache
def rows() -> list[list[int]]:
    """Rows of 1 to 15 tokens. The third has the padding id inside and at its end."""
    generator = torch.Generator().manual_seed(0)
    made = [torch.randint(VOCABULARY, (size,), generator=generator).tolist() for size in (5, 1, 9, 15, 2)]
    made[2][3:6] = made[2][-2:] = [PADDING] * 2
    return made


def saved(family: str, labels: int, directory: Path) -> PreTrainedModel:
    """Save a classifier, and return it as transformers computes it."""
    torch.manual_seed(1)
    config = deepcopy(CLASSIFIED[family])
    config.num_labels, config.eos_token_id, config.pad_token_id = labels, PADDING, PADDING
    model = AutoModelForSequenceClassification.from_config(config, attn_implementation="eager").eval()
    for buffer in dict(model.named_buffers()).values():
        if buffer.dim() and not buffer.any():  # a router's corrections, which begin as zeros
            torch.nn.init.normal_(buffer)
    model.save_pretrained(directory)
    model.config.get_text_config().pad_token_id = None  # else it looks for the last token that is none
    return model


def load(directory: Path, dtype: torch.dtype = torch.float32) -> ValueModel:
    model = blank_score_model(model_config(str(directory)), dtype).requires_grad_(False)
    fill(model.model, str(directory), HOST, new_head(model))
    return model.eval()


def scores(model: ValueModel, some: list[list[int]], *, padded: bool = False) -> Tensor:
    return model(pack_rows(token_rows(some, slice(-1, None)), padded, 0))


@torch.no_grad()
def one_by_one(model: PreTrainedModel) -> Tensor:
    return torch.stack([model(torch.tensor([row]), use_cache=False).logits[0, -1] for row in rows()])


@pytest.mark.parametrize("labels", [1, 2])
@pytest.mark.parametrize("family", CLASSIFIED)
def test_scores_match_transformers_classifier_one_row_at_a_time(family, labels, tmp_path):
    expected = one_by_one(saved(family, labels, tmp_path))
    model = load(tmp_path)
    assert expected.std() > 0.1
    for padded in (False, True):
        actual = scores(model, rows(), padded=padded)
        assert actual.shape == (5,) and actual.dtype == torch.float32
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


def test_there_are_twelve_families_and_more():
    assert len(CLASSIFIED) >= 12


def test_a_score_depends_on_no_other_row(tmp_path):
    saved("two heads a key", 1, tmp_path)
    model = load(tmp_path)
    alone = torch.cat([scores(model, [row]) for row in rows()])
    torch.testing.assert_close(scores(model, rows()[::-1]), alone.flip(0), atol=1e-6, rtol=1e-6)
    assert not packed_rows_interact(model)


def test_scores_of_a_half_precision_model_are_float32(tmp_path):
    saved("two heads a key", 1, tmp_path)
    actual = scores(load(tmp_path, torch.bfloat16), rows())
    assert actual.dtype == torch.float32 and not torch.equal(actual, actual.bfloat16().float())
    torch.testing.assert_close(actual, scores(load(tmp_path), rows()), atol=0.1, rtol=0)


def test_what_is_no_classifier_of_a_decoder_is_rejected_with_its_name(directory, tmp_path):
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1}
    BertConfig(**sizes, architectures=["BertForSequenceClassification"]).save_pretrained(tmp_path)
    with pytest.raises(
        ConfigError, match=f"model_path={tmp_path} is a BertForSequenceClassification: an encoder .*; name"
    ):
        blank_score_model(model_config(str(tmp_path)), torch.float32)
    with pytest.raises(
        ConfigError, match=f"reward.reward_model.model_path={directory} is a Qwen2ForCausalLM"
    ) as caught:
        blank_score_model(model_config(str(directory)), torch.float32)
    assert "hybridrl rm" in str(caught.value) and "reward.judge.base_url" in str(caught.value)


def test_a_frozen_classifier_whose_head_is_missing_is_rejected(directory, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(directory)
    model.save_pretrained(tmp_path)
    config = model.config
    config.architectures = ["Qwen2ForSequenceClassification"]
    config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"score\.weight"):
        load(tmp_path)
