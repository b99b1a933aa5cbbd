from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, PreTrainedModel

from hybridrl.batch import Batch
from hybridrl.config import ConfigError
from hybridrl.config.schema_lora import FurtherLoRAConfig
from hybridrl.training.adapted import adapter_off, adapter_parameters, pairs, without_pairs
from hybridrl.training.fsdp import mesh, reshard, shard_and_fill
from hybridrl.training.lora import add_adapter, check_adapter, export_adapter, load_adapter
from hybridrl.training.model import HOST, LanguageModel, blank_language_model, load_language_model
from hybridrl.training.optimizer import Optimizers
from hybridrl.training.packing import lay_out
from hybridrl.training.sender import Sender
from hybridrl.training.shards import whole
from hybridrl.training.state import state_of
from hybridrl.training.value_model import blank_value_model, load_value_model
from hybridrl.weights.layout import buffer_bytes
from tests.training.families import model_config
from tests.training.on_ranks import on_ranks
from tests.training.test_state import fsdp_config, optimizer_config

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
        return {name: whole(value.detach()) for name, value in model.named_parameters()}


def with_noise(model: LanguageModel) -> LanguageModel:
    """An adapter that counts: B is no longer zero."""
    generator = torch.Generator().manual_seed(1)
    for name, value in adapter_parameters(model.model).items():
        if "lora_B" in name:
            value.data = 0.3 * torch.randn(value.shape, generator=generator)
    return model


def log_probs(model: LanguageModel, rows: Batch) -> torch.Tensor:
    return model(lay_out(rows, padded=False), 1.0).log_probs


def test_a_new_adapter_changes_nothing_and_is_all_that_is_trained(directory, rows):
    model, plain = adapted(directory), load_language_model(model_config(directory), FLOAT)
    assert torch.equal(log_probs(model, rows), log_probs(plain, rows))
    log_probs(model, rows).sum().backward()
    with_gradient = {name for name, value in model.model.named_parameters() if value.grad is not None}
    assert with_gradient and all(".lora_" in name for name in with_gradient)


def test_a_model_has_its_own_names_beneath_the_adapter(directory):
    model, plain = adapted(directory), load_language_model(model_config(directory), FLOAT)
    found, expected = base_parameters(model.model), dict(plain.model.named_parameters())
    assert list(found) == list(expected) and all(torch.equal(found[name], expected[name]) for name in expected)
    assert pairs(model.model) and not pairs(plain.model)


def test_where_an_adapter_begins_follows_from_the_seed_alone(directory):
    torch.manual_seed(1)
    one = adapter_parameters(adapted(directory).model)
    torch.manual_seed(2)
    state = torch.get_rng_state()
    other = adapter_parameters(adapted(directory).model)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(one[name], other[name]) for name in one)
    third = adapter_parameters(adapted(directory, seed=1).model)
    assert not all(torch.equal(one[name], third[name]) for name in one)


def test_all_linear_leaves_out_embedding_and_head(directory):
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
        ({"target_modules": ["q_porj"]}, "model.target_modules: q_porj is no linear layer in .*; nearest: q_proj"),
        ({"target_modules": ["q_proj", "linear_qkv"]}, "linear_qkv is no linear layer .*: down_proj, gate_proj"),
        ({"target_modules": ["lm_head"]}, "lm_head is no linear layer"),
        ({"exclude_modules": ["q_porj"]}, "model.exclude_modules: q_porj is no linear layer"),
        ({"target_modules": ["*.q_proj"]}, "is no regular expression"),
        ({"target_modules": ["q_proj"], "exclude_modules": ["q_proj"]}, "no layer of .* is left to adapt"),
    ],
)  # fmt: skip
def test_layers_that_are_not_there_are_refused_before_any_weight_is_read(directory, changes, message):
    with pytest.raises(ConfigError, match=message):
        check_adapter(model_config(directory, lora_rank=2, **changes), "model")


def test_how_much_is_trained_is_told_without_reading_weights(directory):
    model = adapted(directory, target_modules=["q_proj"])
    trained = sum(value.numel() for value in adapter_parameters(model.model).values())
    assert trained == 2 * (2 * 32 + 32 * 2)  # two layers, each with A [2, 32] and B [32, 2]
    told = check_adapter(model_config(directory, lora_rank=2, target_modules=["q_proj"]), "model")
    whole = sum(value.numel() for value in base_parameters(model.model).values())
    assert "rank 2 on q_proj" in told and f" {trained:,} parameters" in told and f"{whole:,})" in told


