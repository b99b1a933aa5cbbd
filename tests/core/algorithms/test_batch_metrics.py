import math

import pytest
import torch

from hybridrl.core.algorithms.batch_metrics import (
    batch_metrics,
    mismatch_metrics,
    off_policy_metrics,
    repeated_ngrams,
    throughput_metrics,
    value_metrics,
    zero_signal,
)
from hybridrl.core.batch import Batch

LN2 = math.log(2)


def logs(*probabilities: float) -> torch.Tensor:
    return torch.tensor(probabilities).log()


@pytest.fixture
def step(make_batch) -> Batch:
    """Two answers to one prompt and one to another; the policy did not write the last token of all."""
    return make_batch(
        [2, 1, 3],
        prompts=[1, 3, 2],
        group=[0, 0, 1],
        rewards=[1.0, 0.0, 0.5],
        token_rewards=[0.0, 0.5, -0.5, 0.0, 0.0, 0.25],
        advantages=[1.0, 2.0, -3.0, 0.0, 0.5, 100.0],
        returns=[1.0, 1.0, 1.0, 1.0, 6.0, 100.0],
        entropies=[1.0, 2.0, 3.0, 4.0, 5.0, 100.0],
        response_mask=[True, True, True, True, True, False],
        truncated=[False, False, True],
    )


def test_metrics_are_mean_and_extremes_under_verls_names(step):
    assert batch_metrics(step) == {
        "critic/score/mean": 0.5,
        "critic/score/max": 1.0,
        "critic/score/min": 0.0,
        "critic/rewards/mean": pytest.approx(0.25 / 3),
        "critic/rewards/max": 0.5,
        "critic/rewards/min": -0.5,
        "critic/advantages/mean": pytest.approx(0.1),
        "critic/advantages/max": 2.0,
        "critic/advantages/min": -3.0,
        "critic/returns/mean": 2.0,
        "critic/returns/max": 6.0,
        "critic/returns/min": 1.0,
        "response_length/mean": pytest.approx(5 / 3),
        "response_length/max": 2.0,
        "response_length/min": 1.0,
        "response_length/p50": 2.0,
        "response_length/p90": 2.0,
        "response_length/p99": 2.0,
        "response_length/clip_ratio": pytest.approx(1 / 3),
        "prompt_length/mean": 2.0,
        "prompt_length/max": 3.0,
        "prompt_length/min": 1.0,
        "response/repeated_ngrams": 0.0,
        "critic/zero_signal_groups": 1,
        "critic/zero_signal_share": 0.5,
        "actor/entropy": 3.0,
        "perf/total_num_tokens": 12,
        "perf/response_tokens": 5,
    }


def test_half_nine_tenths_and_all_but_a_hundredth_of_the_responses_are_no_longer_than_the_quantiles(make_batch):
    lengths = torch.arange(200, 0, -1)
    zeros = torch.zeros(int(lengths.sum()))
    tokens = dict.fromkeys(("token_rewards", "advantages", "returns"), zeros)
    batch = make_batch(lengths.tolist(), rewards=zeros[:200], truncated=zeros[:200].bool(), **tokens)
    metrics = batch_metrics(batch)
    assert [metrics[f"response_length/p{share}"] for share in (50, 90, 99)] == [100, 180, 198]


def test_the_entropy_is_of_all_that_was_sampled_also_where_a_rejection_left_some_out(step):
    sampled = step.response_mask
    step.response_mask = sampled & torch.tensor([True, False, True, True, False, True])
    found = batch_metrics(step, sampled)
    assert found["actor/entropy"] == (1 + 2 + 3 + 4 + 5) / 5
    assert found["critic/advantages/mean"] == pytest.approx((1 - 3 + 0) / 3)


def test_repeated_ngrams_are_counted_within_each_response(make_batch):
    batch = make_batch([9, 3, 6])
    batch.response_ids = torch.tensor([7, 7, 7, 7, 7, 7, 1, 2, 3, 7, 7, 7, 7, 7, 7, 7, 1, 2], dtype=torch.int32)
    # 7777 thrice, 7771, 7712, 7123; none of three tokens; 7777, 7771, 7712: 2 of 9 were there before.
    assert repeated_ngrams(batch) == pytest.approx(2 / 9)
    assert repeated_ngrams(batch, size=2, rows=1) == pytest.approx(4 / 8)
    assert repeated_ngrams(make_batch([2, 1])) == 0.0


