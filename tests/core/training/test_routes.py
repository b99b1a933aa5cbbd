"""Router replay in the trainer: the experts are the given ones, and everything else is the family's own."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DeepseekV2Config, PhimoeConfig, PreTrainedConfig

from hybridrl.core.batch import Batch
from hybridrl.core.carried import UNROUTED
from hybridrl.core.training.model import LanguageModel, check_replay
from hybridrl.core.training.packing import pack_rows
from hybridrl.core.training.routes import RouterReplay
from hybridrl.required import required
from tests.core.training.families import SMALL
from tests.core.training.test_layout import FAMILIES, GROUPED, LATENT, MIXTURE

MIXTURES = {name: config for name, config in FAMILIES.items() if name != "dense"} | {
    "groups, with the scores of the experts as weights": DeepseekV2Config(
        **SMALL,
        **MIXTURE,
        **GROUPED,
        **LATENT,
        n_group=4,
        topk_group=2,
        topk_method="group_limited_greedy",
    )
}


def replaying(config: PreTrainedConfig) -> LanguageModel:
    torch.manual_seed(0)
    model = LanguageModel(AutoModelForCausalLM.from_config(config).eval())
    model.replay = RouterReplay(model.model)
    return model


@pytest.fixture
def rows(make_batch) -> Batch:
    batch = make_batch([4, 1, 7], prompts=[2, 5, 1])
    for ids in (batch.prompt_ids, batch.response_ids):
        ids.copy_(torch.arange(len(ids)) * 7 % SMALL["vocab_size"])
    return batch


def choices(model: LanguageModel, rows: Batch, *, padded: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probs, and the experts that each layer's experts get, with their weights [tokens, layers, experts]."""
    inputs: list[tuple[Tensor, Tensor]] = []
    found = [module for name, module in model.model.named_modules() if name.endswith(".experts")]
    hooks = [one.register_forward_pre_hook(lambda module, given: inputs.append(given[1:3])) for one in found]
    with torch.no_grad():
        log_probs = model(pack_rows(rows, padded), 1.0).log_probs
    for hook in hooks:
        hook.remove()
    experts, weights = (torch.stack(parts, 1) for parts in zip(*inputs, strict=True))
    if padded:
        longest = int(rows.lengths.max())
        real = torch.cat([torch.arange(length) + longest * row for row, length in enumerate(rows.lengths.tolist())])
        experts, weights = experts[real], weights[real]
    layers = SMALL["num_hidden_layers"] - experts.shape[1]  # the first may be dense
    return log_probs, torch.cat([torch.zeros_like(experts[:, :1])] * layers + [experts], 1), weights


@pytest.mark.parametrize("family", MIXTURES)
def test_with_its_own_experts_a_model_computes_what_it_does_without(rows, family) -> None:
    model = replaying(MIXTURES[family])
    log_probs, experts, weights = choices(model, rows)
    again, same, same_weights = choices(model, replace(rows, carried={"routes": experts.to(torch.int16)}))
    assert torch.equal(again, log_probs) and torch.equal(same_weights, weights)
    assert torch.equal(same, experts)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("family", MIXTURES)
def test_other_experts_are_used_and_weighted_as_the_family_does(rows, family, padded) -> None:
    model = replaying(MIXTURES[family])
    before, own, _ = choices(model, rows, padded=padded)
    routes = (own + 1) % 8
    routes[::3] = UNROUTED  # these tokens keep their own
    after, chosen, others = choices(model, replace(rows, carried={"routes": routes.to(torch.int16)}), padded=padded)
    first = SMALL["num_hidden_layers"] - others.shape[1]
    assert torch.equal(chosen[1::3, first:], routes[1::3, first:])
    assert torch.equal(chosen[::3, first], own[::3, first])
    assert (before - after).abs().max() > 1e-3
    assert others.isfinite().all() and (others > 0).all()


def by_hand(scores: Tensor, chosen: Tensor, family: str) -> Tensor:
    """The weights of experts by their scores, as papers and reports of the families state them."""
    if family == "a mixture":  # Qwen3: a softmax over all, then the chosen add up to 1
        weights = scores.softmax(-1).gather(-1, chosen)
        return weights / weights.sum(-1, keepdim=True)
    if family == "attention sinks":  # gpt-oss: a softmax over the chosen
        return scores.gather(-1, chosen).softmax(-1)
    weights = scores.sigmoid().gather(-1, chosen)  # DeepSeek-V3: affinities that add up to 1, times a factor
    return weights / weights.sum(-1, keepdim=True) * FAMILIES[family].routed_scaling_factor


