import pytest
import torch

from hybridrl.core.algorithms.estimators import placed, whitened, written_tokens


def test_whitened_values_have_mean_0_and_sample_variance_1():
    # Mean 3, sample deviation 2.
    assert whitened(torch.tensor([1.0, 3.0, 5.0])).tolist() == pytest.approx([-1, 0, 1])


@pytest.mark.parametrize("values", [[], [3.0], [0.1] * 1000, [1e6 + 0.1] * 1001])
def test_nothing_one_value_and_equal_values_are_whitened_to_0(values):
    assert whitened(torch.tensor(values)).tolist() == pytest.approx([0.0] * len(values), abs=1e-9)


def test_large_values_that_lie_close_together_are_whitened_as_if_they_were_small():
    small = torch.arange(1001.0).fmod(7)
    assert whitened(small + 2**20).tolist() == pytest.approx(whitened(small).tolist(), abs=1e-6)


def test_written_tokens_are_counted_row_by_row_and_may_be_none(make_batch):
    batch = make_batch([2, 1, 3], response_mask=[False, True, False, True, True, False])
    written, lengths = written_tokens(batch)
    assert batch.response_ids[written].tolist() == [1, 3, 4]
    assert lengths.tolist() == [1, 0, 2]
    assert placed(batch, torch.tensor([5.0, 6.0, 7.0])).tolist() == [0, 5, 0, 6, 7, 0]


def test_where_all_tokens_were_written_all_are_taken_and_stay_where_they_are(make_batch):
    batch = make_batch([2, 1])
    written, lengths = written_tokens(batch)
    assert batch.response_ids[written].tolist() == [0, 1, 2]
    assert lengths.tolist() == [2, 1]
    assert placed(batch, torch.tensor([5.0, 6.0, 7.0], dtype=torch.float64)).dtype == torch.float32
