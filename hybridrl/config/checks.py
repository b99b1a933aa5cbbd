"""What a configuration leaves open is settled; what cannot work is refused, all of it at once, with the way out.

Judges keys against one another and against this machine; each value by itself has been judged when it was read.
"""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from hybridrl.config.algorithm_checks import check_algorithm
from hybridrl.config.data_checks import check_data
from hybridrl.config.error import Refusals
from hybridrl.config.logger_checks import settle_loggers
from hybridrl.config.lora_checks import check_hand_over, note_no_hand_over, settle_lora
from hybridrl.config.machine import Machine, this_machine
from hybridrl.config.micro_batches import settle_micro_batches
from hybridrl.config.model_checks import (
    absolute,
    check_head_size,
    check_model,
    check_recomputation,
    check_sequence_parallel,
    check_served,
    note_small_updates,
    settle_recurrence,
)
from hybridrl.config.read import show
from hybridrl.config.reward_checks import check_reward
from hybridrl.config.schema import (
    FSDPConfig,
    ModelConfig,
    OptimizerConfig,
    PPOConfig,
    TrainerConfig,
    ValidationSamplingConfig,
)
from hybridrl.config.schema_sft import SFTConfig, SFTTrainerConfig
from hybridrl.config.values import ESTIMATORS

Note = Callable[[str], None]

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
LOWER = "lower data.max_prompt_length or data.max_response_length"
CPU_SLOT_BYTES = 3 << 29  # measured for the smallest models: a slot costs processes and memory, not cores


def settle_ppo(config: PPOConfig, note: Note, machine: Machine | None = None) -> None:
    """Fill in what follows from the machine and from other keys; raise ConfigError for what cannot work."""
    wrong = Refusals()
    section, trainer = config.actor_rollout_ref, config.trainer
    _settle_trainer(trainer, config.ray_kwargs.ray_init, wrong, machine)
    settle_loggers(trainer, note, wrong)
    _settle_fsdp("actor_rollout_ref.actor.fsdp_config", section.actor.fsdp_config, trainer, note, wrong)
    config.data.seed = trainer.seed if config.data.seed is None else config.data.seed
    config.reward.custom_reward_function.name = config.reward.custom_reward_function.name or "compute_score"
    settle_micro_batches(config, note, wrong)
    _settle_actor(config, note)
    _settle_rollout(config, note, wrong)
    _settle_optimizer("actor_rollout_ref.actor.optim", section.actor.optim, wrong)
    note_small_updates("actor_rollout_ref.actor.fsdp_config", section.actor.fsdp_config, section.actor.optim.lr, note)
    _settle_critic(config, note, wrong)
    _settle_retention(config, note)
    _settle_reference(config, note, wrong)
    if trainer.device == "cpu":
        check_head_size("actor_rollout_ref.model", section.model, wrong)
    check_model("actor_rollout_ref.model", section.model, section.rollout.max_model_len or 0, LOWER, note, wrong)
    fsdp_key, fsdp = "actor_rollout_ref.actor.fsdp_config", section.actor.fsdp_config
    check_recomputation("actor_rollout_ref.model", section.model, fsdp_key, fsdp, trainer.device, note, wrong)
    settle_lora("actor_rollout_ref.model", section.model, note, wrong)
    check_served("actor_rollout_ref.model", section.model, wrong)
    check_hand_over(config, wrong)
    place, fsdp, devices = "actor_rollout_ref.actor", section.actor.fsdp_config, _devices(trainer)
    check_sequence_parallel(place, fsdp, "actor_rollout_ref.model", section.model, devices, wrong)
    _check_sampling(config, note, wrong)
    _note_idle_keys(config, note)
    check_data(config.data, note, wrong)
    check_algorithm(config, note, wrong)
    check_reward(config.reward, note, wrong)
    if trainer.save_freq >= 0 or trainer.save_freq_epochs or trainer.save_freq_secs:
        _check_save_contents("actor_rollout_ref.actor.checkpoint", section.actor.checkpoint.save_contents, note)
        if config.critic.enable:
            _check_save_contents("critic.checkpoint", config.critic.checkpoint.save_contents, note)
    if trainer.resume_from_path and trainer.resume_mode != "resume_path":
        note("trainer.resume_from_path has no effect without trainer.resume_mode=resume_path")
    if trainer.val_only and not config.data.val_files:
        wrong.add("trainer.val_only=true: there is nothing to validate; set data.val_files")
    wrong.close()


