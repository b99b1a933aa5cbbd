"""What a run says of the seconds of its steps: predictions worked out by hand."""

import json
import re
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace

import pytest

from hybridrl.report.prediction import LEAST_STEPS, WARM_UP, predict_steps, run_sizes
from hybridrl.tracking.records import write_records

CONFIG = {
    "data": {"train_batch_size": 4},
    "algorithm": {"filter_groups": {"enable": False}, "adv_estimator": "grpo"},
    "actor_rollout_ref": {
        "rollout": {
            "n": 1,
            "max_num_seqs": 2,
            "tensor_model_parallel_size": 1,
            "over_sample_rate": 0.0,
            "full_determinism": False,
            "nnodes": 0,
            "n_gpus_per_node": None,
        }
    },
    "trainer": {
        "nnodes": 1,
        "n_gpus_per_node": 1,
        "v1": {"trainer_mode": "sync", "sampler": {"max_off_policy_threshold": 8}},
    },
}
# Of 5 s a step, 2 s are not rollout; a token takes 0.1 s alone, and 0.2 s with a second request on the engine.
STEP = {"timing_s/step": 5.0, "timing_s/gen": 3.0, "timing_s/update_weights": 0.5, "prompt_length/mean": 4.0}
STEP |= {"rollout/iteration_s/running_request": 0.1}
AT_ONCE = {"rollout/iteration_s/fixed": 0.1, "rollout/iteration_s/running_request": 0.0}


def sentence(
    run: Path,
    lengths: list[int],
    *,
    more: dict[str, float] | None = None,
    steps: int = 6,
    deterministic: bool = False,
    devices: int = 1,
    estimator: str = "grpo",
    **mode: object,
) -> str | None:
    """What a run of so many steps says whose responses have these lengths; `mode` is of trainer.v1."""
    for step in range(1, steps + 1):
        records = [
            {"input": "?", "output": "!", "step": step, "episode": {"position": position, "sampled_tokens": length}}
            for position, length in enumerate(lengths)
        ]
        write_records(run / "rollouts" / f"{step}.jsonl", records)
    lines = [{"step": step} | STEP | (more or {}) for step in range(1, steps + 1)]
    lines[0] |= {"timing_s/step": 99.0, "rollout/iteration_s/fixed": 99.0}
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = deepcopy(CONFIG)
    config["trainer"]["v1"] |= mode
    config["trainer"]["n_gpus_per_node"] = devices
    config["algorithm"]["adv_estimator"] = estimator
    config["actor_rollout_ref"]["rollout"]["full_determinism"] = deterministic
    if mode.get("trainer_mode") == "separate_async":
        config["actor_rollout_ref"]["rollout"] |= {"nnodes": 1, "n_gpus_per_node": 1}
    typed = json.loads(json.dumps(config), object_hook=lambda section: SimpleNamespace(**section))
    return predict_steps(typed, run_sizes(config), run)


def seconds(text: str | None) -> list[float]:
    assert text is not None
    return [float(number) for number in re.findall(r"(\d+\.\d+) s", text)]


def test_an_asynchronous_run_compares_its_steps_with_simulated_ones(tmp_path):
    text = sentence(tmp_path, [10] * 4, trainer_mode="colocate_async")
    # Four responses of 10 tokens, two at a time: 2 x 10 x 0.2 s of rollout, and 2 s.
    assert seconds(text) == pytest.approx([5.0, 6.0], abs=0.1)


def test_on_devices_of_its_own_rollout_takes_as_long_as_training_or_longer(tmp_path):
    # 4 s of rollout during 1.5 s of training, then 0.5 s of weight sync.
    assert seconds(sentence(tmp_path, [10] * 4, trainer_mode="separate_async")) == pytest.approx([5.0, 4.5], abs=0.1)


def test_a_synchronous_run_names_the_gain_of_rollouts_that_are_continued_where_there_is_one(tmp_path):
    assert sentence(tmp_path, [10] * 4) is None
    # The engine is twice as fast with two requests, and has one for most of a synchronous step.
    text = sentence(tmp_path, [2, 2, 2, 40], more=AT_ONCE)
    _, synchronous, continued = seconds(text)
    assert "trainer.v1.trainer_mode=colocate_async" in text and synchronous > 1.15 * continued


def test_interrupted_responses_are_computed_again_which_the_prefill_costs(tmp_path):
    fast = seconds(sentence(tmp_path, [2, 2, 2, 40], more=AT_ONCE, trainer_mode="colocate_async"))
    slow = AT_ONCE | {"rollout/iteration_s/prefilled_token": 0.01}
    slow = seconds(sentence(tmp_path, [2, 2, 2, 40], more=slow, trainer_mode="colocate_async"))
    assert slow[1] > fast[1] + 4 * 4 * 0.01, "more than the four prompts of four tokens"


def test_what_the_simulation_does_not_know_is_not_predicted(tmp_path):
    assert sentence(tmp_path, [2, 2, 2, 40], more={"num_turns/mean": 2.0}) is None
    assert sentence(tmp_path, [2, 2, 2, 40], more={"rollout/iteration_s/running_request": 0.0}) is None
    assert sentence(tmp_path, [2, 2, 2, 40], more=AT_ONCE, estimator="remax") is None
    assert sentence(tmp_path, [2, 2, 2, 40], deterministic=True, trainer_mode="colocate_async") is None
    assert sentence(tmp_path, [2, 2, 2, 40], steps=WARM_UP + LEAST_STEPS - 1, trainer_mode="colocate_async") is None


def test_an_engine_that_waits_for_the_other_takes_no_time(tmp_path):
    """Also where all the time of an iteration is that of its requests."""
    assert seconds(sentence(tmp_path, [10] * 4, devices=2, trainer_mode="colocate_async")) == [5.0, 4.0]


@pytest.mark.parametrize(
    ("training", "rollout", "width", "engines", "alone"),
    [(4, 4, 1, 8, 4), (3, 2, 2, 2, 1), (2, 4, 4, 2, 1), (8, 4, 2, 6, 4)],
)
def test_engines_are_those_of_rollout_and_as_many_parts_of_the_devices_train(training, rollout, width, engines, alone):
    config = deepcopy(CONFIG)
    config["actor_rollout_ref"]["rollout"] |= {
        "nnodes": 1,
        "n_gpus_per_node": rollout,
        "tensor_model_parallel_size": width,
    }
    config["trainer"] |= {"n_gpus_per_node": training, "v1": {"trainer_mode": "separate_async"}}
    sizes = run_sizes(config)
    assert (sizes.engines, sizes.training_engines) == (engines, alone)
