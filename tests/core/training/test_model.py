from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, FalconH1Config, Qwen2Config, SeedOssConfig, StableLmConfig

from hybridrl.core.batch import Batch
from hybridrl.core.training import attention
from hybridrl.core.training.heads import LogitRule, ReferenceOutputs
from hybridrl.core.training.model import LanguageModel, check_log_probs, packed_rows_interact
from hybridrl.core.training.packing import pack_rows
from hybridrl.core.training.token_outputs import TokenOutputs
from hybridrl.model_merger.source import outputs
from hybridrl.required import required
from tests.core.training.families import (
    FAMILIES,
    SMALL,
    SPECIAL,
    VOCABULARY,
    load_language_model,
    load_value_model,
    model_config,
)
from tests.core.training.head_cases import chunks_of


def load(directory: str, dtype: torch.dtype = torch.float32, **changes: object) -> LanguageModel:
    return load_language_model(model_config(directory, **changes), dtype)


def one_by_one(directory: str, rows: Batch):
    """Log-probs, entropies and gradient of transformers' own model, each row alone."""
    model = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager")
    log_probs, entropies = [], []
    for number in range(len(rows)):
        row = rows.select([number])
        logits = model(torch.cat([row.prompt_ids, row.response_ids])[None]).logits[0]
        expected = torch.distributions.Categorical(logits=logits[len(row.prompt_ids) - 1 : -1])
        log_probs.append(expected.log_prob(row.response_ids))
        entropies.append(expected.entropy())
    log_probs, entropies = torch.cat(log_probs), torch.cat(entropies)
    return log_probs, entropies, gradient(model, log_probs, entropies)


def gradient(model, log_probs, entropies):
    """The gradient, in the order of the parameters, of a loss with a different weight for every token."""
    weights = torch.linspace(-1, 1, len(log_probs))
    (log_probs * weights + 0.1 * entropies * weights.flip(0)).sum().backward()
    return [parameter.grad for parameter in model.parameters()]


def assert_same(actual, expected):
    """Log-probs and entropies to 1e-5, gradients by parameter."""
    for value, right in zip(actual[:2], expected[:2], strict=True):
        torch.testing.assert_close(value, right, atol=1e-5, rtol=0)
    torch.testing.assert_close(actual[2], expected[2], atol=1e-4, rtol=1e-4)


def through(model: LanguageModel, rows: Batch, padded: bool):
    actual = model(pack_rows(rows, padded), 1.0, entropies=True, entropy_gradient=True)
    return actual.log_probs, actual.entropies, gradient(model, actual.log_probs, actual.entropies)


@pytest.fixture(scope="module", params=FAMILIES | SPECIAL)
def family(request, directories, rows):
    """The directory of a model of each family, and what each row alone gives."""
    return directories[request.param], one_by_one(directories[request.param], rows)


@pytest.mark.parametrize("padded", [False, True], ids=["packed", "padded"])
@pytest.mark.parametrize("tokens_a_chunk", [1, 4, None], ids="chunks of {} logits".format)
def test_rows_together_give_the_same_as_each_row_alone(family, rows, tokens_a_chunk, padded, monkeypatch):
    path, expected = family
    if tokens_a_chunk:
        chunks_of(tokens_a_chunk, monkeypatch)
    assert_same(through(load(path), rows, padded), expected)


@pytest.mark.parametrize("padded", [False, True], ids=["packed", "padded"])
def test_gradient_checkpointing_changes_nothing_but_computes_each_layer_twice(directory, rows, padded):
    model, calls = load(directory, enable_gradient_checkpointing=True).train(), []
    model.model.model.layers[0].self_attn.register_forward_hook(lambda *_: calls.append(1))
    assert_same(through(model, rows, padded), one_by_one(directory, rows))
    assert len(calls) == 2


class VocabularyWide(TorchDispatchMode):
    """Records operations whose result is as wide as the vocabulary, and for how many response tokens."""

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


def test_ids_beyond_the_rows_of_a_second_model_are_read_as_its_last(directory, rows):
    """The policy may sample the padding of its head, which no tokenizer has."""
    beyond = replace(rows, response_ids=torch.where(rows.response_ids < 30, VOCABULARY + 63, rows.response_ids))
    last = replace(rows, response_ids=torch.where(rows.response_ids < 30, VOCABULARY - 1, rows.response_ids))
    for model, options in ((load(directory), [1.0]), (load_value_model(model_config(directory), torch.float32), [])):
        actual, right = (model(pack_rows(each, padded=False), *options) for each in (beyond, last))
        assert all(torch.equal(one, other) for one, other in zip(actual, right, strict=True) if one is not None)


