"""Statistics of repeated samples per question, with two kinds of intervals.

A table has one array per question: the values of its samples. Arrays may have different lengths, since faults are left
out. Each interval answers another question, and neither is the binomial interval over all samples:

  again  this benchmark again: the same questions, new samples
  alike  questions like these: other questions of the same kind
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations, product
from statistics import NormalDist

import numpy as np

Table = Sequence[np.ndarray]  # per question: the values of its samples [n]
Interval = tuple[float, float]

LEVEL = 0.95
CORRECT = 0.5  # a sample with more than this counts as right
FEW = 5  # the normal approximation fails with fewer right, wrong, or mixed questions (samples that differ)
DRAWS = 10_000  # draws of a bootstrap and of a permutation test
MAJORITY_DRAWS = 1000  # draws of k samples per question
MOST_SUBSETS = 5000  # up to this number, all subsets of k samples are counted
EXACT_QUESTIONS = 13  # up to this number Q, all 2^Q sign flips are tried
MOST_FREEDOM = 1_000_000  # from here the t distribution equals the normal distribution
CHUNK = 4_000_000  # numbers of a bootstrap in memory at a time


@dataclass(frozen=True)
class Mean:
    """A mean over questions with both intervals; None: the data do not determine it. `few`: fewer than FEW questions
    are right, wrong or mixed; the intervals are rough, and too wide to separate models this good, or this bad."""

    value: float
    again: Interval | None
    alike: Interval | None
    few: bool = False
    se_again: float | None = None


@dataclass(frozen=True)
class Comparison:
    """B minus A on the same questions. `p`: of the sign-flip permutation test; `mcnemar`: exact, for one sample per
    question. `few`: fewer than FEW questions have samples that differ; `again` is rough."""

    difference: float
    again: Interval | None
    alike: Interval | None
    p: float
    mcnemar: float | None
    up: int
    down: int
    same: int
    flips: int  # number of questions with a changed majority: right in one model, wrong in the other
    few: bool = False


# -- means -------------------------------------------------------------------------------------------------------------


def mean(table: Table) -> Mean:
    """Return avg@n: the mean over questions of the means over their samples."""
    means, questions = means_of(table), len(table)
    value, error = float(means.mean()), sampling_error(table)
    again = _within(_around(value, error.half), table) if error else None
    few = is_binary(table) and min(value, 1 - value) * questions < FEW
    alike = None
    if few:
        alike = wilson(value, questions, NormalDist().inv_cdf((1 + LEVEL) / 2))
    elif questions > 1:
        alike = _of_questions(means, t_quantile(questions - 1))
    few_differ = has_few_mixed(table)
    return Mean(value, again, alike, few or few_differ, error and math.sqrt(error.variance))


def means_of(table: Table) -> np.ndarray:
    """Return the mean of each question [Q]."""
    return np.array([values.mean() for values in table], dtype=float)


def is_binary(table: Table) -> bool:
    return all(((values == 0) | (values == 1)).all() for values in table)


def has_few_mixed(table: Table) -> bool:
    """Whether too few questions are mixed (samples differ) to estimate variances. The variance of the other questions
    is not zero, although all of their samples agree."""
    several = [values for values in table if len(values) > 1]
    mixed = sum(bool((values != values[0]).any()) for values in several)
    return mixed < min(FEW, len(several))


@dataclass(frozen=True)
class SamplingError:
    """The variance of a mean over new samples of the same questions, and its degrees of freedom by Satterthwaite's
    approximation: few if few questions make up the variance."""

    variance: float
    freedom: float

    @property
    def half(self) -> float:
        """Half the width of the interval around the mean."""
        return math.sqrt(self.variance) * t_quantile(max(int(min(self.freedom, MOST_FREEDOM)), 1))

    def plus(self, other: "SamplingError") -> "SamplingError":
        """Return the error of a difference of two means."""
        variance = self.variance + other.variance
        squares = self.variance**2 / self.freedom + other.variance**2 / other.freedom
        return SamplingError(variance, variance**2 / squares if squares else self.freedom + other.freedom)


def sampling_error(table: Table) -> SamplingError | None:
    """Return the sampling error of avg@n; None if no question has two samples. A question with one sample gets the mean
    variance of the others. If few questions are mixed, half a right and half a wrong sample are added to each question
    for its variance, so that none is certain; scores other than 0 and 1 then have no error (None)."""
    several = [values for values in table if len(values) > 1]
    if not several:
        return None
    if has_few_mixed(table):
        return _error_of_few(table) if is_binary(table) else None
    single = len(table) - len(several)
    parts = np.array([values.var(ddof=1) / len(values) for values in several])
    freedom = np.array([len(values) - 1 for values in several])
    usual = float(np.mean([values.var(ddof=1) for values in several]))
    variance = float(parts.sum()) + single * usual
    squares = float((parts**2 / freedom).sum())
    degrees = variance**2 / squares if squares else float(freedom.sum())
    return SamplingError(variance / len(table) ** 2, degrees)


def _error_of_few(table: Table) -> SamplingError:
    counts, right = right_counts(table)
    shares = (right + 0.5) / (counts + 1)
    return SamplingError(float((shares * (1 - shares) / counts).sum()) / len(table) ** 2, math.inf)


def _of_questions(means: np.ndarray, t: float) -> Interval:
    """Return the interval of a mean over questions. Scores between 0 and 1 are skewed if most are near an end: a
    symmetric interval then covers too little (0.92 instead of 0.95 for 50 questions of Beta(0.1, 0.9)). Wilson's is not
    symmetric; its count is the number of binary trials with the same error (Korn and Graubard 1998)."""
    value, error = float(means.mean()), float(means.std(ddof=1)) / math.sqrt(len(means))
    if error and means.min() >= 0 and means.max() <= 1:
        return wilson(value, value * (1 - value) / error**2, t)
    return _around(value, t * error)


def wilson(share: float, count: float, z: float) -> Interval:
    """Return Wilson's interval of a share of `count` trials, for the quantile `z` of the normal or t distribution."""
    scale = 1 + z * z / count
    middle = (share + z * z / (2 * count)) / scale
    half = z / scale * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return max(middle - half, 0.0), min(middle + half, 1.0)


