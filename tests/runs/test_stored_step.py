"""The batch, the samples and the metrics of a step equal those in steps.json, bit for bit. A change that is meant to
change them writes the file again: `python -m tests.runs.test_stored_step`."""

import json
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest

from hybridrl.core.algorithms import Algorithm
from hybridrl.core.algorithms.estimators import grpo
from hybridrl.core.experience.batching import GroupFilter
from hybridrl.core.experience.collector import Collected
from hybridrl.core.rollout import Completion
from hybridrl.rewards.score import OverlongPenalty, Score
from hybridrl.runs.sample_log import SampleLog
from hybridrl.tracking.records import open_records, record_files
from tests.core.experience.test_collector import Client, build, collect, fault

FILE = Path(__file__).with_name("steps.json")
TOKEN_REWARDS = Score(0.75, {"score": 0.75, "acc": 1.0, "pred": "4"}, token_rewards=[0.1, 0.2, 0.45])
STEPS: dict[str, tuple[list[list[Any]], dict[str, Any], dict[tuple[int, int], int]]] = {
    "plain": ([[1, 0, 0.1], [fault(), 1, 0]], {}, {(0, 1): 4, (1, 2): 2}),
    "token rewards": (
        [[TOKEN_REWARDS, 1, 0], [0, 1, 1]],
        {"overlong": OverlongPenalty(4, 2, 1.0, log=True)},
        {(0, 1): 4},
    ),
    "masked": ([[1, 0], [0, 1]], {"mask_truncated": True}, {(0, 1): 4, (1, 0): 2}),
    "filtered": ([[1, 1], [0, 1], [0, 0], [1, 0]], {"group_filter": GroupFilter("score", 0)}, {(1, 1): 4}),
    "greedy": ([[1, 0], [0, 1]], {"greedy_baseline": True, "greedy": [0.25, 0.5]}, {}),
}


class Probable(Client):
    """Every token has another log-prob."""

    def response(self, request):
        response = super().response(request)
        assert isinstance(response, Completion)
        length = len(response.token_ids)
        log_probs = -np.linspace(0.1, 1 + request.sample, length, dtype=np.float32)
        return replace(response, log_probs=log_probs)


def samples_of(collected: Collected) -> list[str]:
    """Return the lines of a step's file, with the tokens of two samples."""
    batch, _ = Algorithm(lambda batch: grpo(batch, norm_adv_by_std_in_grpo=True)).advantages(collected.batch)
    with TemporaryDirectory() as place:
        options = {"training_dir": place, "validation_dir": None, "replay_dir": Path(place), "shown": 0}
        log = SampleLog(None, **options, with_tokens=2, decode=lambda ids: [f"<{token}>" for token in ids])
        log.training_samples(1, collected.samples, batch)
        log.flush()
        (path,) = record_files(Path(place)).values()
        with open_records(path) as lines:
            return lines.read().splitlines()


def step(name: str) -> dict[str, Any]:
    table, options, lengths = STEPS[name]
    collected = collect(build(table, **options), Probable(lengths))
    fields = {field: [str(value.dtype), value.tolist()] for field, _, value in collected.batch.filled()}
    metrics = {key: value for key, value in collected.metrics.items() if not key.startswith("timing_s/")}
    return {"batch": fields, "metrics": metrics, "samples": samples_of(collected)}


@pytest.mark.parametrize("name", STEPS)
def test_a_step_has_the_stored_batch_samples_and_metrics(name):
    stored = json.loads(FILE.read_text(encoding="utf-8"))[name]
    assert json.loads(json.dumps(step(name))) == stored


if __name__ == "__main__":
    text = ",\n".join(f"{json.dumps(name)}: {json.dumps(step(name))}" for name in STEPS)
    FILE.write_text(f"{{\n{text}\n}}\n", encoding="utf-8")
