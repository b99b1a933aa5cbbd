"""Fill in derived values and reject invalid combinations, reporting all errors together with a fix.

Checks keys against one another and against this machine; each value by itself was checked when it was read.
"""

import re
from dataclasses import asdict
from typing import Any

from hybridrl.config.checks import algorithm, training
from hybridrl.config.checks.engine import check_engine, resolve_asynchronous, resolve_router_replay
from hybridrl.config.checks.model import (
    check_lora_sync,
    check_plans,
    check_served,
    is_large,
    resolve_dtype,
    resolve_for_cpu,
)
from hybridrl.config.checks.teachers import resolve_distillation, resolve_reward_model
from hybridrl.config.checks.training import ACTOR, DEVICES, LOWER, MOST_PARTS, Machine, Trained, resolve_trained
from hybridrl.config.findings import Checker, Findings
from hybridrl.config.schema import (
    DataConfig,
    FSDPConfig,
    ModelConfig,
    OptimizerConfig,
    PPOConfig,
    RolloutConfig,
    SFTConfig,
    SFTTrainerConfig,
)

HIGHEST_TEMPERATURE, HIGHEST_LR = 1.5, 1e-3
CHECKPOINT = re.compile(r"(^|/)global_step_\d+/*$")
MODEL, ROLLOUT = "actor_rollout_ref.model", "actor_rollout_ref.rollout"


def resolve_ppo(config: PPOConfig, findings: Findings, machine: Machine | None = None) -> None:
    """Fill in derived values; add findings about settings that cannot work or have no effect."""
    check = Checker(findings, asdict(config))
    section, trainer, data = config.actor_rollout_ref, config.trainer, config.data
    actor, model, rollout = section.actor, section.model, section.rollout
    _resolve_run(trainer, config.ray_kwargs.ray_init, check, machine, model, rollout if config.separate else None)
    model.tokenizer_path = data.tokenizer or model.tokenizer_path  # engines do not see the data
    data.seed = trainer.seed if data.seed is None else data.seed
    training.resolve_micro_batches(section, config.critic, trainer.devices, check)
    training.resolve_actor(actor, data, check)
    if trainer.device == "cpu":
        resolve_for_cpu(ROLLOUT, model, rollout, check)
    rollout.dtype = resolve_dtype(rollout.dtype, trainer.device)
    resolve_rollout(rollout, trainer, data, check.at(ROLLOUT), separate=config.separate)
    policy = Trained(ACTOR, MODEL, model, f"{ACTOR}.optim", actor.optim, f"{ACTOR}.fsdp_config", actor.fsdp_config)
    training.resolve_updates(policy, trainer, check)
    # The policy's model comes last: the other two are compared with its settings as written.
    training.resolve_critic(config, check)
    hint = training.shorten(rollout, data)
    training.resolve_retention(trainer, check, has_critic=bool(config.critic.enable))
    training.resolve_reference(section, hint, check, kl_in_reward=config.algorithm.use_kl_in_reward)
    resolve_distillation(config, hint, check)
    algorithm.resolve_reward(config.reward, check)
    resolve_reward_model(config, hint, check)
    check_served(MODEL, model, rollout, trainer.device, check)
    resolve_trained(policy, rollout.max_model_len or 0, hint, trainer, check)
    check_plans(MODEL, model, policy.fsdp_key, actor.fsdp_config, check)
    if config.critic.enable:
        check_plans("critic.model", config.critic.model, "critic.fsdp", config.critic.fsdp, check)
    check_lora_sync(section, check)
    _check_learning(rollout, actor.optim, check.at(ROLLOUT), val_only=trainer.val_only)
    _check_idle(rollout, data, check.at(ROLLOUT))
    if trainer.test_freq > 0 and not data.val_files:
        check.warn("trainer.test_freq data.val_files", "has no effect without data.val_files")
    check_engine(rollout, trainer, check.at(ROLLOUT))
    resolve_router_replay(section, check)
    _resolve_compilation(MODEL, model, policy.fsdp_key, actor.fsdp_config, check, actor.router_replay.mode)
    if config.critic.enable:
        _resolve_compilation("critic.model", config.critic.model, "critic.fsdp", config.critic.fsdp, check)
    algorithm.check_data(data, check)
    resolve_asynchronous(config, check)
    if config.distillation.rewarded:
        algorithm.check_estimator(config.algorithm, rollout.n, check, val_only=trainer.val_only)
    algorithm.check_filter(config.algorithm.filter_groups, rollout.n, data, trainer.total_training_steps, check)
    algorithm.check_bypass(config.algorithm.rollout_correction, section, check)
    algorithm.check_policy_loss(actor, check)
    algorithm.check_kl(config.algorithm, section, check)
    saved = {f"{ACTOR}.checkpoint": actor.checkpoint}
    saved |= {"critic.checkpoint": config.critic.checkpoint} if config.critic.enable else {}
    training.check_save_contents(trainer, saved, check)
    if trainer.val_only and not data.val_files:
        check.error("trainer.val_only data.val_files", "there is nothing to validate", "set data.val_files")


