from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, Qwen2Config, SeedOssConfig, StableLmConfig

from hybridrl.batch import Batch
from hybridrl.training import attention, linear_log_probs
from hybridrl.training.loading import layer_classes
from hybridrl.training.model import LanguageModel, check_log_probs, load_language_model, rows_mix
from hybridrl.training.packing import lay_out
from hybridrl.training.token_outputs import ReferenceOutputs, TokenOutputs
from hybridrl.training.value_model import load_value_model
from tests.training.families import FAMILIES, SMALL, SPECIAL, VOCABULARY, model_config


def load(directory: str, dtype: torch.dtype = torch.float32, **changes: object) -> LanguageModel:
    return load_language_model(model_config(directory, **changes), dtype)


def one_by_one(directory: str, rows: Batch, temperature: float = 1.0):
    """Log-probs, entropies and gradient of transformers' own model, each row alone."""
    model = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager")
    log_probs, entropies = [], []
    for number in range(len(rows)):
        row = rows.select([number])
        logits = model(torch.cat([row.prompt_ids, row.response_ids])[None]).logits[0] / temperature
        told = torch.distributions.Categorical(logits=logits[len(row.prompt_ids) - 1 : -1])
        log_probs.append(told.log_prob(row.response_ids))
        entropies.append(told.entropy())
    log_probs, entropies = torch.cat(log_probs), torch.cat(entropies)
    return log_probs, entropies, gradient(model, log_probs, entropies)


