import math
import statistics
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridrl.config.schema_parts import AlgorithmConfig, RolloutCorrectionConfig, ratio_bounds
from hybridrl.config.values import Commas
from hybridrl.core.algorithms.rollout_correction import Rejection, RolloutCorrection
from hybridrl.required import required
from tests.sections import section_of

COMMAS, LN2 = Commas(), math.log(2)
OPTIONS = ["token_k1", "token_k2", "token_k3", "seq_sum_k1", "seq_sum_k2", "seq_sum_k3"]
OPTIONS += ["seq_mean_k1", "seq_mean_k2", "seq_mean_k3", "seq_max_k2", "seq_max_k3"]
LEVELS = ["token", "sequence", "geometric"]
ROWS = st.lists(st.lists(st.tuples(st.floats(-30, 30), st.booleans()), min_size=1, max_size=5), min_size=1, max_size=6)
# Bounds that cut some of the reference's rows off, and not others.
CUTS = {"k1": "0.7_1.4", "k2": "0.13", "k3": "0.11"}


def correction(level=None, bounds="2.0", options="", thresholds="", batch_normalize=False):
    """The correction of a configuration with these values, also one that neither weights nor rejects."""
    names, limits = (COMMAS.read(value) or [] for value in (options, thresholds))
    values = {"rollout_is_threshold": bounds, "rollout_rs": names, "rollout_rs_threshold": limits}
    settings = {"rollout_is": level or "token", "rollout_is_batch_normalize": batch_normalize}
    section = section_of(RolloutCorrectionConfig, "algorithm.rollout_correction", **values, **settings)
    algorithm = section_of(AlgorithmConfig, "algorithm", rollout_correction=section)
    return replace(required(RolloutCorrection.of(algorithm)), level=level)


def rows_of(make_batch, rows, **more):
    """A batch of rows of (log-ratio, whether the policy wrote the token)."""
    log_ratios = torch.tensor([ratio for row in rows for ratio, _ in row], dtype=torch.float64)
    return make_batch(
        [len(row) for row in rows],
        rollout_log_probs=torch.full_like(log_ratios, -1.0),
        old_log_probs=log_ratios - 1.0,
        response_mask=[written for row in rows for _, written in row],
        **more,
    )


def log_ratio(batch):
    return batch.old_log_probs - batch.rollout_log_probs


@pytest.fixture
def two_rows(make_batch):
    """Trainer over engine: 2, 1/2 and a token that the policy did not write; 4 and 2."""
    return rows_of(make_batch, [[(LN2, True), (-LN2, True), (7 * LN2, False)], [(2 * LN2, True), (LN2, True)]])


@pytest.mark.parametrize(
    ("level", "bounds", "expected"),
    [
        ("token", "3", [2, 1 / 2, 0, 3, 2]),
        ("sequence", "9", [1, 1, 0, 8, 8]),
        ("sequence", "5", [1, 1, 0, 5, 5]),
        ("geometric", "3", [1, 1, 0, 2**1.5, 2**1.5]),
        ("geometric", "2", [1, 1, 0, 2, 2]),
        ("token", "0.6_3.0", [2, 0, 0, 0, 2]),
        ("sequence", "0.6_3.0", [1, 1, 0, 0, 0]),
        ("geometric", "0.6_3.0", [1, 1, 0, 2**1.5, 2**1.5]),
    ],
)
def test_weights_are_bounded_ratios_of_tokens_or_of_rows(two_rows, level, bounds, expected):
    weights = correction(level, bounds).weights(log_ratio(two_rows), two_rows)
    assert required(weights).tolist() == pytest.approx(expected)


@pytest.mark.parametrize(("level", "expected"), [("sequence", 8.0), ("geometric", 8 ** (1 / 4))])
def test_an_episode_has_one_ratio_and_one_divergence_whatever_the_number_of_its_rows(two_rows, level, expected):
    split = replace(two_rows, episode=torch.tensor([0, 0]))
    wanted = correction(level, "9", "seq_sum_k1", "0.2_1.2")  # of rows it would reject the second only
    corrected, metrics = wanted.apply(split)
    assert required(corrected.importance_weights).tolist() == pytest.approx([expected, expected, 0, expected, expected])
    assert not required(corrected.response_mask).any() and len(corrected) == 2
    assert metrics["rollout_corr/rollout_is_seq_mean"] == pytest.approx(expected)
    assert metrics["rollout_corr/rollout_rs_seq_masked_fraction"] == 1