def resolve_sft(config: SFTConfig, findings: Findings, machine: Machine | None = None) -> None:
    """Fill in derived values; add findings about settings that cannot work or have no effect."""
    check, engine = Checker(findings, asdict(config)), config.engine
    _resolve_run(config.trainer, config.ray_kwargs.ray_init, check, machine, config.model)
    model = Trained("engine", "model", config.model, "optim", config.optim, "engine.fsdp_config", engine.fsdp_config)
    training.resolve_updates(model, config.trainer, check)
    resolve_trained(model, config.data.max_length, "lower data.max_length", config.trainer, check)
    check_plans("model", config.model, model.fsdp_key, engine.fsdp_config, check)
    _resolve_compilation("model", config.model, model.fsdp_key, engine.fsdp_config, check)
    training.check_save_contents(config.trainer, {"checkpoint": config.checkpoint}, check)
    if config.trainer.test_freq > 0 and not config.data.val_files:
        check.warn("trainer.test_freq data.val_files", "has no effect without data.val_files")


def _resolve_run(
    trainer: SFTTrainerConfig,
    ray_init: dict[str, Any],
    check: Checker,
    machine: Machine | None,
    model: ModelConfig,
    engines: RolloutConfig | None = None,
) -> None:
    """Check the settings that all kinds of runs have; see `training.resolve_devices`."""
    slots = 1 if engines is None and is_large(model) else 2
    with check.findings.gathered("conflict"):
        training.resolve_devices(trainer, ray_init, check, machine, engines, slots)
    if trainer.resume_mode == "resume_path" and not trainer.resume_from_path:
        fix = "set trainer.resume_from_path=.../global_step_N"
        check.error("trainer.resume_mode trainer.resume_from_path", "no checkpoint is named", fix)
    if trainer.resume_from_path and trainer.resume_mode == "disable":
        check.warn("trainer.resume_from_path trainer.resume_mode", "has no effect with trainer.resume_mode=disable")
    elif trainer.resume_from_path and trainer.resume_mode == "auto" and not CHECKPOINT.search(trainer.resume_from_path):
        cause = "has no effect with trainer.resume_mode=auto, as it is no .../global_step_N"
        check.warn("trainer.resume_from_path trainer.resume_mode", cause)
        trainer.resume_from_path = None  # as in scripts of verl
    if trainer.max_restarts and trainer.resume_mode == "disable":
        cause = "with resume_mode=disable there is nothing to restart from"
        check.error("trainer.max_restarts trainer.resume_mode", cause, "set resume_mode=auto")
    algorithm.resolve_loggers(trainer, check)
    algorithm.check_diagnoses(trainer, check)


def _resolve_compilation(
    model_key: str, model: ModelConfig, fsdp_key: str, fsdp: FSDPConfig, check: Checker, replay: str = "disabled"
) -> None:
    """Decide whether layers are compiled, and what they recompute then. `replay`: the mode of router replay."""
    key, selective = f"{fsdp_key}.compile_layers", f"{model_key}.selective_checkpointing"
    if fsdp.compile_layers is None:
        sizes = [f"{kind}_parallel_size" for kind in ("tensor", "expert", "ulysses_sequence")]
        obstacles = [f"{fsdp_key}.{name}={vars(fsdp)[name]}" for name in sizes if vars(fsdp)[name] > 1]
        obstacles += [f"{model_key}.lora_rank={model.lora_rank}"] * (model.lora_rank > 0)
        obstacles += [f"{model_key}.use_remove_padding=false"] * (not model.use_remove_padding)
        obstacles += [f"{ACTOR}.router_replay.mode={replay}"] * (replay != "disabled")
        fsdp.compile_layers = not obstacles
        if obstacles:
            check.findings.info("setting", f"layers are not compiled, with {obstacles[0]}", keys=key)
    if model.selective_checkpointing and fsdp.compile_layers:
        if model.enable_gradient_checkpointing:
            check.idle(f"{model_key}.enable_gradient_checkpointing {selective}", "in layers compiled selectively")
        model.enable_gradient_checkpointing = False
    elif model.selective_checkpointing and model.enable_gradient_checkpointing is False:
        enabled = f"{model_key}.enable_gradient_checkpointing"
        check.warn(f"{selective} {enabled}", "has no effect with enable_gradient_checkpointing=false")
    elif model.selective_checkpointing:
        check.warn(f"{selective} {key}", "without compiled layers all are recomputed in full", f"set {key}=true")
        model.enable_gradient_checkpointing = True