@pytest.fixture
def odd_rows(rows) -> Batch:
    return replace(rows, prompt_ids=rows.prompt_ids % 37, response_ids=rows.response_ids % 37)


def reference_outputs(model: LanguageModel, rows: Batch, padded: bool, bias: Tensor | None = None) -> ReferenceOutputs:
    return ReferenceOutputs(model.hidden_states(pack_rows(rows, padded)), model.head._replace(bias=bias))


def by_the_formulas(policy_path: str, reference_path: str, bias: Tensor, rows: Batch, temperature: float):
    """All outputs of transformers' own models in float64, row by row, as sums over the vocabulary; and the policy."""
    policy, reference = (
        AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager", dtype=torch.float64)
        for path in (policy_path, reference_path)
    )
    actual = []
    for number in range(len(rows)):
        row = rows.select([number])
        ids = torch.cat([row.prompt_ids, row.response_ids])[None]
        log_p = (policy(ids).logits[0] / temperature).log_softmax(-1)
        log_q = ((reference(ids).logits[0].detach() + bias) / temperature).log_softmax(-1)
        for place, token in enumerate(row.response_ids.tolist(), start=len(row.prompt_ids) - 1):
            p = log_p[place].exp()
            entropy = -(p * log_p[place]).sum()
            kl = (p * (log_p[place] - log_q[place])).sum()
            actual.append((log_p[place, token], entropy, p.square().sum(), kl))
    return TokenOutputs(*(torch.stack(items) for items in zip(*actual, strict=True))), policy


def full_gradient(model, actual: TokenOutputs) -> list[Tensor]:
    """The gradient, in the order of the parameters, of all outputs that have one; every token has its own weights."""
    weights = torch.linspace(-1, 1, len(actual.log_probs))
    mixed = actual.log_probs * weights + actual.entropies * weights.flip(0) + actual.reference_kl * weights.square()
    mixed.sum().backward()
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("tokens_a_chunk", [1, 4, 10**6])
@pytest.mark.parametrize("padded", [False, True], ids=["packed", "padded"])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_all_outputs_and_their_gradient_match_the_formulas(
    directories, rows, temperature, padded, tokens_a_chunk, monkeypatch
):
    policy, reference = directories["two heads a key"], directories["llama"]
    bias = torch.linspace(-2, 2, VOCABULARY)
    expected, theirs = by_the_formulas(policy, reference, bias, rows, temperature)
    chunks_of(2 * tokens_a_chunk, monkeypatch)
    model, against = load(policy), reference_outputs(load(reference), rows, padded, bias)
    wanted = {"entropies": True, "entropy_gradient": True, "sum_pi_squared": True}
    actual = model(pack_rows(rows, padded), temperature, against=against, **wanted)
    assert actual.teacher_divergence is None
    for value, right in zip(actual[:4], expected[:4], strict=True):
        torch.testing.assert_close(value, required(right).float(), atol=1e-5, rtol=1e-5)
    assert not actual.sum_pi_squared.requires_grad
    gradients, right = full_gradient(model, actual), full_gradient(theirs, expected)
    torch.testing.assert_close(gradients, [value.float() for value in right], atol=1e-4, rtol=1e-4)


def test_the_kl_of_a_policy_to_itself_and_its_gradient_are_zero(directory, rows):
    model = load(directory)
    actual = model(pack_rows(rows, padded=False), 0.7, against=reference_outputs(model, rows, padded=False))
    assert torch.equal(actual.reference_kl, torch.zeros(15))
    actual.reference_kl.sum().backward()
    assert max(float(required(parameter.grad).abs().max()) for parameter in model.parameters()) < 1e-5


def test_the_reference_has_no_gradient_though_its_parameters_could(directories, rows):
    model, reference = load(directories["two heads a key"]), load(directories["llama"])
    actual = model(pack_rows(rows, padded=False), 1.0, against=reference_outputs(reference, rows, padded=False))
    actual.reference_kl.sum().backward()
    assert not any(parameter.grad is not None for parameter in reference.parameters())


