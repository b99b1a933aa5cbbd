"""`trainer.default_local_dir`: whether a run can write there, what lies there, what it would go on from, the room."""

import fcntl
import shutil
import tempfile
from pathlib import Path

from hybridrl.checkpoint.read import open_tensors, stored_tensors
from hybridrl.checkpoint.saved import step_directories
from hybridrl.checkpoint.store import LOCK
from hybridrl.config import ConfigError, PPOConfig
from hybridrl.config.findings import Finding, Findings
from hybridrl.config.model_directory import is_sharded, resolve_model
from hybridrl.config.schema import ModelConfig
from hybridrl.runs.prepare import Prepared
from hybridrl.runs.resume import chart_course, contents_to_save
from hybridrl.runs.setup import save_times

KEY = "trainer.default_local_dir"
GIB = 1 << 30
WIDTHS = {"float32": 4, "bfloat16": 2, "float16": 2}
# Of a parameter's own width: what each part of a saved step takes. Adam has two moments; SGD and Muon have fewer.
PARTS = {"model": 1, "optimizer": 2, "hf_model": 1}
OF_A_RUN = {LOCK, "config.yaml", "metrics.jsonl", "logs", "latest_checkpointed_iteration.txt"}


def check_run_directory(config: PPOConfig, prepared: Prepared, findings: Findings) -> None:
    """Leaves no file behind; says how many steps the run has where the data are known."""
    directory = Path(config.trainer.default_local_dir).expanduser().absolute()
    there = next(parent for parent in (directory, *directory.parents) if parent.is_dir())
    try:
        tempfile.TemporaryFile(dir=there).close()
    except OSError as error:
        told = f"{KEY}={directory}: nothing can be written in {there} ({error.strerror})"
        findings.refuse("run.directory", f"{told}; name another directory")
        return
    if there == directory:
        _check_content(directory, config.trainer.resume_mode, findings)
    steps = _check_course(config, prepared, directory, findings)
    _check_room(config, prepared, there, steps, findings)


def _check_content(directory: Path, resume_mode: str, findings: Findings) -> None:
    if at_work := _at_work(directory):
        told = f"{KEY}={directory}: another run is at work there ({at_work})"
        findings.refuse("run.directory", f"{told}; end it, or name another directory")
    names = {path.name for path in directory.iterdir()}
    steps = step_directories(directory)
    if steps and resume_mode == "disable":
        told = f"{KEY}={directory} holds saved steps, up to {steps[-1].name}, and trainer.resume_mode=disable"
        told += " begins anew: steps of the same numbers are replaced"
        findings.warn("run.directory", f"{told}; name another directory, or set trainer.resume_mode=auto")
    elif names and not steps and not names & OF_A_RUN:
        told = f"{KEY}={directory} holds files of something else ({', '.join(sorted(names)[:3])})"
        findings.warn("run.directory", f"{told}; name a directory of the run's own")


def _at_work(directory: Path) -> str:
    """Who holds the directory, if a run does."""
    lock = directory / LOCK
    if not lock.is_file():
        return ""
    with lock.open(encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return file.read().strip() or "a process that is not named"
        except OSError:  # a file system without locks
            return ""
    return ""


def _check_course(config: PPOConfig, prepared: Prepared, directory: Path, findings: Findings) -> int | None:
    """The number of steps, where it is known."""
    if prepared.algorithm is None or not prepared.prompts or prepared.order is None:
        return config.trainer.total_training_steps
    remarks: list[str] = []
    try:
        rows, epoch = len(prepared.prompts), prepared.order.size
        course = chart_course(config, prepared.algorithm, rows, epoch, directory, remarks.append)
    except ConfigError as error:
        for line in error.lines:
            findings.refuse("run.resume", line)
        return config.trainer.total_training_steps
    if remarks:
        findings.found.append(Finding("run.resume", "information", "\n".join(remarks)))
    begins = f"goes on from {course.saved.path}" if course.saved else "begins anew"
    told = f"{len(prepared.prompts)} prompts, {course.steps} steps: {begins}"
    if course.done >= course.steps and not config.trainer.val_only:
        told = f"the run is complete: {course.done} of {course.steps} steps are done ({course.saved.path})"
        findings.warn("run.steps", f"{told}; raise trainer.total_training_steps, or set another {KEY}")
    else:
        findings.inform("run.steps", told)
    return course.steps


def _check_room(config: PPOConfig, prepared: Prepared, there: Path, steps: int | None, findings: Findings) -> None:
    """Steps that stay, and one that is being written, against the disk."""
    times = save_times(config.trainer)
    size = _step_bytes(config, prepared)
    if not times.ever or not size:
        return
    keep, free = config.trainer.max_actor_ckpt_to_keep, shutil.disk_usage(there).free
    saves = (steps or 1) // times.steps if times.steps > 0 else 1
    stay = max(min(keep or saves, saves), 1)
    told = f"a saved step takes about {_gib(size)}, and {_gib(free)} are free in {there}"
    if (stay + 1) * size <= free:
        findings.inform("run.disk", told)
        return
    room = free // size - 1
    way_out = f"set trainer.max_actor_ckpt_to_keep={room}" if room > 0 else f"free some, or move {KEY} to a larger disk"
    findings.warn("run.disk", f"{told}: not room for {stay} and one that is being written; {way_out}")


def _step_bytes(config: PPOConfig, prepared: Prepared) -> int | None:
    """About what a saved step takes; None where the models are not here, or only an adapter is saved."""
    section, critic = config.actor_rollout_ref, config.critic
    models = {
        "actor": (section.model, section.actor.fsdp_config.model_dtype),
        "critic": (critic.model, critic.fsdp.model_dtype),
    }
    if prepared.algorithm is None:
        return None
    sizes = []
    for name, contents in contents_to_save(config, prepared.algorithm).items():
        model, dtype = models.get(name, models["actor"])
        count = _parameters(model)
        if count is None:
            return None
        sizes.append(count * WIDTHS[dtype] * sum(PARTS.get(part, 0) for part in contents))
    return sum(sizes)


def _parameters(model: ModelConfig) -> int | None:
    directory = resolve_model(model.path)
    if model.lora_rank or not directory.is_dir():
        return None
    try:
        stored = open_tensors(Path(model.path)).meta if is_sharded(model.path) else stored_tensors(directory)
    except ConfigError:  # told of with the model
        return None
    return sum(tensor.shape.numel() for tensor in stored.values()) or None


def _gib(size: int) -> str:
    return f"{size / GIB:,.1f} GiB" if size >= GIB else f"{size / (1 << 20):.0f} MiB"
