import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hybridrl.core.training.partition import MANY, partition

NUMBERS = st.lists(st.integers(1, 50) | st.integers(1, 5000), min_size=1, max_size=120)
PARTS = st.integers(1, 3 * MANY)


def one_by_one(numbers: list[int], parts: int) -> list[list[int]]:
    """Assign the largest remaining number to the part with the smallest sum, the first of equals."""
    shares: list[list[int]] = [[] for _ in range(parts)]
    for place in sorted(range(len(numbers)), key=lambda place: (-numbers[place], place)):
        min(shares, key=lambda share: sum(numbers[other] for other in share)).append(place)
    return shares


def shares_of(numbers: list[int], parts: int, limit: float) -> tuple[list[list[int]], int]:
    shares, largest = partition(np.array(numbers), parts, limit)
    return [share.tolist() for share in shares], largest


@given(NUMBERS, PARTS)
def test_the_largest_remaining_number_goes_to_the_part_with_the_smallest_sum(numbers, parts):
    assert shares_of(numbers, parts, limit=sum(numbers))[0] == one_by_one(numbers, parts)


@given(NUMBERS, PARTS)
def test_exchanges_keep_every_number_in_one_part_and_make_no_sum_larger(numbers, parts):
    shares, largest = shares_of(numbers, parts, limit=0)
    assert sorted(place for share in shares for place in share) == list(range(len(numbers)))
    assert largest == max(sum(numbers[place] for place in share) for share in shares)
    assert largest <= shares_of(numbers, parts, limit=sum(numbers))[1]


def test_a_number_is_exchanged_for_another():
    # Partitioned into 7 + 4 + 4 and 6 + 5 + 2; with 5 for 4, 14 each.
    shares, largest = shares_of([7, 6, 5, 4, 4, 2], 2, limit=14)
    assert largest == 14
    assert sorted(sum([7, 6, 5, 4, 4, 2][place] for place in share) for share in shares) == [14, 14]


def test_a_number_is_exchanged_for_two_if_no_single_one_helps():
    # Partitioned into 9 + 8 + 2 and 9 + 6 + 2, which are 2 apart; 9 for 6 + 2 makes 18 each.
    assert shares_of([9, 9, 8, 6, 2, 2], 2, limit=19)[1] == 19
    assert shares_of([9, 9, 8, 6, 2, 2], 2, limit=18)[1] == 18


def test_nothing_is_exchanged_below_the_limit():
    assert shares_of([8, 7, 6, 5, 4], 2, limit=17)[0] == one_by_one([8, 7, 6, 5, 4], 2)


def test_no_numbers_leave_all_parts_empty():
    assert shares_of([], 3, limit=0) == ([[], [], []], 0)
