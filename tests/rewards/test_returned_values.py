"""Whatever a reward returns is a score or a fault with a reason, and its sample is JSON with the sample's own keys."""

import json
import math
import pickle
from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridrl.core.experience.evaluator import validation_metrics
from hybridrl.core.experience.trajectory import Episode, Trajectory, Turn
from hybridrl.data.prompts import Prompt
from hybridrl.rewards.score import LARGEST, ScoringRequest, component_means, score_request, to_score
from hybridrl.runs.sample_log import TAKEN, sample_record
from hybridrl.tracking.records import read_records, write_records
from tests.fuzz import EXAMPLES


class Trap:
    """An object that fails on every use."""

    def __str__(self) -> str:
        raise RuntimeError("not now")

    __float__ = __bool__ = __len__ = __iter__ = __str__

    def __repr__(self) -> str:
        return "Trap()"


class Level(str):
    """A text of a class that no other process has."""


def cycle() -> list[Any]:
    items: list[Any] = []
    items.append(items)
    return items


NUMBERS = st.floats() | st.integers() | st.booleans() | st.just(10**400)
ODD = st.sampled_from([None, Trap(), Level("a"), cycle(), b"1", 1j, object(), {1, 2}, Exception("x"), float, "\ud83d"])
ODD |= st.sampled_from([np.float32(0.5), np.array(0.5), np.array([1.0, math.nan]), np.array([]), np.array(["a"])])
ODD |= st.sampled_from([torch.tensor(1.0), torch.ones(2, requires_grad=True), torch.tensor([]), np.datetime64("2026")])
NAMES = st.sampled_from(["score", "acc", "pred", "token_rewards", "reward", "x/y", "", 7, None, *sorted(TAKEN)])
LEAVES = NUMBERS | ODD | st.text(max_size=5)
VALUES = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3))
RETURNED = (
    VALUES | st.dictionaries(NAMES, VALUES, max_size=4) | st.fixed_dictionaries({"score": NUMBERS, "acc": VALUES})
)


def episode_of(score: Any) -> Episode:
    turn = Turn([1], np.array([1]), np.array([0.0]), 0, "stop")
    prompt = Prompt(0, [1], [{"role": "user", "content": "1?"}], "sums", "1", {})
    return Episode(prompt, 0, 0, Trajectory([turn]), "the response", score)


@settings(max_examples=EXAMPLES)
@given(st.lists(RETURNED, min_size=2, max_size=2))
def test_what_a_reward_returns_is_scored_or_a_fault_and_its_sample_is_json(tmp_path_factory, returned: list[Any]):
    request = ScoringRequest("sums", "the response", "1", {})
    scores = [score_request(lambda _, value=value: to_score(value), request) for value in returned]
    for value, score in zip(returned, scores, strict=True):
        assert pickle.loads(pickle.dumps(score)).value == score.value
        if score.fault is None:
            assert math.isfinite(score.value) and abs(score.value) <= LARGEST
            if isinstance(value, float | int):
                assert score.value == float(value)
        else:
            assert score.value is None and score.detail
    episodes = [episode_of(score) for score in scores]
    file = tmp_path_factory.mktemp("samples") / "1.jsonl"
    write_records(file, [sample_record(1, episode) for episode in episodes])
    for line, score in zip(file.read_text(encoding="utf-8").splitlines(), scores, strict=True):
        record = json.loads(line, parse_constant=no_json)
        own = {"input": "user: 1?", "output": "the response", "gts": "1", "score": score.value, "step": 1}
        assert own.items() <= record.items() and record["episode"]["data_source"] == "sums"
    assert len(list(read_records(file))) == 2
    metrics = component_means(scores) | validation_metrics(episodes, 2)
    assert all(isinstance(value, float | int) for value in metrics.values())


def no_json(name: str) -> None:
    raise AssertionError(f"{name} is no JSON")
