from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed import HashStore, destroy_process_group, init_process_group
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    Gemma3TextConfig,
    Olmo2Config,
    OPTConfig,
    PreTrainedModel,
    Qwen2Config,
    TrOCRConfig,
)

from hybridrl.core.batch import Batch
from hybridrl.core.training.fsdp import full_tensor
from hybridrl.core.training.heads import ReferenceOutputs
from hybridrl.core.training.loading import layer_classes
from hybridrl.core.training.model import LanguageModel, ValueModel
from hybridrl.core.training.packing import pack_rows
from tests.core.training.families import (
    FAMILIES,
    SMALL,
    VOCABULARY,
    load_language_model,
    load_value_model,
    model_config,
)

# Families that transformers has no token classification for.
WITHOUT_CLASS = {
    "olmo2": Olmo2Config(**SMALL, num_key_value_heads=2),
    "opt": OPTConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        word_embed_proj_dim=32,
        ffn_dim=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        init_std=0.3,
    ),
    "gemma3": Gemma3TextConfig(**SMALL, num_key_value_heads=2, head_dim=8),
}


def load(directory: str | Path, dtype: torch.dtype = torch.float32, **changes: object) -> ValueModel:
    return load_value_model(model_config(str(directory), **changes), dtype)


@pytest.fixture
def critic(directory, tmp_path) -> str:
    """The directory of a value model, saved by transformers."""
    torch.manual_seed(1)
    AutoModelForTokenClassification.from_pretrained(directory, num_labels=1).save_pretrained(tmp_path)
    return str(tmp_path)


def one_by_one(model: PreTrainedModel, rows: Batch) -> Tensor:
    """Outputs of a model's own forward pass at each response token's predictor, one row at a time."""
    values = []
    for number in range(len(rows)):
        row = rows.select([number])
        outputs = model(torch.cat([row.prompt_ids, row.response_ids])[None], use_cache=False)[0][0]
        values.append(outputs[len(row.prompt_ids) - 1 : -1].squeeze(-1))
    return torch.cat(values)


def gradient(model: PreTrainedModel, values: Tensor) -> list[Tensor]:
    """The gradient, in the order of the parameters, of a loss with a different weight for every token."""
    (values * torch.linspace(-1, 1, len(values))).sum().backward()
    return [parameter.grad for parameter in model.parameters()]


def draw_head(model: ValueModel) -> None:
    """Values that differ from token to token."""
    torch.manual_seed(2)
    head = model.model.get_submodule(model.head_name)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter)


