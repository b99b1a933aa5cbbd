"""The proposals at the end of a run, for rows of metrics made by hand."""

from types import SimpleNamespace

import pytest

from hybridrl.health.advice import advise


def config(**changes: object) -> SimpleNamespace:
    """The keys that are read, as they are by default; changes by the last part of a key's name."""
    values = {
        "max_num_seqs": 256, "gpu_memory_utilization": 0.5, "tensor_model_parallel_size": 1, "lora_rank": 0,
        "merge": False, "update_weights_bucket_megabytes": 2048, "max_response_length": 1000, "num_workers": 4,
        "save_freq": 10, "test_freq": 5, "total_epochs": 2, "total_training_steps": None, **changes,
    }  # fmt: skip
    lora, buckets = SimpleNamespace(**values), SimpleNamespace(**values)
    rollout = SimpleNamespace(checkpoint_engine=buckets, **values)
    model = SimpleNamespace(lora=lora, **values)
    section = SimpleNamespace(**values)
    return SimpleNamespace(
        actor_rollout_ref=SimpleNamespace(rollout=rollout, model=model), data=section, reward=section, trainer=section
    )


WELL = {
    "timing_s/step": 10.0,
    "timing_s/gen": 4.0,
    "timing_s/reward": 0.1,
    "timing_s/update_actor": 5.0,
    "timing_s/update_weights": 0.5,
    "rollout/preemptions": 0,
    "rollout/kv_cache_usage/max": 0.6,
    "rollout/running_requests/max": 256,
    "rollout/running_requests/mean": 200,
    "rollout/waiting_requests/max": 10,
    "rollout/tail_share": 0.2,
    "response_length/p99": 900,
    "response_length/max": 1000,
    "critic/score/mean": 0.5,
    "perf/weights_gb": 1.0,
    "perf/weights_gb_per_s": 2.0,
}


def advice(steps: int = 8, changes: dict[str, object] | None = None, **metrics: float) -> list[str]:
    return advise({step: WELL | metrics for step in range(1, steps + 1)}, config(**(changes or {})))


def test_a_run_in_which_nothing_is_worth_changing_gets_no_advice():
    assert advice() == []
    assert advise({}, config()) == []
    assert advise({0: {"timing_s/start_up": 40.0}, 1: {"timing_s/step": 3.0}}, config()) == []


@pytest.mark.parametrize("score", [0.0, 1.0, -0.5])
def test_a_score_that_was_always_the_same_is_said_to_teach_nothing(score):
    ranges = {"critic/score/min": score, "critic/score/max": score, "critic/score/mean": score}
    (sentence,) = advice(**ranges)
    assert sentence.startswith(
        f"the score was {score:g} for every response of all 8 steps, so nothing could be learned"
    )
    for other in (1, 5):
        once = {step: WELL | ranges | {"critic/score/max": score + (step == other)} for step in range(1, 9)}
        assert advise(once, config()) == []


def test_a_first_step_with_other_scores_is_not_forgotten_in_a_run_of_two():
    zero = {"critic/score/min": 0.0, "critic/score/max": 0.0}
    assert advise({1: WELL | zero | {"critic/score/max": 1.0}, 2: WELL | zero}, config()) == []
    assert "of all 2 steps" in advise({1: WELL | zero, 2: WELL | zero}, config())[0]
    assert advise({1: WELL | zero}, config()) == []


def test_preemptions_want_a_larger_share_of_the_device_or_fewer_requests():
    (sentence,) = advice(**{"rollout/preemptions": 30})
    assert sentence == (
        "rollout took 40% of the time: engines preempted 30 requests per step for lack of cache and computed them "
        "again; set actor_rollout_ref.rollout.gpu_memory_utilization=0.6"
    )
    (sentence,) = advice(changes={"gpu_memory_utilization": 0.8}, **{"rollout/preemptions": 30})
    assert sentence.endswith("set actor_rollout_ref.rollout.max_num_seqs=200")


def test_requests_that_wait_while_the_cache_has_room_want_more_sequences():
    (sentence,) = advice(**{"rollout/waiting_requests/max": 400, "rollout/kv_cache_usage/max": 0.2})
    assert "up to 400 requests waited while at most 20% of the cache was in use" in sentence
    assert sentence.endswith("set actor_rollout_ref.rollout.max_num_seqs=512")


def test_requests_that_wait_for_a_full_cache_want_more_cache_and_wider_engines_only_if_it_is_large_already():
    starved = {
        "rollout/waiting_requests/max": 400,
        "rollout/kv_cache_usage/max": 0.98,
        "rollout/running_requests/max": 60,
    }
    assert advice(**starved)[0].endswith("set actor_rollout_ref.rollout.gpu_memory_utilization=0.6")
    (sentence,) = advice(changes={"gpu_memory_utilization": 0.9}, **starved)
    assert "a full cache, which holds 60 at a time" in sentence
    assert sentence.endswith("set actor_rollout_ref.rollout.tensor_model_parallel_size=2")


