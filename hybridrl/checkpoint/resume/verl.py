"""Where a run stood whose step verl saved, as far as verl's files tell it and it means the same here."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from hybridrl.checkpoint.verl import DataPosition, data_position
from hybridrl.config import ConfigError

# What is not gone on with, and why.
NOT_FROM_VERL = {
    "trackers": "verl's own; here they begin after this step",
    "random state": "verl's; here every draw follows from the seed and its place in the run",
}
NO_KL_WEIGHT = {"KL weight": "not saved by verl; it begins at algorithm.kl_ctrl.kl_coef"}


def state_from_verl(
    step: int,
    path: Path,
    *,
    prompts_per_step: int,
    rows: int,
    data: str,
    kl_weight: float,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """The driver's state after a step of verl's. Says where the number of prompts used is from."""
    found = None
    try:
        found = data_position(path)
        source = f"data.pt: {found.prompts} of them in the epoch then begun"
    except ConfigError as error:
        source = f"counted as {prompts_per_step} a step, as there is no data position: {error}"
    prompts = prompts_used(found, step=step, prompts_per_step=prompts_per_step, rows=rows)
    say(
        f"prompts used by verl's run: {prompts} ({source}). Their order was verl's own, so this is how many there were "
        "and not which: of the epoch begun some come again, and some do not"
    )
    return {
        "prompts": prompts,
        "kl_weight": kl_weight,
        "fault_steps": 0,
        "skipped_in_a_row": {"actor": 0, "critic": 0},
        "sinks": {},
        "data": data,
    }


def prompts_used(found: DataPosition | None, *, step: int, prompts_per_step: int, rows: int) -> int:
    """Prompts used since the run began, as one order of epoch after epoch has them.

    The data loader knows its place in an epoch alone; which epoch it was, the number of steps tells: the one that comes
    nearest. verl leaves out what is left of an epoch after its last full batch, so that counts as used.
    """
    if found is None:
        epochs, steps = divmod(step, max(rows // prompts_per_step, 1))
        return epochs * rows + steps * prompts_per_step
    epoch = max(rows // found.batch_size, 1) * found.batch_size
    return max(round((step * prompts_per_step - found.prompts) / epoch), 0) * rows + found.prompts
