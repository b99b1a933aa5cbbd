import gc
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest

from hybridrl.config.schema_parts import ValidationSamplingConfig
from hybridrl.core.experience.evaluator import Evaluator, validation_metrics
from hybridrl.core.experience.trajectory import Episode, Trajectory, Turn
from hybridrl.core.pictures import PictureStore, digest_of, in_parts
from hybridrl.core.rollout import Sampling
from hybridrl.data.prompts import Prompt
from hybridrl.rewards.score import FaultGuard, Score
from hybridrl.tracking.sink import is_validation_score

# 1,000 draws of values between 0 and 1 lie within three deviations of their mean, 3 * 0.5 / sqrt(1000).
BOOTSTRAP = 0.05
EXCLUDE = FaultGuard("exclude", 1.0, 1)
FAULT = Score(None, fault="timeout", detail="no score within 60 s")


def scored(value: float, **extras: object) -> Score:
    return Score(value, {"score": value, **extras})


def episodes(*groups: list[Score], source: str = "maths", tokens: int = 1) -> list[Episode]:
    """The samples of several prompts of one source."""
    return [
        Episode(
            Prompt(row, [1], "?", source, "42", {}),
            row,
            number,
            Trajectory([Turn([1], np.zeros(tokens, np.int64), np.zeros(tokens, np.float32), 0, "stop")]),
            "text",
            score,
        )
        for row, group in enumerate(groups)
        for number, score in enumerate(group)
    ]


def exactly(size: int, values: list[float], choose) -> float:
    """The mean of `choose` over every equally likely draw of `size` of the values, with replacement."""
    draws = list(product(range(len(values)), repeat=size))
    return sum(choose(draw) for draw in draws) / len(draws)


CORE, AUX = "val-core/maths", "val-aux/maths"


@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        ([scored(1.0, acc=1.0), scored(0.5, acc=0.0)], {f"{CORE}/acc/mean@1": 0.5, f"{AUX}/reward/mean@1": 0.75}),
        ([scored(0.5, format=1.0)], {f"{CORE}/reward/mean@1": 0.5, f"{AUX}/format/mean@1": 1.0}),
        ([scored(1.0, acc=1.0), scored(0.0)], {f"{CORE}/reward/mean@1": 0.5, f"{AUX}/acc/mean@1": 1.0}),
        (
            [Score(1.0, {"acc": 1.0}), Score(0.0, {"acc": 0.0})],
            {f"{CORE}/acc/mean@1": 0.5, f"{AUX}/reward/mean@1": 0.5},
        ),
        ([scored(0.0, reward=7.0), scored(1.0, reward=7.0)], {f"{CORE}/reward/mean@1": 0.5}),
        ([scored(1.0, note="fine", pred="7")], {f"{CORE}/reward/mean@1": 1.0}),
    ],
    ids=[
        *("acc is the main value", "without acc it is the reward", "also where some responses have no acc"),
        *("a plain number counts as acc", "a number named reward does not replace the score", "text has no mean"),
    ],
)
def test_one_sample_per_prompt_has_the_means_of_its_numbers_and_nothing_else(scores, expected):
    assert validation_metrics(episodes(*([score] for score in scores)), 1) == expected


def test_the_mean_at_the_largest_number_is_core_and_the_rest_auxiliary():
    samples = episodes([scored(1.0, acc=1, pred="a"), scored(0.0, acc=0, pred="b"), scored(0.0, acc=0, pred="b")])
    metrics = validation_metrics(samples, 3)
    estimates = {
        f"{name}@{size}/{part}" for name in ("best", "worst", "maj") for size in (2, 3) for part in ("mean", "std")
    }
    core = {"mean@3"} | {f"{name}@3/{part}" for name in ("best", "maj") for part in ("mean", "std")}  # verl's rule
    every = estimates | {"mean@3", "std@3"}
    assert {name for name in metrics if name.startswith("val-core/")} == {f"val-core/maths/acc/{name}" for name in core}
    assert {name for name in metrics if name.startswith("val-aux/")} == (
        {f"val-aux/maths/acc/{name}" for name in every - core} | {f"val-aux/maths/reward/{name}" for name in every}
    )


def test_each_data_source_has_separate_metrics():
    samples = episodes([scored(1.0)], source="maths") + episodes([scored(0.0)], [scored(0.5)], source="open/qa")
    metrics = validation_metrics(samples, 1)
    assert metrics == {"val-core/maths/reward/mean@1": 1.0, "val-core/open/qa/reward/mean@1": 0.25}


