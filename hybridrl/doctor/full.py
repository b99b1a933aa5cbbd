"""The checks that need this machine, the model and the data: those that main_ppo runs before it starts devices, and
further ones that still apply if it would reject the configuration. Here are those of `trainer.default_local_dir`:
whether a run can write there, what it contains, the checkpoint to resume from, and the disk space for checkpoints."""

import contextlib
import logging
import shutil
import sys
import tempfile
from pathlib import Path

from rich.console import Console

from hybridrl.checkpoint.read import open_tensors, stored_tensors
from hybridrl.checkpoint.store import LOCK, holder, step_directories
from hybridrl.config import ConfigError, PPOConfig
from hybridrl.config.files import is_sharded, resolve_model
from hybridrl.config.findings import Findings
from hybridrl.doctor.machine import GIB, check_devices, check_gpus, check_machine, check_versions
from hybridrl.doctor.memory_plan import ITEMSIZE, memory_plan
from hybridrl.doctor.reward import try_reward
from hybridrl.doctor.rows import check_rows, check_template
from hybridrl.runs.prepare import RunInputs, prepare
from hybridrl.runs.resume import contents_to_save, plan_resume
from hybridrl.runs.setup import save_times
from hybridrl.tracking.faults import FILE

KEY, KEEP = "trainer.default_local_dir", "trainer.max_actor_ckpt_to_keep"
# Size of each part of a checkpoint in copies of the parameters. Adam has two moments; SGD and Muon have fewer.
COPIES = {"model": 1, "optimizer": 2, "hf_model": 1}
RUN_FILES = {LOCK, "config.yaml", "metrics.jsonl", FILE, "logs", "latest_checkpointed_iteration.txt"}


def examine(config: PPOConfig, findings: Findings, *, with_reward: bool) -> None:
    """Add the findings about a configuration that has no errors by itself. Prints of other code stay off standard
    output, and the package's log warnings become findings."""
    log, handler = logging.getLogger("hybridrl"), _LogFindings(logging.WARNING)
    handler.findings = findings
    log.addHandler(handler)
    log.propagate = False
    try:
        with contextlib.redirect_stdout(sys.stderr), Console(stderr=True).status("") as status:
            status.update("checking versions, machine, devices ...")
            check_versions(config.trainer.device, findings)
            check_machine(config, findings)
            check_gpus(config, findings)
            check_devices(config, findings)
            status.update("checking the memory of each phase ...")
            memory_plan(config, findings)
            status.update("checking model, tokenizer and data, as at the start of a run ...")
            inputs = prepare(config)
            with findings.gathered("run.refused"):
                inputs.rejections.close()
            for message in inputs.messages:
                findings.info("run.adapter", message)
            if inputs.prompts:
                status.update("checking the prompts ...")
                check_rows(config, inputs.prompts, inputs.validation, findings)
            status.update(f"checking {KEY}, and the checkpoint that a run would resume from ...")
            check_run_directory(config, inputs, findings)
            if inputs.tokenizer is not None and inputs.prompts:
                status.update("checking the chat template ...")
                check_template(config, inputs.tokenizer, inputs.prompts, findings)
                if with_reward:
                    status.update("checking the reward, on a few rows ...")
                    try_reward(config.reward, inputs.tokenizer, inputs.prompts, findings)
    finally:
        log.removeHandler(handler)
        log.propagate = True


class _LogFindings(logging.Handler):
    findings: Findings

    def emit(self, record: logging.LogRecord) -> None:
        self.findings.warn("run.warning", record.getMessage())


