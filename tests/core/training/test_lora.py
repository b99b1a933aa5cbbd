from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, PreTrainedModel

from hybridrl.config import ConfigError
from hybridrl.config.schema import FurtherLoRAConfig
from hybridrl.core.batch import Batch
from hybridrl.core.training.fsdp import full_tensor, reshard, shard_and_fill
from hybridrl.core.training.layout import layout
from hybridrl.core.training.lora import add_adapter, export_adapter, load_adapter
from hybridrl.core.training.model import (
    HOST,
    LanguageModel,
    adapter_off,
    adapter_parameters,
    blank_language_model,
    blank_value_model,
    pairs,
    without_pairs,
)
from hybridrl.core.training.optimizer import Optimizers
from hybridrl.core.training.packing import pack_rows
from hybridrl.core.training.state import Sender, state_of
from hybridrl.core.weights.buckets import buffer_bytes
from hybridrl.required import required
from hybridrl.runs.models import check_adapter
from tests.core.training.families import load_language_model, load_value_model, model_config
from tests.core.training.on_ranks import on_ranks
from tests.core.training.test_state import fsdp_config, optimizer_config

FLOAT = torch.float32


def adapted(directory: str, seed: int = 0, **changes: object) -> LanguageModel:
    config = model_config(directory, lora_rank=2, **changes)
    loaded = load_language_model(config, FLOAT)
    add_adapter(loaded.model, config, FLOAT, seed, "model")
    if config.lora_adapter_path:
        load_adapter(loaded.model, Path(config.lora_adapter_path))
    return loaded


def base_parameters(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    with without_pairs(model):
        return {name: full_tensor(value.detach()) for name, value in model.named_parameters()}


def with_noise(model: LanguageModel) -> LanguageModel:
    """An adapter with an effect: B is no longer zero."""
    generator = torch.Generator().manual_seed(1)
    for name, value in adapter_parameters(model.model).items():
        if "lora_B" in name:
            value.data = 0.3 * torch.randn(value.shape, generator=generator)
    return model


def log_probs(model: LanguageModel, rows: Batch) -> torch.Tensor:
    return model(pack_rows(rows, padded=False), 1.0).log_probs


def test_a_new_adapter_changes_nothing_and_only_it_is_trained(directory, rows):
    model, plain = adapted(directory), load_language_model(model_config(directory), FLOAT)
    assert torch.equal(log_probs(model, rows), log_probs(plain, rows))
    log_probs(model, rows).sum().backward()
    with_gradient = {name for name, value in model.model.named_parameters() if value.grad is not None}
    assert with_gradient and all(".lora_" in name for name in with_gradient)


def test_the_base_model_keeps_its_names_under_the_adapter(directory):
    model, plain = adapted(directory), load_language_model(model_config(directory), FLOAT)
    result, expected = base_parameters(model.model), dict(plain.model.named_parameters())
    assert list(result) == list(expected) and all(torch.equal(result[name], expected[name]) for name in expected)
    assert pairs(model.model) and not pairs(plain.model)


def test_an_adapters_initial_values_follow_from_the_seed_alone(directory):
    torch.manual_seed(1)
    one = adapter_parameters(adapted(directory).model)
    torch.manual_seed(2)
    state = torch.get_rng_state()
    other = adapter_parameters(adapted(directory).model)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(one[name], other[name]) for name in one)
    third = adapter_parameters(adapted(directory, seed=1).model)
    assert not all(torch.equal(one[name], third[name]) for name in one)


def test_all_linear_excludes_embedding_and_head(directory):
    names = {name.rsplit(".", 2)[-2] for name in pairs(adapted(directory).model)}
    assert names == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


