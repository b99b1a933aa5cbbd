"""Fill in derived values and reject invalid combinations, reporting all errors together with a fix.

Checks keys against one another and against this machine; each value by itself was checked when it was read.
"""

from dataclasses import asdict

from hybridrl.config.checks.algorithm import check_algorithm
from hybridrl.config.checks.inputs import check_data, check_reward, resolve_loggers
from hybridrl.config.checks.lora import check_lora_sync, resolve_lora
from hybridrl.config.checks.machine import Machine, all_devices, resolve_devices
from hybridrl.config.checks.model import check_model, check_sequence_parallel, check_served, resolve_recurrence
from hybridrl.config.checks.training import (
    ACTOR,
    LOWER,
    check_recomputation,
    check_save_contents,
    resolve_actor,
    resolve_critic,
    resolve_dtype,
    resolve_fsdp,
    resolve_micro_batches,
    resolve_optimizer,
    resolve_reference,
    resolve_retention,
)
from hybridrl.config.findings import Checker, Findings
from hybridrl.config.schema import PPOConfig, SFTConfig, SFTTrainerConfig

MODEL, ROLLOUT = "actor_rollout_ref.model", "actor_rollout_ref.rollout"


def resolve_ppo(config: PPOConfig, findings: Findings, machine: Machine | None = None) -> None:
    """Fill in derived values; add findings about what cannot work or has no effect."""
    check = Checker(findings, asdict(config))
    section, trainer = config.actor_rollout_ref, config.trainer
    fsdp, fsdp_key = section.actor.fsdp_config, f"{ACTOR}.fsdp_config"
    with findings.gathered("conflict"):
        resolve_devices(trainer, config.ray_kwargs.ray_init, check, machine)
    device = trainer.device
    _check_restarts(trainer, check)
    resolve_loggers(trainer, check)
    resolve_fsdp(fsdp_key, fsdp, trainer, check)
    config.data.seed = trainer.seed if config.data.seed is None else config.data.seed
    config.reward.custom_reward_function.name = config.reward.custom_reward_function.name or "compute_score"
    resolve_micro_batches(config, check)
    resolve_actor(config, check)
    _resolve_rollout(config, check)
    resolve_optimizer(f"{ACTOR}.optim", section.actor.optim, fsdp_key, fsdp, check)
    resolve_critic(config, check)
    resolve_retention(config, check)
    resolve_reference(config, check)
    check_served(MODEL, section.model, device, check)
    check_model(MODEL, section.model, section.rollout.max_model_len or 0, LOWER, check)
    check_recomputation(MODEL, section.model, fsdp_key, fsdp, device, check)
    resolve_lora(MODEL, section.model, check, served=True)
    check_lora_sync(config, check)
    size = fsdp.ulysses_sequence_parallel_size
    check_sequence_parallel(ACTOR, size, MODEL, section.model, all_devices(trainer), check)
    _check_sampling(config, check)
    _check_idle_keys(config, check)
    check_data(config.data, check)
    check_algorithm(config, findings)
    check_reward(config.reward, check)
    check_save_contents(config, check)
    if trainer.resume_from_path and trainer.resume_mode != "resume_path":
        keys = ("trainer.resume_from_path", "trainer.resume_mode")
        check.warn(keys, "has no effect without trainer.resume_mode=resume_path")
    if trainer.val_only and not config.data.val_files:
        check.error(("trainer.val_only", "data.val_files"), "there is nothing to validate", "set data.val_files")


def resolve_sft(config: SFTConfig, findings: Findings, machine: Machine | None = None) -> None:
    """Fill in derived values; add findings about what cannot work or has no effect."""
    check = Checker(findings, asdict(config))
    trainer, fsdp, fsdp_key = config.trainer, config.engine.fsdp_config, "engine.fsdp_config"
    with findings.gathered("conflict"):
        resolve_devices(trainer, config.ray_kwargs.ray_init, check, machine)
    _check_restarts(trainer, check)
    resolve_loggers(trainer, check)
    resolve_fsdp(fsdp_key, fsdp, trainer, check)
    resolve_optimizer("optim", config.optim, fsdp_key, fsdp, check)
    check_model("model", config.model, config.data.max_length, "lower data.max_length", check)
    check_recomputation("model", config.model, fsdp_key, fsdp, trainer.device, check)
    resolve_lora("model", config.model, check, served=False)
    size = fsdp.ulysses_sequence_parallel_size
    check_sequence_parallel("engine", size, "model", config.model, all_devices(trainer), check)
    if trainer.test_freq > 0 and not config.data.val_files:
        check.warn(("trainer.test_freq", "data.val_files"), "has no effect without data.val_files")


