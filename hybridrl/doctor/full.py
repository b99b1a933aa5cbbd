"""The checks that need this machine, the model and the data. Most of them main_ppo runs before it starts devices; some
still apply if it would reject the configuration. This module checks `trainer.default_local_dir`: whether a run can
write there, its contents, the checkpoint to resume from, and the disk space for checkpoints."""

import importlib.util
import logging
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from hybridrl.checkpoint.store import LOCK, holder, step_directories
from hybridrl.config import PPOConfig
from hybridrl.config.custom_code import attempt
from hybridrl.config.findings import Findings
from hybridrl.core.pictures import placeholder_ids
from hybridrl.core.training.loading import load_settings
from hybridrl.doctor.machine import version_of
from hybridrl.doctor.rows import check_pixels, check_rows, check_template
from hybridrl.doctor.start import KEY, check_devices, check_space, check_start
from hybridrl.required import required
from hybridrl.rewards.load import scorer_of, uses_built_in
from hybridrl.runs.models import picture_settings
from hybridrl.runs.prepare import RunInputs, prepare
from hybridrl.runs.resume import check_complete, plan_resume
from hybridrl.runs.reward_trial import try_reward
from hybridrl.runs.trials import Subject
from hybridrl.runtime.environment import EXTENSIONS
from hybridrl.tracking.console import Terminal
from hybridrl.tracking.faults import FILE

SECONDS = 20.0  # for the trial of a reward
IMPORT_SECONDS = 60
READERS = ("PIL", "torchvision")  # import packages of models that see
RUN_FILES = {LOCK, "config.yaml", "metrics.jsonl", FILE, "logs", "latest_checkpointed_iteration.txt"}


def examine(config: PPOConfig, findings: Findings, *, with_reward: bool) -> None:
    """Add the findings about a configuration that has no errors by itself; log warnings of the package become some."""
    log, handler = logging.getLogger("hybridrl"), _LogFindings(logging.WARNING)
    handler.findings = findings
    log.addHandler(handler)
    log.propagate = False
    try:
        with Terminal(stderr=True).status("") as status:
            status.update("checking models, versions, machine, memory, devices ...")
            if not check_start(config, findings):
                return
            settings = attempt(partial(load_settings, config.actor_rollout_ref.model))
            check_extensions(findings, *READERS * bool(placeholder_ids(settings)))
            check_devices(config, findings)
            status.update("checking model, tokenizer and data, as at the start of a run ...")
            inputs = prepare(config, in_full=True)
            with findings.gathered("run.refused"):
                inputs.rejections.close()
            for message in inputs.messages:
                findings.info("run.adapter", message)
            if inputs.prompts:
                status.update("checking the prompts ...")
                check_rows(inputs.prompts, inputs.validation, config.data.max_prompt_length, findings)
                if inputs.prompts.most_pictures:
                    check_pixels(config, inputs.prompts, findings)
            status.update(f"checking {KEY}, and the checkpoint that a run would resume from ...")
            check_run_directory(config, inputs, findings)
            if inputs.tokenizer is not None and inputs.prompts:
                status.update("checking the chat template ...")
                model, arguments = config.actor_rollout_ref.model.path, config.data.apply_chat_template_kwargs
                check_template(model, arguments, inputs.tokenizer, inputs.prompts, findings)
                scorers = [scorer_of(source, config.reward.name) for source in inputs.data_sources]
                can_score = not uses_built_in(config.reward) or all(scorers)
                if with_reward and can_score:  # others are reported with the rows
                    status.update("checking the reward, on a few rows ...")
                    try_on_rows(Subject(config, inputs.tokenizer, inputs.scored), findings)
    finally:
        log.removeHandler(handler)
        log.propagate = True


class _LogFindings(logging.Handler):
    findings: Findings

    def emit(self, record: logging.LogRecord) -> None:
        self.findings.warn("run.warning", record.getMessage())


