"""Checks of the trained models and their devices: this machine (without torch), sharding, optimizer, micro-batches,
actor, critic, reference and checkpoints."""

import os
from dataclasses import dataclass, replace
from math import gcd
from pathlib import Path
from typing import Any

import psutil
import pynvml

from hybridrl.config.catalog import ESTIMATORS
from hybridrl.config.checks.model import (
    absolute,
    check_model,
    check_recurrence,
    experts_of,
    model_settings,
    resolve_dtype,
    resolve_lora,
)
from hybridrl.config.findings import Checker, ConfigError, show
from hybridrl.config.schema import (
    ActorConfig,
    ActorRolloutRefConfig,
    CheckpointConfig,
    CriticConfig,
    DataConfig,
    FSDPConfig,
    ModelConfig,
    OptimizerConfig,
    PPOConfig,
    RolloutConfig,
    SFTTrainerConfig,
    TrainerConfig,
)
from hybridrl.config.values import value_of

CPU_SLOT_BYTES = 3 << 29  # measured for the smallest models: a CPU device takes processes and memory, not cores
ACTOR, ROLLOUT, DEVICES = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "trainer.n_gpus_per_node"
MOST_PARTS = 10_000  # larger sizes are not tried as a fix: trying all of an immense number would take hours
LOWER = "lower data.max_prompt_length or data.max_response_length"
SURE_IN_BFLOAT16 = 1e-3  # a learning rate at which most elements move (84% measured)


@dataclass(frozen=True)
class Machine:
    """`here`: the run uses this machine, so missing devices are errors. `no_gpu`: why there is none, and the fix."""

    gpus: int
    cores: int
    memory_bytes: int
    here: bool = True
    no_gpu: tuple[str, str] = ("", "")


def this_machine(*, count_gpus: bool = True) -> Machine:
    """Count the devices of this machine. A broken CUDA driver raises ConfigError: it never silently means CPU."""
    visible, gpus = os.environ.get("CUDA_VISIBLE_DEVICES"), 0
    why = "the NVIDIA driver finds none", "see nvidia-smi -L"
    if visible is not None and visible.strip() in ("", "-1"):
        why = f"CUDA_VISIBLE_DEVICES={visible} hides them", "unset it"
    elif count_gpus:
        try:
            pynvml.nvmlInit()
            gpus = pynvml.nvmlDeviceGetCount()
            pynvml.nvmlShutdown()
        except pynvml.NVMLError_LibraryNotFound:
            why = "there is no NVIDIA driver", "install it (in a container: docker run --gpus all)"
        except pynvml.NVMLError as error:
            cause = f"there is an NVIDIA driver, but it is not responding ({error})"
            fix = "fix the driver (nvidia-smi must work), or set trainer.device=cpu"
            raise ConfigError(cause, fix=fix) from error
        gpus = gpus if visible is None else min(gpus, len(visible.split(",")))
    return Machine(gpus, len(os.sched_getaffinity(0)), psutil.virtual_memory().available, no_gpu=why)