def test_without_a_level_there_are_no_weights(two_rows):
    assert correction().weights(log_ratio(two_rows), two_rows) is None
    assert correction().apply(two_rows)[0].importance_weights is None


def test_weights_pass_no_gradient(two_rows):
    assert not required(correction("token").weights(log_ratio(two_rows).requires_grad_(), two_rows)).requires_grad


@pytest.mark.parametrize("level", LEVELS)
def test_ratios_beyond_e_to_the_20_are_cut(make_batch, level):
    batch = rows_of(make_batch, [[(50.0, True)], [(-50.0, True)]])
    weights = correction(level, "1e30").weights(log_ratio(batch), batch)
    assert required(weights).tolist() == pytest.approx([math.exp(20), math.exp(-20)], rel=1e-9)


@pytest.mark.parametrize(("option", "kept"), [("token_k1", True), ("seq_mean_k1", True), ("seq_sum_k1", False)])
def test_divergences_are_those_of_log_ratios_cut_at_20(make_batch, option, kept):
    # The bound is e to the 20.7.
    batch = rows_of(make_batch, [[(-25.0, True), (-25.0, True)]])
    assert correction(None, options=option, thresholds="1e9").accepted(log_ratio(batch), batch).tolist() == [kept, kept]


@pytest.mark.parametrize(
    ("level", "mean"), [("token", (2 + 1 / 2 + 3 + 2) / 4), ("sequence", (1 + 3) / 2), ("geometric", (1 + 2**1.5) / 2)]
)
def test_a_step_can_divide_weights_by_their_mean_over_tokens_or_rows(make_batch, two_rows, level, mean):
    # The policy wrote three tokens of the first row here, so that rows do not count by their tokens.
    longer = [[(LN2, True), (-LN2, True), (0, True)], [(2 * LN2, True), (LN2, True)]]
    batch = two_rows if level == "token" else rows_of(make_batch, longer)
    normalising = correction(level, "3", batch_normalize=True)
    plain = normalising.weights(log_ratio(batch), batch)
    corrected, metrics = normalising.apply(batch)
    assert metrics["rollout_corr/rollout_is_batch_norm_factor"] == pytest.approx(mean)
    assert required(corrected.importance_weights).tolist() == pytest.approx((plain / mean).tolist())


def test_weights_that_are_all_zero_are_divided_by_nothing(make_batch):
    batch = rows_of(make_batch, [[(3.0, True), (-3.0, True)]])
    corrected, metrics = correction("token", "0.5_2.0", batch_normalize=True).apply(batch)
    assert required(corrected.importance_weights).tolist() == [0, 0]
    assert metrics["rollout_corr/rollout_is_batch_norm_factor"] == 1
    assert metrics["rollout_corr/rollout_is_eff_sample_size"] == 0


def test_weights_are_of_the_rows_before_rejection(two_rows):
    corrected, _ = correction("sequence", "9", "token_k2", "0.5").apply(two_rows)
    assert required(corrected.response_mask).tolist() == [True, True, False, False, True]
    assert required(corrected.importance_weights).tolist() == pytest.approx([1, 1, 0, 8, 8])


def test_an_update_corrects_by_its_own_log_probs_without_rejections_and_normalization():
    assert correction("token").fits_update and correction(None).fits_update
    assert not correction("token", options="token_k2", thresholds="0.5").fits_update
    assert not correction("token", batch_normalize=True).fits_update


def test_only_ratios_of_single_tokens_without_a_rejection_are_by_token():
    assert [correction(level).by_token for level in (None, *LEVELS)] == [True, True, False, False]
    assert not correction("token", options="token_k2", thresholds="0.5").by_token


# With d = ln 2, a token's k1 is -d, d; -2d, -d. Its k2 is 0.24, 0.24; 0.96, 0.24, and k3 0.31, 0.19; 1.61,
# 0.31. So a row's k1 is 0; -3d (sum) or -1.5d (mean), its k2 0.48; 1.20 or 0.24; 0.60, its k3 0.50; 1.92 or 0.25; 0.96.


