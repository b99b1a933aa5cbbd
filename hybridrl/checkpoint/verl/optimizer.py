"""The optimizer's moments in a checkpoint of verl's FSDP workers, by the names of the model's parameters.

verl saves `optimizer.state_dict()`, which knows parameters by number, and under FSDP1 those are flat parameters: one
for each layer and one for all that belongs to no layer, end to end, padded and cut into one part a rank. Which number
stands for which names is found by holding the arrangements that verl uses against the sizes that were saved.
"""

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hybridrl.checkpoint.pickles import Record
from hybridrl.checkpoint.stored import Stored
from hybridrl.checkpoint.tensors import Part, Tensors, blank, reading
from hybridrl.checkpoint.verl.model import OPTIMIZER, RankFiles, described, parts_of
from hybridrl.config import ConfigError

STEP = "step"

Unit = list[str]  # the parameters that share a number, in order


@dataclass(frozen=True)
class _Place:
    """A parameter's number, and where its elements begin in the first `ranks` ranks' parts end to end."""

    number: int
    start: int
    ranks: int


def read_moments(directory: Path, model: dict[str, Tensor]) -> tuple[dict[str, Tensors], int]:
    """The optimizer's state of the model's parameters under its own names (exp_avg, exp_avg_sq, step), and how many
    updates there were. Raises ConfigError where a file is missing or damaged, or the numbers cannot be told apart."""
    files = RankFiles(directory, OPTIMIZER)
    with reading(files.paths[0]):
        saved = files.values[0]
        numbers = [number for group in saved["param_groups"] for number in group["params"]]
        steps = {number: _step(files, number) for number in numbers}
        states = list(saved["state"].values())
        kinds = {kind: described(value, directory / kind).dtype for kind, value in states[0].items() if kind != STEP}
        places = _find_places([_held(files, number, next(iter(kinds))) for number in numbers], numbers, model)
    if not places:
        raise ConfigError(
            f"{directory}: the optimizer's state does not fit the model's parameters, layer by layer or all"
        )
    form = f"of verl, {len(files.paths)} ranks"
    once = {name: blank(torch.Size(), torch.float32) for name in places}
    found = {STEP: Tensors(form, once, lambda name: [((), torch.tensor(steps[places[name].number]))])}
    for kind, dtype in kinds.items():
        meta = {name: blank(model[name].shape, dtype) for name in places}
        found[kind] = Tensors(form, meta, _reader(files, kind, places, meta))
    return found, int(max(steps.values()))


def _step(files: RankFiles, number: int) -> float:
    """How many updates a parameter has had, as the first rank has it that holds some of it; 0 where it had none."""
    steps = (step for step in _held(files, number, STEP) if step is not None)
    step = next(steps, 0)
    return float(step.mapped() if isinstance(step, Stored) else step)


def _reader(
    files: RankFiles, kind: str, places: dict[str, _Place], meta: dict[str, Tensor]
) -> Callable[[str], Iterator[Part]]:
    def parts(name: str) -> Iterator[Part]:
        place, expected = places[name], meta[name]
        with reading(files.paths[0].parent / f"{kind} of {name}"):
            held = _held(files, place.number, kind)
            if isinstance(held[0], Record):
                yield from parts_of(held)
            else:
                elements = list(_cut(held[: place.ranks], place.start, expected.numel()))
                yield [0] * expected.dim(), torch.cat(elements).view(expected.shape)

    return parts


def _held(files: RankFiles, number: int, kind: str) -> list[Any]:
    """One moment as each rank has it, or None: a rank that holds nothing of a parameter has no state for it."""
    return [rank["state"].get(number, {}).get(kind) for rank in files.values]


def _cut(held: list[Stored | None], start: int, length: int) -> Iterator[Tensor]:
    """Some of the elements of parts that lie end to end."""
    for stored in held:
        if stored is not None:
            part = stored.mapped().flatten()
            yield part[max(start, 0) : max(start + length, 0)]
            start -= part.numel()


def _find_places(saved: list[list[Any]], numbers: list[int], model: dict[str, Tensor]) -> dict[str, _Place]:
    """Each parameter's place in the first arrangement that fits, or nothing."""
    world_size = len(saved[0])
    sharded_over = [ranks for ranks in range(1, world_size + 1) if world_size % ranks == 0]
    candidates = (units for units in _arrangements(list(model)) if len(units) == len(saved))
    for units, ranks in product(candidates, sharded_over):
        if all(_fits(unit, held, ranks, model) for unit, held in zip(units, saved, strict=True)):
            return {
                name: _Place(number, sum(model[before].numel() for before in unit[:index]), ranks)
                for number, unit in zip(numbers, units, strict=True)
                for index, name in enumerate(unit)
            }
    return {}


def _arrangements(names: list[str]) -> Iterator[list[Unit]]:
    """Each parameter by itself, or flat parameters: what is in no layer, then layer by layer; or all in one.

    A head that is tied to the embedding is saved with the model, and is no parameter of its own.
    """
    for chosen in (names, [name for name in names if not name.endswith("lm_head.weight")]):
        yield [[name] for name in chosen]
        layers: dict[str, Unit] = {"": []}
        for name in chosen:
            layer = re.match(r"(.*?\.\d+)\.", name)
            layers.setdefault(layer[1] if layer else "", []).append(name)
        yield list(layers.values())
        yield [chosen]


def _fits(unit: Unit, held: list[Any], ranks: int, model: dict[str, Tensor]) -> bool:
    """Whether what the first ranks hold is as large as these parameters, but for less padding than there are ranks."""
    if isinstance(held[0], Record):
        return len(unit) == 1 and described(held[0], Path()).shape == model[unit[0]].shape
    size = sum(math.prod(stored.shape) for stored in held[:ranks] if stored is not None)
    return 0 <= size - sum(model[name].numel() for name in unit) < ranks
