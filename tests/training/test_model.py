import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
    StableLmConfig,
)

from hybridrl.batch import Batch
from hybridrl.config.schema import ModelConfig
from hybridrl.training import attention
from hybridrl.training import model as model_module
from hybridrl.training.model import LanguageModel, check_log_probs, layer_classes, load_language_model
from hybridrl.training.packing import lay_out

VOCABULARY = 48
SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,  # log-probs that differ from token to token by more than any tolerance here
}
FAMILIES = {
    "all heads their own keys": Qwen2Config(**SMALL, num_key_value_heads=4),
    "two heads a key": Qwen2Config(**SMALL, num_key_value_heads=2),
    "all heads one key, tied head": Qwen2Config(**SMALL, num_key_value_heads=1, tie_word_embeddings=True),
    "llama": LlamaConfig(**SMALL, num_key_value_heads=2),
    "qwen3": Qwen3Config(**SMALL, num_key_value_heads=2, head_dim=8),
    "learned positions": GPT2Config(
        vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=64, initializer_range=0.3
    ),
    "a sliding window in every layer": MistralConfig(**SMALL, num_key_value_heads=2, sliding_window=3),
    "a sliding window in the second layer": Qwen2Config(
        **SMALL, num_key_value_heads=2, use_sliding_window=True, sliding_window=3, max_window_layers=1
    ),
}


@pytest.fixture(scope="module")
def directories(tmp_path_factory) -> dict[str, str]:
    """A small random model of each family, saved."""
    found = {}
    for number, (family, config) in enumerate(FAMILIES.items()):
        torch.manual_seed(number)
        path = tmp_path_factory.mktemp("models") / str(number)
        AutoModelForCausalLM.from_config(config).save_pretrained(path)
        found[family] = str(path)
    return found


@pytest.fixture
def directory(directories) -> str:
    return directories["two heads a key"]


@pytest.fixture(scope="module")
def rows(make_batch) -> Batch:
    batch = make_batch([4, 1, 7, 3], prompts=[2, 5, 1, 3])
    generator = torch.Generator().manual_seed(0)
    batch.prompt_ids = torch.randint(VOCABULARY, batch.prompt_ids.shape, generator=generator)
    batch.response_ids = torch.randint(VOCABULARY, batch.response_ids.shape, generator=generator)
    return batch


def load(directory: str, dtype: torch.dtype = torch.float32, **changes: object) -> LanguageModel:
    settings = {
        "path": directory,
        "tokenizer_path": None,
        "trust_remote_code": False,
        "custom_chat_template": None,
        "override_config": {},
        "enable_gradient_checkpointing": False,
        "use_remove_padding": True,
    }
    return load_language_model(ModelConfig(**settings | changes), dtype)


def one_by_one(directory: str, rows: Batch, temperature: float = 1.0):
    """Log-probs, entropies and gradient of transformers' own model, each row alone."""
    model = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="sdpa")
    log_probs, entropies = [], []
    for number in range(len(rows)):
        row = rows.select([number])
        logits = model(torch.cat([row.prompt_ids, row.response_ids])[None]).logits[0] / temperature
        told = torch.distributions.Categorical(logits=logits[len(row.prompt_ids) - 1 : -1])
        log_probs.append(told.log_prob(row.response_ids))
        entropies.append(told.entropy())
    log_probs, entropies = torch.cat(log_probs), torch.cat(entropies)
    return log_probs, entropies, gradient(model, log_probs, entropies)


def gradient(model, log_probs, entropies):
    """The gradient, in the order of the parameters, of a loss in which every token has a weight of its own."""
    weights = torch.linspace(-1, 1, len(log_probs))
    (log_probs * weights + 0.1 * entropies * weights.flip(0)).sum().backward()
    return [parameter.grad for parameter in model.parameters()]


def assert_same(found, expected):
    """Log-probs and entropies to 1e-5, gradients by parameter."""
    for value, right in zip(found[:2], expected[:2], strict=True):
        torch.testing.assert_close(value, right, atol=1e-5, rtol=0)
    torch.testing.assert_close(found[2], expected[2], atol=1e-4, rtol=1e-4)


def through(model: LanguageModel, rows: Batch, padded: bool, temperature: float = 1.0):
    log_probs, entropies = model(lay_out(rows, padded), temperature, True)
    return log_probs, entropies, gradient(model, log_probs, entropies)


@pytest.mark.parametrize("padded", [False, True], ids=["in one line", "padded"])
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_together_are_as_each_row_alone(directories, family, rows, padded):
    assert_same(through(load(directories[family]), rows, padded), one_by_one(directories[family], rows))