@pytest.mark.parametrize(
    ("option", "threshold", "kept"),
    [
        ("token_k1", "0.4_3.0", [True, True, False, True]),
        ("token_k1", "0.3_1.5", [True, False, False, True]),
        ("token_k1", "3", [True, True, False, True]),
        ("token_k2", "0.5", [True, True, False, True]),
        ("token_k3", "0.25", [False, True, False, False]),
        ("seq_sum_k1", "0.2_2.0", [True, True, False, False]),
        ("seq_sum_k1", "0.1_2.0", [True, True, True, True]),
        ("seq_sum_k2", "0.7", [True, True, False, False]),
        ("seq_sum_k3", "0.97", [True, True, False, False]),
        ("seq_mean_k1", "0.4_2.0", [True, True, False, False]),
        ("seq_mean_k1", "0.2_2.0", [True, True, True, True]),
        ("seq_mean_k2", "0.5", [True, True, False, False]),
        ("seq_mean_k2", "0.7", [True, True, True, True]),
        ("seq_mean_k3", "0.3", [True, True, False, False]),
        ("seq_max_k2", "0.7", [True, True, False, False]),
        ("seq_max_k2", "0.97", [True, True, True, True]),
        ("seq_max_k3", "1.6", [True, True, False, False]),
        ("seq_max_k3", "1.7", [True, True, True, True]),
    ],
)
def test_what_each_option_rejects(two_rows, option, threshold, kept):
    found = correction(None, options=option, thresholds=threshold).accepted(log_ratio(two_rows), two_rows)
    assert found.tolist() == [*kept[:2], False, *kept[2:]]


def test_a_token_must_pass_every_rejection(two_rows):
    both = correction(None, options="token_k1,token_k3", thresholds="0.3_1.5,0.4")
    assert both.accepted(log_ratio(two_rows), two_rows).tolist() == [True, False, False, False, True]


def test_a_ratio_that_is_no_number_is_rejected_with_its_row(make_batch):
    batch = rows_of(make_batch, [[(math.nan, True), (0, True)], [(0, True)]])
    kept = correction(None, options="seq_mean_k3", thresholds="1.0").accepted(log_ratio(batch), batch)
    assert kept.tolist() == [False, False, True]


def test_log_probs_of_tokens_that_the_policy_did_not_write_do_not_matter(make_batch):
    asked = correction("sequence", options=OPTIONS, thresholds="9.0")
    results = []
    for other in (0.0, math.nan, math.inf):
        batch = rows_of(make_batch, [[(0.1, True), (other, False), (0.2, True)]])
        corrected, metrics = asked.apply(batch)
        tokens = (required(corrected.importance_weights).tolist(), required(corrected.response_mask).tolist())
        results.append((*tokens, metrics))
    assert results[0] == results[1] == results[2]


# The reference: plain loops over rows of (log-ratio, written), from the formulas and verl's names.


def clamp(value, low=-20.0, high=20.0):
    return min(max(value, low), high)


def reference_ratios(rows, level):
    """Trainer over engine of the written tokens, by row; rows without one are left out."""
    found = []
    for row in rows:
        logs = [ratio for ratio, written in row if written]
        if level == "sequence":
            logs = [sum(logs)] * len(logs)
        if level == "geometric":
            logs = [sum(logs) / len(logs) for _ in logs]
        found.append([math.exp(clamp(value)) for value in logs])
    return [row for row in found if row]


def reference_divergence(rows, option):
    pool, form = option.rsplit("_", 1)
    found = []
    for row in rows:
        tokens = []
        for ratio, written in row:
            d = clamp(ratio)
            if written:
                tokens.append({"k1": -d, "k2": d * d / 2, "k3": math.exp(d) - 1 - d}[form])
        if pool != "token" and tokens:
            value = {"seq_sum": sum(tokens), "seq_mean": sum(tokens) / len(tokens), "seq_max": max(tokens)}[pool]
            tokens = [value for _ in tokens]
        found.append(tokens)
    return [row for row in found if row]


def flat(rows):
    return [value for row in rows for value in row]


def share(values, test):
    return sum(map(test, values)) / len(values)


def row_metrics(means, ideal):
    return {
        "seq_mean": statistics.mean(means),
        "seq_std": statistics.stdev(means),
        "seq_max": max(means),
        "seq_min": min(means),
        "seq_max_deviation": max(abs(mean - ideal) for mean in means),
    }