def _check_restarts(trainer: SFTTrainerConfig, check: Checker) -> None:
    if trainer.resume_mode == "resume_path" and not trainer.resume_from_path:
        keys = ("trainer.resume_mode", "trainer.resume_from_path")
        check.error(keys, "no checkpoint is named", "set trainer.resume_from_path=.../global_step_N")
    if trainer.max_restarts and trainer.resume_mode == "disable":
        keys = ("trainer.max_restarts", "trainer.resume_mode")
        check.error(keys, "with resume_mode=disable there is nothing to restart from", "set resume_mode=auto")


def _resolve_rollout(config: PPOConfig, check: Checker) -> None:
    rollout, trainer, width_key = (
        config.actor_rollout_ref.rollout,
        config.trainer,
        f"{ROLLOUT}.tensor_model_parallel_size",
    )
    if trainer.device == "cpu":
        resolve_recurrence(ROLLOUT, config.actor_rollout_ref.model, rollout, check)
    rollout.dtype = resolve_dtype(rollout.dtype, trainer.device)
    width, devices, devices_key = (
        rollout.tensor_model_parallel_size,
        trainer.n_gpus_per_node or 1,
        "trainer.n_gpus_per_node",
    )
    if width > devices and width % devices == 0 and width // devices <= trainer.nnodes:
        check.warn((width_key, devices_key), f"an engine spans the devices of one machine; {devices} is used")
        width = rollout.tensor_model_parallel_size = devices
    if devices % width:
        check.error((width_key, devices_key), f"must divide {devices_key}={devices}")
    elif trainer.device == "cpu" and 1 < width < devices:
        check.error(
            (width_key, devices_key),
            f"with {devices_key}={devices} on CPU only a single engine can span several devices",
            f"set {devices_key}={width}",
        )
    need, length_key = config.data.max_prompt_length + rollout.response_length, f"{ROLLOUT}.max_model_len"
    rollout.max_model_len = rollout.max_model_len or need
    if rollout.max_model_len < need:
        keys = (length_key, "data.max_prompt_length", "data.max_response_length", f"{ROLLOUT}.response_length")
        check.error(keys, f"prompt and response may have {need} tokens", f"{LOWER}, or leave max_model_len at null")
    if rollout.min_tokens > rollout.response_length:
        keys = (f"{ROLLOUT}.min_tokens", f"{ROLLOUT}.response_length", "data.max_response_length")
        check.error(keys, f"a response has at most {rollout.response_length} tokens")


def _check_sampling(config: PPOConfig, check: Checker) -> None:
    rollout, key = config.actor_rollout_ref.rollout, f"{ROLLOUT}.val_kwargs"
    greedy = "do_sample" if not rollout.do_sample else "temperature" if rollout.temperature == 0 else None
    if greedy and rollout.n > 1:
        check.error(
            (f"{ROLLOUT}.{greedy}", f"{ROLLOUT}.n"),
            f"all n={rollout.n} responses to a prompt would be equal",
            f"set {ROLLOUT}.do_sample=true and {ROLLOUT}.temperature=1.0",
        )
    validation = rollout.val_kwargs
    keys, temperature = (f"{key}.do_sample", f"{key}.temperature"), f"{key}.temperature={validation.temperature:g}"
    if validation.do_sample and validation.temperature == 0:
        cause = f"has no effect: at {temperature} validation is greedy, as in verl"
        check.warn(keys, cause, f"set {key}.temperature=1.0 to sample")
    if validation.temperature == 0 and validation.n > 1:
        cause = "validation is greedy, so all responses are equal"
        check.warn((f"{key}.n", f"{key}.temperature"), cause, f"set {key}.temperature=1.0")
    if not validation.do_sample and validation.temperature > 0:
        cause = f"has no effect: at {temperature} validation samples, as in verl"
        check.warn(keys, cause, f"for greedy responses set {key}.temperature=0")


def _check_idle_keys(config: PPOConfig, check: Checker) -> None:
    """Warn about settings that have no effect given the others."""
    data, rollout = config.data, config.actor_rollout_ref.rollout
    if rollout.mode != "async":
        check.warn(f"{ROLLOUT}.mode", "has no effect: responses enter and leave the engine one by one")
        rollout.mode = "async"
    if not rollout.calculate_log_probs:
        check.warn(f"{ROLLOUT}.calculate_log_probs", "has no effect: the rollout log-probs are kept")
    if rollout.prompt_length != data.max_prompt_length:
        keys = (f"{ROLLOUT}.prompt_length", "data.max_prompt_length")
        check.warn(keys, "has no effect: data.max_prompt_length limits the prompts")
    if rollout.response_length != data.max_response_length:
        keys = (f"{ROLLOUT}.response_length", "data.max_response_length")
        check.warn(keys, f"responses end there, not at data.max_response_length={data.max_response_length}")
    if config.trainer.test_freq > 0 and not data.val_files:
        check.warn(("trainer.test_freq", "data.val_files"), "has no effect without data.val_files")