@pytest.mark.parametrize(
    ("targets", "exclude", "expected"),
    [
        (["q_proj", "1.self_attn.k_proj"], [], ["0.self_attn.q_proj", "1.self_attn.k_proj", "1.self_attn.q_proj"]),
        (["0.self_attn.q_proj"], [], ["0.self_attn.q_proj"]),
        ([r".*\.1\.mlp\..*"], [], ["1.mlp.gate_proj", "1.mlp.up_proj", "1.mlp.down_proj"]),
        (["q_proj"], [r".*visual.*"], ["0.self_attn.q_proj", "1.self_attn.q_proj"]),
        (["all-linear"], [".*mlp.*", "k_proj", "o_proj", "v_proj"], ["0.self_attn.q_proj", "1.self_attn.q_proj"]),
    ],
)  # fmt: skip
def test_layers_are_named_by_the_ends_of_their_names_or_by_regular_expressions(directory, targets, exclude, expected):
    model = adapted(directory, target_modules=targets, exclude_modules=exclude).model
    assert sorted(pairs(model)) == sorted(f"model.layers.{name}.weight" for name in expected)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target_modules": ["q_porj"]}, "model.target_modules: q_porj is not a linear layer of .*; nearest: q_proj"),
        ({"target_modules": ["q_proj", "linear_qkv"]}, "linear_qkv is not a linear layer .*: down_proj, gate_proj"),
        ({"target_modules": ["lm_head"]}, "lm_head is not a linear layer"),
        ({"exclude_modules": ["q_porj"]}, "model.exclude_modules: q_porj is not a linear layer"),
        ({"target_modules": ["*.q_proj"]}, "is not a valid regular expression"),
        ({"target_modules": ["q_proj"], "exclude_modules": ["q_proj"]}, "no layer of .* is left to adapt"),
    ],
)  # fmt: skip
def test_missing_layers_are_rejected_before_any_weight_is_read(directory, changes, message):
    with pytest.raises(ConfigError, match=message):
        check_adapter(model_config(directory, lora_rank=2, **changes), "model")


def test_the_number_of_trained_parameters_is_reported_without_reading_weights(directory):
    model = adapted(directory, target_modules=["q_proj"])
    trained = sum(value.numel() for value in adapter_parameters(model.model).values())
    assert trained == 2 * (2 * 32 + 32 * 2)  # two layers, each with A [2, 32] and B [32, 2]
    description = check_adapter(model_config(directory, lora_rank=2, target_modules=["q_proj"]), "model")
    total = sum(value.numel() for value in base_parameters(model.model).values())
    assert all(said in description for said in ("rank 2 on q_proj", f" {trained:,} parameters", f"{total:,})"))


def test_turned_off_it_is_the_base_model_and_it_still_has_gradients_afterwards(directory, rows):
    plain, model = load_language_model(model_config(directory), FLOAT), with_noise(adapted(directory))
    before = log_probs(model, rows)
    with adapter_off(model.model):
        torch.testing.assert_close(log_probs(model, rows), log_probs(plain, rows), atol=0, rtol=0)
    assert torch.equal(log_probs(model, rows), before)
    assert not torch.allclose(log_probs(plain, rows), before, atol=0.1)
    log_probs(model, rows).sum().backward()
    assert all(value.grad is not None for value in adapter_parameters(model.model).values())


def test_an_exported_adapter_loads_in_peft_and_here(directory, rows, tmp_path):
    model = with_noise(adapted(directory, lora_alpha=6))
    export_adapter(model.model, tmp_path, writes=True)
    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(directory, dtype=FLOAT), tmp_path)
    merged = LanguageModel(theirs.merge_and_unload())
    merged.model.set_attn_implementation(model.model.config._attn_implementation)
    torch.testing.assert_close(log_probs(model, rows), log_probs(merged, rows), atol=1e-5, rtol=0)
    again = adapted(directory, seed=5, lora_alpha=6, lora_adapter_path=str(tmp_path))
    assert torch.equal(log_probs(again, rows), log_probs(model, rows))


def test_an_adapter_of_another_model_is_rejected_with_the_differences(directories, tmp_path):
    export_adapter(adapted(directories["two heads a key"]).model, tmp_path, writes=True)
    config = model_config(directories["all heads their own keys"], lora_rank=2, lora_adapter_path=str(tmp_path))
    message = r"lora_adapter_path=.* belongs to another model: .*k_proj.* here.*; name its base model"
    with pytest.raises(ConfigError, match=message):
        check_adapter(config, "model")