def test_numbers_at_powers_of_two_and_at_the_largest_are_estimated():
    metrics = validation_metrics(episodes([scored(float(n)) for n in range(6)]), 6)
    sizes = {name.split("@")[1] for name in metrics if "best@" in name and name.endswith("mean")}
    assert sizes == {"2/mean", "4/mean", "6/mean"}


def test_the_deviation_is_that_of_each_prompts_samples():
    # Deviations 0.5 and 0, over n as in verl.
    samples = episodes([scored(1.0), scored(0.0)], [scored(1.0), scored(1.0)])
    assert validation_metrics(samples, 2)["val-aux/maths/reward/std@2"] == 0.25


@pytest.mark.parametrize("size", [2, 3])
def test_best_worst_and_majority_are_near_their_exact_values(size):
    values, predictions = [1.0, 0.0, 0.4], ["a", "b", "b"]

    def majority(draw: tuple[int, ...]) -> float:
        votes = [predictions[i] for i in draw]
        most_frequent = max(votes, key=votes.count)  # the first of those that tie
        return values[draw[votes.index(most_frequent)]]

    samples = episodes([scored(v, pred=p) for v, p in zip(values, predictions, strict=True)])
    metrics = {
        name.removeprefix("val-core/maths/reward/"): value for name, value in validation_metrics(samples, 3).items()
    }
    metrics = {name.removeprefix("val-aux/maths/reward/"): value for name, value in metrics.items()}
    for name, choose in (
        ("best", lambda draw: max(values[i] for i in draw)),
        ("worst", lambda draw: min(values[i] for i in draw)),
        ("maj", majority),
    ):
        mean = exactly(size, values, choose)
        square = exactly(size, values, lambda draw, choose=choose: choose(draw) ** 2)
        assert metrics[f"{name}@{size}/mean"] == pytest.approx(mean, abs=BOOTSTRAP), name
        assert metrics[f"{name}@{size}/std"] == pytest.approx((square - mean**2) ** 0.5, abs=BOOTSTRAP), name


def test_the_same_samples_give_the_same_estimates():
    samples = episodes([scored(float(n % 3), pred=n % 2) for n in range(8)])
    assert validation_metrics(samples, 8) == validation_metrics(samples, 8)


def test_a_number_that_some_responses_lack_has_its_mean_over_the_others():
    samples = episodes([scored(1.0, format=1.0, some=None), scored(0.0, some=3)], [scored(0.0, some=1), FAULT])
    metrics = validation_metrics(samples, 2)
    assert metrics["val-aux/maths/format/mean@2"] == 1.0
    assert metrics["val-aux/maths/some/mean@2"] == pytest.approx((3 + 1) / 2)
    assert not any(name.startswith("val-aux/maths/format/best") for name in metrics)
    assert metrics["val-core/maths/reward/mean@2"] == 0.25


def good(value: float, pred: str = "a") -> Score:
    return scored(value, acc=value, pred=pred)


def test_a_prompt_has_the_samples_that_were_graded_and_one_without_any_is_left_out():
    mixed, alone = [good(1.0), good(0.0, "b"), good(0.0, "b")], [FAULT, good(1.0), FAULT]
    expected = validation_metrics(episodes(mixed, [good(1.0)] * 3), 3)
    metrics = validation_metrics(episodes(mixed, alone, [FAULT] * 3, alone), 3)
    assert metrics.keys() == expected.keys()
    assert metrics["val-core/maths/acc/mean@3"] == pytest.approx((1 / 3 + 1 + 1) / 3)
    for name in ("val-core/maths/acc/best", "val-core/maths/acc/maj", "val-aux/maths/acc/worst"):
        first = 2 * expected[f"{name}@3/mean"] - 1  # the other prompt's is 1
        assert metrics[f"{name}@3/mean"] == pytest.approx((first + 2) / 3)


class Runner:
    """Returns prepared samples, and records its arguments and those of the switch."""

    def __init__(self, samples: list[Episode]) -> None:
        self.samples = samples

    def to_rollout(self, version):
        self.version = version

    def to_training(self):
        self.switched = self.arguments

    def metrics(self, episodes):
        return {}

    def run(self, prompts, count, sampling, positions, stream):
        self.arguments = (prompts, count, sampling, positions, stream)
        return self.samples, {"timing_s/gen": 2.0, "timing_s/reward": 0.5}