def resolve_devices(
    trainer: SFTTrainerConfig,
    ray_init: dict[str, Any],
    check: Checker,
    machine: Machine | None,
    engines: RolloutConfig | None = None,
    slots: int = 2,
) -> None:
    """Fill in `device` and `n_gpus_per_node` (on a CPU at most `slots`), and check them and the directories of the run
    against the machine. `engines`: engines with their own devices."""
    machine = machine or this_machine(count_gpus=trainer.device != "cpu")  # a CPU needs no working GPU driver
    if trainer.device == "auto":
        trainer.device = "cuda" if machine.gpus else "cpu"
    joined = bool(os.environ.get("RAY_ADDRESS") or ray_init.get("address"))
    fitting = min(machine.cores, slots, machine.memory_bytes // CPU_SLOT_BYTES)
    whole = max(machine.gpus if trainer.device == "cuda" else fitting, 1)
    keys, machines = DEVICES, {"trainer.nnodes": trainer.nnodes}
    if engines:
        keys, machines[f"{ROLLOUT}.nnodes"] = f"{DEVICES} {ROLLOUT}.n_gpus_per_node", engines.nnodes
        _divide_devices(trainer, engines, whole, joined=joined)
    trainer.n_gpus_per_node = trainer.n_gpus_per_node or whole
    devices = trainer.n_gpus_per_node + ((engines.n_gpus_per_node or 1) if engines else 0)
    alone = machine.here and not joined
    if alone and trainer.device == "cuda":
        _check_gpus(machine, devices, keys, check)
    for key in (key for key, count in machines.items() if alone and count > 1):
        cause = "without a Ray cluster to join there is only this machine"
        least = 1 if key == "trainer.nnodes" else 0
        check.error(key, cause, f"run ray start on each machine and set RAY_ADDRESS, or leave {key} at {least}")
    if machine.here:
        _check_directories(trainer, check)
    if trainer.device == "cpu":
        _check_cpu_devices(machine, devices, keys, check, alone=alone)


def _check_gpus(machine: Machine, devices: int, keys: str, check: Checker) -> None:
    if machine.gpus == 0:
        why, fix = machine.no_gpu
        cause = f"this machine has no usable GPU{f': {why}' if why else ''}"
        check.error("trainer.device", cause, f"{fix}{', or ' if fix else ''}set trainer.device=cpu")
    elif devices > machine.gpus:
        fix = f"set {DEVICES}={machine.gpus}" if keys == DEVICES else "lower them, or set colocate_async"
        check.error(keys, f"this machine has {machine.gpus} GPUs", fix)


def _check_cpu_devices(machine: Machine, devices: int, keys: str, check: Checker, *, alone: bool) -> None:
    """`alone`: all devices are on this machine."""
    fix = "set {0}={1}" if keys == DEVICES else "lower them"
    if alone and devices > machine.cores:
        cause = f"more devices than this machine's {machine.cores} cores, which they share: each has its own processes"
        check.warn(keys, cause, fix.format(DEVICES, machine.cores))
    most = max(machine.memory_bytes // CPU_SLOT_BYTES, 1)
    if devices > most:
        check.error(keys, f"free memory is enough for {most} CPU devices", fix.format(DEVICES, most))


def _divide_devices(trainer: SFTTrainerConfig, rollout: RolloutConfig, whole: int, *, joined: bool) -> None:
    """Divide the `whole` devices of this machine between training and rollout: half for each by default."""
    rollout.nnodes = rollout.nnodes or trainer.nnodes
    if trainer.n_gpus_per_node is None:
        trainer.n_gpus_per_node = max(whole - rollout.n_gpus_per_node if rollout.n_gpus_per_node else whole // 2, 1)
    rest = trainer.n_gpus_per_node if joined else max(whole - trainer.n_gpus_per_node, 1)
    rollout.n_gpus_per_node = rollout.n_gpus_per_node or rest


def _check_directories(trainer: SFTTrainerConfig, check: Checker) -> None:
    home = Path(trainer.default_local_dir).absolute()
    for name in ("default_local_dir", "rollout_data_dir", "validation_data_dir"):
        directory = Path(vars(trainer).get(name) or home).absolute()
        if name == "default_local_dir" or home not in (directory, *directory.parents):
            _check_writable(f"trainer.{name}", directory, check)


def _check_writable(key: str, directory: Path, check: Checker) -> None:
    try:
        existing = next(parent for parent in (directory, *directory.parents) if parent.exists())
    except OSError as error:
        check.error(key, str(error.strerror), "name another directory")
        return
    if not existing.is_dir():
        check.error(key, f"{existing} is a file", "name a directory")
    elif not os.access(existing, os.W_OK):
        check.error(key, f"{existing} is not writable", "name another directory")


@dataclass(frozen=True)
class Trained:
    """A trained model's settings, each section after its key; section `key` has ulysses_sequence_parallel_size."""

    key: str
    model_key: str
    model: ModelConfig
    optim_key: str
    optim: OptimizerConfig
    fsdp_key: str
    fsdp: FSDPConfig


def resolve_trained(
    part: Trained, longest: int, hint: str, trainer: SFTTrainerConfig, check: Checker, *, reported: bool = False
) -> None:
    """Fill in and check a model that is trained on rows of up to `longest` tokens, except its updates. `hint`: the fix
    to shorten rows. `reported`: its findings are reported with another model."""
    fsdp, model = part.fsdp, part.model
    check_model(part.model_key, model, longest, hint, check.muted() if reported else check)
    check_recurrence(part.model_key, model, trainer.device, check)

    if trainer.device == "cpu":
        if fsdp.compile_layers:
            cause = "has no effect on CPU, where compiled layers make updates no faster"
            check.warn(f"{part.fsdp_key}.compile_layers", cause)
        fsdp.compile_layers = False
    resolve_lora(part.model_key, model, check, served=part.key == ACTOR)

    resolve_division(part, trainer.devices, check)


def resolve_division(part: Trained, devices: int, check: Checker) -> None:
    """Fill in and check the sizes of sequence, tensor and expert parallelism."""
    fsdp, model, settings = part.fsdp, part.model, model_settings(part.model) | part.model.override_config
    settings = settings.get("text_config") or settings
    tensor_key, expert_key = (f"{part.fsdp_key}.{name}_parallel_size" for name in ("tensor", "expert"))
    name, path = "ulysses_sequence_parallel_size", f"{part.model_key}.path={model.path}"
    own = value_of(check.values, f"{part.key}.{name}") == fsdp.ulysses_sequence_parallel_size
    size_key = f"{part.key if own else part.fsdp_key}.{name}"
    heads = settings.get("num_attention_heads") or settings.get("n_head") or 0  # unknown for a hub model
    experts = experts_of(settings)
    if experts and fsdp.expert_parallel_size == 1:
        fsdp.expert_parallel_size = gcd(fsdp.tensor_parallel_size, experts)  # an expert is never divided
    tensor, sequence = fsdp.tensor_parallel_size, fsdp.ulysses_sequence_parallel_size
    for key, size, others, parts, what in (
        (tensor_key, tensor, 1, settings.get("num_key_value_heads") or heads, "key heads"),
        (size_key, sequence, tensor, heads, "attention heads"),
        (expert_key, fsdp.expert_parallel_size, 1, experts, "experts"),
    ):
        if size > 1 and (devices % (size * others) or parts % (size * others)):
            sizes = range(1, min(size, devices + 1, MOST_PARTS))
            fitting = max((n for n in sizes if devices % (n * others) == parts % (n * others) == 0), default=1)
            of = f", times {tensor_key}={others}," if others > 1 else ""
            also = f" and the {parts} {what} of {path}" if parts else ""
            keys = f"{key} {part.model_key}.path {DEVICES} trainer.nnodes"
            check.error(keys, f"must{of} divide the {devices} devices{also}", f"set {fitting}")
    if fsdp.expert_parallel_size > 1 and settings and not experts:
        check.error(f"{expert_key} {part.model_key}.path", f"{path} is not a mixture of experts", "set 1")
    if sequence > 1 and not model.use_remove_padding:
        padding_key = f"{part.model_key}.use_remove_padding"
        check.error(f"{size_key} {padding_key}", "only packed rows can be shared", f"set {padding_key}=true")
    divided = tensor_key if tensor > 1 else expert_key if fsdp.expert_parallel_size > 1 else ""
    for wrong, key, cause in (
        (tensor > 1 and model.lora_rank, f"{part.model_key}.lora_rank", "adapters"),
        (tensor > 1 and part.optim.optimizer == "Muon", f"{part.optim_key}.optimizer", "Muon"),
        (divided and fsdp.compile_layers, f"{part.fsdp_key}.compile_layers", "compiled layers"),
        (divided and 0 < fsdp.fsdp_size < devices, f"{part.fsdp_key}.fsdp_size", "replicas"),
    ):
        if wrong:
            fix = f"set {divided}=1, or leave out {key}"
            check.error(f"{divided} {key}", f"{cause} cannot be combined with it", fix)


def shorten(rollout: RolloutConfig, data: DataConfig, lower: str = LOWER) -> str:
    """Return the fix for overlong rows, with the key that determines their length."""
    beyond = (rollout.max_model_len or 0) > data.max_prompt_length + rollout.response_length
    return f"lower {ROLLOUT}.max_model_len" if beyond else lower


def resolve_updates(part: Trained, trainer: SFTTrainerConfig, check: Checker) -> None:
    """Fill in and check the sharding and the optimizer of a trained model."""
    check = check.at(part.fsdp_key)
    fsdp, ranks = part.fsdp, trainer.devices
    size = ranks if fsdp.fsdp_size < 1 else min(fsdp.fsdp_size, ranks)
    keys = f".fsdp_size {DEVICES} trainer.nnodes"
    if fsdp.fsdp_size > ranks:
        check.warn(keys, f"there are only {ranks} devices, which all have a part each")
    if ranks % size:
        check.error(keys, f"must divide the {ranks} devices", "set -1 for all of them")
    fsdp.fsdp_size, fsdp.dtype = size, resolve_dtype(fsdp.dtype, trainer.device)
    fsdp.model_dtype = resolve_dtype(fsdp.model_dtype, trainer.device)
    if fsdp.model_dtype == "float16":
        fix = "set model_dtype=fp32, and dtype=fp16 to compute in it"
        check.error(".model_dtype", "small updates vanish in parameters of float16", fix)
    for name in ("param_offload", "optimizer_offload"):
        if fsdp.offload_policy and vars(fsdp)[name]:
            cause = "has no effect with offload_policy=true, which keeps more in host memory"
            check.warn(f".{name} .offload_policy", cause)

    # Parameters in bfloat16 may lose updates: it has 8 significant bits, so that an update below a 512th of an element
    # never changes it (scripts/benchmark/bfloat16_updates.py).
    part.optim.min_lr_ratio = part.optim.min_lr_ratio or 0.0
    if other := [name for name in part.optim.override_optimizer_config if name not in ("eps", "foreach", "fused")]:
        section = f"{part.optim_key}.override_optimizer_config"
        cause = f"{section}: only eps, foreach and fused can be set there"
        keys = [section, *(f"{section}.{name}" for name in other)]
        check.error(keys, cause, f"leave out {', '.join(other)}", valued=False)
    lr, dtype_key = part.optim.lr, f"{part.fsdp_key}.model_dtype"
    if part.fsdp.model_dtype == "bfloat16" and 0 < lr < SURE_IN_BFLOAT16:
        cause = (
            f"{dtype_key}=bf16 with optim.lr={lr:g}: parameters in bfloat16 lose small updates, as an element larger "
            f"than 512 times its update does not change, at this lr each above {512 * lr:.1e}. At an lr of 1e-6 an "
            "update of AdamW was measured to change 0.3% of the elements of normal weights, at 1e-4 25%"
        )
        fix = f"set {dtype_key}=fp32, float32 masters of a computation in {part.fsdp.dtype}"
        check.warn(f"{dtype_key} {part.optim_key}.lr", cause, fix, valued=False)


def resolve_micro_batches(section: ActorRolloutRefConfig, critic: CriticConfig, devices: int, check: Checker) -> None:
    """Convert every `..._micro_batch_size` (older, over all devices) to `..._micro_batch_size_per_gpu`."""
    for place, part, name in (
        (ACTOR, section.actor, "ppo_micro_batch_size"),
        ("actor_rollout_ref.ref", section.ref, "log_prob_micro_batch_size"),
        ("actor_rollout_ref.rollout", section.rollout, "log_prob_micro_batch_size"),
        ("critic", critic, "ppo_micro_batch_size"),
        ("critic", critic, "forward_micro_batch_size"),
    ):
        rows, per_gpu, keys = vars(part)[name], f"{name}_per_gpu", f"{place}.{name} {place}.{name}_per_gpu"
        if rows is None:
            continue
        if vars(part)[per_gpu] is not None:
            check.error(keys, f"{per_gpu}={vars(part)[per_gpu]} is set too", f"set {per_gpu} only")
            continue
        setattr(part, per_gpu, max(rows // devices, 1))
        setattr(part, name, None)
        over = f"over {devices} device{'s' * (devices > 1)}"
        check.warn(keys, f"{place}.{name}={rows} is now {place}.{per_gpu}={vars(part)[per_gpu]} ({over})")
    rows = critic.forward_micro_batch_size_per_gpu or critic.ppo_micro_batch_size_per_gpu
    critic.forward_micro_batch_size_per_gpu = rows


def resolve_actor(actor: ActorConfig, data: DataConfig, check: Checker) -> None:
    actor.ppo_mini_batch_size = _of_step(ACTOR, actor.ppo_mini_batch_size, data.train_batch_size, check)
    longest = data.max_prompt_length + data.max_response_length
    tokens = actor.ppo_max_token_len_per_gpu * actor.fsdp_config.ulysses_sequence_parallel_size
    if (actor.use_dynamic_bsz or actor.ppo_micro_batch_size_per_gpu is None) and tokens < longest:
        keys = f"{ACTOR}.ppo_max_token_len_per_gpu data.max_prompt_length data.max_response_length"
        cause = f"a row may have {longest} tokens: each that is longer is computed alone, which takes longer"
        check.warn(keys, cause, f"set {ACTOR}.ppo_max_token_len_per_gpu={longest}")
    actor.clip_ratio_low = actor.clip_ratio if actor.clip_ratio_low is None else actor.clip_ratio_low
    actor.clip_ratio_high = actor.clip_ratio if actor.clip_ratio_high is None else actor.clip_ratio_high
    actor.loss_scale_factor = actor.loss_scale_factor or float(data.max_response_length)


def _of_step(section: str, size: int, prompts: int, check: Checker) -> int:
    """Return the number of prompts per update, at most the number per step."""
    key = f"{section}.ppo_mini_batch_size"
    if size > prompts:
        cause = f"{key}={size} is more than data.train_batch_size={prompts}: one update per step"
        check.warn(f"{key} data.train_batch_size", cause, valued=False)
    return min(size, prompts)


def resolve_critic(config: PPOConfig, check: Checker) -> None:
    """Decide whether there is a critic, and check it."""
    critic, trainer, name = config.critic, config.trainer, config.algorithm.adv_estimator
    section, data = config.actor_rollout_ref, config.data
    keys, estimator = "critic.enable algorithm.adv_estimator", ESTIMATORS.get(name)
    rewarded = config.distillation.rewarded
    needed = rewarded and estimator is not None and "values" in estimator.reads
    if critic.enable is False and needed:
        check.error(keys, f"algorithm.adv_estimator={name} needs a critic", "set algorithm.adv_estimator=grpo")
    if critic.enable and rewarded and estimator and not needed:
        check.warn(keys, f"has no effect: algorithm.adv_estimator={name} reads no values")
    critic.enable = needed or bool(critic.enable and rewarded and estimator is None)
    if not critic.enable:
        if trainer.critic_warmup:
            check.warn("trainer.critic_warmup", "has no effect without a critic")
            trainer.critic_warmup = 0
        return
    part = Trained("critic", "critic.model", critic.model, "critic.optim", critic.optim, "critic.fsdp", critic.fsdp)
    resolve_updates(part, trainer, check)
    for key in ("tokenizer_path", "custom_chat_template"):
        if vars(critic.model)[key] is not None:
            check.warn(f"critic.model.{key}", "has no effect: the critic reads the policy's tokens")
    longest, reported = section.rollout.max_model_len or 0, _is_policy(critic.model, section.model)
    resolve_trained(part, longest, shorten(section.rollout, data), trainer, check, reported=reported)
    follows = critic.ppo_mini_batch_size == value_of(check.values, f"{ACTOR}.ppo_mini_batch_size")
    quiet = check.muted() if follows else check
    critic.ppo_mini_batch_size = _of_step("critic", critic.ppo_mini_batch_size, data.train_batch_size, quiet)
    critic.loss_scale_factor = critic.loss_scale_factor or float(data.max_response_length)


def resolve_reference(section: ActorRolloutRefConfig, hint: str, check: Checker, *, kl_in_reward: bool) -> None:
    """Fill in and check the reference. `hint`: the fix for overlong rows."""
    key, model = "actor_rollout_ref.ref.model", replace(section.model, path=section.ref.model.path)
    if (kl_in_reward or section.actor.use_kl_loss) and not _is_policy(model, section.model):
        check_model(key, model, section.rollout.max_model_len or 0, hint, check)
    section.ref.model.path = absolute(section.ref.model.path)


def _is_policy(model: ModelConfig, policy: ModelConfig) -> bool:
    """Whether this is the policy's model: its findings are reported only once."""
    return (model.path, model.override_config) == (policy.path, policy.override_config)


def resolve_retention(trainer: TrainerConfig, check: Checker, *, has_critic: bool) -> None:
    """Use the larger of the two numbers of retained checkpoints, since a checkpoint holds both models."""
    keys, actor_key = "trainer.max_critic_ckpt_to_keep", "trainer.max_actor_ckpt_to_keep"
    actor, critic = trainer.max_actor_ckpt_to_keep, trainer.max_critic_ckpt_to_keep
    if critic is None or critic == actor:
        return
    if not has_critic:
        check.warn(keys, "has no effect without a critic")
    elif actor is None or critic < actor:
        cause = f"has no effect next to {actor_key}={show(actor)}: a checkpoint is kept or removed with both models"
        check.warn(f"{keys} {actor_key}", cause)
    else:
        cause = f"as many checkpoints are kept, with both models, although {actor_key}={actor}"
        check.warn(f"{keys} {actor_key}", cause)
        trainer.max_actor_ckpt_to_keep = critic


def check_save_contents(trainer: SFTTrainerConfig, sections: dict[str, CheckpointConfig], check: Checker) -> None:
    recovers = trainer.ckpt_freq_secs is None or trainer.ckpt_freq_secs > 0
    saves = recovers or trainer.save_freq >= 0 or trainer.save_freq_epochs or trainer.save_freq_secs
    for key, section in sections.items() if saves and trainer.resume_mode != "disable" else ():
        missing = [part for part in ("model", "optimizer", "extra") if part not in section.save_contents]
        cause = f"a run that resumes from such a checkpoint starts without {', '.join(missing)}"
        cause = "no run can resume from such a checkpoint, without model" if "model" in missing else cause
        if missing:
            check.warn(f"{key}.save_contents", cause)
