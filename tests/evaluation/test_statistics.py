"""Intervals cover what they claim, estimates equal brute force, and comparisons find what is there."""

import math
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridrl.evaluation import statistics

REPETITIONS, QUESTIONS, SAMPLES = 2000, 30, 32
right_and_wrong = st.lists(st.booleans(), min_size=1, max_size=8)


def difficulty(random: np.random.Generator, questions: int = QUESTIONS) -> np.ndarray:
    """The probability of each question to be answered rightly: many are hard, many are easy."""
    return random.beta(0.5, 0.6, questions)


def table(random: np.random.Generator, p: np.ndarray, samples: int = SAMPLES) -> list[np.ndarray]:
    return list((random.random((len(p), samples)) < p[:, None]).astype(float))


def covered(draw) -> tuple[float, float]:
    """The share of repetitions in which each interval holds the truth."""
    hits = np.zeros(2)
    for _ in range(REPETITIONS):
        again, alike, (same, all_questions) = draw()
        hits += [again[0] <= same <= again[1], alike[0] <= all_questions <= alike[1]]
    return tuple(hits / REPETITIONS)


def test_both_intervals_of_a_mean_cover_what_they_are_of():
    random = np.random.default_rng(0)
    overall = 0.5 / 1.1  # the mean of the distribution of questions

    def draw():
        p = difficulty(random)
        estimate = statistics.mean(table(random, p))
        return estimate.again, estimate.alike, (p.mean(), overall)

    assert all(0.94 <= share <= 0.96 for share in covered(draw))


@pytest.mark.slow
def test_both_intervals_of_a_difference_cover_what_they_are_of():
    random = np.random.default_rng(1)

    def draw():
        p = difficulty(random)
        better = 0.8 * p + 0.2 * random.random(QUESTIONS)  # 0.2 (1/2 - p) more, on average over all questions
        comparison = statistics.compare(table(random, p), table(random, better))
        return comparison.again, comparison.alike, ((better - p).mean(), 0.2 * (0.5 - 0.5 / 1.1))

    assert all(0.94 <= share <= 0.96 for share in covered(draw))


@pytest.mark.slow
def test_the_interval_of_a_difference_covers_for_samples_with_the_same_random_numbers_and_is_narrower():
    random, widths = np.random.default_rng(6), []

    def draw():
        p = difficulty(random)
        better = 0.8 * p + 0.2 * random.random(QUESTIONS)
        numbers = random.random((QUESTIONS, SAMPLES))
        a, b = (list((numbers < chance[:, None]).astype(float)) for chance in (p, better))
        aligned, apart = statistics.compare(a, b, aligned=True), statistics.compare(a, b)
        widths.append((np.diff(aligned.again), np.diff(apart.again)))
        return aligned.again, aligned.alike, ((better - p).mean(), 0.2 * (0.5 - 0.5 / 1.1))

    assert all(0.94 <= share <= 0.96 for share in covered(draw))
    narrow, wide = np.mean(widths, axis=0)
    assert narrow < 0.7 * wide


@pytest.mark.slow
def test_the_interval_of_a_difference_covers_for_aligned_samples_that_are_independent():
    random = np.random.default_rng(7)

    def draw():
        p = difficulty(random)
        comparison = statistics.compare(table(random, p), table(random, p), aligned=True)
        return comparison.again, comparison.again, (0.0, 0.0)

    assert 0.94 <= covered(draw)[0] <= 0.96


def test_the_binomial_interval_over_all_samples_would_be_wrong_for_both():
    random = np.random.default_rng(2)

    def draw():
        p = difficulty(random)
        values = np.stack(table(random, p))
        half = 1.96 * math.sqrt(values.mean() * (1 - values.mean()) / values.size)
        interval = values.mean() - half, values.mean() + half
        return interval, interval, (p.mean(), 0.5 / 1.1)

    again, alike = covered(draw)
    assert again > 0.98 and alike < 0.5


def test_a_mean_is_over_questions_however_many_samples_each_has():
    estimate = statistics.mean([np.array([1.0, 1, 1, 1]), np.array([0.0, 0])])
    assert estimate.value == 0.5


def test_the_interval_of_the_same_benchmark_is_that_of_its_samples():
    # 10 questions with 1 of 2 right: variance 0.5 per sample, 0.25 per question, 10 x 0.25 / 100 of the mean; t(10).
    estimate = statistics.mean([np.array([0.0, 1])] * 10)
    assert estimate.se_again == pytest.approx(math.sqrt(0.025))
    assert estimate.again == pytest.approx([0.5 - 2.22814 * 0.158114, 0.5 + 2.22814 * 0.158114], abs=1e-5)


