"""A step that verl saved, as a whole: `global_step_N` with a folder for each model and the data loader's state."""

from dataclasses import dataclass
from pathlib import Path

from hybridrl.checkpoint.pickles import is_damaged, load
from hybridrl.checkpoint.tensors import reading
from hybridrl.checkpoint.verl.model import EXTRA, MODEL, OPTIMIZER, RankFiles, holds_verl
from hybridrl.config import ConfigError

DATA = "data.pt"


@dataclass(frozen=True)
class DataPosition:
    """Prompts that were drawn in the present epoch, whose order is verl's own, and how many made a batch."""

    prompts: int
    batch_size: int


def verl_faults(step: Path) -> list[str]:
    """Each file that is missing, cannot be read, or changed since torch wrote it, in words."""
    found = []
    for directory in (step / "actor", step / "critic"):
        for kind in (MODEL, OPTIMIZER, EXTRA):
            if holds_verl(directory, kind):
                try:
                    found += [f"{directory.name}/{fault}" for fault in RankFiles(directory, kind).faults()]
                except ConfigError as error:
                    found.append(str(error))
    if (step / DATA).is_file():
        try:
            found += [f"{DATA}: changed since it was written"] if is_damaged(step / DATA) else []
        except ConfigError as error:
            found.append(str(error))
    return found


def data_position(step: Path) -> DataPosition:
    """From the state of torchdata's StatefulDataLoader, which is another with worker processes than without. Raises
    ConfigError where there is none, or it cannot be read."""
    file = step / DATA
    state = load(file)
    with reading(file):
        if "_snapshot" in state:
            sampled = state["_snapshot"]["_main_snapshot"]
            batches = state["_snapshot"]["_snapshot_step"] + state["_steps_since_snapshot"]
        else:
            sampled, batches = state, state["_num_yielded"]
        sampler = sampled["_sampler_iter_state"] or sampled["_index_sampler_state"]
        # Workers draw batches ahead, so the sampler may have gone further than the training.
        batch_size = sampler["samples_yielded"] // max(sampled["_sampler_iter_yielded"], 1)
        return DataPosition(prompts=batches * batch_size, batch_size=batch_size)
