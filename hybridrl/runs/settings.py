"""From a configuration to plans: what a run's algorithm, models, updates and samplings are, as plain values."""

from dataclasses import replace
from pathlib import Path

from hybridrl.algorithms import Algorithm
from hybridrl.algorithms.agreement import LIMITS, Agreement
from hybridrl.algorithms.estimators import ESTIMATORS, NEEDS
from hybridrl.algorithms.kl import KLWeight
from hybridrl.algorithms.rollout_correction import RolloutCorrection, parse_rejections, parse_threshold
from hybridrl.algorithms.settings import AdvantageSettings, LossSettings
from hybridrl.checkpoint.store import SKIPPED_UPDATES
from hybridrl.config import ConfigError
from hybridrl.config.custom_code import load_function
from hybridrl.config.families import disturbances
from hybridrl.config.schema import FSDPConfig, ModelConfig, PPOConfig, RolloutConfig
from hybridrl.config.schema_algorithm import RolloutCorrectionConfig
from hybridrl.rollout import Sampling
from hybridrl.training.losses import LossConfig, ValueLossConfig, find_policy_loss
from hybridrl.training.packing import Budget
from hybridrl.training.worker import FrozenConfig, LearnerConfig, WorkerConfig
from hybridrl.training.worker_group import CriticPlan, PolicyPlan, UpdatePlan


def ppo_worker_config(config: PPOConfig, algorithm: Algorithm, directory: Path, steps: int) -> WorkerConfig:
    section, critic, prompts = config.actor_rollout_ref, config.critic, config.data.train_batch_size
    actor, ref = section.actor, section.ref
    reference = FrozenConfig(
        replace(section.model, path=ref.model.path, lora_rank=0),
        ref.fsdp_config.param_offload,
        refreshed=ref.refresh_freq > 0,
        layers=tuple(ref.fsdp_config.wrap_policy.transformer_layer_cls_to_wrap),
    )
    # With LoRA the policy without its adapter is the reference, unless another model is named.
    apart = not section.model.lora_rank or ref.model.path != section.model.path
    policy_steps = steps - max(config.trainer.critic_warmup - 1, 0)
    per_step, critic_per_step = policy_updates(config).updates(prompts), critic_updates(config).updates(prompts)
    policy = LearnerConfig(section.model, actor.fsdp_config, actor.optim, policy_steps * per_step, per_step)
    values = LearnerConfig(critic.model, critic.fsdp, critic.optim, steps * critic_per_step, critic_per_step)
    return WorkerConfig(
        device=config.trainer.device,
        policy=policy,
        collective_timeout=section.nccl_timeout,
        seed=config.trainer.seed,
        skipped_updates=str(directory.absolute() / SKIPPED_UPDATES),
        reference=reference if algorithm.uses_reference and apart else None,
        critic=values if algorithm.uses_critic else None,
    )


def build_algorithm(config: PPOConfig) -> Algorithm:
    algorithm, actor = config.algorithm, config.actor_rollout_ref.actor
    control, name = algorithm.kl_ctrl, algorithm.adv_estimator
    adaptive = control.type == "adaptive"
    return Algorithm(
        estimator=ESTIMATORS[name] if name in ESTIMATORS else load_function(name, "algorithm.adv_estimator"),
        settings=AdvantageSettings(
            gamma=algorithm.gamma,
            lam=algorithm.lam,
            normalise=algorithm.norm_adv_by_std_in_grpo,
            part_weights=tuple(algorithm.gdpo_reward_weights),
        ),
        needs=NEEDS.get(name),
        uses_critic=bool(config.critic.enable),
        kl_in_reward=algorithm.kl_penalty if algorithm.use_kl_in_reward else None,
        kl_weight=KLWeight(control.kl_coef, control.target_kl if adaptive else None, control.horizon),
        kl_in_loss=actor.kl_loss_type if actor.use_kl_loss else None,
        correction=build_correction(algorithm.rollout_correction),
        bypass=algorithm.rollout_correction.bypass_mode,
    )