def test_an_evaluation_samples_every_prompt_and_reports_metrics_lengths_faults_and_seconds():
    samples = episodes([scored(1.0), scored(0.0)], [FAULT, scored(1.0)], tokens=3)
    prompts = [samples[0].prompt, samples[2].prompt]
    sampling, runner = Sampling(max_tokens=8, stop_ids=(0,)), Runner(samples)
    returned, metrics = Evaluator(runner, prompts, runner, sampling, 2, EXCLUDE).evaluate(7)
    assert returned == samples
    assert runner.version == 7
    assert runner.arguments == (prompts, 2, sampling, [0, 1], "validation")
    assert metrics["val-core/maths/reward/mean@2"] == (0.5 + 1.0) / 2
    assert metrics["val-aux/response_length/mean"] == 3.0
    assert metrics["val-aux/reward/faults"] == 1
    assert metrics["timing_s/testing"] == 2.5


def test_without_faults_none_are_reported():
    samples = episodes([scored(1.0)])
    runner = Runner(samples)
    _, metrics = Evaluator(runner, [samples[0].prompt], runner, Sampling(8, (0,)), 1, EXCLUDE).evaluate(0)
    assert "val-aux/reward/faults" not in metrics


def test_a_reward_model_scores_on_the_trainers_devices_after_all_responses():
    samples, none = episodes([Score(None, fault="none")] * 2), Score(None, fault="reward_model:length")
    runner = Runner(samples)

    def rate(responses: list[Episode]) -> list[Episode]:
        assert runner.switched == runner.arguments and responses == samples
        return [replace(responses[0], score=scored(2.5)), replace(responses[1], score=none)]

    evaluator = Evaluator(runner, [samples[0].prompt], runner, Sampling(8, (0,)), 2, EXCLUDE, rate)
    returned, metrics = evaluator.evaluate(3)
    assert [one.score.value for one in returned] == [2.5, None]
    assert metrics["val-core/maths/reward/mean@2"] == 2.5 and metrics["val-aux/reward/faults"] == 1


@pytest.mark.parametrize(("on_error", "mean"), [("exclude", 1.0), ("zero", 0.25)])
def test_what_becomes_of_a_fault_is_as_in_training(on_error, mean, caplog):
    faults = [replace(FAULT) for _ in range(3)]
    for groups, graded in (([[faults[0], good(1.0)], faults[1:]], True), ([faults], False)):
        samples, guard = episodes(*groups), FaultGuard(on_error, 1.0, 1)
        runner = Runner(samples)
        _, metrics = Evaluator(runner, [samples[0].prompt], runner, Sampling(8, (0,)), len(groups[0]), guard).evaluate(
            4
        )
        assert metrics["val-aux/reward/faults"] == 3
        assert any(map(is_validation_score, metrics)) == (graded or on_error == "zero")
        assert not graded or metrics["val-core/maths/acc/mean@2"] == metrics["val-aux/maths/reward/mean@2"] == mean
    assert "validation after step 4: 3 of 4 responses could not be scored ({'timeout': 3}), mostly" in caplog.text


def test_validation_has_a_separate_temperature_whatever_do_sample_is() -> None:
    chosen = ValidationSamplingConfig(n=1, do_sample=False, temperature=0.6, top_p=0.9, top_k=5)
    sampling = Sampling.of_validation(SimpleNamespace(val_kwargs=chosen, response_length=7, stop=["a"]), (2,))
    assert sampling == Sampling(max_tokens=7, stop_ids=(2,), temperature=0.6, top_p=0.9, top_k=5, stop=("a",))


def test_pictures_of_a_validation_are_in_memory_for_a_part_of_its_prompts_only(monkeypatch) -> None:
    store, alive = PictureStore(), []
    blank = episodes([scored(1.0)])[0].prompt

    def pixels(number: int) -> dict[str, np.ndarray]:
        return {"pixels": np.full(100, number, np.uint8)}

    def prompts() -> Iterator[Prompt]:
        for number in range(6):
            yield replace(blank, row=number, pictures=(store.add(pixels(number), 4),))

    def is_stored(number: int) -> bool:
        with suppress(KeyError):
            return bool(store.handles([digest_of(pixels(number))]))
        return False

    class Parts(Runner):
        def run(self, prompts, count, sampling, positions, stream):
            gc.collect()
            alive.append(sum(map(is_stored, range(6))))
            run = [replace(self.samples[0], prompt=prompt, position=prompt.row) for prompt in prompts]
            return run, {"timing_s/gen": 1.0}

    monkeypatch.setattr("hybridrl.core.experience.evaluator.in_parts", partial(in_parts, limit=200))
    runner = Parts(episodes([scored(1.0)]))
    samples, metrics = Evaluator(runner, prompts(), runner, Sampling(8, (0,)), 1, EXCLUDE).evaluate(0)
    assert alive == [2, 2, 2]
    assert [sample.position for sample in samples] == [*range(6)]
    assert [sample.prompt.pictures[0].pixels for sample in samples] == [None] * 6
    assert metrics["timing_s/testing"] == 3.0
