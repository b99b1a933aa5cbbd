"""Checkpoints of verl's FSDP workers, which save one file per rank; read without those ranks or another copy on disk.

FSDP2 saves DTensors, FSDP1 DTensors or ShardedTensors. If every rank holds the full tensor, the first rank's is used.
verl saves `optimizer.state_dict()`, which numbers the parameters. Under FSDP1 these are flat parameters: one per layer,
and one for everything outside the layers, concatenated, padded and split over the ranks. The names of each number are
found by comparing the arrangements that verl uses with the saved sizes.
"""

import io
import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner
from torch.futures import Future

from hybridrl.checkpoint.read import MODEL as SAVED
from hybridrl.checkpoint.read import UPDATES
from hybridrl.checkpoint.tensors import Chunk, Record, StoredTensor, Tensors, Unreadable, blank, damaged, load, reading
from hybridrl.config import ConfigError
from hybridrl.config.files import HUGGINGFACE, VERL_SHARDS, holds_verl

SETTINGS, DATA = "fsdp_config.json", "data.pt"
MODEL, OPTIMIZER, EXTRA = "model", "optim", "extra_state"  # kinds of files
STEP, HEAD = "step", "lm_head.weight"

# A parameter's number, the start of its elements in the concatenated parts of the first ranks, and the number of these.
Slice = tuple[int, int, int]

# What is not restored, and why.
NOT_FROM_VERL = {
    "trackers": "verl's own; here they start after this step",
    "random state": "verl's own; here every draw follows from the seed and its position in the run",
}
NO_KL_WEIGHT = {"KL weight": "not saved by verl; it starts at algorithm.kl_ctrl.kl_coef"}


class RankFiles:
    """The files of one kind, one per rank. Raises Unreadable if one is missing or damaged."""

    def __init__(self, directory: Path, kind: str) -> None:
        ranks = _world_size(directory)
        self.paths = [directory / f"{kind}_world_size_{ranks}_rank_{rank}.pt" for rank in range(ranks)]
        self.form = f"in verl's files of {ranks} ranks"
        if missing := [path.name for path in self.paths if not path.is_file()]:
            raise Unreadable(f"{directory}: {', '.join(missing[:3])} of {ranks} ranks is missing", fix="copy it there")
        self.values = [load(path) for path in self.paths]

    def faults(self) -> list[str]:
        """Return a line per changed file: torch.save writes checksums, and its content differs from them."""
        return [f"{path.name}: changed since it was written" for path in self.paths if damaged(path)]

    def held(self, number: int, kind: str) -> list[Any]:
        """Return one moment on each rank; None on ranks without elements of the parameter, hence without state."""
        return [rank["state"].get(number, {}).get(kind) for rank in self.values]


def _world_size(directory: Path) -> int:
    """Return the number of ranks in verl's settings or, where it did not write any yet, in the file names."""
    if (directory / SETTINGS).is_file():
        with reading(directory / SETTINGS):
            return int(json.loads((directory / SETTINGS).read_text())["world_size"])
    names = [path.name for path in directory.glob(VERL_SHARDS)]
    sizes = {int(number) for name in names for number in re.findall(r"world_size_(\d+)_rank_\d+\.pt$", name)}
    if len(sizes) != 1:
        raise ConfigError(f"{directory} has files of several runs, of {sorted(sizes)} ranks", fix="keep those of one")
    return sizes.pop()


def verl_faults(step: Path) -> list[str]:
    """Return one line per file of a verl checkpoint that is missing, unreadable, or changed since torch wrote it."""
    faults = []
    for directory, kind in product((step / "actor", step / "critic"), (MODEL, OPTIMIZER, EXTRA)):
        try:
            if holds_verl(directory, kind):
                faults += [f"{directory.name}/{fault}" for fault in RankFiles(directory, kind).faults()]
        except ConfigError as error:
            faults.append(str(error))
    try:
        if (step / DATA).is_file() and damaged(step / DATA):
            faults.append(f"{DATA}: changed since it was written")
    except ConfigError as error:
        faults.append(str(error))
    return faults