@cache
def t_quantile(freedom: int) -> float:
    """Return t with P(|T| <= t) = LEVEL."""
    from scipy.special import stdtrit

    return float(stdtrit(freedom, (1 + LEVEL) / 2))


def _around(value: float, half: float) -> Interval:
    return value - half, value + half


def _within(interval: Interval, table: Table) -> Interval:
    """Return the interval, for a binary table cut to [0, 1]."""
    return (max(interval[0], 0.0), min(interval[1], 1.0)) if is_binary(table) else interval


# -- k samples ---------------------------------------------------------------------------------------------------------


def right_counts(table: Table) -> tuple[np.ndarray, np.ndarray]:
    """Return the number of samples of each question, and of right ones, [Q] each."""
    return np.array([len(values) for values in table]), np.array([int((values > CORRECT).sum()) for values in table])


def pass_at(samples: np.ndarray, right: np.ndarray, k: int) -> np.ndarray:
    """Return for each question the probability that one of k of its samples, drawn without replacement, is right:
    unbiased for k new samples (Chen et al. 2021). Questions with fewer than k samples must be left out."""
    wrong = np.ones(len(samples))
    for taken in range(k):
        wrong *= np.maximum(samples - right - taken, 0) / (samples - taken)
    return 1 - wrong


def pass_all(samples: np.ndarray, right: np.ndarray, k: int) -> np.ndarray:
    """Return for each question the probability that all of k of its samples are right (pass^k)."""
    return 1 - pass_at(samples, samples - right, k)


def majority_at(
    values: np.ndarray, predictions: Sequence[str], k: int, random: np.random.Generator | None = None
) -> float:
    """Return the probability that the most frequent prediction among k of a question's samples, drawn without
    replacement, is right; ties count by the share of right ones among them. An empty prediction does not vote. Exact
    for up to MOST_SUBSETS subsets of k samples, else from draws."""
    words, group = np.unique([normalised_prediction(text) for text in predictions], return_inverse=True)
    right = np.array([(values[group == index] > CORRECT).mean() for index in range(len(words))])
    voting = words != ""
    if k == 1:
        return float(np.where(voting, right, 0)[group].mean())
    if math.comb(len(values), k) <= MOST_SUBSETS:
        drawn = group[np.array(list(combinations(range(len(values)), k)))]
    else:
        random = np.random.default_rng(0) if random is None else random
        drawn = group[random.random((MAJORITY_DRAWS, len(values))).argsort(axis=1)[:, :k]]
    votes = (drawn[:, :, None] == np.arange(len(words))).sum(axis=1) * voting  # [draws, predictions]
    winners = (votes == votes.max(axis=1, keepdims=True)) & (votes > 0)
    return float((winners * right).sum(axis=1).astype(float).dot(1 / np.maximum(winners.sum(axis=1), 1)) / len(drawn))


def normalised_prediction(text: str) -> str:
    """Return a prediction without differences of case and white space."""
    return " ".join(str(text).split()).casefold()