def test_groups_of_equal_scores_have_no_signal_but_a_single_response_each_is_no_group(make_batch):
    batch = make_batch([1] * 5, group=[4, 9, 4, 9, 6], rewards=[1.0, 0.0, 1.0, 0.5, 0.0])
    assert zero_signal(batch) == {"critic/zero_signal_groups": 2, "critic/zero_signal_share": pytest.approx(2 / 3)}
    assert zero_signal(make_batch([2, 1], rewards=[1.0, 1.0])) == {}


def test_without_entropies_there_is_no_metric_of_them(step):
    step.entropies = None
    assert "actor/entropy" not in batch_metrics(step)


def test_of_rows_in_which_nothing_was_written_only_that_is_left_out_which_needs_it(step):
    step.response_mask = torch.zeros(6, dtype=torch.bool)
    step.values = torch.zeros(6)
    step.old_log_probs = step.rollout_log_probs = torch.zeros(6)
    metrics = batch_metrics(step) | mismatch_metrics(step)
    assert metrics["critic/score/mean"] == 0.5
    assert all(map(math.isfinite, metrics.values()))
    for name in ("critic/advantages", "critic/returns", "critic/values", "actor/entropy", "rollout_corr", "training"):
        assert not [found for found in metrics if found.startswith(name)]


def test_value_metrics_cover_written_tokens_and_the_explained_variance(make_batch):
    # Written are returns 1, 2, 6 of variance 7, predicted wrong by 1, -1, 3, of variance 4.
    batch = make_batch(
        [2, 2],
        values=[0.0, 3.0, 3.0, 50.0],
        returns=[1.0, 2.0, 6.0, -50.0],
        response_mask=[True, True, True, False],
    )
    assert value_metrics(batch) == pytest.approx(
        {
            "critic/values/mean": 2,
            "critic/values/max": 3,
            "critic/values/min": 0,
            "critic/vf_explained_var": 1 - 4 / (7 + 1e-5),
        }
    )


def test_returns_that_do_not_vary_have_no_variance_to_explain(make_batch):
    batch = make_batch([2], values=[1.0, 1.0], returns=[3.0, 3.0])
    assert value_metrics(batch)["critic/vf_explained_var"] == 1
    assert "critic/vf_explained_var" not in value_metrics(make_batch([1], values=[1.0], returns=[3.0]))


def test_without_a_critic_there_are_no_value_metrics(make_batch):
    assert value_metrics(make_batch([1], returns=[3.0])) == {}


def test_engine_and_trainer_are_compared_token_by_token(make_batch):
    # Probabilities differ by 0, 1/4 and 1/4; their ratios are 1, 2 and 1/2; of the last token nothing is asked.
    batch = make_batch(
        [2, 2],
        rollout_log_probs=logs(0.5, 0.25, 0.5, 0.9),
        old_log_probs=logs(0.5, 0.5, 0.25, 0.1),
        response_mask=[True, True, True, False],
    )
    assert mismatch_metrics(batch) == pytest.approx(
        {
            "training/rollout_probs_diff_valid": 1,
            "training/rollout_probs_diff_max": 1 / 4,
            "training/rollout_probs_diff_mean": 1 / 6,
            "training/rollout_probs_diff_std": math.sqrt(1 / 24 - 1 / 36),
            "training/rollout_actor_probs_pearson_corr": -1 / 2,
            "training/log_probs_diff_max": LN2,
            "rollout_corr/kl": 0,
            "rollout_corr/k3_kl": (0 + (2 - LN2 - 1) + (1 / 2 + LN2 - 1)) / 3,
            # The rows' mean log-probs: -1.5 ln 2 and -ln 2 in the engine, -ln 2 and -2 ln 2 in the trainer.
            "rollout_corr/rollout_ppl": (2**1.5 + 2) / 2,
            "rollout_corr/rollout_log_ppl": (1.5 + 1) / 2 * LN2,
            "rollout_corr/training_ppl": (2 + 4) / 2,
            "rollout_corr/training_log_ppl": (1 + 2) / 2 * LN2,
            "rollout_corr/log_ppl_diff": (-0.5 + 1) / 2 * LN2,
            "rollout_corr/log_ppl_abs_diff": (0.5 + 1) / 2 * LN2,
            "rollout_corr/log_ppl_diff_max": LN2,
            "rollout_corr/log_ppl_diff_min": -0.5 * LN2,
            "rollout_corr/ppl_ratio": (2**-0.5 + 2) / 2,
            # The rows' ratios are 2 and 1/2.
            "rollout_corr/chi2_token": (1 + 4 + 1 / 4) / 3 - 1,
            "rollout_corr/chi2_seq": (4 + 1 / 4) / 2 - 1,
        },
        abs=1e-6,
    )