def read_verl_model(directory: Path) -> Tensors:
    """Open the model's tensors. Raises Unreadable, or ConfigError if a file holds anything but tensors."""
    files = RankFiles(directory, MODEL)
    with reading(files.paths[0]):
        meta = {name: _meta(value, directory / name) for name, value in files.values[0].items()}

    def chunks(name: str) -> Iterator[Chunk]:
        with reading(directory / name):
            yield from _chunks([rank.get(name) for rank in files.values])

    return Tensors(files.form, meta, chunks, files.faults)


def _meta(value: Any, path: Path) -> Tensor:
    """Return shape and type of the full tensor of which `value` is one rank's part."""
    if isinstance(value, StoredTensor):
        return blank(value.shape, value.dtype)
    if not isinstance(value, Record) or _kind(value) not in ("DTensor", "ShardedTensor"):
        raise ConfigError(f"{path} is neither a tensor nor a DTensor or ShardedTensor, but {_kind(value)}")
    return blank(torch.Size(value.arguments[2]), value.arguments[1])


def _chunks(parts: list[Any]) -> Iterator[Chunk]:
    """Yield the chunks of a tensor of which each rank holds a shard, a replica of one, or everything."""
    if isinstance(parts[0], StoredTensor):
        yield from parts[0].chunks([0] * len(parts[0].shape))
        return
    if _kind(parts[0]) == "ShardedTensor":
        shards: dict[tuple[int, ...], Record] = {}
        for shard in (shard for value in parts for shard in value.state[0]):
            shards.setdefault(tuple(shard.fields["metadata"].fields["shard_offsets"]), shard)
        for offsets, shard in shards.items():
            yield from shard.fields["tensor"].chunks(offsets)
        return
    # The ranks form a row-major mesh that is sharded over its last dimension: the first ranks hold all shards, and the
    # others repeat them.
    placements = parts[0].fields["_spec"].fields["placements"]
    kinds = [_kind(placement) for placement in placements if _kind(placement) != "Replicate"]
    if kinds not in ([], ["Shard"]):
        raise ValueError(f"it is placed as {' and '.join(kinds)} (tensor parallel), which is not supported")
    dims = [placement.fields["dim"] for placement in placements if _kind(placement) == "Shard"]
    shape = parts[0].arguments[2]
    offsets = [0] * len(shape)
    for value in parts:
        local = value.fields["_local_tensor"]
        yield from local.chunks(tuple(offsets))
        for dim in dims:
            offsets[dim] += local.shape[dim]
        if all(offsets[dim] >= shape[dim] for dim in dims):
            return


def _kind(value: object) -> str:
    return type(value).__name__


def read_moments(directory: Path, model: dict[str, Tensor]) -> tuple[dict[str, Tensors], int]:
    """Open the optimizer's state (exp_avg, exp_avg_sq, step) by the model's parameter names; also return the number of
    updates. Raises ConfigError if a file is missing or damaged, or the numbers do not match the parameters."""
    files = RankFiles(directory, OPTIMIZER)
    with reading(files.paths[0]):
        saved, steps = files.values[0], {}
        numbers = [number for group in saved["param_groups"] for number in group["params"]]
        for number in numbers:
            # The first rank that holds some of a parameter counts its updates; it had none if no rank does.
            step = next((step for step in files.held(number, STEP) if step is not None), 0)
            steps[number] = float(step.mapped() if isinstance(step, StoredTensor) else step)
        state = next(iter(saved["state"].values()))
        kinds = {kind: _meta(value, directory / kind).dtype for kind, value in state.items() if kind != STEP}
        slices = _find_slices([files.held(number, next(iter(kinds))) for number in numbers], numbers, model)
    if not slices:
        raise ConfigError(
            f"{directory}: the optimizer's state does not fit the model's parameters, neither layer by layer nor in all"
        )

    def chunks(kind: str, name: str) -> Iterator[Chunk]:
        (number, start, ranks), expected = slices[name], model[name]
        with reading(directory / f"{kind} of {name}"):
            parts = files.held(number, kind)
            if isinstance(parts[0], Record):
                yield from _chunks(parts)
                return
            elements = []
            for stored in parts[:ranks]:
                if stored is not None:
                    flat = stored.mapped().flatten()
                    elements.append(flat[max(start, 0) : max(start + expected.numel(), 0)])
                    start -= flat.numel()
            yield [0] * expected.dim(), torch.cat(elements).view(expected.shape)

    scalars = {name: blank(torch.Size(), torch.float32) for name in slices}
    moments = {STEP: Tensors(files.form, scalars, lambda name: [((), torch.tensor(steps[slices[name][0]]))])}
    for kind, dtype in kinds.items():
        meta = {name: blank(model[name].shape, dtype) for name in slices}
        moments[kind] = Tensors(files.form, meta, partial(chunks, kind))
    return moments, int(max(steps.values()))