def test_a_truncated_adapter_is_named(directory, tmp_path):
    export_adapter(adapted(directory).model, tmp_path, writes=True)
    file = tmp_path / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    config = model_config(directory, lora_rank=2, lora_adapter_path=str(tmp_path))
    with pytest.raises(ConfigError, match=r"adapter_model\.safetensors cannot be read"):
        check_adapter(config, "model")


def test_a_value_models_head_is_trained_with_the_adapter(directory, rows, tmp_path):
    config = model_config(directory, lora_rank=2)
    values = load_value_model(config, FLOAT)
    add_adapter(values.model, config, FLOAT, 0, "critic.model")
    assert {"base_model.model.score.weight", "base_model.model.score.bias"} <= adapter_parameters(values.model).keys()
    assert not any("score" in name for name in pairs(values.model))
    values.model.score.weight.data.fill_(0.1)
    export_adapter(values.model, tmp_path, writes=True)
    again = load_value_model(config, FLOAT)
    add_adapter(again.model, model_config(directory, lora_rank=2, lora_adapter_path=str(tmp_path)), FLOAT, 3, "critic")
    load_adapter(again.model, tmp_path)
    inputs = pack_rows(rows, padded=False)
    assert torch.equal(values(inputs), again(inputs)) and again(inputs).abs().max() > 0


# -- sharded -----------------------------------------------------------------------------------------------------------


def trained_in_each_type(directory: str, rows: Batch) -> dict[str, dict]:
    return {dtype: trained_on_ranks(directory, rows, dtype) for dtype in ("float32", "bfloat16")}


def trained_on_ranks(directory: str, rows: Batch, dtype: str) -> dict:
    """Two updates of a sharded model with an adapter: what is trained, synchronised and saved."""
    torch.manual_seed(torch.distributed.get_rank())
    config = model_config(directory, lora_rank=2, enable_gradient_checkpointing=True)
    blank = blank_language_model(config, getattr(torch, dtype))
    add_adapter(blank.model, config, FLOAT, 0, "model")
    ranks = torch.distributed.get_world_size()
    model = shard_and_fill(blank, directory, fsdp_config(dtype=dtype), layout("cpu", ranks, ranks), HOST)
    optimizers = Optimizers(model, optimizer_config(lr=0.1), 2)
    result = {"base": base_parameters(model.model)}
    for _ in range(2):
        with torch.no_grad(), adapter_off(model.model):  # in which FSDP2 gathers every parameter for the first time
            result["off"] = log_probs(model.eval(), rows)
        reshard(model)
        model.train()
        (log_probs(model, rows) * torch.linspace(-1, 1, 15)).sum().backward()
        reshard(model)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizers.step()
        optimizers.zero_grad()
    with torch.no_grad():
        result["log_probs"] = log_probs(model.eval(), rows)
    reshard(model)
    result["adapter"] = {name: full_tensor(value) for name, value in adapter_parameters(model.model).items()}
    result["moments"] = sum(len(optimizer.state) for optimizer in optimizers.optimizers)
    result["saved"] = sorted(state_of(model, optimizers, ["model"])["model"])
    result["base_after"] = base_parameters(model.model)
    for merge in (False, True):
        sender = Sender(model, torch.device("cpu"), FLOAT, 1 << 12, merge)
        result[f"sent {merge}"] = {}
        for bucket in (*sender.plan.model, *sender.plan.adapter):
            sender.fill(bucket, shared=False)
            memory = bucket.view(required(sender.buffer).tensor)
            result[f"sent {merge}"] |= {tensor.name: tensor.view(memory).clone() for tensor in bucket.tensors}
    result["buffer of an adapter alone"] = buffer_of_an_adapter_alone(model)
    return result


def buffer_of_an_adapter_alone(model: LanguageModel) -> tuple[int, int]:
    """The buffer's bytes, and those that the adapter's buckets need."""
    sender = Sender(model, torch.device("cpu"), FLOAT, 1 << 12, False)
    for bucket in sender.plan.adapter:
        sender.fill(bucket, shared=False)
    return len(required(sender.buffer).tensor), buffer_bytes(sender.plan.adapter)