def test_the_ratios_of_chi_squared_are_cut_at_e_to_the_20(make_batch):
    batch = make_batch([2], rollout_log_probs=[-15.0, -15.0], old_log_probs=[0.0, 0.0])
    metrics = mismatch_metrics(batch)
    assert metrics["rollout_corr/chi2_token"] == pytest.approx(math.exp(30) - 1)
    assert metrics["rollout_corr/chi2_seq"] == pytest.approx(math.exp(40) - 1)


def test_a_mismatch_too_small_for_single_precision_is_measured(make_batch):
    batch = make_batch([2], rollout_log_probs=[-1.0, -1.0], old_log_probs=[-1.0 + 2**-20, -1.0 + 2**-20])
    assert mismatch_metrics(batch)["rollout_corr/k3_kl"] == pytest.approx(2**-41, rel=1e-3, abs=0)


def test_a_row_in_which_nothing_was_written_counts_for_nothing(make_batch):
    fields = {"rollout_log_probs": logs(0.5, 0.25, 0.5, 0.9), "old_log_probs": logs(0.5, 0.5, 0.25, math.nan)}
    batch = make_batch([2, 1, 1], response_mask=[True, True, True, False], **fields)
    assert mismatch_metrics(batch) == mismatch_metrics(batch.select([0, 1]))


def test_kl_is_positive_where_the_engine_is_the_surer(make_batch):
    batch = make_batch([2], rollout_log_probs=logs(0.5, 0.5), old_log_probs=logs(0.25, 0.5))
    assert mismatch_metrics(batch)["rollout_corr/kl"] == pytest.approx(LN2 / 2)


def test_equal_probabilities_throughout_correlate_fully(make_batch):
    batch = make_batch([3], rollout_log_probs=logs(0.5, 0.5, 0.5), old_log_probs=logs(0.5, 0.5, 0.5))
    assert mismatch_metrics(batch)["training/rollout_actor_probs_pearson_corr"] == 1.0


def test_without_log_probs_of_both_there_is_no_comparison(make_batch):
    assert mismatch_metrics(make_batch([1], old_log_probs=[-1.0])) == {}
    assert mismatch_metrics(make_batch([1], rollout_log_probs=[-1.0])) == {}


def test_throughput_is_tokens_a_second_a_device_and_milliseconds_a_token_of_each_phase():
    metrics = {
        "timing_s/step": 4.0,
        "timing_s/gen": 0.5,
        "timing_s/update_actor": 2.0,
        "perf/total_num_tokens": 400,
        "perf/response_tokens": 100,
    }
    assert throughput_metrics(metrics, devices=2) == {
        "perf/time_per_step": 4.0,
        "perf/throughput": 50.0,
        "timing_per_token_ms/gen": 5.0,
        "timing_per_token_ms/update_actor": 5.0,
    }


@pytest.mark.parametrize(
    ("episode", "newest", "oldest", "spans", "continued"),
    [(None, (4 / 3, 3, 0), (2, 3, 1), (5 / 3, 3, 1), 1 / 3), ([0, 0, 1], (1.5, 3, 0), (2.5, 3, 2), (2, 3, 1), 1 / 2)],
    ids=["a row each", "two rows of an episode"],
)
def test_staleness_is_of_the_newest_and_oldest_written_token_of_an_episode(
    make_batch, episode, newest, oldest, spans, continued
):
    batch = make_batch([2, 2, 1], staleness=[0, 2, 1, 9, 3], response_mask=[True, True, True, False, True])
    batch.episode = None if episode is None else torch.tensor(episode)
    expected = {"training/off_policy/token_staleness": 1.5, "partial/continued_share": continued}
    for name, values in (("staleness", newest), ("staleness_worst", oldest), ("spans", spans)):
        kinds = zip(("mean", "max", "min"), values, strict=True)
        expected |= {f"training/off_policy/trajectory_{name}/{kind}": value for kind, value in kinds}
    assert off_policy_metrics(batch) == pytest.approx(expected)


def test_rows_without_versions_or_a_written_token_have_no_staleness(make_batch):
    assert off_policy_metrics(make_batch([2])) == {}
    assert off_policy_metrics(make_batch([2], staleness=[0, 1], response_mask=[False, False])) == {}
