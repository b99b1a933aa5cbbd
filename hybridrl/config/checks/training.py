"""Settings of what is trained: sharding, optimizer, micro-batches, actor, critic, reference and checkpoints."""

from dataclasses import replace

from hybridrl.config.catalog import ESTIMATORS
from hybridrl.config.checks.lora import resolve_lora
from hybridrl.config.checks.machine import all_devices
from hybridrl.config.checks.model import absolute, check_model, check_sequence_parallel
from hybridrl.config.findings import Checker, show
from hybridrl.config.schema import FSDPConfig, ModelConfig, OptimizerConfig, PPOConfig, SFTTrainerConfig

ACTOR = "actor_rollout_ref.actor"
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
LOWER = "lower data.max_prompt_length or data.max_response_length"
SURE_IN_BFLOAT16 = 1e-3  # a learning rate at which most elements move (84% measured)


def resolve_dtype(name: str | None, device: str) -> str:
    if name is None:
        return "bfloat16" if device == "cuda" else "float32"
    return DTYPES.get(name, name)


def resolve_fsdp(key: str, fsdp: FSDPConfig, trainer: SFTTrainerConfig, check: Checker) -> None:
    """Fill in `fsdp_size` and the data types."""
    ranks = all_devices(trainer)
    size = ranks if fsdp.fsdp_size < 1 else min(fsdp.fsdp_size, ranks)
    if ranks % size:
        keys = (f"{key}.fsdp_size", "trainer.n_gpus_per_node", "trainer.nnodes")
        check.error(keys, f"must divide the {ranks} devices", "set -1 for all of them")
    fsdp.fsdp_size = size
    fsdp.model_dtype, fsdp.dtype = (
        DTYPES.get(fsdp.model_dtype, fsdp.model_dtype),
        resolve_dtype(fsdp.dtype, trainer.device),
    )
    if fsdp.model_dtype == "float16":
        cause = "small updates vanish in parameters of float16"
        check.error(f"{key}.model_dtype", cause, "set model_dtype=fp32, and dtype=fp16 to compute in it")
    for name in ("param_offload", "optimizer_offload"):
        if fsdp.offload_policy and vars(fsdp)[name]:
            cause = "has no effect with offload_policy=true, which keeps more in host memory"
            check.warn((f"{key}.{name}", f"{key}.offload_policy"), cause)


def resolve_optimizer(key: str, optimizer: OptimizerConfig, fsdp_key: str, fsdp: FSDPConfig, check: Checker) -> None:
    """Check the options, and whether parameters in bfloat16 lose updates of this size: bfloat16 has 8 significant bits,
    so an update below a 512th of an element never changes it (scripts/benchmark/bfloat16_updates.py)."""
    optimizer.min_lr_ratio = optimizer.min_lr_ratio or 0.0
    other = [name for name in optimizer.override_optimizer_config if name not in ("eps", "foreach", "fused")]
    if other:
        section = f"{key}.override_optimizer_config"
        cause = f"{section}: only eps, foreach and fused can be set there"
        keys = (section, *(f"{section}.{name}" for name in other))
        check.findings.error("conflict", cause, f"leave out {', '.join(other)}", keys=keys)
    lr = optimizer.lr
    if fsdp.model_dtype == "bfloat16" and 0 < lr < SURE_IN_BFLOAT16:
        check.findings.warn(
            "setting",
            f"{fsdp_key}.model_dtype=bf16 with optim.lr={lr:g}: parameters in bfloat16 lose small updates, as an "
            f"element larger than 512 times its update does not change, at this lr each above {512 * lr:.1e}. At an lr "
            "of 1e-6 an update of AdamW was measured to change 0.3% of the elements of normal weights, at 1e-4 25%",
            f"set {fsdp_key}.model_dtype=fp32, float32 masters of a computation in {fsdp.dtype}",
            keys=(f"{fsdp_key}.model_dtype", f"{key}.lr"),
        )