def reference_weight_metrics(rows, level, lower, upper):
    ratios = reference_ratios(rows, level)
    if lower is None:
        weights = [[min(ratio, upper) for ratio in row] for row in ratios]
    else:
        weights = [[ratio if lower <= ratio <= upper else 0.0 for ratio in row] for row in ratios]
    tokens, mean_ratios = flat(weights), [statistics.mean(row) for row in ratios]
    judged, extremes = (flat(ratios), tokens) if level == "token" else (mean_ratios, mean_ratios)
    low = 1 / upper if lower is None else lower
    mean = statistics.mean(tokens)
    metrics = {
        "mean": mean,
        "max": max(extremes),
        "min": min(extremes),
        "std": statistics.pstdev(tokens),
        "eff_sample_size": 1 / statistics.mean((token / mean) ** 2 for token in tokens),
        "ratio_fraction_high": share(judged, lambda ratio: ratio > upper),
        "ratio_fraction_low": share(judged, lambda ratio: ratio < low),
        **row_metrics([statistics.mean(row) for row in weights], ideal=1),
        "seq_fraction_high": share(mean_ratios, lambda ratio: ratio > upper),
        "seq_fraction_low": share(mean_ratios, lambda ratio: ratio < low),
    }
    if lower is not None:
        metrics["oob_ratio"] = share(flat(ratios), lambda ratio: not lower <= ratio <= upper)
    return {f"rollout_corr/rollout_is_{name}": value for name, value in metrics.items()}


def reference_rejection_metrics(rows, option, threshold):
    divergence = reference_divergence(rows, option)
    if option.endswith("k1"):
        low, high = (math.log(float(bound)) for bound in threshold.split("_"))
    else:
        low, high = -math.inf, float(threshold)
    tokens, means = flat(divergence), [statistics.mean(row) for row in divergence]
    judged = tokens if option.startswith("token") else means
    metrics = {
        "mean": statistics.mean(tokens),
        "max": max(judged),
        "min": min(judged),
        "std": statistics.pstdev([clamp(token, low, high) for token in tokens]),
        "fraction_high": share(judged, lambda value: value > high),
        "fraction_low": share(judged, lambda value: value < low),
        **row_metrics(means, ideal=0),
        "seq_fraction_high": share(means, lambda value: value > high),
        "masked_fraction": share(tokens, lambda value: not low <= value <= high),
        "seq_masked_fraction": share(divergence, lambda row: any(not low <= value <= high for value in row)),
    }
    if option.endswith("k1"):
        metrics["seq_fraction_low"] = share(means, lambda value: value < low)
    return {f"rollout_corr/rollout_rs_{option}_{name}": value for name, value in metrics.items()}