def bootstrap(table: np.ndarray) -> list[Interval]:
    """Return percentile intervals of the mean of each column of a table [Q, metrics] over questions drawn with
    replacement."""
    questions, random = len(table), np.random.default_rng(0)
    rows = max(CHUNK // questions, 1)
    means = []
    for start in range(0, DRAWS, rows):
        drawn = random.integers(questions, size=(min(rows, DRAWS - start), questions))
        weights = np.stack([np.bincount(sample, minlength=questions) for sample in drawn])
        means.append(weights @ table / questions)
    ends = np.quantile(np.concatenate(means), [(1 - LEVEL) / 2, (1 + LEVEL) / 2], axis=0)
    return [(float(low), float(high)) for low, high in ends.T]


# -- several models ----------------------------------------------------------------------------------------------------


def compare(a: Table, b: Table, *, aligned: bool = False) -> Comparison:
    """Compare two models on the same questions, in the same order. Pairs cancel the differences between questions.
    `aligned`: the samples of a question are paired too, by equal seeds. Samples of similar models then agree in part,
    and only the differences within pairs are sampling errors."""
    first, second = means_of(a), means_of(b)
    differences, questions = second - first, len(first)
    value = float(differences.mean())
    error, alike = difference_error(a, b, aligned=aligned), None
    again = _around(value, error.half) if error else None
    if questions > 1:
        half = float(differences.std(ddof=1)) / math.sqrt(questions) * t_quantile(questions - 1)
        alike = _around(value, half)
    single = all(len(values) == 1 for values in (*a, *b))
    sides = [means > CORRECT for means in (first, second)]
    up, down = int((differences > 0).sum()), int((differences < 0).sum())
    return Comparison(
        value,
        again,
        alike,
        p=sign_flips(differences),
        mcnemar=mcnemar(int((~sides[0] & sides[1]).sum()), int((sides[0] & ~sides[1]).sum())) if single else None,
        up=up,
        down=down,
        same=questions - up - down,
        flips=int((sides[0] != sides[1]).sum()),
        few=error is not None and math.isinf(error.freedom),
    )


def difference_error(a: Table, b: Table, *, aligned: bool) -> SamplingError | None:
    """Return the sampling error of a difference of two means; None if questions have one sample only."""
    if aligned:
        differences = [second - first for first, second in zip(a, b, strict=True)]
        if not has_few_mixed(differences):
            return sampling_error(differences)
    errors = sampling_error(a), sampling_error(b)
    return errors[0].plus(errors[1]) if errors[0] and errors[1] else None


def sign_flips(differences: np.ndarray) -> float:
    """Return the two-sided p of a mean difference: the share of random signs per question with one as large."""
    differences = differences[differences != 0]
    if not len(differences):
        return 1.0
    observed = abs(differences.sum()) * (1 - 1e-12)
    if len(differences) <= EXACT_QUESTIONS:
        signs = np.array(list(product((-1, 1), repeat=len(differences))))
        return float((abs(signs @ differences) >= observed).mean())
    random, larger = np.random.default_rng(0), 0
    rows = max(CHUNK // len(differences), 1)
    for start in range(0, DRAWS, rows):
        signs = random.integers(2, size=(min(rows, DRAWS - start), len(differences))) * 2 - 1
        larger += int((abs(signs @ differences) >= observed).sum())
    return (1 + larger) / (1 + DRAWS)


def mcnemar(up: int, down: int) -> float:
    """Return the exact two-sided p: `up` questions became right, and `down` became wrong."""
    total = up + down
    tail = sum(math.comb(total, count) for count in range(min(up, down) + 1)) / 2**total
    return min(1.0, 2 * tail)


def holm(values: Sequence[float]) -> list[float]:
    """Return p values corrected for their number, by Holm's step-down procedure."""
    corrected, least = [0.0] * len(values), 0.0
    for rank, index in enumerate(sorted(range(len(values)), key=values.__getitem__)):
        least = max(least, min(1.0, (len(values) - rank) * values[index]))
        corrected[index] = least
    return corrected


def selection_bias(tables: Sequence[Table]) -> float | None:
    """Return how much better the best of these evaluations would look by chance if all were of one unchanged model:
    the expected maximum of their sampling errors. With one sample per question the errors are estimated from changes
    between models, which real changes increase. None: only one evaluation, or their questions differ."""
    if len(tables) < 2 or len({len(table) for table in tables}) > 1:
        return None
    errors = [error for table in tables if (error := sampling_error(table)) is not None]
    if errors:
        variance = float(np.mean([error.variance for error in errors]))
    else:
        means = np.stack([means_of(table) for table in tables])  # [models, Q]
        variance = float(means.var(axis=0, ddof=1).sum()) / means.shape[1] ** 2
    return math.sqrt(variance) * expected_maximum(len(tables))


@cache
def expected_maximum(count: int) -> float:
    """Return the mean of the largest of `count` standard normal numbers."""
    grid = np.linspace(-9, 9, 18_001)
    below = np.array([NormalDist().cdf(x) for x in grid])
    density = np.exp(-grid * grid / 2) / math.sqrt(2 * math.pi)
    return float((grid * count * density * below ** (count - 1)).sum() * (grid[1] - grid[0]))
