"""How two runs differ: metrics, samples, and the last step's weights and moments, bit for bit."""

import json
from itertools import chain
from pathlib import Path

import torch

from hybridrl.checkpoint.read import read_shards
from hybridrl.config.model_directory import SHARDS

# Clocks, memory, and engines that were lost: they tell of the machine, not of what was learnt.
OF_THE_MACHINE = ("timing", "perf/", "rollout/")


def differences(expected: Path, found: Path, last_step: int) -> list[str]:
    """A line for each difference of the run in `found`; none where they are the same."""
    return [
        *_differences_of_metrics(_metrics(expected), _metrics(found)),
        *_differences_of_samples(expected / "samples", found / "samples"),
        *_differences_of_tensors(expected / f"global_step_{last_step}", found / f"global_step_{last_step}"),
    ]


def _metrics(directory: Path) -> dict[tuple[int, str], float]:
    """Every value by step and name; a step that was told of twice has its last values."""
    records = [json.loads(line) for line in (directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    named = chain.from_iterable(((record["step"], name, value) for name, value in record.items()) for record in records)
    return {(step, name): value for step, name, value in named if not name.startswith(OF_THE_MACHINE)}


def _differences_of_metrics(expected: dict[tuple[int, str], float], found: dict[tuple[int, str], float]) -> list[str]:
    places = sorted(place for place in expected.keys() | found.keys() if expected.get(place) != found.get(place))
    return [
        f"step {step}: {name} is {found.get((step, name))}, not {expected.get((step, name))}" for step, name in places
    ]


def _differences_of_samples(expected: Path, found: Path) -> list[str]:
    names = sorted({path.name for path in chain(expected.glob("*.jsonl"), found.glob("*.jsonl"))})
    return [f"{name}: other samples" for name in names if _bytes(expected / name) != _bytes(found / name)]


def _bytes(file: Path) -> bytes | None:
    return file.read_bytes() if file.is_file() else None


def _differences_of_tensors(expected: Path, found: Path) -> list[str]:
    models = sorted(path.parent.name for path in expected.glob(f"*/{SHARDS}"))
    assert models, f"{expected} holds no model"
    return [line for model in models for line in _differences_of_model(expected / model, found / model)]


def _differences_of_model(expected: Path, found: Path) -> list[str]:
    if not (found / SHARDS).is_file():
        return [f"{found}: nothing was saved"]
    left, right = read_shards(expected, section=""), read_shards(found, section="")
    names = sorted(left.meta.keys() | right.meta.keys())
    same = left.meta.keys() & right.meta.keys()
    return [
        f"{expected.name}: {name} differs"
        for name in names
        if name not in same or not torch.equal(_bits(left.read(name)), _bits(right.read(name)))
    ]


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """As bytes: 0.0 and -0.0 differ, two equal NaN do not."""
    return tensor.reshape(-1).view(torch.uint8)
