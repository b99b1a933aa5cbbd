"""A model of two layers of 100 elements and 50 outside of them, 4 wide, worked out by hand."""

from dataclasses import replace

import pytest

from hybridrl.doctor import memory_formulas as formulas
from hybridrl.doctor.memory_formulas import Kept, ModelSizes

WHOLE = ModelSizes(
    parameters=250,
    trained=250,
    outside=50,
    layer=100,
    largest=40,
    small_fused=200,
    tied=True,
    layers=2,
    hidden=4,
    query=4,
    key=2,
    intermediate=10,
    vocabulary=12,
)
ADAPTED = ModelSizes(
    parameters=270,
    trained=20,
    outside=50,
    layer=110,
    largest=8,
    small_fused=220,
    tied=False,
    layers=2,
    hidden=4,
    query=4,
    key=2,
    intermediate=10,
    vocabulary=12,
)
FULL, MIXED = Kept(stored=4, computed=4, shards=1), Kept(stored=4, computed=2, shards=2)


def test_a_shard_has_parameters_gradients_and_two_moments_in_the_stored_type() -> None:
    assert formulas.parameters(WHOLE, MIXED) == 250 * 4 / 2
    assert formulas.gradients(WHOLE, MIXED) == 250 * 4 / 2
    assert formulas.moments(WHOLE, MIXED) == 2 * 250 * 4 / 2


def test_muon_has_one_moment_of_what_lies_in_the_layers() -> None:
    assert formulas.moments(WHOLE, FULL, muon=True) == (200 + 2 * 50) * 4


def test_beside_an_adapter_the_model_is_stored_as_it_computes_and_has_neither_gradients_nor_moments() -> None:
    assert formulas.parameters(ADAPTED, MIXED) == (20 * 4 + 250 * 2) / 2
    assert formulas.gradients(ADAPTED, MIXED) == 20 * 4 / 2
    assert formulas.moments(ADAPTED, MIXED, muon=False) == 2 * 20 * 4 / 2
    assert formulas.reduced(ADAPTED, MIXED) == 0


def test_a_rank_gathers_what_is_in_no_layer_and_two_layers_whole() -> None:
    assert formulas.gathered(WHOLE, MIXED) == (50 + 2 * 100) * 2
    assert formulas.gathered(WHOLE, replace(MIXED, resharded=False)) == 250 * 2
    assert formulas.optimizer_step(WHOLE, MIXED) == 2 * 40 * 4 / 2


def test_gradients_are_whole_once_as_computed_and_once_in_float32_while_they_are_reduced() -> None:
    assert formulas.reduced(WHOLE, MIXED) == 100 * (2 + 4) + 12 * 4 * 2  # a layer, while the head's gradient waits
    assert formulas.reduced(replace(WHOLE, outside=150), MIXED) == 150 * (2 + 4)


def test_activations_are_those_of_all_layers() -> None:
    # A token of a layer in float32: 6 x 4 of the norms, 2 x (4 + 2) + 4 of the attention, 4 x 10 of the MLP.
    every = {"checkpointed": False, "selective": False}
    assert formulas.activations(WHOLE, FULL, 7, **every, by_rows=True) == 7 * 2 * (24 + 16 + 40) * 4
    # In half precision norms keep more; in one call attention keeps its output once.
    assert formulas.activations(WHOLE, MIXED, 7, **every, by_rows=False) == 7 * 2 * (32 + 12 + 40) * 2


def test_with_checkpointing_activations_are_every_layers_input_and_one_layer() -> None:
    inputs = {"checkpointed": True, "selective": False}
    assert formulas.activations(WHOLE, FULL, 7, **inputs, by_rows=True) == 7 * (2 * 4 + 80) * 4
    # Of every layer also queries and attention's output (4 each), keys and values (2), two results of 4 and two of 10.
    products = {"checkpointed": True, "selective": True}
    assert formulas.activations(WHOLE, FULL, 7, **products, by_rows=True) == 7 * (2 * (4 + 8 + 4 + 8 + 20) + 80) * 4


def test_a_pass_without_gradients_holds_the_widest_of_one_layer() -> None:
    assert formulas.passing(WHOLE, FULL, 7) == 7 * (30 + 8) * 4


@pytest.mark.parametrize(("tokens", "size"), [(5, 2.5 * 5 * 12 * 4), (100, 2.5 * 20 * 12 * 4)])
def test_logits_are_as_many_as_the_tokens_and_at_most_a_chunk(tokens: int, size: int) -> None:
    assert formulas.logits(WHOLE, FULL, tokens, at_once=20, on_cpu=True) == size
    assert formulas.logits(WHOLE, MIXED, tokens, at_once=20, on_cpu=False) == min(tokens, 20) * 12 * 2


def test_a_pass_takes_rows_up_to_the_budget_and_a_longer_one_alone() -> None:
    assert formulas.pass_tokens(1000, None, rows=8, longest=100) == 800
    assert formulas.pass_tokens(500, None, rows=8, longest=100) == 500
    assert formulas.pass_tokens(50, None, rows=8, longest=100) == 100
    assert formulas.pass_tokens(50, 3, rows=8, longest=100) == 300
    assert formulas.pass_tokens(50, 9, rows=8, longest=100) == 800


def test_an_engine_has_further_copies_on_cpu() -> None:
    assert formulas.rollout_weights(WHOLE, 2, on_cpu=False) == 250 * 2
    assert formulas.rollout_weights(WHOLE, 4, on_cpu=True) == (250 + 200 + 4 * 12 * 4) * 4
    assert formulas.rollout_weights(ADAPTED, 4, on_cpu=True) == (270 + 220) * 4


def test_a_rows_cache_has_keys_and_values_of_every_layer() -> None:
    assert formulas.cache_of_row(WHOLE, 10, 2) == 2 * 2 * 2 * 10 * 2