def test_switched_off_it_is_the_model_as_it_was_and_it_learns_on_after(directory, rows):
    plain, model = load_language_model(model_config(directory), FLOAT), with_noise(adapted(directory))
    before = log_probs(model, rows)
    with adapter_off(model.model):
        torch.testing.assert_close(log_probs(model, rows), log_probs(plain, rows), atol=0, rtol=0)
    assert torch.equal(log_probs(model, rows), before)
    assert not torch.allclose(log_probs(plain, rows), before, atol=0.1)
    log_probs(model, rows).sum().backward()
    assert all(value.grad is not None for value in adapter_parameters(model.model).values())


def test_an_exported_adapter_is_pefts_and_goes_on_as_it_was(directory, rows, tmp_path):
    model = with_noise(adapted(directory, lora_alpha=6))
    export_adapter(model.model, tmp_path, writes=True)
    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(directory, dtype=FLOAT), tmp_path)
    merged = LanguageModel(theirs.merge_and_unload())
    merged.model.set_attn_implementation(model.model.config._attn_implementation)
    torch.testing.assert_close(log_probs(model, rows), log_probs(merged, rows), atol=1e-5, rtol=0)
    again = adapted(directory, seed=5, lora_alpha=6, lora_adapter_path=str(tmp_path))
    assert torch.equal(log_probs(again, rows), log_probs(model, rows))


def test_an_adapter_of_another_model_is_refused_with_what_differs(directories, tmp_path):
    export_adapter(adapted(directories["two heads a key"]).model, tmp_path, writes=True)
    config = model_config(directories["all heads their own keys"], lora_rank=2, lora_adapter_path=str(tmp_path))
    with pytest.raises(ConfigError, match=r"lora_adapter_path=.* is of another model: .*k_proj.* here"):
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
    inputs = lay_out(rows, padded=False)
    assert torch.equal(values(inputs), again(inputs)) and again(inputs).abs().max() > 0


# -- sharded -----------------------------------------------------------------------------------------------------------


def trained_on_ranks(directory: str, rows: Batch, dtype: str) -> dict:
    """Two updates of a sharded model with an adapter: what is trained, what is handed over, what would be saved."""
    torch.manual_seed(torch.distributed.get_rank())
    config = model_config(directory, lora_rank=2, enable_gradient_checkpointing=True)
    blank = blank_language_model(config, getattr(torch, dtype))
    add_adapter(blank.model, config, FLOAT, 0, "model")
    ranks = torch.distributed.get_world_size()
    model = shard_and_fill(blank, directory, fsdp_config(dtype=dtype), mesh("cpu", ranks, ranks), HOST)
    optimizers = Optimizers(model, optimizer_config(lr=0.1), 2)
    found = {"base": base_parameters(model.model)}
    for _ in range(2):
        with torch.no_grad(), adapter_off(model.model):  # in which FSDP2 gathers every parameter for the first time
            found["off"] = log_probs(model.eval(), rows)
        reshard(model)
        model.train()
        (log_probs(model, rows) * torch.linspace(-1, 1, 15)).sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizers.step()
        optimizers.zero_grad()
    with torch.no_grad():
        found["log_probs"] = log_probs(model.eval(), rows)
    reshard(model)
    found["adapter"] = {name: value.full_tensor() for name, value in adapter_parameters(model.model).items()}
    found["moments"] = sum(len(optimizer.state) for optimizer in optimizers.optimizers)
    found["saved"] = sorted(state_of(model, optimizers, ["model"])["model"])
    found["base_after"] = base_parameters(model.model)
    for merge in (False, True):
        sender = Sender(model, torch.device("cpu"), FLOAT, 1 << 12, merge)
        found[f"sent {merge}"] = {}
        for bucket in (*sender.plan.model, *sender.plan.adapter):
            sender.fill(bucket)
            found[f"sent {merge}"] |= {
                t.name: t.view(bucket.room(sender.buffer.tensor)).clone() for t in bucket.tensors
            }
    found["buffer of an adapter alone"] = buffer_of_an_adapter_alone(model)
    return found