def _find_slices(saved: list[list[Any]], numbers: list[int], model: dict[str, Tensor]) -> dict[str, Slice]:
    """Return each parameter's slice in the first arrangement that fits, or nothing. An arrangement has one unit per
    number, the names of the parameters that share it."""

    def fits(unit: list[str], parts: list[Any], ranks: int) -> bool:
        """Whether the first ranks hold as many elements as these parameters have, plus padding below `ranks`."""
        if isinstance(parts[0], Record):
            return len(unit) == 1 and _meta(parts[0], Path()).shape == model[unit[0]].shape
        size = sum(math.prod(stored.shape) for stored in parts[:ranks] if stored is not None)
        return 0 <= size - sum(model[name].numel() for name in unit) < ranks

    world_size = len(saved[0])
    sharded_over = [ranks for ranks in range(1, world_size + 1) if world_size % ranks == 0]
    candidates = (units for units in _arrangements(list(model)) if len(units) == len(saved))
    for units, ranks in product(candidates, sharded_over):
        if all(fits(unit, parts, ranks) for unit, parts in zip(units, saved, strict=True)):
            return {
                name: (number, sum(model[before].numel() for before in unit[:index]), ranks)
                for number, unit in zip(numbers, units, strict=True)
                for index, name in enumerate(unit)
            }
    return {}


def _arrangements(names: list[str]) -> Iterator[list[list[str]]]:
    """Yield the ways to number parameters: each by itself; flat, first those outside the layers, then layer by layer;
    or all in one. Each with the head and without: a tied head is saved with the model but is not a parameter."""
    for chosen in (names, [name for name in names if not name.endswith(HEAD)]):
        yield [[name] for name in chosen]
        layers: dict[str, list[str]] = {"": []}
        for name in chosen:
            layer = re.match(r"(.*?\.\d+)\.", name)
            layers.setdefault(layer[1] if layer else "", []).append(name)
        yield list(layers.values())
        yield [chosen]


@dataclass(frozen=True)
class DataPosition:
    """Prompts used in the current epoch, in verl's own order, and prompts per batch."""

    prompts: int
    batch_size: int


def data_position(step: Path) -> DataPosition:
    """Read the state of torchdata's StatefulDataLoader, whose layout differs with workers. Raises Unreadable."""
    state = load(step / DATA)
    with reading(step / DATA):
        if "_snapshot" in state:
            loader = state["_snapshot"]["_main_snapshot"]
            batches = state["_snapshot"]["_snapshot_step"] + state["_steps_since_snapshot"]
        else:
            loader, batches = state, state["_num_yielded"]
        sampler = loader["_sampler_iter_state"] or loader["_index_sampler_state"]
        # Workers prefetch batches, so the sampler may be ahead of the training.
        batch_size = sampler["samples_yielded"] // max(loader["_sampler_iter_yielded"], 1)
        return DataPosition(prompts=batches * batch_size, batch_size=batch_size)