def build_correction(config: RolloutCorrectionConfig) -> RolloutCorrection | None:
    """The correction for what rollout engine and trainer differ in, or None; ConfigError for what cannot be read."""
    if config.rollout_is is None and not config.rollout_rs:
        return None
    key = "algorithm.rollout_correction"
    try:
        lower, upper = parse_threshold(config.rollout_is_threshold)
    except ValueError as error:
        raise ConfigError(f"{key}.rollout_is_threshold={config.rollout_is_threshold}: {error}") from error
    try:
        rejections = parse_rejections(config.rollout_rs, config.rollout_rs_threshold)
    except ValueError as error:
        asked = f"{key}.rollout_rs={config.rollout_rs} with rollout_rs_threshold={config.rollout_rs_threshold}"
        raise ConfigError(f"{asked}: {error}") from error
    return RolloutCorrection(config.rollout_is, lower, upper, config.rollout_is_batch_normalize, rejections)


def build_policy_plan(config: PPOConfig) -> PolicyPlan:
    section = config.actor_rollout_ref
    rollout, ref = section.rollout, section.ref
    return PolicyPlan(
        loss=policy_loss_config(config),
        updates=policy_updates(config),
        log_prob_budget=budget(
            section.model,
            section.actor.fsdp_config,
            rollout.log_prob_max_token_len_per_gpu,
            rollout.log_prob_micro_batch_size_per_gpu,
            rollout.log_prob_use_dynamic_bsz,
        ),
        reference_budget=budget(
            section.model,
            section.actor.fsdp_config,
            ref.log_prob_max_token_len_per_gpu,
            ref.log_prob_micro_batch_size_per_gpu,
            ref.log_prob_use_dynamic_bsz,
        ),
        with_sum_pi_squared=NEEDS.get(config.algorithm.adv_estimator) == "sum_pi_squared",
        disturbed=_disturbed(section.model),
    )


def build_agreement(config: PPOConfig) -> Agreement | None:
    """How far engine and trainer may differ; None where they are asked for different things: the engine tells the
    log-probs of what it samples from, which these settings cut or bend."""
    section = config.actor_rollout_ref
    rollout, limit = section.rollout, section.rollout.max_log_prob_gap
    types = (section.actor.fsdp_config.dtype or "float32", rollout.dtype or "float32")
    plain = (rollout.top_p, rollout.top_k, rollout.repetition_penalty, rollout.min_tokens) == (1.0, -1, 1.0, 0)
    if not (plain and rollout.do_sample and rollout.temperature > 0):
        return None
    coarser = max(types, key=lambda name: LIMITS[name])
    return Agreement(LIMITS[coarser] if limit is None else limit, coarser)


def _disturbed(model: ModelConfig) -> bool:
    """Whether activations are dropped at random in training, as only those who ask for it have it."""
    return bool(model.lora_rank and model.lora.dropout) or bool(disturbances(model.override_config))


def policy_loss_config(config: PPOConfig) -> LossConfig:
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    chosen, correction = actor.policy_loss, config.algorithm.rollout_correction
    bypass = build_correction(correction) if correction.bypass_mode else None
    name = chosen.loss_mode
    if correction.bypass_mode and correction.loss_type == "reinforce":
        name = "reinforce"
    elif bypass is not None:
        bypass = replace(bypass, level=None)  # the ratio to the rollout's log-probs is in the policy loss already
    find_policy_loss(name)  # refused here rather than in the workers
    return LossConfig(
        policy_loss=_anywhere(name),
        settings=LossSettings(
            clip_low=actor.clip_ratio_low or 0.0,
            clip_high=actor.clip_ratio_high or 0.0,
            clip_dual=actor.clip_ratio_c,
            tau_positive=actor.tau_pos,
            tau_negative=actor.tau_neg,
            clip_cov_share=chosen.clip_cov_ratio,
            clip_cov_least=chosen.clip_cov_lb,
            clip_cov_most=chosen.clip_cov_ub,
            kl_cov_share=chosen.kl_cov_ratio,
            kl_cov_weight=chosen.ppo_kl_coef,
            dro_weight=chosen.dro_beta or 0.0,
        ),
        aggregation=actor.loss_agg_mode,
        scale=actor.loss_scale_factor or 1.0,
        temperature=rollout.temperature if rollout.do_sample and rollout.temperature > 0 else 1.0,
        grad_clip=actor.grad_clip,
        entropy_coeff=actor.entropy_coeff,
        kl_coef=actor.kl_loss_coef,
        kl_form=actor.kl_loss_type if actor.use_kl_loss else None,
        correction=bypass,
    )


