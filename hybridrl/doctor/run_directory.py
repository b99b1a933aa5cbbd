"""Check `trainer.default_local_dir`: whether a run can write there, what it contains, the checkpoint that the run would
resume from, and the disk space for checkpoints."""

import fcntl
import shutil
import tempfile
from pathlib import Path

from hybridrl.checkpoint.read import open_tensors, stored_tensors
from hybridrl.checkpoint.store import LOCK, step_directories
from hybridrl.config import ConfigError, PPOConfig
from hybridrl.config.files import is_sharded, resolve_model
from hybridrl.config.findings import Findings
from hybridrl.config.schema import ModelConfig
from hybridrl.doctor.machine import GIB
from hybridrl.runs.prepare import RunInputs
from hybridrl.runs.resume import contents_to_save, plan_resume
from hybridrl.runs.setup import save_times

KEY, KEEP = "trainer.default_local_dir", "trainer.max_actor_ckpt_to_keep"
ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}
# Size of each part of a checkpoint in copies of the parameters. Adam has two moments; SGD and Muon have fewer.
COPIES = {"model": 1, "optimizer": 2, "hf_model": 1}
RUN_FILES = {LOCK, "config.yaml", "metrics.jsonl", "logs", "latest_checkpointed_iteration.txt"}


def check_run_directory(config: PPOConfig, inputs: RunInputs, findings: Findings) -> None:
    """Leaves no file behind. Reports the number of steps if the data are known."""
    directory = Path(config.trainer.default_local_dir).expanduser().absolute()
    existing = next(parent for parent in (directory, *directory.parents) if parent.is_dir())
    try:
        tempfile.TemporaryFile(dir=existing).close()
    except OSError as error:
        cause = f"{existing} is not writable ({error.strerror})"
        findings.error("run.directory", cause, "name another directory", keys=KEY, value=directory)
        return
    if existing == directory:
        _check_content(directory, config.trainer.resume_mode, findings)
    steps = _check_resume(config, inputs, directory, findings)
    _check_space(config, inputs, existing, steps, findings)


def _check_content(directory: Path, resume_mode: str, findings: Findings) -> None:
    setting = {"keys": KEY, "value": directory}
    if holder := _lock_holder(directory):
        cause = f"another run is using this directory ({holder})"
        findings.error("run.directory", cause, "end it, or name another directory", **setting)
    names = {path.name for path in directory.iterdir()}
    steps = step_directories(directory)
    if steps and resume_mode == "disable":
        cause = f"the directory holds checkpoints, up to {steps[-1].name}, and trainer.resume_mode=disable starts from "
        cause += "scratch: checkpoints of the same steps are replaced"
        fix = "name another directory, or set trainer.resume_mode=auto"
        findings.warn("run.directory", cause, fix, keys=(KEY, "trainer.resume_mode"), value=directory)
    elif names and not steps and not names & RUN_FILES:
        cause = f"the directory holds files that are not of a run ({', '.join(sorted(names)[:3])})"
        findings.warn("run.directory", cause, "name a directory used only for this run", **setting)


def _lock_holder(directory: Path) -> str:
    """Return the run that has locked the directory, if there is one."""
    lock = directory / LOCK
    if not lock.is_file():
        return ""
    with lock.open(encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return file.read().strip() or "an unnamed process"
        except OSError:  # a file system without locks
            return ""
    return ""


def _check_resume(config: PPOConfig, inputs: RunInputs, directory: Path, findings: Findings) -> int | None:
    """Report what the run would resume from. Returns its number of steps, if known."""
    steps = config.trainer.total_training_steps
    if inputs.algorithm is None or not inputs.prompts or inputs.order is None:
        return steps
    messages: list[str] = []
    rows, epoch = len(inputs.prompts), inputs.order.size
    plan = None
    with findings.gathered("run.resume"):
        plan = plan_resume(config, inputs.algorithm, rows, epoch, directory, messages.append)
    if plan is None:
        return steps
    if messages:
        findings.info("run.resume", "\n".join(messages))
    if plan.done >= plan.steps and not config.trainer.val_only:
        cause = f"the run is complete: {plan.done} of {plan.steps} steps are done ({plan.checkpoint.path})"
        fix = f"raise trainer.total_training_steps, or set another {KEY}"
        findings.warn("run.steps", cause, fix, keys=("trainer.total_training_steps", KEY))
    else:
        start = f"resuming from {plan.checkpoint.path}" if plan.checkpoint else "starting from scratch"
        findings.info("run.steps", f"{rows} prompts, {plan.steps} steps: {start}")
    return plan.steps


def _check_space(config: PPOConfig, inputs: RunInputs, existing: Path, steps: int | None, findings: Findings) -> None:
    """Compare the disk with the checkpoints that are kept plus the one being written."""
    times, size = save_times(config.trainer), _checkpoint_bytes(config, inputs)
    if not times.ever or not size:
        return
    free, saves = shutil.disk_usage(existing).free, (steps or 1) // times.steps if times.steps > 0 else 1
    kept = max(min(config.trainer.max_actor_ckpt_to_keep or saves, saves), 1)
    cause = f"a checkpoint takes about {_size(size)}, and {_size(free)} are free in {existing}"
    if (kept + 1) * size <= free:
        findings.info("run.disk", cause)
        return
    fit = free // size - 1
    fix = f"set {KEEP}={fit}" if fit > 0 else f"free some, or move {KEY} to a larger disk"
    findings.warn("run.disk", f"{cause}: not enough for {kept} and one being written", fix, keys=(KEEP, KEY))


def _checkpoint_bytes(config: PPOConfig, inputs: RunInputs) -> int | None:
    """Estimate the size of a checkpoint; None if the models are not here, or only an adapter is saved."""
    section, critic = config.actor_rollout_ref, config.critic
    actor = (section.model, section.actor.fsdp_config.model_dtype)
    models = {"actor": actor, "critic": (critic.model, critic.fsdp.model_dtype)}
    if inputs.algorithm is None:
        return None
    total = 0
    for name, contents in contents_to_save(config, inputs.algorithm).items():
        model, dtype = models.get(name, actor)
        count = _parameters(model)
        if count is None:
            return None
        total += count * ITEMSIZE[dtype] * sum(COPIES.get(part, 0) for part in contents)
    return total


def _parameters(model: ModelConfig) -> int | None:
    directory = resolve_model(model.path)
    if model.lora_rank or not directory.is_dir():
        return None
    try:
        stored = open_tensors(Path(model.path)).meta if is_sharded(model.path) else stored_tensors(directory)
    except ConfigError:  # reported with the model
        return None
    return sum(tensor.shape.numel() for tensor in stored.values()) or None


def _size(size: int) -> str:
    return f"{size / GIB:,.1f} GiB" if size >= GIB else f"{size / (1 << 20):.0f} MiB"