@pytest.mark.parametrize("tokens_a_chunk", [4, 10**6])
def test_outputs_that_are_not_requested_are_none_and_not_computed(odd, odd_rows, tokens_a_chunk, monkeypatch):
    chunks_of(tokens_a_chunk, monkeypatch)
    model, inputs = load(odd), pack_rows(odd_rows, padded=False)
    with VocabularyWide(37) as bare, torch.no_grad():
        actual = model(inputs, 1.0)
    assert set(actual[1:]) == {None}
    # In every chunk the head, subtracting the largest logit, and exp: a temperature of 1 divides nothing, and log-probs
    # need no probabilities.
    assert {name for name, _ in bare.seen} == {"slice", "mm", "sub_", "exp"}
    for requested in ("entropies", "sum_pi_squared"):
        more = model(inputs, 1.0, **{requested: True})
        assert [name for name, value in more._asdict().items() if value is not None] == ["log_probs", requested]
        assert torch.equal(more.log_probs, actual.log_probs)


def test_entropies_that_are_only_logged_have_no_gradient(directory, rows):
    model = load(directory)
    logged = model(pack_rows(rows, padded=False), 1.0, entropies=True)
    assert not logged.entropies.requires_grad
    trained = model(pack_rows(rows, padded=False), 1.0, entropies=True, entropy_gradient=True)
    assert torch.equal(logged.entropies, trained.entropies) and trained.entropies.requires_grad


def test_full_logits_never_exist_with_a_reference_either(odd, odd_rows, monkeypatch):
    chunks_of(4, monkeypatch)
    model = load(odd)
    against = reference_outputs(model, odd_rows, padded=False)
    with VocabularyWide(37) as wide:
        wanted = {"entropies": True, "entropy_gradient": True, "sum_pi_squared": True}
        actual = model(pack_rows(odd_rows, padded=False), 1.0, against=against, **wanted)
        torch.stack([required(values) for values in (*actual[:2], actual.reference_kl)]).sum().backward()
    # 15 response tokens and memory for the logits of 4: 2 of the policy with 2 of the reference.
    assert {size for _, size in wide.seen} == {1, 2}


def test_the_order_of_the_rows_does_not_matter(directory, rows):
    model, order = load(directory), [2, 0, 3, 1]
    log_probs = model(pack_rows(rows, padded=False), 1.0).log_probs
    mixed = model(pack_rows(rows.select(order), padded=False), 1.0).log_probs
    parts = log_probs.split(rows.response_lengths.tolist())
    torch.testing.assert_close(mixed, torch.cat([parts[row] for row in order]), atol=1e-5, rtol=0)


def test_log_probs_of_a_half_precision_model_are_float32(directory, rows):
    model = load(directory, torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    actual, _, _ = through(model, rows, padded=False)
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual, one_by_one(directory, rows)[0], atol=0.3, rtol=0)


def test_settings_of_the_model_can_be_overridden(directory):
    assert load(directory, override_config={"rms_norm_eps": 0.5}).model.config.rms_norm_eps == 0.5


def test_a_directory_that_lacks_weights_is_rejected_by_their_names(directory, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(directory)
    weights = {name: value for name, value in model.state_dict().items() if name != "lm_head.weight"}
    model.save_pretrained(tmp_path, state_dict=weights)
    with pytest.raises(ValueError, match=r"1 of the model's weights are missing \(lm_head.weight\)"):
        load(str(tmp_path))


def test_a_right_model_in_bfloat16_is_accepted_however_large_its_logits_are():
    """Single log-probs of two right computations differ by 0.3 and more there."""
    torch.manual_seed(1)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}
    config = Qwen2Config(vocab_size=4096, num_key_value_heads=2, tie_word_embeddings=False, **sizes)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention.NAME).bfloat16()
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2:
            scale = {"lm_head.weight": 9.0 / 128**0.5, "model.embed_tokens.weight": 1.0}
            torch.nn.init.normal_(parameter, std=scale.get(name, 1.5 / parameter.shape[1] ** 0.5))
    check_log_probs(LanguageModel(model), torch.bfloat16, padded=False)