def resolve_rollout(
    rollout: RolloutConfig,
    trainer: SFTTrainerConfig,
    data: DataConfig,
    check: Checker,
    lower: str = LOWER,
    *,
    separate: bool = False,
) -> None:
    """Fill in and check the settings of engines that do not depend on the model. `lower`: the fix for overlong rows.
    `separate`: engines have their own devices."""
    width, pool = rollout.tensor_model_parallel_size, rollout if separate else trainer
    machines, devices, key = pool.nnodes, pool.n_gpus_per_node or 1, ".n_gpus_per_node" if separate else DEVICES
    keys = f".tensor_model_parallel_size {key}"
    if width > devices and width % devices == 0 and width // devices <= machines:
        check.warn(keys, f"an engine spans the devices of one machine; {devices} is used")
        width = rollout.tensor_model_parallel_size = devices
    if devices % width:
        fitting = [size for size in range(1, min(devices, MOST_PARTS) + 1) if devices % size == 0]
        fitting = [1, devices] if trainer.device == "cpu" else fitting
        fix = f"set {' or '.join(map(str, dict.fromkeys(fitting)))}"
        check.error(keys, f"must divide {key.lstrip('.')}={devices}", fix)
    elif trainer.device == "cpu" and 1 < width < devices:
        cause = f"with {key.lstrip('.')}={devices} on CPU only a single engine can span several devices"
        check.error(keys, cause, f"set {key.lstrip('.')}={width}")
    need = data.max_prompt_length + rollout.response_length
    rollout.max_model_len = rollout.max_model_len or need
    if rollout.max_model_len < need:
        keys = ".max_model_len data.max_prompt_length data.max_response_length .response_length"
        check.error(keys, f"prompt and response may have {need} tokens", f"{lower}, or leave max_model_len at null")
    if rollout.min_tokens > rollout.response_length:
        keys = ".min_tokens .response_length data.max_response_length"
        check.error(keys, f"a response has at most {rollout.response_length} tokens")


def _check_learning(rollout: RolloutConfig, optim: OptimizerConfig, check: Checker, *, val_only: bool) -> None:
    """Check whether a policy can learn with these settings of sampling and updates."""
    greedy = ".do_sample" if not rollout.do_sample else ".temperature" if rollout.temperature == 0 else ""
    fix = f"set {ROLLOUT}.do_sample=true and {ROLLOUT}.temperature=1.0"
    if greedy and rollout.n > 1:
        check.error(f"{greedy} .n", f"all n={rollout.n} responses to a prompt would be equal", fix)
    if greedy and rollout.n == 1 and not val_only:
        cause = "responses are greedy: nothing is explored, so that little is learned"
        check.warn(f"{greedy} .n", cause, fix)
    if rollout.temperature > HIGHEST_TEMPERATURE:
        cause = f"above {HIGHEST_TEMPERATURE:g} most models sample noise, which scores nothing"
        check.warn(".temperature", cause, f"set {ROLLOUT}.temperature=1.0")
    if optim.lr > HIGHEST_LR and optim.optimizer == "AdamW":
        cause = "a policy is destroyed within a few updates; usual are 1e-6, with an adapter 1e-5 to 1e-4, and up to "
        cause += "1e-3 for models of a few million parameters"
        check.warn(f"{ACTOR}.optim.lr", cause, f"set {ACTOR}.optim.lr=1e-6")


def _check_idle(rollout: RolloutConfig, data: DataConfig, check: Checker) -> None:
    """Warn about settings of rollout and validation that have no effect given the others."""
    validation, key = rollout.val_kwargs, f"{ROLLOUT}.val_kwargs.temperature"
    keys = ".val_kwargs.do_sample .val_kwargs.temperature"
    if validation.do_sample and validation.temperature == 0:
        check.warn(keys, f"has no effect: at {key}=0 validation is greedy, as in verl", f"set {key}=1.0 to sample")
    if validation.temperature == 0 and validation.n > 1:
        cause = "validation is greedy, so all responses are equal"
        check.warn(".val_kwargs.n .val_kwargs.temperature", cause, f"set {key}=1.0")
    if not validation.do_sample and validation.temperature > 0:
        cause = f"has no effect: at {key}={validation.temperature:g} validation samples, as in verl"
        check.warn(keys, cause, f"for greedy responses set {key}=0")
    check_ignored(data, rollout, check)
    if rollout.response_length != data.max_response_length:
        cause = f"responses end there, not at data.max_response_length={data.max_response_length}"
        check.warn(".response_length data.max_response_length", cause)


def check_ignored(data: DataConfig, rollout: RolloutConfig, check: Checker) -> None:
    """Warn about settings of the rollout that never have an effect."""
    if rollout.mode != "async":
        check.warn(".mode", "has no effect: responses enter and leave the engine one by one")
        rollout.mode = "async"
    if not rollout.calculate_log_probs:
        check.warn(".calculate_log_probs", "has no effect: the rollout log-probs are kept")
    if rollout.prompt_length != data.max_prompt_length:
        cause = "has no effect: data.max_prompt_length limits the prompts"
        check.warn(".prompt_length data.max_prompt_length", cause)