def state_from_verl(
    step: int, path: Path, *, prompts_per_step: int, rows: int, data: str, kl_weight: float, log: Callable[[str], None]
) -> dict[str, Any]:
    """Return the driver's state after a step of a verl run; log where the number of used prompts comes from."""
    position = None
    try:
        position = data_position(path)
        source = f"data.pt: {position.prompts} of them in the epoch then current"
    except ConfigError as error:
        source = f"counted as {prompts_per_step} per step, as there is no data position: {error}"
    prompts = prompts_used(position, step=step, prompts_per_step=prompts_per_step, rows=rows)
    log(
        f"prompts used by verl's run: {prompts} ({source}). Their order was verl's own, so this is how many there "
        "were and not which: in the current epoch some repeat, and some never come"
    )
    state = {"prompts": prompts, "kl_weight": kl_weight, "fault_steps": 0, "sinks": {}, "data": data}
    return state | {"skipped_in_a_row": {"actor": 0, "critic": 0}}


def prompts_used(position: DataPosition | None, *, step: int, prompts_per_step: int, rows: int) -> int:
    """Return the number of prompts used since the run started. The data loader knows only its position in an epoch; the
    epoch is the one nearest to the number of steps. What verl drops after an epoch's last full batch counts as used."""
    if position is None:
        epochs, steps = divmod(step, max(rows // prompts_per_step, 1))
        return epochs * rows + steps * prompts_per_step
    epoch = max(rows // position.batch_size, 1) * position.batch_size
    return max(round((step * prompts_per_step - position.prompts) / epoch), 0) * rows + position.prompts


class VerlReader(FileSystemReader):
    """Presents one model of a checkpoint of verl, `.../global_step_N/actor`, in the layout of hybridrl's state; with
    `moments` also its optimizer, whose updates are the schedule's position here (verl's schedule counts steps). Raises
    ConfigError if files are missing or damaged."""

    def __init__(self, directory: Path, *, moments: bool = True) -> None:
        super().__init__(directory)
        model, settings, tied = read_verl_model(directory), directory / HUGGINGFACE / "config.json", None
        if adapters := [name for name in model.meta if "lora_" in name]:
            raise ConfigError(f"{directory} holds a LoRA adapter ({adapters[0]}), from which no run can resume yet")
        if settings.is_file():
            with reading(settings):  # a tied head is saved with the model, but is not a parameter
                tied = HEAD if json.loads(settings.read_text(encoding="utf-8")).get("tie_word_embeddings") else None
        # Where each tensor is, and its name there. The optimizer's are under the model's names.
        self.sources = {SAVED + name: (model, name) for name in model.meta if name != tied}
        self.updates: int | None = None
        if moments and holds_verl(directory, OPTIMIZER):
            try:
                state, self.updates = read_moments(directory, model.meta)
            except ConfigError as error:
                raise ConfigError(str(error), fix="trainer.reset_optimizer=true resumes without it") from error
            for moment, tensors in state.items():
                self.sources |= {f"optimizer.state.{name}.{moment}": (tensors, name) for name in tensors.meta}

    def read_metadata(self, *_: Any, **__: Any) -> metadata.Metadata:
        items: dict[str, Any] = {} if self.updates is None else {UPDATES: metadata.BytesStorageMetadata()}
        for key, (tensors, name) in self.sources.items():
            # Declared as one chunk, however it is stored: `fill` takes what is needed of each stored chunk.
            tensor = tensors.meta[name]
            whole = metadata.ChunkStorageMetadata(torch.Size([0] * tensor.dim()), tensor.shape)
            properties = metadata.TensorProperties(dtype=tensor.dtype)
            items[key] = metadata.TensorStorageMetadata(properties, tensor.shape, [whole])
        return metadata.Metadata(items, planner_data={}, storage_data={})

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                content = io.BytesIO()
                torch.save(self.updates, content)
                content.seek(0)
                planner.load_bytes(item, content)
            else:
                target = planner.resolve_tensor(item).detach()
                tensors, name = self.sources[item.storage_index.fqn]
                tensors.fill(target, name, item.storage_offsets)
                planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done