@pytest.mark.parametrize("padded", [False, True], ids=["packed", "padded"])
@pytest.mark.parametrize("family", FAMILIES)
def test_values_match_transformers_own_forward_pass(directories, family, rows, padded, tmp_path):
    torch.manual_seed(1)
    theirs = AutoModelForTokenClassification.from_pretrained(directories[family], num_labels=1).eval()
    theirs.save_pretrained(tmp_path)
    ours = load(tmp_path)
    actual, expected = ours(pack_rows(rows, padded)), one_by_one(theirs, rows)
    assert expected.std() > 0.01
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
    assert actual.shape == (15,) and actual.dtype == torch.float32
    torch.testing.assert_close(gradient(ours.model, actual), gradient(theirs, expected), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("padded", [False, True], ids=["packed", "padded"])
@pytest.mark.parametrize("family", WITHOUT_CLASS)
def test_a_family_without_a_token_classification_gets_a_head_too(family, rows, padded, tmp_path):
    torch.manual_seed(0)
    base = AutoModel.from_config(WITHOUT_CLASS[family])
    base.save_pretrained(tmp_path)
    model = load(tmp_path)
    draw_head(model)
    hidden = one_by_one(AutoModel.from_pretrained(tmp_path).eval(), rows)
    expected = torch.nn.functional.linear(hidden, model.model.score.weight, model.model.score.bias).squeeze(-1)
    torch.testing.assert_close(model(pack_rows(rows, padded)), expected, atol=1e-4, rtol=1e-4)
    assert layer_classes(model.model) == set(base._no_split_modules)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_new_head_starts_at_zero_on_the_language_models_own_base_whatever_the_seed(directories, family, rows):
    torch.manual_seed(5)
    model, language_model = load(directories[family]), load_language_model(model_config(directories[family]), None)
    inputs = pack_rows(rows, padded=False)
    values = model(inputs)
    assert torch.equal(values, torch.zeros(15))
    assert torch.equal(*(each.model.base_model(inputs.input_ids)[0] for each in (model, language_model)))
    values.sum().backward()
    head = model.model.get_submodule(model.head_name)
    assert head.weight.grad.abs().max() > 0.1 and head.bias.grad == 15


def test_a_reward_models_trained_head_is_kept(directory, rows, tmp_path):
    torch.manual_seed(1)
    theirs = AutoModelForSequenceClassification.from_pretrained(directory, num_labels=1).eval()
    theirs.save_pretrained(tmp_path)
    expected = theirs.score(one_by_one(theirs.model, rows)).squeeze(-1)
    torch.testing.assert_close(load(tmp_path)(pack_rows(rows, padded=False)), expected, atol=1e-5, rtol=1e-5)


def test_values_do_not_change_in_training_mode(critic, rows):
    model, inputs = load(critic), pack_rows(rows, padded=False)
    assert model.model.dropout.p > 0
    assert torch.equal(model.train()(inputs), model.eval()(inputs))


def test_values_of_a_half_precision_model_are_float32(critic, rows):
    model = load(critic, torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    values = model(pack_rows(rows, padded=False))
    torch.testing.assert_close(values, load(critic)(pack_rows(rows, padded=False)), atol=0.05, rtol=0)
    assert values.dtype == torch.float32 and not torch.equal(values, values.bfloat16().float())


def test_gradient_checkpointing_changes_nothing_but_computes_each_layer_twice(critic, rows):
    model, calls = load(critic, enable_gradient_checkpointing=True).train(), []
    model.model.model.layers[0].self_attn.register_forward_hook(lambda *_: calls.append(1))
    plain, inputs = load(critic), pack_rows(rows, padded=False)
    actual, expected = (gradient(each.model, each(inputs)) for each in (model, plain))
    torch.testing.assert_close(actual, expected)
    assert len(calls) == 2


def test_a_model_that_cannot_be_trained_is_rejected(tmp_path):
    Qwen2Config(**SMALL, num_key_value_heads=2, is_encoder_decoder=True).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="an encoder and a decoder"):
        load(tmp_path)


def test_a_directory_that_lacks_weights_of_the_base_is_rejected(critic, tmp_path):
    model = AutoModelForTokenClassification.from_pretrained(critic)
    weights = {name: value for name, value in model.state_dict().items() if "layers.1.mlp.up_proj" not in name}
    model.save_pretrained(tmp_path / "cut", state_dict=weights)
    with pytest.raises(ValueError, match=r"1 of the model's weights are missing \(model.layers.1.mlp.up_proj.weight"):
        load(tmp_path / "cut")


def test_a_family_without_a_base_model_is_rejected_with_a_fix(tmp_path):
    TrOCRConfig().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"critic.model.path=.* family trocr .*; name a model of another family"):
        load(tmp_path)


@pytest.fixture(scope="module")
def mesh():
    """A process group of one rank."""
    init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,), mesh_dim_names=("shard",))
    destroy_process_group()


def sharded(model, mesh, **options):
    for module in list(model.modules()):
        if type(module).__name__ == "Qwen2DecoderLayer":
            fully_shard(module, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, reshard_after_forward=False, **options)


def test_a_sharded_value_model_gives_the_same_values_and_gradient(critic, rows, mesh):
    inputs = pack_rows(rows, padded=False)
    plain, parts = load(critic), sharded(load(critic), mesh)
    expected, actual = plain(inputs), parts(inputs)
    torch.testing.assert_close(actual, expected)
    right, shards = gradient(plain.model, expected), gradient(parts.model, actual)
    assert all(isinstance(shard, DTensor) for shard in shards)
    torch.testing.assert_close([full_tensor(shard) for shard in shards], right)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["float32", "computed in bfloat16"])
def test_a_sharded_policy_is_measured_against_a_sharded_reference(directories, rows, mesh, dtype):
    def distance(policy: LanguageModel, reference: LanguageModel) -> tuple[Tensor, Tensor, list[Tensor]]:
        inputs = pack_rows(rows, padded=False)
        with torch.no_grad():
            hidden = reference.hidden_states(inputs)
        # After the call and until it is resharded, the root's parameters are gathered, in the compute type.
        actual = policy(inputs, 0.8, sum_pi_squared=True, against=ReferenceOutputs(hidden, reference.head))
        return actual.sum_pi_squared, actual.reference_kl, gradient(policy.model, actual.reference_kl)

    paths = (directories["two heads a key"], directories["all heads their own keys"])
    plain = distance(*(load_language_model(model_config(path), torch.float32) for path in paths))
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    models = [sharded(load_language_model(model_config(path), torch.float32), mesh, mp_policy=policy) for path in paths]
    register_fsdp_forward_method(models[1], "hidden_states")
    squared, kl, shards = distance(*models)
    exact = {} if dtype is None else {"atol": 0.3, "rtol": 0.3}
    torch.testing.assert_close((squared, kl), plain[:2], **exact)
    if dtype is None:
        torch.testing.assert_close([full_tensor(shard) for shard in shards], plain[2])
    else:
        assert all(full_tensor(shard).isfinite().all() for shard in shards)
