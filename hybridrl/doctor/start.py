"""What is checked of this machine before anything is loaded: by main_ppo, by main_sft, and by the doctor."""

import contextlib
import importlib.util
import math
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

from huggingface_hub import HfApi, try_to_load_from_cache
from huggingface_hub.errors import RepositoryNotFoundError

from hybridrl.checkpoint.read import open_tensors, stored_tensors
from hybridrl.config import ConfigError, PPOConfig, SFTConfig
from hybridrl.config.custom_code import import_libraries, publish_own_keys
from hybridrl.config.files import HUB_NAME, is_sharded, resolve_model
from hybridrl.config.findings import Findings
from hybridrl.config.schema import ModelConfig
from hybridrl.config.values import PACKAGES
from hybridrl.doctor.machine import GIB, check_gpus, check_machine, check_versions
from hybridrl.doctor.memory_plan import ITEMSIZE, memory_plan
from hybridrl.runs.model_settings import reject_unusable_overrides
from hybridrl.runs.resume import contents_to_save
from hybridrl.runs.settings import build_algorithm
from hybridrl.runs.setup import save_times
from hybridrl.tracking.console import warn
from hybridrl.tracking.records import COMPRESSED

HUB_SECONDS = 10.0
KEY, KEEP = "trainer.default_local_dir", "trainer.max_actor_ckpt_to_keep"
SAMPLES = "trainer.max_rollout_data_gb"
# Size of each part of a checkpoint in copies of the parameters. Adam has two moments; SGD and Muon have fewer.
COPIES = {"model": 1, "optimizer": 2, "hf_model": 1}
# Bytes of a sample in its file: of each token of prompt and response, and of what is known besides; of the importance
# weight of a token, and of one that is written with its log-probs (trainer.rollout_tokens). Large files are compressed,
# prose to a third.
TEXT_BYTES, SAMPLE_BYTES, WEIGHT_BYTES, TOKEN_BYTES, COMPRESSION = 4.5, 420, 6.5, 70, 3


def check_run_start(config: PPOConfig | SFTConfig) -> None:
    """Print the warnings of `check_start`; raises ConfigError with all of its errors."""
    findings = Findings()
    check_hub(config, findings)
    findings.close()
    check_start(config, findings)
    check_space(config, findings)
    for finding in findings.items:
        if finding.severity == "warning":
            warn(finding.text, finding.code)
    findings.close()


def check_loggers(loggers: Sequence[str], findings: Findings) -> None:
    """Report loggers whose package is not installed: what a run does not log cannot be logged later."""
    for name in loggers:
        if name in PACKAGES and importlib.util.find_spec(name) is None:
            cause, key = f"trainer.logger={name}: its package is not installed", "trainer.logger"
            findings.error("logger.package", cause, f"pip install {name}, or leave it out", keys=key, value=name)


def check_evaluation_start(config: PPOConfig) -> None:
    """Raise ConfigError for models that are neither here nor on the hub, and for versions that cannot work."""
    findings = Findings()
    if not config.eval.responses:
        names = [*(("eval.models", name) for name in config.eval.models), ("eval.compare", config.eval.compare)]
        check_models([(key, name) for key, name in names if name and "://" not in name], findings)
        check_versions(config.trainer.device, findings)
    findings.close()


def check_hub(config: PPOConfig | SFTConfig, findings: Findings) -> None:
    """Report models of a run that are neither here nor on the hub, and changed settings that a model cannot have."""
    if isinstance(config, SFTConfig):
        models = {"model": config.model}
    else:
        models = {"actor_rollout_ref.model": config.actor_rollout_ref.model}
        if config.critic.enable:
            models["critic.model"] = config.critic.model
    check_models([(f"{key}.path", model.path) for key, model in models.items()], findings)
    if findings.errors:
        return
    first = next(iter(models.values()))
    with contextlib.suppress(ConfigError):  # reported with the model, which may be what a library registers
        import_libraries(first.external_lib)
    for key, model in models.items():
        if model is first or (model.path, model.override_config) != (first.path, first.override_config):
            with findings.gathered():
                reject_unusable_overrides(model, f"{key}.override_config")


def check_models(models: Iterable[tuple[str, str]], findings: Findings) -> None:
    """Report models, each with the key that names it, that are neither here nor on the hub. It asks once: libraries
    that load them try for a minute."""
    for key, name in models:
        if not HUB_NAME.fullmatch(name) or Path(name).is_dir():
            continue
        if isinstance(try_to_load_from_cache(name, "config.json"), str):
            continue
        try:
            HfApi().model_info(name, timeout=HUB_SECONDS)
        except RepositoryNotFoundError:
            cause, fix = "neither a directory nor a model on the hub", "check the name, or log in: hf auth login"
            findings.error("model.hub", f"{key}={name}: {cause}", fix, keys=key, value=name)
        except Exception as error:  # of the network, whose library's exceptions depend on its version
            cause = f"neither a directory nor in the hub's cache, and the hub does not respond ({error})"
            fix = f"name a local directory; where there is a network: hf download {name}"
            findings.error("model.hub", f"{key}={name}: {cause}", fix, keys=key, value=name)