def policy_updates(config: PPOConfig) -> UpdatePlan:
    actor, model = config.actor_rollout_ref.actor, config.actor_rollout_ref.model
    rows, by_tokens = actor.ppo_micro_batch_size_per_gpu, actor.use_dynamic_bsz
    return UpdatePlan(
        prompts_per_update=actor.ppo_mini_batch_size,
        epochs=actor.ppo_epochs,
        shuffle=actor.shuffle,
        seed=actor.data_loader_seed,
        budget=budget(model, actor.fsdp_config, actor.ppo_max_token_len_per_gpu, rows, by_tokens),
    )


def critic_updates(config: PPOConfig) -> UpdatePlan:
    critic = config.critic
    rows, by_tokens = critic.ppo_micro_batch_size_per_gpu, critic.use_dynamic_bsz
    return UpdatePlan(
        prompts_per_update=critic.ppo_mini_batch_size,
        epochs=critic.ppo_epochs,
        shuffle=critic.shuffle,
        seed=critic.data_loader_seed,
        budget=budget(critic.model, critic.fsdp, critic.ppo_max_token_len_per_gpu, rows, by_tokens),
    )


def build_critic_plan(config: PPOConfig) -> CriticPlan:
    critic = config.critic
    rows, by_tokens = critic.forward_micro_batch_size_per_gpu, critic.use_dynamic_bsz
    return CriticPlan(
        loss=ValueLossConfig(
            critic.cliprange_value, critic.loss_agg_mode, critic.loss_scale_factor or 1.0, critic.grad_clip
        ),
        updates=critic_updates(config),
        value_budget=budget(critic.model, critic.fsdp, critic.forward_max_token_len_per_gpu, rows, by_tokens),
    )


def budget(model: ModelConfig, fsdp: FSDPConfig, tokens: int, rows: int | None, by_tokens: bool) -> Budget:
    """Of tokens a device, as the configuration has it, or of rows."""
    devices = fsdp.ulysses_sequence_parallel_size
    return Budget(tokens * devices, None if by_tokens else rows, padded=not model.use_remove_padding, devices=devices)


def _anywhere(name: str) -> str:
    """The name of a function that workers find from any directory: an own file's path is made absolute."""
    return str(Path(name).expanduser().absolute()) if ":" in name else name


def training_sampling(rollout: RolloutConfig, stop_ids: tuple[int, ...]) -> Sampling:
    return Sampling(
        max_tokens=rollout.response_length,
        stop_ids=stop_ids,
        temperature=rollout.temperature if rollout.do_sample else 0.0,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        repetition_penalty=rollout.repetition_penalty,
        min_tokens=rollout.min_tokens,
        ignore_eos=rollout.ignore_eos,
    )


def validation_sampling(rollout: RolloutConfig, stop_ids: tuple[int, ...]) -> Sampling:
    chosen = rollout.val_kwargs
    return Sampling(
        max_tokens=rollout.response_length,
        stop_ids=stop_ids,
        temperature=chosen.temperature,
        top_p=chosen.top_p,
        top_k=chosen.top_k,
    )