@pytest.mark.parametrize("padded", [False, True], ids=["in one line", "padded"])
def test_the_temperature_divides_the_logits(directory, rows, padded):
    assert_same(through(load(directory), rows, padded, temperature=0.6), one_by_one(directory, rows, temperature=0.6))


@pytest.mark.parametrize("padded", [False, True], ids=["in one line", "padded"])
def test_logits_formed_in_chunks_change_nothing_and_never_exist_as_a_whole(directory, rows, padded, monkeypatch):
    monkeypatch.setitem(model_module.CHUNK_BYTES, "cpu", 4 * VOCABULARY * 4)
    model, sizes = load(directory), []
    model.model.lm_head.register_forward_hook(lambda head, inputs, logits: sizes.append(len(logits)))
    found = through(model, rows, padded)
    assert_same(found, one_by_one(directory, rows))
    # 15 response tokens, forward and again in the backward pass.
    assert sorted(sizes) == [3, 3, 4, 4, 4, 4, 4, 4]


def test_a_chunk_is_one_token_at_least(directory, rows, monkeypatch):
    monkeypatch.setitem(model_module.CHUNK_BYTES, "cpu", 1)
    assert_same(through(load(directory), rows, padded=False), one_by_one(directory, rows))


@pytest.mark.parametrize("padded", [False, True], ids=["in one line", "padded"])
def test_gradient_checkpointing_changes_nothing_but_computes_each_layer_twice(directory, rows, padded):
    model, calls = load(directory, enable_gradient_checkpointing=True).train(), []
    model.model.model.layers[0].self_attn.register_forward_hook(lambda *_: calls.append(1))
    assert_same(through(model, rows, padded), one_by_one(directory, rows))
    assert len(calls) == 2


def test_without_entropies_none_are_computed(directory, rows, monkeypatch):
    model = load(directory)
    expected, _ = model(lay_out(rows, padded=False), 1.0, True)
    for chunk_bytes in (model_module.CHUNK_BYTES["cpu"], 1):
        monkeypatch.setitem(model_module.CHUNK_BYTES, "cpu", chunk_bytes)
        log_probs, entropies = model(lay_out(rows, padded=False), 1.0, False)
        assert entropies is None
        torch.testing.assert_close(log_probs, expected)


def test_the_order_of_the_rows_does_not_matter(directory, rows):
    model, order = load(directory), [2, 0, 3, 1]
    log_probs, _ = model(lay_out(rows, padded=False), 1.0, False)
    mixed, _ = model(lay_out(rows.select(order), padded=False), 1.0, False)
    parts = log_probs.split(rows.response_lengths.tolist())
    torch.testing.assert_close(mixed, torch.cat([parts[row] for row in order]), atol=1e-5, rtol=0)


def test_log_probs_of_a_model_in_half_precision_are_in_full(directory, rows):
    model = load(directory, torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    found, _, _ = through(model, rows, padded=False)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, one_by_one(directory, rows)[0], atol=0.3, rtol=0)


def test_settings_of_the_model_can_be_overridden(directory):
    assert load(directory, override_config={"rms_norm_eps": 0.5}).model.config.rms_norm_eps == 0.5


def test_layers_to_shard_are_those_named_or_else_those_that_the_model_says(directory):
    model = load(directory).model
    assert layer_classes(model, None) == layer_classes(model, []) == {"Qwen2DecoderLayer"}
    assert layer_classes(model, "Qwen2MLP") == {"Qwen2MLP"}
    assert layer_classes(model, ["Qwen2MLP", "Qwen2Attention"]) == {"Qwen2MLP", "Qwen2Attention"}


def test_a_family_whose_rows_see_one_another_in_one_line_is_refused_with_the_way_out():
    config = StableLmConfig(**SMALL, num_key_value_heads=4)
    model = LanguageModel(AutoModelForCausalLM.from_config(config, attn_implementation=attention.NAME))
    with pytest.raises(ValueError, match=r"stablelm: .* differ by .*; set model.use_remove_padding=false"):
        check_log_probs(model, padded=False)
    check_log_probs(model, padded=True)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("family", list(FAMILIES))
def test_a_family_that_is_computed_as_in_its_own_forward_passes(directories, family, padded):
    loaded = AutoModelForCausalLM.from_pretrained(directories[family], attn_implementation=attention.NAME)
    check_log_probs(LanguageModel(loaded), padded=padded)
