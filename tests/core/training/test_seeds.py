import pytest

from hybridrl.core.training.seeds import training_seed


@pytest.mark.parametrize(
    ("keys", "seed"),
    [
        ((0, 1, 0), 2073067270),  # dropout of the first step on the first rank
        ((42, 3, 1), 292735539),  # the order of prompts in the third step's second epoch
        ((42, 100), 100974721),  # the selected tokens of a step
    ],
)
def test_seeds_are_the_same_with_every_python_so_that_resumed_runs_repeat_them(keys, seed):
    assert training_seed(*keys) == seed