def test_where_few_questions_have_samples_that_differ_the_others_are_not_taken_as_certain():
    # Shares (2.5, 0.5, 1.5) / 3 of 20, 18 and 2 questions: variances 5/36, 5/36 and 1/4, halved for two samples.
    estimate = statistics.mean([np.ones(2)] * 20 + [np.zeros(2)] * 18 + [np.array([0.0, 1])] * 2)
    half = 1.959964 * math.sqrt((38 * 5 / 72 + 2 / 8) / 40**2)
    assert estimate.few and estimate.again == pytest.approx([0.525 - half, 0.525 + half], abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("a", "b", "questions", "samples"), [(0.05, 0.1, 30, 2), (0.02, 0.04, 30, 4), (0.1, 0.1, 10, 2)]
)
def test_the_intervals_of_the_same_benchmark_cover_where_nearly_all_questions_are_all_right_or_all_wrong(
    a, b, questions, samples
):
    random, hits = np.random.default_rng(8), np.zeros(3)
    for _ in range(1000):
        p = random.beta(a, b, questions)
        better = 0.8 * p + 0.2 * random.beta(a, b, questions)
        first, second = table(random, p, samples), table(random, better, samples)
        means = statistics.mean(first).again, p.mean()
        gain = (better - p).mean()
        pairs = [means, *((statistics.compare(first, second, aligned=one).again, gain) for one in (False, True))]
        hits += [low <= truth <= high for (low, high), truth in pairs]
    assert (hits / 1000 >= 0.93).all()


def test_equal_samples_of_every_question_give_no_interval_of_width_zero():
    estimate = statistics.mean([np.ones(4)] * 5 + [np.zeros(4)] * 5)
    assert estimate.few and estimate.again[0] < 0.45 and estimate.again[1] > 0.55
    same = statistics.compare([np.ones(4)] * 10, [np.ones(4)] * 10, aligned=True)
    assert same.few and same.again[0] < 0 < same.again[1]


def test_the_interval_of_questions_like_these_covers_skewed_scores():
    random, true, hits = np.random.default_rng(0), 0.1, 0
    for _ in range(3000):
        low, high = statistics.mean(list(random.beta(0.1, 0.9, (50, 1)))).alike
        hits += low <= true <= high
    assert 0.935 <= hits / 3000 <= 0.96  # mean +- t covers 0.923


def test_scores_beyond_0_and_1_have_a_symmetric_interval():
    scores = [np.array([value]) for value in (2.0, 0, 2, 0)] * 10
    assert statistics.mean(scores).alike == pytest.approx((0.676, 1.324), abs=1e-3)  # t(39) = 2.0227, sd 1.0127


def test_scores_other_than_0_and_1_without_spread_have_no_interval_of_the_same_benchmark():
    estimate = statistics.mean([np.full(4, 0.3)] * 10)
    assert estimate.again is None and estimate.few


def test_one_sample_per_question_has_no_interval_of_the_same_benchmark():
    estimate = statistics.mean([np.array([value]) for value in (1.0, 0, 1, 0)] * 10)
    assert estimate.again is None
    # Wilson's with t(39) = 2.0227, as 0.25 / (0.25641 / 40) = 39 trials: 0.5 +- 1.8307 sqrt(0.25 / 39 + 0.000672)
    assert estimate.alike == pytest.approx((0.3459, 0.6541), abs=1e-4)


def test_with_few_wrong_questions_the_interval_is_wilsons_and_says_so():
    estimate = statistics.mean([np.ones(4)] * 29 + [np.zeros(4)])
    assert estimate.few
    assert estimate.alike == pytest.approx((0.8333, 0.9941), abs=1e-3)  # Wilson, 29 of 30
    mixed = [np.array([0.0, 1, 1, 1])] * 5
    assert not statistics.mean([np.ones(4)] * 20 + [np.zeros(4)] * 10 + mixed).few


@pytest.mark.parametrize(
    ("freedom", "expected"),
    [
        (1, 12.7062047),
        (2, 4.3026527),
        (3, 3.1824463),
        (4, 2.7764451),
        (29, 2.0452296),
        (30, 2.0422725),
        (499, 1.9647294),
    ],
)
def test_the_t_quantile_is_that_of_the_tables(freedom, expected):
    assert statistics.t_quantile(freedom) == pytest.approx(expected, abs=2e-7)


@given(right_and_wrong, st.integers(1, 8))
def test_pass_at_k_equals_counting_all_subsets(right, k):
    k = min(k, len(right))
    subsets = list(combinations(right, k))
    samples, count = np.array([len(right)]), np.array([sum(right)])
    assert statistics.pass_at(samples, count, k) == pytest.approx([np.mean([any(one) for one in subsets])])
    assert statistics.pass_all(samples, count, k) == pytest.approx([np.mean([all(one) for one in subsets])])