def check_extensions(findings: Findings, *readers: str) -> None:
    """Import the installed EXTENSIONS, and the packages that read pictures, each in a subprocess; it takes seconds."""
    for name in (*filter(importlib.util.find_spec, EXTENSIONS), *readers):
        fix = (
            f"pip install --force-reinstall {name.replace('PIL', 'pillow')}"
            if name in readers
            else f"pip uninstall -y {name}"
        )
        command = [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path}; import {name}"]
        try:
            ended = subprocess.run(command, capture_output=True, text=True, timeout=IMPORT_SECONDS)
        except subprocess.TimeoutExpired:
            findings.warn("versions.extension", f"{name} does not import within {IMPORT_SECONDS} s", fix)
            continue
        if ended.returncode:
            last = [f"exit status {ended.returncode}", *ended.stderr.strip().splitlines()][-1]
            if name in readers:
                findings.error("versions.pictures", f"{name}, which reads pictures, does not import ({last:.160})", fix)
                continue
            cause = f"{name} does not work with torch {version_of('torch')} ({last:.160}), and "
            cause += "models then fail to import"
            findings.warn("versions.extension", cause, f"{fix} (nothing needs it)")


# -- the reward on a run's rows ----------------------------------------------------------------------------------------


def try_on_rows(subject: Subject, findings: Findings, seconds: float = SECONDS) -> None:
    """Try the reward as a run does (runs/reward_trial.py), with more time. `seconds` limits all responses together;
    loading has its own limit."""
    directory = Path(tempfile.mkdtemp(prefix="hybridrl-doctor-"))
    log = directory / "reward.log"
    try:
        with findings.gathered("reward.load"):
            if late := try_reward(subject, findings, log, seconds):
                cause = f"{late} responses had no score after {seconds:g} s, and a run ends a call only after "
                cause += f"reward.timeout={subject.config.reward.timeout:g} seconds"
                fix = "if scoring takes that long, skip this check: --no-reward"
                findings.warn("reward.slow", cause, fix, keys="reward.timeout")
    finally:
        if not any(str(log) in finding.text for finding in findings.items):
            shutil.rmtree(directory)


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
        rows = [Path(file).absolute() for file in (*config.data.train_files, *config.data.val_files)]
        _check_content(directory, config.trainer.resume_mode, rows, findings)
    messages: list[str] = []
    steps = config.trainer.total_training_steps
    if inputs.algorithm is not None and inputs.prompts and inputs.order is not None:
        with findings.gathered("run.resume"):
            rows, epoch = len(inputs.prompts), inputs.order.size
            pictures = picture_settings(config.actor_rollout_ref.rollout, inputs.prompts)
            plan = plan_resume(config, inputs.algorithm, rows, epoch, directory, messages.append, *pictures)
            steps = plan.steps
            if messages:
                findings.info("run.resume", "\n".join(messages))
            if not config.trainer.val_only and check_complete(config, plan, directory):
                last = required(plan.checkpoint).path
                cause = f"the run is complete: {plan.done} of {plan.steps} steps are done ({last})"
                fix = f"raise trainer.total_training_steps, or set another {KEY}"
                findings.warn("run.steps", cause, fix, keys=("trainer.total_training_steps", KEY))
            else:
                start = f"resuming from {plan.checkpoint.path}" if plan.checkpoint else "starting from scratch"
                findings.info("run.steps", f"{rows} prompt{'s' * (rows > 1)}, {plan.steps} steps: {start}")
    check_space(config, findings, steps)


def _check_content(directory: Path, resume_mode: str, rows: Sequence[Path], findings: Findings) -> None:
    """Report a directory that is in use, or holds checkpoints to be replaced, or anything but a run and its rows."""
    setting = {"keys": KEY, "value": directory}
    if user := holder(directory):
        cause = f"another run is using this directory ({user})"
        findings.error("run.directory", cause, "end it, or name another directory", **setting)
    own = [path for path in directory.iterdir() if not any(file.is_relative_to(path) for file in rows)]
    names, steps = {path.name for path in own}, step_directories(directory)
    if steps and resume_mode == "disable":
        cause = f"the directory holds checkpoints, up to {steps[-1].name}, and trainer.resume_mode=disable starts from "
        cause += "scratch: checkpoints of the same steps are replaced"
        fix = "name another directory, or set trainer.resume_mode=auto"
        findings.warn("run.directory", cause, fix, keys=(KEY, "trainer.resume_mode"), value=directory)
    elif names and not steps and not names & RUN_FILES:
        cause = f"the directory holds files that are not of a run ({', '.join(sorted(names)[:3])})"
        findings.warn("run.directory", cause, "name a directory used only for this run", **setting)
