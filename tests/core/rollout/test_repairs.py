"""Repairs of vLLM that families need; `scripts/benchmark/families.py` tries them with engines."""

from functools import partial
from typing import Any

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.activation import XIELU
from vllm.model_executor.layers.fused_moe.router.cpu_router import select_experts
from vllm.model_executor.model_loader.reload import initialize_layerwise_reload, record_metadata_for_reloading
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler
from vllm.v1.sample.sampler import Sampler

from hybridrl.core.rollout.vllm.repairs import name_weight_loaders


def load_part(param: torch.nn.Parameter, loaded_weight: torch.Tensor, *, part: int) -> None:
    param.data.copy_(loaded_weight.chunk(2)[part])


def weight_of(model: torch.nn.Module) -> Any:
    (weight,) = model.parameters()
    return weight


def test_a_weight_whose_loader_is_a_partial_function_is_reloaded_as_one_with_a_named_loader():
    """As the norms of MiniMax-M2's queries and keys, of which each rank loads a part."""
    model = torch.nn.Sequential(torch.nn.RMSNorm(2))
    weight_of(model).weight_loader = partial(load_part, part=1)
    record_metadata_for_reloading(model)
    name_weight_loaders(model)
    initialize_layerwise_reload(model)
    weight_of(model).weight_loader(weight_of(model), torch.tensor([1.0, 2.0, 3.0, 4.0]))
    assert weight_of(model).tolist() == [3.0, 4.0]


def test_experts_are_selected_by_corrected_sigmoids_without_groups():
    """Sigmoids of 0.5, 0.881 and 0.731, corrected to 1.5, -0.119 and 0.731: the first and the last expert, whose
    weights are their sigmoids divided by the sum of both, 1.231."""
    logits, corrections = torch.tensor([[0.0, 2.0, 1.0]]), torch.tensor([1.0, -1.0, 0.0])
    options = {"scoring_func": "sigmoid", "e_score_correction_bias": corrections, "renormalize": True}
    weights, experts = select_experts(torch.zeros(1, 4), logits, top_k=2, use_grouped_topk=False, **options)
    weight_of = dict(zip(experts[0].tolist(), weights[0].tolist(), strict=True))
    assert weight_of == {0: pytest.approx(0.4062, abs=1e-4), 2: pytest.approx(0.5938, abs=1e-4)}


def test_the_parameters_of_apertus_activation_have_the_type_of_the_model():
    """The logarithm of exp(0.8) - 1 is 0.2034, and in bfloat16 0.2031."""
    with set_current_vllm_config(VllmConfig()):
        activation = XIELU()
    assert activation.alpha_p.dtype == activation.beta.dtype == torch.float32
    assert activation.alpha_p.item() == pytest.approx(0.2034, abs=5e-5)


def test_log_probs_of_a_large_vocabulary_are_not_too_high_wherever_the_sampler_computes_them():
    """Most of 262,144 probabilities are below what float32 adds to a sum near 1: torch loses 1e-5 of them."""
    logits = torch.randn(2, 262144, generator=torch.Generator().manual_seed(0)) * 3
    right = logits.double().log_softmax(-1)
    torch.testing.assert_close(Sampler.compute_logprobs(logits).double(), right, atol=4e-6, rtol=0)
    sampled, found = TopKTopPSampler("processed_logprobs").forward(logits.clone(), {}, torch.tensor([1, 262144]), None)
    assert found[0, sampled[0]] == 0 and found[0].isneginf().sum() == 262143
    torch.testing.assert_close(found[1].double(), right[1], atol=4e-6, rtol=0)


def test_log_probs_of_a_row_do_not_depend_on_the_rows_beside_it():
    logits = torch.randn(64, 65600, generator=torch.Generator().manual_seed(0)) * 3
    together = Sampler.compute_logprobs(logits)
    assert torch.equal(torch.cat([Sampler.compute_logprobs(row[None]) for row in logits]), together)
    torch.testing.assert_close(
        Sampler.compute_logprobs(logits[:, :999]), logits[:, :999].double().log_softmax(-1).float()
    )
    torch.testing.assert_close(logits.log_softmax(0), logits.double().softmax(0).log().float())