def test_log_probs_of_a_large_vocabulary_have_no_bias_in_the_models_own_pass_and_in_a_merges():
    torch.manual_seed(0)
    config = Qwen2Config(**SMALL | {"vocab_size": 262144}, num_key_value_heads=2)
    model, ids = AutoModelForCausalLM.from_config(config).eval(), torch.arange(9) * 37
    with torch.no_grad():
        right = model(ids[None]).logits[0, :-1].double().log_softmax(-1).gather(-1, ids[1:, None]).squeeze(-1)
        ours = LanguageModel(model).own_log_probs(ids)
    torch.testing.assert_close(ours, right, atol=1e-9, rtol=0)
    torch.testing.assert_close(outputs(model, ids), right, atol=1e-9, rtol=0)


@torch.no_grad()
def test_a_right_model_that_rounds_more_than_usual_is_accepted_and_one_with_a_fault_is_not():
    """With queries and keys of large weights, and 24 layers, log-probs in float32 are rounded by 1e-4."""
    torch.manual_seed(1)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 24, "num_attention_heads": 4}
    config = Qwen2Config(vocab_size=512, num_key_value_heads=2, tie_word_embeddings=False, **sizes)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention.NAME)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=2.0 if "q_proj" in name or "k_proj" in name else 0.3)
    policy = LanguageModel(model)
    check_log_probs(policy, torch.float32, padded=False)
    policy.rule = LogitRule(1.1)
    with pytest.raises(ValueError, match=r"differ from the model.s own by"):
        check_log_probs(policy, torch.float32, padded=False)


def test_a_family_whose_packed_rows_interact_is_detected():
    config = StableLmConfig(**SMALL, num_key_value_heads=4)
    model = LanguageModel(AutoModelForCausalLM.from_config(config, attn_implementation=attention.NAME))
    with pytest.raises(ValueError, match=r"stablelm: .* differ from the model.s own by"):
        check_log_probs(model, torch.float32, padded=False)
    assert packed_rows_interact(model)
    check_log_probs(model, torch.float32, padded=True)


def test_attention_without_the_familys_window_is_detected_although_no_row_of_the_check_is_as_long():
    window = {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 0}
    config = Qwen2Config(**SMALL, num_key_value_heads=2, **window)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention.NAME)
    check_log_probs(LanguageModel(model), torch.float32, padded=False)
    attentions = [layer.self_attn for layer in model.model.layers]
    assert {config.sliding_window} | {module.sliding_window for module in attentions} == {4096}
    for module in attentions:
        module.sliding_window = None
    with pytest.raises(ValueError, match=r"qwen2: the training log-probs differ from the model.s own"):
        check_log_probs(LanguageModel(model), torch.float32, padded=False)


def test_a_multiplier_of_the_head_is_part_of_the_logits():
    sizes = {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 8}
    config = FalconH1Config(**SMALL, **sizes, num_key_value_heads=2, head_dim=8, lm_head_multiplier=0.3)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention.NAME)
    check_log_probs(LanguageModel(model), torch.float32, padded=False)


@pytest.mark.parametrize("family", ["a recurrence along the text", "two heads a key"])
def test_packed_rows_of_other_families_do_not_interact(directories, family):
    assert not packed_rows_interact(load(directories[family]))
    assert not packed_rows_interact(load_value_model(model_config(directories[family]), torch.float32))


def test_dropout_that_is_not_requested_is_off(rows, tmp_path):
    torch.manual_seed(0)
    config = SeedOssConfig(**SMALL, num_key_value_heads=2, head_dim=8, residual_dropout=0.5, attention_dropout=0.5)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    inputs, requested = pack_rows(rows, padded=False), {"residual_dropout": 0.5}
    model, noisy = load(str(tmp_path)), load(str(tmp_path), override_config=requested)
    expected = model.eval()(inputs, 1.0).log_probs
    assert torch.equal(model.train()(inputs, 1.0).log_probs, expected)
    assert torch.equal(noisy.eval()(inputs, 1.0).log_probs, expected)
    assert (noisy.train()(inputs, 1.0).log_probs - expected).abs().max() > 0.1


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("family", FAMILIES | SPECIAL)
def test_log_probs_match_the_familys_own_forward_pass(directories, family, padded):
    loaded = AutoModelForCausalLM.from_pretrained(directories[family], attn_implementation=attention.NAME)
    check_log_probs(LanguageModel(loaded), torch.float32, padded=padded)