def test_pass_at_k_does_not_overflow():
    assert statistics.pass_at(np.array([20_000]), np.array([3]), 10_000) == pytest.approx([1 - 0.5**3], abs=1e-4)


@given(st.lists(st.sampled_from(["a", "A ", "b", "c", ""]), min_size=2, max_size=6), st.data())
def test_maj_at_k_equals_counting_all_subsets(words, data):
    k = data.draw(st.integers(1, len(words)))
    values = np.array([word.strip().lower() == "a" for word in words], dtype=float)

    def winner(subset):
        votes = [words[index].strip().lower() for index in subset if words[index].strip()]
        most = max((votes.count(word) for word in votes), default=0)
        tied = {word for word in votes if votes.count(word) == most}
        return ("a" in tied) / len(tied) if tied else 0.0

    expected = np.mean([winner(subset) for subset in combinations(range(len(words)), k)])
    assert statistics.majority_at(values, words, k) == pytest.approx(expected, abs=1e-9)


def test_maj_at_k_of_many_samples_is_drawn():
    values, words = np.array([1.0] * 20 + [0.0] * 20), ["a"] * 20 + ["b"] * 20
    assert statistics.majority_at(values, words, 9) == pytest.approx(0.5, abs=0.05)  # sets of 9: 273,438,880


def test_the_bootstrap_of_a_mean_is_about_its_normal_interval():
    values = np.random.default_rng(0).random((400, 2))
    for column, (low, high) in zip(values.T, statistics.bootstrap(values), strict=True):
        half = 1.96 * column.std() / 20
        assert (low, high) == pytest.approx((column.mean() - half, column.mean() + half), abs=0.003)


def test_a_paired_comparison_finds_a_gain_that_separate_intervals_cannot_see():
    random = np.random.default_rng(3)
    found = apart = 0
    for _ in range(200):
        p = difficulty(random)
        better = np.clip(p + 0.05, 0, 1)
        a, b = table(random, p), table(random, better)
        found += statistics.compare(a, b).p < 0.05
        apart += statistics.mean(a).alike[1] < statistics.mean(b).alike[0]
    assert found >= 150 and apart == 0


def test_without_a_difference_p_is_below_5_percent_in_5_percent_of_comparisons():
    random = np.random.default_rng(4)
    p = difficulty(random)
    seen = [statistics.compare(table(random, p), table(random, p)).p < 0.05 for _ in range(400)]
    assert 0.03 <= np.mean(seen) <= 0.07


def test_a_comparison_counts_questions_and_changed_sides():
    a = [np.array([1.0, 1]), np.array([0.0, 0]), np.array([1.0, 0]), np.array([0.0, 1])]
    b = [np.array([0.0, 0]), np.array([1.0, 0]), np.array([0.0, 1]), np.array([1.0, 1])]
    result = statistics.compare(a, b)
    assert (result.difference, result.up, result.down, result.same, result.flips) == (0.0, 2, 1, 1, 2)


def test_mcnemar_is_the_binomial_test_of_the_questions_that_changed():
    assert statistics.mcnemar(1, 9) == pytest.approx(2 * 11 / 1024)
    assert statistics.mcnemar(5, 5) == 1.0 and statistics.mcnemar(0, 0) == 1.0
    one_each = [np.array([value]) for value in (0.0,) * 10], [np.array([value]) for value in (1.0,) * 9 + (0.0,)]
    assert statistics.compare(*one_each).mcnemar == pytest.approx(2 / 2**9)
    assert statistics.compare(*one_each).p == pytest.approx(2 / 2**9)  # the sign flips are the same test then


def test_holm_multiplies_the_least_p_by_their_number_and_keeps_the_order():
    assert statistics.holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert statistics.holm([0.5, 0.9]) == [1.0, 1.0]


@pytest.mark.slow
@pytest.mark.parametrize(("samples", "least", "most"), [(1, 0.09, 0.14), (32, 0.016, 0.026)])
def test_the_best_of_twenty_evaluations_of_one_model_looks_better_by_the_bias_that_is_reported(samples, least, most):
    random = np.random.default_rng(5)
    p = difficulty(random)
    gains, biases = [], []
    for _ in range(100):
        tables = [table(random, p, samples) for _ in range(20)]
        gains.append(max(statistics.mean(one).value for one in tables) - p.mean())
        biases.append(statistics.selection_bias(tables))
    assert np.mean(biases) == pytest.approx(np.mean(gains), rel=0.1)
    assert least < np.mean(biases) < most


def test_one_evaluation_has_no_selection_bias():
    assert statistics.selection_bias([[np.array([1.0, 0])]]) is None