# -- the run's directory -----------------------------------------------------------------------------------------------


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
    messages: list[str] = []
    steps = config.trainer.total_training_steps
    if inputs.algorithm is not None and inputs.prompts and inputs.order is not None:
        with findings.gathered("run.resume"):
            rows, epoch = len(inputs.prompts), inputs.order.size
            plan = plan_resume(config, inputs.algorithm, rows, epoch, directory, messages.append)
            steps = plan.steps
            if messages:
                findings.info("run.resume", "\n".join(messages))
            if plan.done >= plan.steps and not config.trainer.val_only:
                cause = f"the run is complete: {plan.done} of {plan.steps} steps are done ({plan.checkpoint.path})"
                fix = f"raise trainer.total_training_steps, or set another {KEY}"
                findings.warn("run.steps", cause, fix, keys=("trainer.total_training_steps", KEY))
            else:
                start = f"resuming from {plan.checkpoint.path}" if plan.checkpoint else "starting from scratch"
                findings.info("run.steps", f"{rows} prompts, {plan.steps} steps: {start}")
    _check_space(config, inputs, existing, steps, findings)


def _check_content(directory: Path, resume_mode: str, findings: Findings) -> None:
    setting = {"keys": KEY, "value": directory}
    if user := holder(directory):
        cause = f"another run is using this directory ({user})"
        findings.error("run.directory", cause, "end it, or name another directory", **setting)
    names, steps = {path.name for path in directory.iterdir()}, step_directories(directory)
    if steps and resume_mode == "disable":
        cause = f"the directory holds checkpoints, up to {steps[-1].name}, and trainer.resume_mode=disable starts from "
        cause += "scratch: checkpoints of the same steps are replaced"
        fix = "name another directory, or set trainer.resume_mode=auto"
        findings.warn("run.directory", cause, fix, keys=(KEY, "trainer.resume_mode"), value=directory)
    elif names and not steps and not names & RUN_FILES:
        cause = f"the directory holds files that are not of a run ({', '.join(sorted(names)[:3])})"
        findings.warn("run.directory", cause, "name a directory used only for this run", **setting)


def _check_space(config: PPOConfig, inputs: RunInputs, existing: Path, steps: int | None, findings: Findings) -> None:
    """Compare the disk with the checkpoints that are kept plus the one being written."""
    times, size = save_times(config.trainer), _checkpoint_bytes(config, inputs)
    if not times.ever or not size:
        return

    def amount(size: int) -> str:
        return f"{size / GIB:,.1f} GiB" if size >= GIB else f"{size / (1 << 20):.0f} MiB"

    free, saves = shutil.disk_usage(existing).free, (steps or 1) // times.steps if times.steps > 0 else 1
    kept = max(min(config.trainer.max_actor_ckpt_to_keep or saves, saves), 1)
    cause = f"a checkpoint takes about {amount(size)}, and {amount(free)} are free in {existing}"
    if (kept + 1) * size <= free:
        findings.info("run.disk", cause)
    else:
        fit = free // size - 1
        fix = f"set {KEEP}={fit}" if fit > 0 else f"free some, or move {KEY} to a larger disk"
        findings.warn("run.disk", f"{cause}: not enough for {kept} and one being written", fix, keys=(KEEP, KEY))


def _checkpoint_bytes(config: PPOConfig, inputs: RunInputs) -> int | None:
    """Estimate the size of a checkpoint; None if the models are not here, or only an adapter is saved."""
    section, critic, total = config.actor_rollout_ref, config.critic, 0
    actor = (section.model, section.actor.fsdp_config.model_dtype)
    models = {"actor": actor, "critic": (critic.model, critic.fsdp.model_dtype)}
    for name, contents in contents_to_save(config, inputs.algorithm).items() if inputs.algorithm else ():
        model, dtype = models.get(name, actor)
        directory = resolve_model(model.path)
        if model.lora_rank or not directory.is_dir():
            return None
        try:
            stored = open_tensors(Path(model.path)).meta if is_sharded(model.path) else stored_tensors(directory)
        except ConfigError:  # reported with the model
            return None
        count = sum(tensor.shape.numel() for tensor in stored.values())
        if not count:
            return None
        total += count * ITEMSIZE[dtype] * sum(COPIES.get(part, 0) for part in contents)
    return total