def test_engines_over_many_devices_with_an_empty_cache_are_too_wide():
    changes = {"tensor_model_parallel_size": 8}
    assert advice(changes=changes) == []
    (sentence,) = advice(changes=changes, **{"rollout/kv_cache_usage/max": 0.1})
    assert sentence.endswith("set actor_rollout_ref.rollout.tensor_model_parallel_size=4")


def test_a_long_tail_of_few_responses_wants_a_shorter_limit_unless_many_are_long():
    tail = {"rollout/tail_share": 0.6, "response_length/p99": 400}
    (sentence,) = advice(**tail)
    assert "in 60% of it fewer than half of the requests still ran" in sentence
    assert sentence.endswith("set data.max_response_length=440")
    assert advice(**tail | {"response_length/p99": 950}) == []
    # Of episodes the limit is for what they read as well, which these lengths are not.
    assert advice(**tail | {"episode/observed_tokens/mean": 30}) == []


def test_a_slow_weight_sync_is_described_by_its_bytes_and_rate():
    slow = {
        "timing_s/update_weights": 12.0,
        "timing_s/step": 40.0,
        "perf/weights_gb": 15.0,
        "perf/weights_gb_per_s": 1.25,
    }
    (sentence,) = advice(**slow)
    assert sentence.startswith("switch took 30% of the time: a weight sync takes 12.0 s for 15.00 GB (1.2 GB/s)")
    assert sentence.endswith("set actor_rollout_ref.model.lora_rank=32")
    assert advice(changes={"lora_rank": 8, "merge": True}, **slow)[0].endswith(
        "set actor_rollout_ref.model.lora.merge=false, which sends the adapter alone"
    )
    assert advice(**slow | {"timing_s/step": 300.0})[0].startswith("switch took 4% of the time")
    assert advice(changes={"lora_rank": 8}, **slow) == []
    assert advice(changes={"update_weights_bucket_megabytes": 256}, **slow)[0].endswith("megabytes=1024")


def test_a_short_sync_of_a_short_step_is_not_worth_a_word():
    assert advice(**{"timing_s/update_weights": 0.4, "timing_s/step": 1.6, "timing_s/gen": 0.3}) == []


@pytest.mark.parametrize(
    ("metrics", "fix"),
    [
        ({"timing_s/save_checkpoint": 8.0}, "trainer.save_freq=20"),
        ({"timing_s/testing": 9.0}, "trainer.test_freq=10"),
        ({"timing_s/reward": 6.0}, "reward.num_workers=8"),
    ],
)
def test_saves_validations_and_scores_that_take_long(metrics, fix):
    (sentence,) = advice(**metrics)
    assert sentence.endswith(f"set {fix}")


def test_the_largest_phase_with_a_proposal_is_chosen():
    (sentence,) = advice(**{"timing_s/testing": 9.0, "timing_s/gen": 4.0, "rollout/preemptions": 99})
    assert sentence.startswith("validation took 48% of the time")


def curve(values: list[float], **changes: object) -> list[str]:
    steps = {step: {"timing_s/step": 1.0, "critic/score/mean": value} for step, value in enumerate(values, start=1)}
    return advise({step: metrics | {"training/epoch": 1} for step, metrics in steps.items()}, config(**changes))


def noisy(step: int) -> float:
    return 0.02 * (step * 7919 % 13 - 6) / 6


def test_memory_that_is_held_in_pieces_wants_smaller_ones():
    gpu = {"perf/device_used_gb": 70.0, "perf/device_free_gb": 10.0, "perf/max_memory_allocated_gb": 40.0}
    assert advice(**gpu, **{"perf/max_memory_reserved_gb": 52.0}) == []
    assert advice(**gpu, **{"perf/max_memory_reserved_gb": 54.0}) == [
        "torch held up to 54.0 GiB of a GPU for tensors of at most 40.0 GiB: its memory may be fragmented; "
        "try PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:256 in the environment"
    ]


def test_a_score_that_rose_until_the_end_wants_more_epochs_or_steps():
    rising = [0.1 + 0.005 * step + noisy(step) for step in range(81)]
    (sentence,) = curve(rising)
    assert sentence.startswith("the score was still rising when the run ended, from ")
    assert "over its last 40 steps, in epoch 2" in sentence and sentence.endswith("set trainer.total_epochs=4")
    assert curve(rising, total_training_steps=80)[0].endswith("set trainer.total_training_steps=160")


def test_a_score_that_is_flat_at_the_end_or_a_run_of_few_steps_gets_no_remark():
    assert curve([0.1 + noisy(step) for step in range(81)]) == []
    assert curve([min(0.1 + 0.02 * step, 0.9) + noisy(step) for step in range(81)]) == []
    assert curve([0.1 + 0.02 * step for step in range(25)]) == []