def settle_sft(config: SFTConfig, note: Note, machine: Machine | None = None) -> None:
    """Fill in what follows from the machine and from other keys; raise ConfigError for what cannot work."""
    wrong = Refusals()
    _settle_trainer(config.trainer, config.ray_kwargs.ray_init, wrong, machine)
    settle_loggers(config.trainer, note, wrong)
    _settle_fsdp("engine.fsdp_config", config.engine.fsdp_config, config.trainer, note, wrong)
    _settle_optimizer("optim", config.optim, wrong)
    note_small_updates("engine.fsdp_config", config.engine.fsdp_config, config.optim.lr, note)
    check_model("model", config.model, config.data.max_length, "lower data.max_length", note, wrong)
    device, fsdp = config.trainer.device, config.engine.fsdp_config
    check_recomputation("model", config.model, "engine.fsdp_config", fsdp, device, note, wrong)
    settle_lora("model", config.model, note, wrong)
    note_no_hand_over("model", config.model, note)
    devices = _devices(config.trainer)
    check_sequence_parallel("engine", config.engine.fsdp_config, "model", config.model, devices, wrong)
    if config.trainer.test_freq > 0 and not config.data.val_files:
        note("trainer.test_freq has no effect without data.val_files")
    wrong.close()


def _settle_trainer(
    trainer: TrainerConfig | SFTTrainerConfig, ray_init: dict[str, Any], wrong: Refusals, machine: Machine | None
) -> None:
    # Who asked for the CPU need not have a GPU driver that works.
    machine = machine or this_machine(count_gpus=trainer.device != "cpu")
    if trainer.device == "auto":
        trainer.device = "cuda" if machine.gpus else "cpu"
    if trainer.n_gpus_per_node is None:
        trainer.n_gpus_per_node = max(machine.gpus if trainer.device == "cuda" else min(machine.cores, 2), 1)
    asked = f"trainer.n_gpus_per_node={trainer.n_gpus_per_node}"
    if machine.here and not (os.environ.get("RAY_ADDRESS") or ray_init.get("address")):
        if trainer.device == "cuda" and machine.gpus == 0:
            wrong.add("trainer.device=cuda: this machine has no GPU that can be used; set trainer.device=cpu")
        elif trainer.device == "cuda" and trainer.n_gpus_per_node > machine.gpus:
            wrong.add(f"{asked}: GPUs of this machine: {machine.gpus}; set trainer.n_gpus_per_node={machine.gpus}")
        if trainer.nnodes > 1:
            wrong.add(
                f"trainer.nnodes={trainer.nnodes}: without a Ray to join there is this machine alone; run ray start on "
                "each machine and set RAY_ADDRESS, or leave trainer.nnodes at 1"
            )
    most = max(machine.memory_bytes // CPU_SLOT_BYTES, 1)
    if machine.here:
        for name in ("default_local_dir", "rollout_data_dir", "validation_data_dir"):
            if directory := vars(trainer).get(name):
                _check_writable(f"trainer.{name}", directory, wrong)
    if trainer.device == "cpu" and trainer.n_gpus_per_node > most:
        wrong.add(f"{asked}: free memory is enough for {most} slots on CPU; set trainer.n_gpus_per_node={most}")
    if trainer.resume_mode == "resume_path" and not trainer.resume_from_path:
        wrong.add("trainer.resume_mode=resume_path: set trainer.resume_from_path=.../global_step_N")
    if trainer.max_restarts and trainer.resume_mode == "disable":
        wrong.add(
            "trainer.max_restarts with resume_mode=disable: there is nothing to restart from; set resume_mode=auto"
        )


def _settle_retention(config: PPOConfig, note: Note) -> None:
    """A saved step is whole or absent, so that of two counts the one that keeps more holds."""
    actor, critic = config.trainer.max_actor_ckpt_to_keep, config.trainer.max_critic_ckpt_to_keep
    asked = f"trainer.max_critic_ckpt_to_keep={critic}"
    if critic is None or critic == actor:
        return
    if not config.critic.enable:
        note(f"{asked} has no effect without a critic")
    elif actor is None or critic < actor:
        kept = f"trainer.max_actor_ckpt_to_keep={show(actor)}"
        note(f"{asked} has no effect beside {kept}: a step stays with both models or goes with both")
    else:
        note(f"{asked}: so many steps are kept, with both models, though trainer.max_actor_ckpt_to_keep={actor}")
        config.trainer.max_actor_ckpt_to_keep = critic


def _settle_optimizer(key: str, optimizer: OptimizerConfig, wrong: Refusals) -> None:
    optimizer.min_lr_ratio = optimizer.min_lr_ratio or 0.0
    further = [name for name in optimizer.override_optimizer_config if name not in ("eps", "foreach", "fused")]
    if further:
        wrong.add(
            f"{key}.override_optimizer_config: only eps, foreach and fused can be set there; leave out "
            f"{', '.join(further)}"
        )


def _check_save_contents(key: str, contents: list[str], note: Note) -> None:
    missing = [part for part in ("model", "optimizer", "extra") if part not in contents]
    if missing:
        lacks = ", ".join(missing)
        note(f"{key}.save_contents={show(contents)}: no run can go on from such a step, which lacks {lacks}")


def _check_writable(key: str, directory: str, wrong: Refusals) -> None:
    path = Path(directory).absolute()
    try:
        there = next(parent for parent in (path, *path.parents) if parent.exists())
    except OSError as error:
        return wrong.add(f"{key}={directory}: {error.strerror}; name another directory")
    if not there.is_dir():
        wrong.add(f"{key}={directory}: {there} is a file; name a directory")
    elif not os.access(there, os.W_OK):
        wrong.add(f"{key}={directory}: {there} cannot be written to; name another directory")


def _settle_fsdp(
    key: str, fsdp: FSDPConfig, trainer: TrainerConfig | SFTTrainerConfig, note: Note, wrong: Refusals
) -> None:
    ranks = _devices(trainer)
    size = ranks if fsdp.fsdp_size < 1 else min(fsdp.fsdp_size, ranks)
    if ranks % size:
        wrong.add(f"{key}.fsdp_size={fsdp.fsdp_size}: must divide the {ranks} devices; set -1 for all of them")
    fsdp.fsdp_size = size
    if DTYPES.get(fsdp.model_dtype, fsdp.model_dtype) == "float16":
        wrong.add(
            f"{key}.model_dtype={fsdp.model_dtype}: small updates vanish in parameters of float16; "
            "set model_dtype=fp32, and dtype=fp16 to compute in it"
        )
    for name in ("param_offload", "optimizer_offload"):
        if fsdp.offload_policy and vars(fsdp)[name]:
            note(f"{key}.{name}=true has no effect with offload_policy=true, which keeps more in host memory")
    fsdp.model_dtype, fsdp.dtype = DTYPES.get(fsdp.model_dtype, fsdp.model_dtype), _dtype(fsdp.dtype, trainer.device)


def _devices(trainer: TrainerConfig | SFTTrainerConfig) -> int:
    return (trainer.n_gpus_per_node or 1) * trainer.nnodes


def _dtype(name: str | None, device: str) -> str:
    if name is None:
        return "bfloat16" if device == "cuda" else "float32"
    return DTYPES.get(name, name)


def _settle_actor(config: PPOConfig, note: Note) -> None:
    actor, prompts = config.actor_rollout_ref.actor, config.data.train_batch_size
    if actor.ppo_mini_batch_size > prompts:
        note(
            f"actor_rollout_ref.actor.ppo_mini_batch_size={actor.ppo_mini_batch_size} is more than "
            f"data.train_batch_size={prompts}: one update a step"
        )
        actor.ppo_mini_batch_size = prompts
    actor.clip_ratio_low = actor.clip_ratio if actor.clip_ratio_low is None else actor.clip_ratio_low
    actor.clip_ratio_high = actor.clip_ratio if actor.clip_ratio_high is None else actor.clip_ratio_high
    actor.loss_scale_factor = actor.loss_scale_factor or float(config.data.max_response_length)


def _settle_reference(config: PPOConfig, note: Note, wrong: Refusals) -> None:
    section, algorithm = config.actor_rollout_ref, config.algorithm
    if algorithm.use_kl_in_reward or section.actor.use_kl_loss:
        reference = replace(section.model, path=section.ref.model.path)
        _check_other_model("actor_rollout_ref.ref.model", reference, config, note, wrong)
    section.ref.model.path = absolute(section.ref.model.path)


def _check_other_model(key: str, model: ModelConfig, config: PPOConfig, note: Note, wrong: Refusals) -> None:
    """The check of a model that reads the policy's rows; what is wrong with the policy's own is said once."""
    policy, longest = config.actor_rollout_ref.model, config.actor_rollout_ref.rollout.max_model_len or 0
    if (model.path, model.override_config) == (policy.path, policy.override_config):
        note, wrong = (lambda _: None), Refusals()
    check_model(key, model, longest, LOWER, note, wrong)


def _settle_critic(config: PPOConfig, note: Note, wrong: Refusals) -> None:
    critic, estimator, prompts = config.critic, config.algorithm.adv_estimator, config.data.train_batch_size
    if critic.enable is False and estimator == "gae":
        wrong.add("critic.enable=false: algorithm.adv_estimator=gae needs a critic; set algorithm.adv_estimator=grpo")
    if critic.enable and estimator in ESTIMATORS and estimator != "gae":
        note(f"critic.enable=true has no effect: algorithm.adv_estimator={estimator} reads no values")
    critic.enable = estimator == "gae" or bool(critic.enable and estimator not in ESTIMATORS)
    if not critic.enable:
        if config.trainer.critic_warmup:
            note(f"trainer.critic_warmup={config.trainer.critic_warmup} has no effect without a critic")
            config.trainer.critic_warmup = 0
        return
    _settle_fsdp("critic.fsdp", critic.fsdp, config.trainer, note, wrong)
    _settle_optimizer("critic.optim", critic.optim, wrong)
    note_small_updates("critic.fsdp", critic.fsdp, critic.optim.lr, note)
    for name, value in (
        ("tokenizer_path", critic.model.tokenizer_path),
        ("custom_chat_template", critic.model.custom_chat_template),
    ):
        if value is not None:
            note(f"critic.model.{name} has no effect: the critic reads the policy's tokens")
    _check_other_model("critic.model", critic.model, config, note, wrong)
    check_recomputation("critic.model", critic.model, "critic.fsdp", critic.fsdp, config.trainer.device, note, wrong)
    settle_lora("critic.model", critic.model, note, wrong)
    note_no_hand_over("critic.model", critic.model, note)
    check_sequence_parallel("critic", critic.fsdp, "critic.model", critic.model, _devices(config.trainer), wrong)
    critic.ppo_mini_batch_size = min(critic.ppo_mini_batch_size, prompts)
    critic.loss_scale_factor = critic.loss_scale_factor or float(config.data.max_response_length)


def _settle_rollout(config: PPOConfig, note: Note, wrong: Refusals) -> None:
    rollout, trainer, key = config.actor_rollout_ref.rollout, config.trainer, "actor_rollout_ref.rollout"
    asked, rollout.dtype = rollout.dtype, _dtype(rollout.dtype, trainer.device)
    if trainer.device == "cpu":
        settle_recurrence(key, config.actor_rollout_ref.model, rollout, asked, note, wrong)
    size, devices = rollout.tensor_model_parallel_size, trainer.n_gpus_per_node or 1
    if size > devices and size % devices == 0 and size // devices <= trainer.nnodes:
        note(f"{key}.tensor_model_parallel_size={size}: an engine spans devices of one machine; {devices} is taken")
        size = rollout.tensor_model_parallel_size = devices
    if devices % size:
        wrong.add(f"{key}.tensor_model_parallel_size={size}: must divide trainer.n_gpus_per_node={devices}")
    elif trainer.device == "cpu" and 1 < size < devices:
        wrong.add(
            f"{key}.tensor_model_parallel_size={size} with trainer.n_gpus_per_node={devices}: on CPU a single engine "
            f"can span slots; set trainer.n_gpus_per_node={size}"
        )
    need = config.data.max_prompt_length + rollout.response_length
    rollout.max_model_len = rollout.max_model_len or need
    if rollout.max_model_len < need:
        wrong.add(
            f"{key}.max_model_len={rollout.max_model_len}: prompt plus answer may be {need} tokens; {LOWER}, "
            "or leave max_model_len at null"
        )
    if rollout.min_tokens > rollout.response_length:
        wrong.add(f"{key}.min_tokens={rollout.min_tokens}: an answer has at most {rollout.response_length} tokens")


def _check_sampling(config: PPOConfig, note: Note, wrong: Refusals) -> None:
    rollout, key = config.actor_rollout_ref.rollout, "actor_rollout_ref.rollout"
    greedy = "do_sample=false" if not rollout.do_sample else "temperature=0" if rollout.temperature == 0 else None
    if greedy and rollout.n > 1:
        wrong.add(
            f"{key}.{greedy}: all n={rollout.n} answers to a prompt would be equal; set {key}.do_sample=true and "
            f"{key}.temperature=1.0"
        )
    _check_validation_sampling(f"{key}.val_kwargs", rollout.val_kwargs, note)


def _check_validation_sampling(key: str, chosen: ValidationSamplingConfig, note: Note) -> None:
    if chosen.do_sample and chosen.temperature == 0:
        note(
            f"{key}.do_sample=true has no effect: at {key}.temperature=0 validation is greedy, as in verl; "
            f"set {key}.temperature=1.0 to sample"
        )
    if chosen.temperature == 0 and chosen.n > 1:
        note(f"{key}.n={chosen.n}: validation is greedy, so all answers are equal; set {key}.temperature=1.0")
    if not chosen.do_sample and chosen.temperature > 0:
        note(
            f"{key}.do_sample=false has no effect: at {key}.temperature={chosen.temperature:g} validation samples, as "
            f"in verl; for greedy answers set {key}.temperature=0"
        )


def _note_idle_keys(config: PPOConfig, note: Note) -> None:
    """Say which settings change nothing as the others are."""
    data, rollout = config.data, config.actor_rollout_ref.rollout
    if rollout.mode != "async":
        note(f"actor_rollout_ref.rollout.mode={rollout.mode} has no effect: answers enter and leave one by one")
        rollout.mode = "async"
    if not rollout.calculate_log_probs:
        note("actor_rollout_ref.rollout.calculate_log_probs=false has no effect: the engine's log-probs are kept")
    if rollout.prompt_length != data.max_prompt_length:
        note(
            "actor_rollout_ref.rollout.prompt_length has no effect: data.max_prompt_length says which prompts there are"
        )
    if rollout.response_length != data.max_response_length:
        note(
            f"actor_rollout_ref.rollout.response_length={rollout.response_length} ends answers, not "
            f"data.max_response_length={data.max_response_length}"
        )
    if config.trainer.test_freq > 0 and not data.val_files:
        note("trainer.test_freq has no effect without data.val_files")