def ragged(seed):
    """Seven rows of 1 to 9 tokens, a quarter of them not written; the last row has none that is."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for length in [3, 9, 1, 6, 4, 7]:
        ratios = (0.3 * torch.randn(length, generator=generator, dtype=torch.float64)).tolist()
        written = (torch.rand(length, generator=generator) < 0.75).tolist()
        rows.append(list(zip(ratios, [True, *written[1:]], strict=True)))
    return [*rows, [(0.3, False), (9.0, False)]]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("bounds", ["1.3", "0.8_1.3"])
@pytest.mark.parametrize("level", LEVELS)
def test_weights_and_their_metrics_follow_the_formulas(make_batch, level, bounds, seed):
    rows, (lower, upper) = ragged(seed), ratio_bounds(bounds)
    batch = rows_of(make_batch, rows)
    corrected, metrics = correction(level, bounds).apply(batch)
    ratios = torch.tensor(flat(reference_ratios(rows, level)), dtype=torch.float64)
    expected = [min(x, upper) if lower is None else x * (lower <= x <= upper) for x in ratios.tolist()]
    assert corrected.importance_weights[batch.response_mask].tolist() == pytest.approx(expected, abs=1e-9)
    assert not corrected.importance_weights[~batch.response_mask].any()
    assert metrics == pytest.approx(reference_weight_metrics(rows, level, lower, upper), abs=1e-6)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("option", OPTIONS)
def test_a_rejection_and_its_metrics_follow_the_formulas(make_batch, option, seed):
    rows, threshold = ragged(seed), CUTS[option[-2:]]
    batch = rows_of(make_batch, rows)
    corrected, metrics = correction(None, options=option, thresholds=threshold).apply(batch)
    expected = reference_rejection_metrics(rows, option, threshold)
    low, high = correction(options=option, thresholds=threshold).rejections[0].bounds
    kept = [low <= value <= high for value in flat(reference_divergence(rows, option))]
    assert corrected.response_mask[batch.response_mask].tolist() == kept
    assert not corrected.response_mask[~batch.response_mask].any()
    for whole in ("masked_fraction", "seq_masked_fraction"):
        expected[f"rollout_corr/rollout_rs_{whole}"] = expected[f"rollout_corr/rollout_rs_{option}_{whole}"]
    assert metrics == pytest.approx(expected, abs=1e-6)


def test_several_rejections_have_metrics_together_and_each(two_rows):
    # One leaves out the first and third of four tokens, the other the second and third.
    _, metrics = correction(None, options="token_k3,token_k1", thresholds="0.31,0.3_1.5").apply(two_rows)
    assert metrics["rollout_corr/rollout_rs_token_k3_masked_fraction"] == 1 / 4
    assert metrics["rollout_corr/rollout_rs_token_k3_seq_masked_fraction"] == 1 / 2
    assert metrics["rollout_corr/rollout_rs_token_k1_masked_fraction"] == 2 / 4
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == 2 / 4
    assert metrics["rollout_corr/rollout_rs_seq_masked_fraction"] == 1


def everything():
    return correction("token", "0.5_2.0", OPTIONS, "1.0", batch_normalize=True)


@pytest.mark.parametrize("rows", [[[5.0, 6.0], [7.0]], [[0.1]]], ids=["several rows", "a single token"])
def test_completely_rejected_rows_are_in_the_metrics(make_batch, rows):
    batch = rows_of(make_batch, [[(ratio, True) for ratio in row] for row in rows])
    corrected, metrics = everything().apply(batch)
    assert not required(corrected.response_mask).any()
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == 1
    assert all(map(math.isfinite, metrics.values()))


def test_rows_in_which_nothing_was_written_have_no_metrics(make_batch):
    batch = rows_of(make_batch, [[(0.5, False), (0.5, False)]])
    corrected, metrics = everything().apply(batch)
    assert metrics == {}
    assert not required(corrected.importance_weights).any()
    assert not required(corrected.response_mask).any()


@given(
    rows=st.lists(st.lists(st.booleans(), min_size=1, max_size=5), min_size=1, max_size=6),
    level=st.sampled_from(LEVELS),
)
@pytest.mark.parametrize("bounds", ["1.0", "1.0_1.0"])
def test_equal_log_probs_weigh_exactly_one_and_nothing_is_rejected(make_batch, rows, level, bounds):
    batch = rows_of(make_batch, [[(0.0, written) for written in row] for row in rows])
    rejections = tuple(Rejection(name, *((1.0, 1.0) if name.endswith("k1") else (None, 0.0))) for name in OPTIONS)
    corrected, _ = RolloutCorrection(level, *ratio_bounds(bounds), True, rejections).apply(batch)
    assert required(corrected.importance_weights).tolist() == [float(written) for row in rows for written in row]
    assert torch.equal(corrected.response_mask, batch.response_mask)


@given(rows=ROWS, level=st.sampled_from(LEVELS))
def test_a_row_says_the_same_in_a_pass_of_its_own(make_batch, rows, level):
    asked, batch = correction(level, "5", OPTIONS, "3", batch_normalize=True), rows_of(make_batch, rows)
    weights, kept = asked.weights(log_ratio(batch), batch), asked.accepted(log_ratio(batch), batch)
    alone = [batch.select([row]) for row in range(len(batch))]
    assert torch.equal(torch.cat([asked.weights(log_ratio(row), row) for row in alone]), weights)
    assert torch.equal(torch.cat([asked.accepted(log_ratio(row), row) for row in alone]), kept)


@pytest.mark.parametrize(
    ("options", "thresholds"),
    [
        ("token_k1, seq_mean_k3", "0.5_2.5, 0.01"),
        (["token_k1", "seq_mean_k3"], ["0.5_2.5", "0.01"]),
        ("token_k1,seq_mean_k3,token_k1", "0.5_2.5,0.01"),
    ],
)
def test_rejections_are_named_with_a_bound_each(options, thresholds):
    expected = (Rejection("token_k1", 0.5, 2.5), Rejection("seq_mean_k3", None, 0.01))
    assert correction("token", options=options, thresholds=thresholds).rejections == expected


def test_one_bound_serves_all_and_the_lower_one_of_k1_is_its_inverse():
    expected = (Rejection("seq_sum_k1", 0.25, 4.0), Rejection("token_k2", None, 4.0))
    assert correction("token", options="seq_sum_k1,token_k2", thresholds="4").rejections == expected


def test_without_weights_and_rejections_there_is_no_correction():
    algorithm = section_of(AlgorithmConfig, "algorithm")
    settings = replace(algorithm.rollout_correction, rollout_is=None, rollout_rs_threshold=["1", "2"])
    assert RolloutCorrection.of(replace(algorithm, rollout_correction=settings)) is None