@pytest.mark.parametrize("family", ["a mixture", "attention sinks", "latent attention"])
def test_the_weights_of_given_experts_are_those_worked_out_by_hand(rows, family) -> None:
    model = replaying(MIXTURES[family])
    scores: list[Tensor] = []
    router = next(module for name, module in model.model.named_modules() if name.endswith((".gate", ".router")))
    router.register_forward_hook(lambda module, given, output: scores.append(output[0].detach()))
    routes = torch.tensor([5, 2]).expand(int(rows.lengths.sum()), 2, -1).to(torch.int16)
    _, chosen, weights = choices(model, replace(rows, carried={"routes": routes}))
    assert (chosen[:, -1] == torch.tensor([5, 2])).all()
    torch.testing.assert_close(weights[:, 0].float(), by_hand(scores[0].float(), routes[:, 0].long(), family))


def test_the_share_of_experts_that_the_routers_would_not_have_chosen(rows) -> None:
    model = replaying(MIXTURES["a mixture"])
    scores: list[Tensor] = []
    for name, module in model.model.named_modules():
        if name.endswith(".gate"):
            module.register_forward_hook(lambda module, given, output: scores.append(output[0].detach()))
    routes = torch.tensor([5, 2]).expand(int(rows.lengths.sum()), 2, -1).to(torch.int16)
    inputs = pack_rows(replace(rows, carried={"routes": routes}), padded=False)
    model(inputs, 1.0)
    own = torch.stack(scores, 1).topk(2).indices  # [tokens, layers, experts of a token]
    kept = torch.stack([(own == expert).any(-1) for expert in (5, 2)]).float().mean((0, 2))
    found = model.route_statistics(inputs)
    replaced = found["replaced_experts"]
    assert torch.equal(replaced, (1 - kept)[inputs.predictors]) and 0 < float(replaced.mean()) < 1
    assert not found["tokens_without_routes"].any()
    routes = routes.clone()
    routes[inputs.predictors[:2]] = UNROUTED
    inputs = pack_rows(replace(rows, carried={"routes": routes}), padded=False)
    model(inputs, 1.0)
    found = model.route_statistics(inputs)
    assert found["tokens_without_routes"].tolist() == [1, 1, *[0] * 10] and not found["replaced_experts"][:2].any()
    inputs = pack_rows(rows, padded=False)
    model(inputs, 1.0)
    assert model.route_statistics(inputs)["tokens_without_routes"].all()


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_gradient_reaches_the_router_through_the_weights_of_given_experts(rows, checkpointing) -> None:
    model = replaying(MIXTURES["a mixture"])
    if checkpointing:
        model.model.gradient_checkpointing_enable({"use_reentrant": False})
    routes = torch.tensor([5, 2]).expand(int(rows.lengths.sum()), 2, -1).to(torch.int16)
    model.train()
    model(pack_rows(replace(rows, carried={"routes": routes}), padded=False), 1.0).log_probs.sum().backward()
    for name, parameter in model.named_parameters():
        if name.endswith(".gate.weight"):
            norms = required(parameter.grad).norm(dim=-1)
            assert norms[[5, 2]].min() > 1e-4
        if "experts" in name:
            others = [expert for expert in range(8) if expert not in (5, 2)]
            assert required(parameter.grad)[[5, 2]].abs().amax((1, 2)).min() > 0
            assert not required(parameter.grad)[others].any()


def test_a_family_whose_choice_cannot_be_replaced_is_rejected_by_name() -> None:
    model = replaying(PhimoeConfig(**SMALL, num_key_value_heads=2, num_local_experts=8, num_experts_per_tok=2))
    with pytest.raises(ValueError, match=r"phimoe: layer 0 does not choose its experts in a way .*mode=disabled"):
        check_replay(model, padded=False)


def test_a_dense_model_is_rejected_by_name() -> None:
    with pytest.raises(ValueError, match=r"qwen3: no layer chooses its experts in a way that can be replayed; set"):
        replaying(FAMILIES["dense"])


@pytest.mark.parametrize("family", MIXTURES)
def test_families_pass_the_check_at_the_start(family) -> None:
    model = replaying(MIXTURES[family])
    check_replay(model, padded=False)