def check_start(config: PPOConfig | SFTConfig, findings: Findings) -> None:
    """Check versions, machine and GPUs, and unless it is supervised the memory of each phase."""
    check_versions(config.trainer.device, findings, engine=isinstance(config, PPOConfig))
    check_loggers(config.trainer.logger, findings)
    check_machine(config, findings)
    check_gpus(config, findings)
    if isinstance(config, SFTConfig):
        return
    publish_own_keys(config.own)
    with contextlib.suppress(ConfigError):  # reported with the model, which may be what a library registers
        import_libraries(config.actor_rollout_ref.model.external_lib)
    memory_plan(config, findings)


def check_space(config: PPOConfig | SFTConfig, findings: Findings, steps: int | None = None) -> None:
    """Compare the disk with the checkpoints that are kept plus the one being written, and with the samples of the
    steps, if their number is known."""

    def amount(size: float) -> str:
        return f"{size / GIB:,.1f} GiB" if size >= GIB else f"{size / (1 << 20):.0f} MiB"

    directory = Path(config.trainer.default_local_dir).expanduser().absolute()
    existing = next(parent for parent in (directory, *directory.parents) if parent.is_dir())
    times, free, steps = save_times(config.trainer), shutil.disk_usage(existing).free, steps or 0
    samples = _samples_bytes(config, steps or config.trainer.total_training_steps or 0, existing)
    of_samples = f"the samples of all steps take up to {amount(samples)}"
    size = _checkpoint_bytes(config) if times.ever else None
    if not size:
        if samples > free:
            cause = f"{of_samples}, and {amount(free)} are free in {existing}"
            findings.warn("run.disk", cause, f"set a lower {SAMPLES}", keys=(SAMPLES, KEY))
        return
    saves = (steps or 1) // times.steps if times.steps > 0 else 1
    kept = max(min(config.trainer.max_actor_ckpt_to_keep or saves, saves), 1)
    cause = f"a checkpoint takes about {amount(size)}, and {amount(free)} are free in {existing}"
    cause += f"; {of_samples}" * bool(samples)
    if (kept + 1) * size + samples <= free:
        findings.info("run.disk", cause)
    else:
        fit = (free - samples) // size - 1
        fix = f"set {KEEP}={fit}" if fit > 0 else f"free some, or move {KEY} to a larger disk"
        fix += f", or set a lower {SAMPLES}" * (samples > size)
        findings.warn("run.disk", f"{cause}: not enough for {kept} and one being written", fix, keys=(KEEP, KEY))


def _samples_bytes(config: PPOConfig | SFTConfig, steps: int, existing: Path) -> int:
    """Estimate what the training samples of these steps take at most on the disk of a directory."""
    if isinstance(config, SFTConfig) or not config.trainer.rollout_data_dir:
        return 0
    place = Path(config.trainer.rollout_data_dir).expanduser().absolute()
    there = next(parent for parent in (place, *place.parents) if parent.is_dir())
    if there.stat().st_dev != existing.stat().st_dev:
        return 0
    data, rollout, trainer = config.data, config.actor_rollout_ref.rollout, config.trainer
    length = data.max_prompt_length + data.max_response_length
    correction = config.algorithm.rollout_correction
    weights = WEIGHT_BYTES * data.max_response_length * bool(correction.rollout_is and not correction.bypass_mode)
    written = data.train_batch_size * rollout.n * (SAMPLE_BYTES + TEXT_BYTES * length + weights)
    written += trainer.rollout_tokens * TOKEN_BYTES * data.max_response_length
    of_step = written / COMPRESSION if written >= COMPRESSED else written
    most = math.inf if trainer.max_rollout_data_gb is None else trainer.max_rollout_data_gb * 1e9
    return int(min(steps * of_step, most))


def _checkpoint_bytes(config: PPOConfig | SFTConfig) -> int | None:
    """Estimate the size of a checkpoint; None if the models are not here or cannot be read, or only an
    adapter is saved."""
    total = 0
    try:
        for model, dtype, contents in _saved_models(config):
            directory = resolve_model(model.path)
            if model.lora_rank or not directory.is_dir():
                return None
            stored = open_tensors(Path(model.path)).meta if is_sharded(model.path) else stored_tensors(directory)
            count = sum(tensor.shape.numel() for tensor in stored.values())
            total += count * ITEMSIZE[dtype] * sum(COPIES.get(part, 0) for part in contents)
    except ConfigError:  # reported with the algorithm or the model
        return None
    return total or None


def _saved_models(config: PPOConfig | SFTConfig) -> list[tuple[ModelConfig, str, list[str]]]:
    """Each model that is saved, with the type that it is stored in and the parts that are saved."""
    if isinstance(config, SFTConfig):
        return [(config.model, config.engine.fsdp_config.model_dtype, config.checkpoint.save_contents)]
    section, critic = config.actor_rollout_ref, config.critic
    actor = (section.model, section.actor.fsdp_config.model_dtype)
    models = {"actor": actor, "critic": (critic.model, critic.fsdp.model_dtype)}
    saved = contents_to_save(config, build_algorithm(config))
    return [(*models.get(name, actor), contents) for name, contents in saved.items()]