@pytest.fixture(scope="module")
def runs(directories, rows):
    return [on_ranks(ranks, trained_in_each_type, directories["two heads a key"], rows)[0] for ranks in (1, 2)]


@pytest.fixture(params=["float32", "bfloat16"])
def trained(request, runs):
    return [run[request.param] for run in runs]


def test_an_adapter_that_is_sent_alone_needs_a_buffer_of_its_size_only(trained):
    for size, needed in (result["buffer of an adapter alone"] for result in trained):
        assert size == needed


def test_a_sharded_adapter_trains_as_an_unsharded_one_and_the_base_is_unchanged(trained, rows):
    for result in trained:
        assert result["moments"] == len(result["adapter"]) == len(result["saved"])
        assert all(".lora_" in name for name in result["saved"])
        assert all(value.dtype == FLOAT and value.abs().max() > 0 for value in result["adapter"].values())
        assert all(torch.equal(result["base"][name], result["base_after"][name]) for name in result["base"])
        assert float((result["off"] - result["log_probs"]).abs().max()) > 0.01
    one, two = trained
    if one["base"]["model.norm.weight"].dtype == FLOAT:
        for name in one["adapter"]:
            torch.testing.assert_close(one["adapter"][name], two["adapter"][name], atol=1e-3, rtol=0)


def test_base_and_adapter_or_the_merged_weights_are_synchronised(trained):
    for result in trained:
        apart, together = result["sent False"], result["sent True"]
        assert set(apart) == set(result["base"]) | set(result["adapter"]) and set(together) == set(result["base"])
        for name, base in result["base"].items():
            stem = f"base_model.model.{name.removesuffix('.weight')}.lora_"
            expected = base.double()
            if f"{stem}A.weight" in result["adapter"]:
                a, b = (result["adapter"][f"{stem}{part}.weight"].double() for part in "AB")
                expected = expected + 16 / 2 * (b @ a)
                assert (expected - base.double()).abs().max() > 1e-3
            torch.testing.assert_close(together[name].double(), expected, atol=1e-5, rtol=1e-5)
            assert torch.equal(apart[name], base.float())


def read_on_ranks(directory: str, adapter: Path) -> dict:
    """The parameters of a critic created without memory, after its base and an adapter were read."""
    config = model_config(directory, lora_rank=2, lora_adapter_path=str(adapter))
    blank = blank_value_model(config, FLOAT)
    add_adapter(blank.model, config, FLOAT, 3, "critic.model")
    ranks = torch.distributed.get_world_size()
    values = shard_and_fill(blank, directory, fsdp_config(), layout("cpu", ranks, ranks), HOST)
    load_adapter(values.model, adapter)
    base, trained = base_parameters(values.model), adapter_parameters(values.model)
    return {"base": base, "adapter": {name: full_tensor(value.detach()) for name, value in trained.items()}}


def test_each_rank_reads_its_part_of_base_and_adapter_and_head(directory, tmp_path):
    config = model_config(directory, lora_rank=2)
    values = load_value_model(config, FLOAT)
    base = base_parameters(values.model)
    add_adapter(values.model, config, FLOAT, 0, "critic.model")
    for number, value in enumerate(adapter_parameters(values.model).values()):
        value.data.fill_(number + 1.0)
    export_adapter(values.model, tmp_path, writes=True)
    for result in on_ranks(2, read_on_ranks, directory, tmp_path):
        heads = {name for name in base if name.startswith("score.")}
        assert heads and all(torch.equal(result["base"][name], base[name]) for name in base.keys() - heads)
        assert result["adapter"].keys() == adapter_parameters(values.model).keys()
        assert all(torch.equal(result["adapter"][n], value) for n, value in adapter_parameters(values.model).items())


def test_dropout_is_active_only_in_training(directory, rows):
    model = with_noise(adapted(directory, lora=FurtherLoRAConfig(merge=False, dropout=0.5)))
    model.eval()
    still = log_probs(model, rows)
    assert torch.equal(log_probs(model, rows), still)
    assert not torch.equal(log_probs(model.train(), rows), still)