def buffer_of_an_adapter_alone(model: LanguageModel) -> tuple[int, int]:
    """Its bytes, and those that the adapter's buckets need."""
    sender = Sender(model, torch.device("cpu"), FLOAT, 1 << 12, False)
    for bucket in sender.plan.adapter:
        sender.fill(bucket)
    return len(sender.buffer.tensor), buffer_bytes(sender.plan.adapter)


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def trained(request, directories, rows):
    return [
        on_ranks(ranks, trained_on_ranks, directories["two heads a key"], rows, request.param)[0] for ranks in (1, 2)
    ]


def test_an_adapter_that_is_sent_alone_needs_no_buffer_of_the_base_s_size(trained):
    for size, needed in (found["buffer of an adapter alone"] for found in trained):
        assert size == needed


def test_a_sharded_adapter_learns_as_an_unsharded_one_and_the_base_stays(trained, rows):
    for found in trained:
        assert found["moments"] == len(found["adapter"]) == len(found["saved"])
        assert all(".lora_" in name for name in found["saved"])
        assert all(value.dtype == FLOAT and value.abs().max() > 0 for value in found["adapter"].values())
        assert all(torch.equal(found["base"][name], found["base_after"][name]) for name in found["base"])
        assert float((found["off"] - found["log_probs"]).abs().max()) > 0.01
    one, two = trained
    if one["base"]["model.norm.weight"].dtype == FLOAT:
        for name in one["adapter"]:
            torch.testing.assert_close(one["adapter"][name], two["adapter"][name], atol=1e-3, rtol=0)


def test_what_is_handed_over_is_base_and_adapter_or_what_they_are_together(trained):
    for found in trained:
        apart, together = found["sent False"], found["sent True"]
        assert set(apart) == set(found["base"]) | set(found["adapter"]) and set(together) == set(found["base"])
        for name, base in found["base"].items():
            stem = f"base_model.model.{name.removesuffix('.weight')}.lora_"
            expected = base.double()
            if f"{stem}A.weight" in found["adapter"]:
                a, b = (found["adapter"][f"{stem}{part}.weight"].double() for part in "AB")
                expected = expected + 16 / 2 * (b @ a)
                assert (expected - base.double()).abs().max() > 1e-3
            torch.testing.assert_close(together[name].double(), expected, atol=1e-5, rtol=1e-5)
            assert torch.equal(apart[name], base.float())


def read_on_ranks(directory: str, adapter: Path) -> dict:
    """What a critic that is made without memory has once its base and an adapter are read."""
    config = model_config(directory, lora_rank=2, lora_adapter_path=str(adapter))
    blank = blank_value_model(config, FLOAT)
    add_adapter(blank.model, config, FLOAT, 3, "critic.model")
    ranks = torch.distributed.get_world_size()
    values = shard_and_fill(blank, directory, fsdp_config(), mesh("cpu", ranks, ranks), HOST)
    load_adapter(values.model, adapter)
    base, trained = base_parameters(values.model), adapter_parameters(values.model)
    return {"base": base, "adapter": {name: whole(value.detach()) for name, value in trained.items()}}


def test_ranks_read_each_their_part_of_base_and_adapter_and_head(directory, tmp_path):
    config = model_config(directory, lora_rank=2)
    values = load_value_model(config, FLOAT)
    base = base_parameters(values.model)
    add_adapter(values.model, config, FLOAT, 0, "critic.model")
    for number, value in enumerate(adapter_parameters(values.model).values()):
        value.data.fill_(number + 1.0)
    export_adapter(values.model, tmp_path, writes=True)
    for found in on_ranks(2, read_on_ranks, directory, tmp_path):
        heads = {name for name in base if name.startswith("score.")}
        assert heads and all(torch.equal(found["base"][name], base[name]) for name in base.keys() - heads)
        assert found["adapter"].keys() == adapter_parameters(values.model).keys()
        assert all(torch.equal(found["adapter"][n], value) for n, value in adapter_parameters(values.model).items())


def test_dropout_drops_in_training_alone(directory, rows):
    model = with_noise(adapted(directory, lora=FurtherLoRAConfig(merge=False, dropout=0.5)))
    model.eval()
    still = log_probs(model, rows)
    assert torch.equal(log_probs(model, rows), still)
    assert not torch.equal(log_probs(model.train(), rows), still)