def chunks_of(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(linear_log_probs.CHUNK_BYTES, "cpu", 0)
    monkeypatch.setattr(linear_log_probs, "FEWEST_TOKENS", tokens)


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
    found = model(lay_out(rows, padded), temperature, entropies=True, entropy_gradient=True)
    return found.log_probs, found.entropies, gradient(model, found.log_probs, found.entropies)


@pytest.mark.parametrize("padded", [False, True], ids=["in one line", "padded"])
@pytest.mark.parametrize("family", FAMILIES | SPECIAL)
def test_rows_together_are_as_each_row_alone(directories, family, rows, padded):
    assert_same(through(load(directories[family]), rows, padded), one_by_one(directories[family], rows))


@pytest.mark.parametrize("padded", [False, True], ids=["in one line", "padded"])
def test_the_temperature_divides_the_logits(directory, rows, padded):
    assert_same(through(load(directory), rows, padded, temperature=0.6), one_by_one(directory, rows, temperature=0.6))


@pytest.mark.parametrize("padded", [False, True], ids=["in one line", "padded"])
@pytest.mark.parametrize("tokens_a_chunk", [1, 4])
@pytest.mark.parametrize("family", FAMILIES | SPECIAL)
def test_logits_formed_in_chunks_change_nothing(directories, family, rows, tokens_a_chunk, padded, monkeypatch):
    chunks_of(tokens_a_chunk, monkeypatch)
    assert_same(through(load(directories[family]), rows, padded), one_by_one(directories[family], rows))


@pytest.mark.parametrize("padded", [False, True], ids=["in one line", "padded"])
def test_gradient_checkpointing_changes_nothing_but_computes_each_layer_twice(directory, rows, padded):
    model, calls = load(directory, enable_gradient_checkpointing=True).train(), []
    model.model.model.layers[0].self_attn.register_forward_hook(lambda *_: calls.append(1))
    assert_same(through(model, rows, padded), one_by_one(directory, rows))
    assert len(calls) == 2


class VocabularyWide(TorchDispatchMode):
    """Records operations that make a number for every token of the vocabulary (the head's own weight apart), and for
    how many response tokens."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.vocabulary, self.seen = vocabulary, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **kwargs or {})
        if isinstance(made, Tensor) and made.shape[1:] == (self.vocabulary,) and len(made) != SMALL["hidden_size"]:
            self.seen.append((func.overloadpacket.__name__, len(made)))
        return made


@pytest.fixture
def odd(tmp_path) -> str:
    """A model in which nothing but the vocabulary has 37 of anything."""
    torch.manual_seed(0)
    settings = SMALL | {"vocab_size": 37}
    AutoModelForCausalLM.from_config(Qwen2Config(**settings, num_key_value_heads=2)).save_pretrained(tmp_path)
    return str(tmp_path)


@pytest.fixture
def odd_rows(rows) -> Batch:
    return replace(rows, prompt_ids=rows.prompt_ids % 37, response_ids=rows.response_ids % 37)


def reference_outputs(model: LanguageModel, rows: Batch, padded: bool, bias: Tensor | None = None) -> ReferenceOutputs:
    return ReferenceOutputs(model.hidden_states(lay_out(rows, padded)), model.head._replace(bias=bias))


def by_the_formulas(policy_path: str, reference_path: str, bias: Tensor, rows: Batch, temperature: float):
    """All outputs in float64 of transformers' own models, row by row, as sums over the vocabulary; and the policy."""
    policy, reference = (
        AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager", dtype=torch.float64)
        for path in (policy_path, reference_path)
    )
    found = []
    for number in range(len(rows)):
        row = rows.select([number])
        ids = torch.cat([row.prompt_ids, row.response_ids])[None]
        log_p = (policy(ids).logits[0] / temperature).log_softmax(-1)
        log_q = ((reference(ids).logits[0].detach() + bias) / temperature).log_softmax(-1)
        for place, token in enumerate(row.response_ids.tolist(), start=len(row.prompt_ids) - 1):
            p = log_p[place].exp()
            entropy = -(p * log_p[place]).sum()
            kl = (p * (log_p[place] - log_q[place])).sum()
            found.append((log_p[place, token], entropy, p.square().sum(), kl))
    return TokenOutputs(*(torch.stack(items) for items in zip(*found, strict=True))), policy


def whole_gradient(model, found: TokenOutputs) -> list[Tensor]:
    """The gradient, in the order of the parameters, of all outputs that have one; every token has its own weights."""
    weights = torch.linspace(-1, 1, len(found.log_probs))
    mixed = found.log_probs * weights + found.entropies * weights.flip(0) + found.reference_kl * weights.square()
    mixed.sum().backward()
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("tokens_a_chunk", [1, 4, 10**6])
@pytest.mark.parametrize("padded", [False, True], ids=["in one line", "padded"])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_all_outputs_and_their_gradient_are_those_of_the_formulas(
    directories, rows, temperature, padded, tokens_a_chunk, monkeypatch
):
    policy, reference = directories["two heads a key"], directories["llama"]
    bias = torch.linspace(-2, 2, VOCABULARY)
    expected, whole_model = by_the_formulas(policy, reference, bias, rows, temperature)
    chunks_of(2 * tokens_a_chunk, monkeypatch)
    model, against = load(policy), reference_outputs(load(reference), rows, padded, bias)
    wanted = {"entropies": True, "entropy_gradient": True, "sum_pi_squared": True}
    found = model(lay_out(rows, padded), temperature, against=against, **wanted)
    for value, right in zip(found, expected, strict=True):
        torch.testing.assert_close(value, right.float(), atol=1e-5, rtol=1e-5)
    assert not found.sum_pi_squared.requires_grad
    gradients, right = whole_gradient(model, found), whole_gradient(whole_model, expected)
    torch.testing.assert_close(gradients, [value.float() for value in right], atol=1e-4, rtol=1e-4)


def test_a_policy_is_at_no_distance_from_itself_and_is_not_pulled(directory, rows):
    model = load(directory)
    found = model(lay_out(rows, padded=False), 0.7, against=reference_outputs(model, rows, padded=False))
    assert torch.equal(found.reference_kl, torch.zeros(15))
    found.reference_kl.sum().backward()
    assert max(float(parameter.grad.abs().max()) for parameter in model.parameters()) < 1e-5


def test_the_reference_has_no_gradient_though_its_parameters_could(directories, rows):
    model, reference = load(directories["two heads a key"]), load(directories["llama"])
    found = model(lay_out(rows, padded=False), 1.0, against=reference_outputs(reference, rows, padded=False))
    found.reference_kl.sum().backward()
    assert not any(parameter.grad is not None for parameter in reference.parameters())


@pytest.mark.parametrize("tokens_a_chunk", [4, 10**6])
def test_what_is_not_asked_for_is_none_and_computed_by_no_operation(odd, odd_rows, tokens_a_chunk, monkeypatch):
    chunks_of(tokens_a_chunk, monkeypatch)
    model, inputs = load(odd), lay_out(odd_rows, padded=False)
    with VocabularyWide(37) as bare, torch.no_grad():
        found = model(inputs, 1.0)
    assert found[1:] == (None, None, None)
    # In every chunk the head, the largest logit taken off, and e to the power: a temperature of 1 divides nothing, and
    # log-probs need no probabilities.
    assert {name for name, _ in bare.seen} == {"slice", "mm", "sub_", "exp"}
    for asked in ("entropies", "sum_pi_squared"):
        more = model(inputs, 1.0, **{asked: True})
        assert [name for name, value in more._asdict().items() if value is not None] == ["log_probs", asked]
        assert torch.equal(more.log_probs, found.log_probs)


def test_entropies_that_are_only_told_have_no_gradient_and_change_none(directory, rows):
    model = load(directory)
    told = model(lay_out(rows, padded=False), 1.0, entropies=True)
    assert not told.entropies.requires_grad
    learnt = model(lay_out(rows, padded=False), 1.0, entropies=True, entropy_gradient=True)
    assert torch.equal(told.entropies, learnt.entropies) and learnt.entropies.requires_grad


def test_no_logits_exist_as_a_whole_where_a_reference_has_some_too(odd, odd_rows, monkeypatch):
    chunks_of(4, monkeypatch)
    model = load(odd)
    against = reference_outputs(model, odd_rows, padded=False)
    with VocabularyWide(37) as wide:
        wanted = {"entropies": True, "entropy_gradient": True, "sum_pi_squared": True}
        found = model(lay_out(odd_rows, padded=False), 1.0, against=against, **wanted)
        sum(found[:2] + found[3:]).sum().backward()
    # 15 response tokens and room for the logits of 4: 2 of the policy with 2 of the reference.
    assert {size for _, size in wide.seen} == {1, 2}


def test_the_order_of_the_rows_does_not_matter(directory, rows):
    model, order = load(directory), [2, 0, 3, 1]
    log_probs = model(lay_out(rows, padded=False), 1.0).log_probs
    mixed = model(lay_out(rows.select(order), padded=False), 1.0).log_probs
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


def test_a_directory_that_lacks_weights_is_refused_by_their_names(directory, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(directory)
    weights = {name: value for name, value in model.state_dict().items() if name != "lm_head.weight"}
    model.save_pretrained(tmp_path, state_dict=weights)
    with pytest.raises(ValueError, match=r"1 of the model's weights are not there \(lm_head.weight\)"):
        load(str(tmp_path))


def test_a_family_whose_rows_see_one_another_in_one_line_is_found_out():
    config = StableLmConfig(**SMALL, num_key_value_heads=4)
    model = LanguageModel(AutoModelForCausalLM.from_config(config, attn_implementation=attention.NAME))
    with pytest.raises(ValueError, match=r"stablelm: .* differ by"):
        check_log_probs(model, torch.float32, padded=False)
    assert rows_mix(model)
    check_log_probs(model, torch.float32, padded=True)


@pytest.mark.parametrize("family", ["a recurrence along the text", "two heads a key"])
def test_rows_of_other_families_lie_in_one_line(directories, family):
    assert not rows_mix(load(directories[family]))
    assert not rows_mix(load_value_model(model_config(directories[family]), torch.float32))


def test_dropout_that_was_not_asked_for_is_off(rows, tmp_path):
    torch.manual_seed(0)
    config = SeedOssConfig(**SMALL, num_key_value_heads=2, head_dim=8, residual_dropout=0.5, attention_dropout=0.5)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    inputs, asked = lay_out(rows, padded=False), {"residual_dropout": 0.5}
    model, noisy = load(str(tmp_path)), load(str(tmp_path), override_config=asked)
    expected = model.eval()(inputs, 1.0).log_probs
    assert torch.equal(model.train()(inputs, 1.0).log_probs, expected)
    assert torch.equal(noisy.eval()(inputs, 1.0).log_probs, expected)
    assert (noisy.train()(inputs, 1.0).log_probs - expected).abs().max() > 0.1


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("family", FAMILIES | SPECIAL)
def test_a_family_that_is_computed_as_in_its_own_forward_passes(directories, family, padded):
    loaded = AutoModelForCausalLM.from_pretrained(directories[family], attn_implementation=attention.NAME)
    check_log_probs(LanguageModel(loaded), torch.float32, padded=padded)