def check_recomputation(
    key: str, model: ModelConfig, fsdp_key: str, fsdp: FSDPConfig, device: str, check: Checker
) -> None:
    """Check together what a layer recomputes and whether it is compiled."""
    compile_key, selective_key = f"{fsdp_key}.compile_layers", f"{key}.selective_checkpointing"
    checkpointing_key = f"{key}.enable_gradient_checkpointing"
    if fsdp.compile_layers and device == "cpu":
        check.warn(compile_key, "has no effect on CPU, where compiled layers make updates no faster")
        fsdp.compile_layers = False
    if model.selective_checkpointing and not model.enable_gradient_checkpointing:
        check.warn((selective_key, checkpointing_key), "has no effect with enable_gradient_checkpointing=false")
    elif model.selective_checkpointing and fsdp.compile_layers:
        check.error(
            (selective_key, compile_key),
            "the operations of compiled layers cannot be selected one by one",
            f"set {checkpointing_key}=false (compiled layers recompute what is cheap by themselves), or "
            f"{compile_key}=false",
        )


def resolve_micro_batches(config: PPOConfig, check: Checker) -> None:
    """Convert every `..._micro_batch_size`, an older form over all devices, to `..._micro_batch_size_per_gpu`."""
    section, critic, devices = config.actor_rollout_ref, config.critic, all_devices(config.trainer)
    for place, part, name in (
        (ACTOR, section.actor, "ppo_micro_batch_size"),
        ("actor_rollout_ref.ref", section.ref, "log_prob_micro_batch_size"),
        ("actor_rollout_ref.rollout", section.rollout, "log_prob_micro_batch_size"),
        ("critic", critic, "ppo_micro_batch_size"),
        ("critic", critic, "forward_micro_batch_size"),
    ):
        rows, name_per_gpu = vars(part)[name], f"{name}_per_gpu"
        keys = (f"{place}.{name}", f"{place}.{name_per_gpu}")
        if rows is None:
            continue
        if vars(part)[name_per_gpu] is not None:
            check.error(keys, f"{name_per_gpu}={vars(part)[name_per_gpu]} is set too", f"set {name_per_gpu} only")
            continue
        setattr(part, name_per_gpu, max(rows // devices, 1))
        setattr(part, name, None)
        over = f"over {devices} device{'s' * (devices > 1)}"
        cause = f"{keys[0]}={rows} is now {keys[1]}={vars(part)[name_per_gpu]} ({over})"
        check.findings.warn("setting", cause, keys=keys, value=rows)
    critic.forward_micro_batch_size_per_gpu = (
        critic.forward_micro_batch_size_per_gpu or critic.ppo_micro_batch_size_per_gpu
    )


def resolve_actor(config: PPOConfig, check: Checker) -> None:
    actor, prompts = config.actor_rollout_ref.actor, config.data.train_batch_size
    if actor.ppo_mini_batch_size > prompts:
        key = f"{ACTOR}.ppo_mini_batch_size"
        cause = f"{key}={actor.ppo_mini_batch_size} is more than data.train_batch_size={prompts}: one update per step"
        check.warn((key, "data.train_batch_size"), cause)
        actor.ppo_mini_batch_size = prompts
    actor.clip_ratio_low = actor.clip_ratio if actor.clip_ratio_low is None else actor.clip_ratio_low
    actor.clip_ratio_high = actor.clip_ratio if actor.clip_ratio_high is None else actor.clip_ratio_high
    actor.loss_scale_factor = actor.loss_scale_factor or float(config.data.max_response_length)


def resolve_critic(config: PPOConfig, check: Checker) -> None:
    """Decide whether there is a critic, and check it."""
    critic, trainer, name = config.critic, config.trainer, config.algorithm.adv_estimator
    keys, known = ("critic.enable", "algorithm.adv_estimator"), ESTIMATORS.get(name)
    needed = known is not None and known.reads_values
    if critic.enable is False and needed:
        check.error(keys, f"algorithm.adv_estimator={name} needs a critic", "set algorithm.adv_estimator=grpo")
    if critic.enable and known and not needed:
        check.warn(keys, f"has no effect: algorithm.adv_estimator={name} reads no values")
    critic.enable = needed or bool(critic.enable and known is None)
    if not critic.enable:
        if trainer.critic_warmup:
            check.warn("trainer.critic_warmup", "has no effect without a critic")
            trainer.critic_warmup = 0
        return
    resolve_fsdp("critic.fsdp", critic.fsdp, trainer, check)
    resolve_optimizer("critic.optim", critic.optim, "critic.fsdp", critic.fsdp, check)
    for key in ("tokenizer_path", "custom_chat_template"):
        if vars(critic.model)[key] is not None:
            check.warn(f"critic.model.{key}", "has no effect: the critic reads the policy's tokens")
    _check_other_model("critic.model", critic.model, config, check)
    check_recomputation("critic.model", critic.model, "critic.fsdp", critic.fsdp, trainer.device, check)
    resolve_lora("critic.model", critic.model, check, served=False)
    size = critic.fsdp.ulysses_sequence_parallel_size
    check_sequence_parallel("critic", size, "critic.model", critic.model, all_devices(trainer), check)
    critic.ppo_mini_batch_size = min(critic.ppo_mini_batch_size, config.data.train_batch_size)
    critic.loss_scale_factor = critic.loss_scale_factor or float(config.data.max_response_length)


def resolve_reference(config: PPOConfig, check: Checker) -> None:
    section = config.actor_rollout_ref
    if config.algorithm.use_kl_in_reward or section.actor.use_kl_loss:
        model = replace(section.model, path=section.ref.model.path)
        _check_other_model("actor_rollout_ref.ref.model", model, config, check)
    section.ref.model.path = absolute(section.ref.model.path)


def _check_other_model(key: str, model: ModelConfig, config: PPOConfig, check: Checker) -> None:
    """Check a model that reads the policy's rows; for the policy's own model findings are reported only once."""
    policy, longest = config.actor_rollout_ref.model, config.actor_rollout_ref.rollout.max_model_len or 0
    if (model.path, model.override_config) == (policy.path, policy.override_config):
        check = check.muted()
    check_model(key, model, longest, LOWER, check)


def resolve_retention(config: PPOConfig, check: Checker) -> None:
    """A checkpoint holds both models, so the larger of the two counts applies."""
    actor_key, critic_key = "trainer.max_actor_ckpt_to_keep", "trainer.max_critic_ckpt_to_keep"
    actor, critic = config.trainer.max_actor_ckpt_to_keep, config.trainer.max_critic_ckpt_to_keep
    if critic is None or critic == actor:
        return
    if not config.critic.enable:
        check.warn(critic_key, "has no effect without a critic")
    elif actor is None or critic < actor:
        cause = f"has no effect next to {actor_key}={show(actor)}: a checkpoint is kept or removed with both models"
        check.warn((critic_key, actor_key), cause)
    else:
        cause = f"as many checkpoints are kept, with both models, although {actor_key}={actor}"
        check.warn((critic_key, actor_key), cause)
        config.trainer.max_actor_ckpt_to_keep = critic


def check_save_contents(config: PPOConfig, check: Checker) -> None:
    if not (config.trainer.save_freq >= 0 or config.trainer.save_freq_epochs or config.trainer.save_freq_secs):
        return
    sections = {f"{ACTOR}.checkpoint": config.actor_rollout_ref.actor.checkpoint}
    if config.critic.enable:
        sections["critic.checkpoint"] = config.critic.checkpoint
    for key, section in sections.items():
        missing = [part for part in ("model", "optimizer", "extra") if part not in section.save_contents]
        if missing:
            check.warn(
                f"{key}.save_contents", f"no run can resume from such a checkpoint, without {', '.join(missing)}"
            )
